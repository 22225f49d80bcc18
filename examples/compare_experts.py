"""Trains the model of train_lm.py with sparse and with dense experts, to compare their losses.

    python examples/compare_experts.py --out /tmp/compare --seeds 0 1 2

It takes the options of train_lm.py, goes on where it was interrupted, and prints a table in
Markdown: the held-out loss of each run, and whether the two kinds differ by more than the seeds do.
"""

import statistics
import sys

import train_lm


def table(losses: dict[str, dict[int, float]]) -> str:
    """Returns losses[kind][seed] as a table with mean and standard deviation over the seeds."""
    kinds = list(losses)
    lines = ["| seed | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds)]
    rows = {str(seed): [losses[kind][seed] for kind in kinds] for seed in losses[kinds[0]]}
    for name, of in (("mean", statistics.mean), ("standard deviation", statistics.stdev)):
        rows[name] = [of(losses[kind].values()) for kind in kinds]
    for name, values in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.4f}" for value in values) + " |")
    return "\n".join(lines)


def within_noise(losses: dict[str, dict[int, float]]) -> bool:
    """Whether the means differ by no more than the seeds of one kind do, in standard deviations."""
    means = [statistics.mean(of.values()) for of in losses.values()]
    return max(means) - min(means) <= max(statistics.stdev(of.values()) for of in losses.values())


def main(arguments: list[str] | None = None) -> int:
    """Trains every kind with every seed; returns 1 if the kinds differ by more than noise."""
    options = train_lm.parser(__doc__)
    options.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more (0 1 2)"
    )
    args = options.parse_args(arguments)
    if len(set(args.seeds)) < 2:
        options.error("--seeds needs two different seeds or more: their spread is the noise")
    losses: dict[str, dict[int, float]] = {kind: {} for kind in train_lm.EXPERTS}
    for seed in args.seeds:
        for kind, of in losses.items():
            out = args.out / f"{kind}-{seed}"
            config = train_lm.chosen(args, kind)
            of[seed], _ = train_lm.run(config, seed, out, args.every, args.save_every)
    print(table(losses))
    same = within_noise(losses)
    print("The means differ by", "no more" if same else "MORE", "than the seeds of one kind.")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
