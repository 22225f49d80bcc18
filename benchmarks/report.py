"""Turns results files into tables and plots: `python -m benchmarks.report`."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks import bounds, report_ep, report_fp8, report_train
from benchmarks.models import MODELS
from benchmarks.rows import Row, remark
from benchmarks.suites.stack import CHAIN
from benchmarks.tables import filled, table, us

ROOT = Path(__file__).resolve().parent
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"

# Columns of the README table behind those of jaxmoe itself: heading, implementation.
_MEASURED = (
    ("ragged_dot", "xla_ragged_dot"),
    ("tokamax", "tokamax"),
    ("torch", "torch_grouped_mm"),
)
_PEERS = ("FlashInfer", "SonicMoE")
_DAGGER = "†"


@dataclasses.dataclass(frozen=True)
class Report:
    """All rows of one device (the newest of each kind), their runs, and the peers' rows."""

    runs: list[dict[str, Any]]
    rows: list[Row]
    peers: dict[str, Any]
    commits: dict[tuple[Any, ...], str | None] = dataclasses.field(default_factory=dict)

    def older(self, row: Row) -> bool:
        """Returns whether its suite has newer rows of the same scheme, of another commit."""
        same = [r for r in self.rows if (r.suite, r.scheme) == (row.suite, row.scheme)]
        newest = [self.commits[_kind(r)] for r in same][-1:]
        return newest != [self.commits[_kind(row)]]

    def find(self, model: str, tokens: int, impl: str, **fields: Any) -> Row | None:
        """Returns the row of the whole layer: timed, uniform, in a burst unless told otherwise."""
        wanted = {"suite": "layer", "op": "moe_mlp", "skew": "uniform", "regime": "burst"} | fields
        for row in self.rows:
            same = (row.model, row.tokens, row.impl) == (model, tokens, impl)
            if same and row.us and all(getattr(row, k) == v for k, v in wanted.items()):
                return row
        return None

    def peer_us(self, model: str, tokens: int, impl: str) -> float | None:
        """Returns a peer's time."""
        for row in self.peers.get("rows", ()):
            if (row["model"], row["tokens"], row["impl"]) == (model, tokens, impl):
                return row["us"]
        return None

    def points(self) -> list[tuple[str, int]]:
        """Returns (model, tokens) of every measured layer, in the order of `MODELS`."""
        found = {
            (r.model, r.tokens) for r in self.rows if r.suite == "layer" and r.impl == "jaxmoe"
        }
        return sorted(found, key=lambda point: (list(MODELS).index(point[0]), point[1]))


def load(folder: Path, peers: Path | None = None) -> Report:
    """Reads the results files of one device; where two measured the same, the newer run counts."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    files.sort(key=lambda content: content["header"]["date"])
    newest: dict[tuple[Any, ...], tuple[int, Row]] = {}
    compared: dict[tuple[Any, ...], int] = {}  # the run that compared tiles last
    for number, content in enumerate(files):
        most = max((values.get("devices") or 0 for values in content["rows"]), default=0)
        for values in content["rows"]:
            row = Row.from_json(values)
            if row.devices is None and row.beside is None and most:
                row.beside = most
            newest[_kind(row)] = (number, row)
            if row.chosen is not None:
                compared[_kind(row)[:-1]] = number
    # An older run had tiles that a newer one left out: they do not count.
    newest = {
        kind: (number, row)
        for kind, (number, row) in newest.items()
        if row.chosen is None or compared[kind[:-1]] == number
    }
    used = sorted({number for number, _ in newest.values()})
    peer_file = peers or ROOT / f"peers_{folder.name}.json"
    return Report(
        runs=[files[number]["header"] for number in used],
        rows=[row for _, row in sorted(newest.values(), key=lambda pair: pair[0])],
        peers=json.loads(peer_file.read_text(encoding="utf-8")) if peer_file.is_file() else {},
        commits={kind: files[number]["header"]["commit"] for kind, (number, _) in newest.items()},
    )


def _kind(row: Row) -> tuple[Any, ...]:
    keys = (
        "suite",
        "op",
        "model",
        "tokens",
        "scheme",
        "pass_",
        "skew",
        "regime",
        "devices",
        "beside",
        "impl",
    )
    return tuple(getattr(row, key) for key in keys)


def summary(report: Report) -> str:
    """Returns the README's section: the layer table, what it says, and where it comes from."""
    head = ["model", "tokens", "floor", "jaxmoe", "of floor", "[E,K,N]", "sustained", "vs dense"]
    head += [heading for heading, _ in _MEASURED] + [f"{name}*" for name in _PEERS]
    body = [_summary_row(report, model, tokens) for model, tokens in report.points()]
    parts = [filled(head, body)]
    parts.append(
        "Microseconds per whole MoE layer, bf16, routing given, uniform; weights in checkpoint "
        'order (`weight_layout="nk"`), *[E,K,N]* with the contraction first. *floor*: the '
        "larger of bytes / 4.3 TB/s and FLOPs / 780 TFLOP/s. *sustained*: under a second of load, "
        "for compute-heavy rows. *vs dense*: TFLOP/s over those of `jnp.matmul` with equal FLOPs."
    )
    if any(_DAGGER in cell for cells in body for cell in cells):
        parts.append(f"{_DAGGER} Not measured again since an older commit, see below.")
    for heading, models in _losses(report).items():
        where = "; ".join(f"{m} at {', '.join(map(str, t))} tokens" for m, t in models.items())
        parts.append(f"{heading} is faster than jaxmoe here: {where}.")
    if report.peers:
        names = "; ".join(f"{name} {how}" for name, how in report.peers["impls"].items())
        parts.append(f"\\* Not measured in these runs. {names}. {report.peers['conditions']}")
    if fp8 := report_fp8.summary(report):
        parts.append(fp8)
    if training := report_train.summary(report):
        parts.append(training)
    parts.append(_origin(report.runs))
    return "\n\n".join(parts)


def _summary_row(report: Report, model: str, tokens: int) -> list[str]:
    ours = report.find(model, tokens, "jaxmoe")
    loaded = report.find(model, tokens, "jaxmoe", regime="sustained")
    floor = report.find(model, tokens, "floor", regime=None)
    other_layout = report.find(model, tokens, "jaxmoe[kn]")
    others = [report.find(model, tokens, impl) for _, impl in _MEASURED]
    return [
        model,
        str(tokens),
        us(floor and floor.us),
        f"**{us(ours and ours.us)}**" + (_DAGGER if ours and report.older(ours) else ""),
        f"{ours.floor_fraction:.0%}" if ours and ours.floor_fraction else "-",
        us(other_layout and other_layout.us),
        us(loaded and loaded.us),
        f"{ours.vs_dense:.2f}" if ours and ours.vs_dense else "-",
        *(us(row and row.us) for row in others),
        *(us(report.peer_us(model, tokens, name)) for name in _PEERS),
    ]


def _losses(report: Report) -> dict[str, dict[str, list[int]]]:
    """Returns who is faster where: heading, then model, then tokens."""
    out: dict[str, dict[str, list[int]]] = {}

    def note(heading: str, theirs: float | None, ours: Row | None) -> None:
        if theirs and ours and ours.us and theirs < ours.us:
            out.setdefault(heading, {}).setdefault(ours.model, []).append(ours.tokens)

    for model, tokens in report.points():
        ours = report.find(model, tokens, "jaxmoe")
        loaded = report.find(model, tokens, "jaxmoe", regime="sustained") or ours
        for heading, impl in _MEASURED:
            other = report.find(model, tokens, impl)
            note(heading, other and other.us, ours)
        for name in _PEERS:  # they ran under load
            note(f"{name}*", report.peer_us(model, tokens, name), loaded)
    return out


def _origin(runs: list[dict[str, Any]]) -> str:
    lines = [
        f"- {run['date'][:10]}, {run['device']}{_speeds(run)}, driver {run['driver']}, "
        f"CUDA {run['cuda']}, jax {run['jax']}, commit {run['commit']}: `{run['command']}`"
        for run in runs
    ]
    return "\n".join(["Measured by", "", *lines])


def _speeds(run: dict[str, Any]) -> str:
    """Returns how fast the card of a run is, nothing where the run did not measure it."""
    known = []
    if run.get("copy_tbps"):
        known.append(f"copy {run['copy_tbps']:.2f} TB/s")
    if run.get("dense_tflops"):
        known.append(f"dense {run['dense_tflops']:.0f} TFLOP/s")
    return f" ({', '.join(known)})" if known else ""


def details(report: Report) -> str:
    """Returns a table of every row, by suite and op."""
    parts = ["# Every row", _origin(report.runs)]
    if body := _tile_rows(report.rows):
        parts += ["## tiles: the heuristics and the best tile", _TILES_NOTE, table(_TILES, body)]
    head = ["model", "tokens", "skew", "impl", "regime", "us", "p10", "p90"]
    head += ["TFLOP/s", "TB/s", "TFLOP/J", "floor", "of floor", "vs dense", "error", "note"]
    if body := _stack_rows(report.rows):
        parts += ["## stack: 48 layers in one program", _STACK_NOTE, table(_STACK, body)]
    if spread := report_ep.summary(report):
        parts += ["## ep: experts over devices", spread]
    for suite, op in dict.fromkeys((row.suite, row.op) for row in report.rows):
        rows = [row for row in report.rows if (row.suite, row.op) == (suite, op)]
        order = list(MODELS)
        rows.sort(key=lambda r: (order.index(r.model), r.skew, r.tokens))
        parts += [f"## {suite}: {op}", table(head, [_detail_row(row) for row in rows])]
    return "\n\n".join(parts) + "\n"


_TILES = ["model", "tokens", "skew", "product", "heuristics", "us", "best tile", "us", "within"]
_TILES_NOTE = (
    "Microseconds of the whole layer in which only the tile of this product differs, all in one "
    "run. The best of many is partly luck: a percent or two is no difference."
)


def _tile_rows(rows: list[Row]) -> list[list[str]]:
    """Returns, for each case and product of suite `tiles`, the tile chosen and the fastest."""
    out = []
    timed = [row for row in rows if row.vs_best is not None]
    timed.sort(key=lambda r: (list(MODELS).index(r.model), r.skew, r.tokens))
    for chosen in (row for row in timed if row.chosen):
        same = [row for row in timed if _kind(row)[:-1] == _kind(chosen)[:-1]]
        best = min(same, key=lambda row: row.vs_best or math.inf)
        product = chosen.op.removeprefix("moe_mlp/")
        cells = [chosen.model, str(chosen.tokens), chosen.skew, product]
        for row in (chosen, best):
            cells += [row.impl.removeprefix(f"{product} "), us(row.us)]
        out.append([*cells, f"{100 * ((chosen.vs_best or math.inf) - 1):.1f} %"])
    return out


_STACK = ["model", "tokens", "skew", "layers", "weight sets", "us a layer", "chain", "to chain"]
_STACK_NOTE = (
    "*chain*: microseconds a layer as suite `layer` measures it, with fewer weight sets, in the "
    "same run."
)


def _stack_rows(rows: list[Row]) -> list[list[str]]:
    """Returns the time a layer of each stack next to that of suite `layer`'s chain."""
    timed = [row for row in rows if row.suite == "stack" and row.us]
    chains = {_kind(row)[:-1]: row for row in timed if row.impl == CHAIN}
    out = []
    for row in (row for row in timed if row.impl == "jaxmoe"):
        other = chains.get(_kind(row)[:-1])
        counts = [str(value) for value in (row.tokens, row.skew, row.layers, row.weight_sets)]
        ratio = f"{row.us / other.us:.2f}" if row.us and other and other.us else "-"
        out.append([row.model, *counts, us(row.us), us(other and other.us), ratio])
    return out


def _detail_row(row: Row) -> list[str]:
    def cell(value: float | None, spec: str) -> str:
        return "-" if value is None else format(value, spec)

    return [
        row.model,
        str(row.tokens),
        row.skew,
        row.impl,
        row.regime or "-",
        *(us(value) for value in (row.us, row.us_p10, row.us_p90)),
        cell(row.tflops, ".0f"),
        cell(row.weight_tbps, ".2f"),
        cell(row.tflop_per_joule, ".2f"),
        us(row.floor_us),
        cell(row.floor_fraction, ".0%"),
        cell(row.vs_dense, ".2f"),
        cell(row.rel_err, ".1e"),
        remark(row),
    ]


def replace_section(text: str, section: str) -> str:
    """Returns `text` with `section` between the markers."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"no {BEGIN} ... {END} in the file")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def floors(report: Report) -> dict[tuple[str, int], float]:
    """Returns the floor of every measured point, and of the peers' points for even routing."""
    out: dict[tuple[str, int], float] = {}
    for row in report.peers.get("rows", ()):
        model, tokens = MODELS[row["model"]], row["tokens"]
        work = bounds.layer(model, tokens, bounds.expected_hit(model, tokens))
        us = work.floor_us(bounds.CEILINGS.get(report.peers["device"]))
        if us is not None:
            out[model.name, tokens] = us
    for name, tokens in report.points():
        row = report.find(name, tokens, "floor", regime=None)
        if row and row.us:
            out[name, tokens] = row.us
    return out


def main(arguments: list[str] | None = None) -> int:
    """Writes the sections of README and of two pages, the table of all rows, and the plots.

    Returns the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "h200")
    parser.add_argument("--readme", type=Path, default=ROOT.parent / "README.md")
    docs = ROOT.parent / "docs"
    parser.add_argument("--performance", type=Path, default=docs / "performance.md")
    parser.add_argument("--spread", type=Path, default=docs / "expert_parallel.md")
    parser.add_argument("--plot", type=Path, default=docs / "img" / "layer.svg")
    args = parser.parse_args(arguments)
    report = load(args.results)
    if not report.points():
        print(f"no rows of jaxmoe's layer under {args.results}")
        return 1
    text = args.readme.read_text(encoding="utf-8")
    args.readme.write_text(replace_section(text, summary(report)), encoding="utf-8")
    (args.results / "README.md").write_text(details(report), encoding="utf-8")
    written = [args.readme, args.results / "README.md", args.plot]
    sections = {args.performance: report_fp8.details(report), args.spread: report_ep.page(report)}
    for page, section in sections.items():
        if section:
            text = page.read_text(encoding="utf-8")
            page.write_text(replace_section(text, section), encoding="utf-8")
            written.append(page)
    from benchmarks import plot, plot_ep

    plot.write(report, floors(report), args.plot)
    if spread := report_ep.points(report):
        written.append(args.plot.with_name("expert_parallel.svg"))
        plot_ep.write(spread, written[-1])
    print("wrote", *written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
