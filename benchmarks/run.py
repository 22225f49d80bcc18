"""Measures suites: `python -m benchmarks.run --suite layer,ops --json FILE`."""

import argparse
import gc
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import card, cases, rows, runner
from benchmarks.baselines import dense, tokamax_gmm, torch_grouped_mm, xla_ragged_dot
from benchmarks.models import DEFAULT_MODELS, DEFAULT_SKEWS, DEFAULT_TOKENS, MODELS, SKEWS
from benchmarks.suites import (
    GRIDS,
    SUITES,
    ep,
    layer_fp8,
    layer_packed,
    lora,
    routing,
    stack,
    train,
)
from jaxmoe._jax import targets as _targets

_PEERS = (xla_ragged_dot, tokamax_gmm, torch_grouped_mm, dense)
_PEER_NAMES = (routing.XLA, *(peer.NAME for peer in _PEERS))
_OURS = (
    "jaxmoe",
    *(*layer_fp8.VARIANTS, *layer_packed.VARIANTS, *ep.VARIANTS, *ep.FP8_VARIANTS),
    *lora.ADAPTED.values(),
)
_IMPLS = (
    *(*_OURS, "jaxmoe[kn]", stack.CHAIN, train.RECOMPUTE, routing.TWO_CALLS),
    *(name for name in ep.IMPLS if name not in _OURS),
    *(*_PEER_NAMES, layer_fp8.DEQUANTIZED, dense.FP8_NAME, *runner.FLOORS.values()),
)
_MEMORY = "0.92"  # part of the GPU's memory; JAX's own default leaves a quarter unused


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for. Returns 1 if a row of jaxmoe failed, else 0."""
    args = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY)
    start = time.monotonic()
    peers = _torch_rows(args)  # first: once JAX has a device, it holds the memory
    device = jax.devices()[0]
    if device.platform != "gpu" and args.models is None:
        print("No GPU: choose shapes that a CPU can hold, as --models odd,clamped --tokens 8.")
        return 2
    planned = plan(args)
    head = rows.header(device.device_kind, args.commit)
    head["kernels"] = _targets.why_not() or "cuda"
    head |= card.speeds(device.platform)
    out = rows.Results(head, args.json, start)
    print(*(f"{key}: {value}" for key, value in head.items()), sep="\n")
    print(rows.TITLE)
    for number, values in enumerate(peers, 1):
        out.progress = f"torch {number}/{len(peers)}"
        out.add(rows.Row.from_json(values))
    settings = runner.Settings(
        repeats=args.repeats or (5 if args.quick else 20),
        impls=frozenset(args.impl) if args.impl else None,
        sustained=not args.quick,
        cap_s=1.0 if args.quick else 2.0,
    )
    not_run: list[str] = []
    for name, group in itertools.groupby(enumerate(planned, 1), lambda item: item[1].model):
        sets: list[Any] | None = None
        for number, (suite, _, num_tokens, skew) in group:
            out.progress = f"{number}/{len(planned)}"
            if args.budget_s is not None and out.elapsed_s > args.budget_s:
                not_run.append(f"{suite} {name} T={num_tokens} {skew}")
                continue
            if sets is None:
                sets = cases.weight_sets(MODELS[name], args.seed)
            case = cases.Case(MODELS[name], num_tokens, skew, args.seed + number, sets)
            runner.measure(suite, case, SUITES[suite](case), settings, out)
            ep.close_memory()
            del case
            gc.collect()
        del sets
        gc.collect()
    if not_run:
        head["not_run"] = not_run
        out.save()
        print(f"not run, {args.budget_s} s were over:", *not_run, sep="\n  ")
    broken = [r for r in out.rows if (r.impl in _OURS or r.chosen) and r.us is None]
    return 1 if broken else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    names = _names

    def add(flag: str, **options: Any) -> None:
        if options.get("type") is names:  # given twice, the lists are one
            options["action"] = "extend"
        parser.add_argument(flag, **options)

    add("--suite", type=names, required=True, help=", ".join(SUITES))
    add("--json", type=Path, help="file for the results, rewritten after every row")
    add("--models", type=names, help=f"of {', '.join(MODELS)}")
    add("--tokens", type=lambda text: [int(t) for t in names(text)], help="numbers of tokens")
    add("--skew", type=names, help=", ".join(SKEWS))
    add("--impl", type=names, help=", ".join(_IMPLS))
    add("--quick", action="store_true", help="fewer shapes and repeats, no sustained load")
    add("--repeats", type=int, help="bursts per row (20)")
    add("--budget-s", type=float, help="start no new case after so many seconds")
    add("--commit", help="commit measured, where git cannot tell")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    known = {
        "suite": tuple(SUITES),
        "models": tuple(MODELS),
        "skew": SKEWS,
        "impl": _IMPLS,
    }
    for flag, allowed in known.items():
        for value in getattr(args, flag) or ():
            if value not in allowed:
                parser.error(f"--{flag} {value}: choose from {', '.join(allowed)}")
    return args


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


class Planned(NamedTuple):
    """One case to come."""

    suite: str
    model: str
    tokens: int
    skew: str


def plan(args: argparse.Namespace) -> list[Planned]:
    """Returns what to run, model by model, so that weights are drawn once."""
    few = args.quick
    skews = args.skew or (DEFAULT_SKEWS[:1] if few else DEFAULT_SKEWS)
    usual = (DEFAULT_MODELS, (1, 64, 4096) if few else DEFAULT_TOKENS)
    planned: list[Planned] = []
    for suite in args.suite:
        models, tokens = GRIDS.get(suite, usual)
        grid = itertools.product(args.models or models, args.tokens or tokens, skews)
        planned += [Planned(suite, *case) for case in grid]
    models = list(dict.fromkeys(case.model for case in planned))
    return sorted(planned, key=lambda case: models.index(case.model))


def _torch_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the PyTorch layer, measured in its own process."""
    wanted = args.impl is None or torch_grouped_mm.NAME in args.impl
    layers = [case[1:] for case in plan(args) if case.suite == "layer"]
    if args.quick or not wanted or not layers:
        return []
    return torch_grouped_mm.run_apart(layers, args.repeats or 20, args.seed)


if __name__ == "__main__":
    sys.exit(main())
