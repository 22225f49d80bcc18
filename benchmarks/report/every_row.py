"""The page of one device's results: the runs, the tables of the layer, and every row."""

import math
from typing import Any

from benchmarks.report import ep, ep_parts, fp8, layer, train
from benchmarks.report.measurements import Measurements, by_model, kind
from benchmarks.report.tables import number, table, time_of, us
from benchmarks.rows import Row, remark
from benchmarks.suites.stack import CHAIN
from benchmarks.tune import pair_name

_HEAD = [
    *("model", "tokens", "skew", "impl", "regime", "us", "p10", "p90", "TFLOP/s", "TB/s"),
    *("TFLOP/J", "floor", "of floor", "vs dense", "error", "run", "note"),
]
_INTRODUCTION = (
    "Tables of whole layers, the [runs](#runs) with card, commit and command, then every row by "
    "suite. A number in a column *run* counts these runs; † behind it says that another commit has "
    "newer rows of the same suite."
)


def page(found: Measurements) -> str:
    """Everything: runs, tables, rows by suite and op."""
    parts = ["# Results", _INTRODUCTION]
    sections = {
        "The layer in bf16": layer.summary(found) if found.points() else "",
        "The layer in bf16, in turn with others on one card": layer.in_turn(found),
        "The layer with FP8 weights": fp8.summary(found),
        "Training": train.summary(found),
        "tiles: the heuristics and the best tile": _section(_TILES, _tile_rows(found), _TILES_NOTE),
        "tune: the heuristics and the best of both tiles": _section(
            _TUNED, _tuned_rows(found), _TUNED_NOTE
        ),
        "stack: 48 layers in one program": _section(_STACK, _stack_rows(found), _STACK_NOTE),
        "ep: experts over devices": ep.summary(found),
        "ep: FP8, training, and what is sent": ep_parts.summary(found),
        "Runs": runs_text(found.runs),
    }
    for title, text in sections.items():
        parts += [f"## {title}", text] if text else []
    for suite, op in dict.fromkeys((row.suite, row.op) for row in found.rows):
        rows = [row for row in found.rows if (row.suite, row.op) == (suite, op)]
        ordered = by_model((r.model, r.skew, r.tokens, i) for i, r in enumerate(rows))
        body = [_cells(found, rows[i]) for *_, i in ordered]
        parts += [f"## {suite}: {op}", table(_HEAD, body)]
    return "\n\n".join(parts) + "\n"


def _section(head: list[str], body: list[list[str]], note: str) -> str:
    return f"{note}\n\n{table(head, body)}" if body else ""


def runs_text(runs: list[dict[str, Any]]) -> str:
    """The numbered list of runs: day, card, versions, commit, command."""
    lines = [
        f"{number}. {run['date'][:10]}, {run['device']}{_speeds(run)}, driver {run['driver']}, "
        f"CUDA {run['cuda']}, jax {run['jax']}, commit {run['commit']}: `{run['command']}`"
        for number, run in enumerate(runs, 1)
    ]
    return "\n".join(lines)


def _speeds(run: dict[str, Any]) -> str:
    """How fast the card of a run is, nothing where the run did not measure it."""
    known = []
    if run.get("copy_tbps"):
        known.append(f"copy {run['copy_tbps']:.2f} TB/s")
    if run.get("dense_tflops"):
        known.append(f"dense {run['dense_tflops']:.0f} TFLOP/s")
    return f" ({', '.join(known)})" if known else ""


_TILES = ["model", "tokens", "skew", "product", "heuristics", "us", "best tile", "us", "within"]
_TILES_NOTE = (
    "Microseconds of the whole layer in which only the tile of this product differs, all in one "
    "run. The best of many is partly luck: a percent or two is no difference."
)


def _tile_rows(found: Measurements) -> list[list[str]]:
    """The tile chosen and the fastest one, for each case and product of suite `tiles`."""
    timed = [row for row in found.rows if row.vs_best is not None]
    chosen = [(row.model, row.skew, row.tokens, i) for i, row in enumerate(timed) if row.chosen]
    out = []
    for *_, i in by_model(chosen):
        ours = timed[i]
        same = [row for row in timed if kind(row)[:-1] == kind(ours)[:-1]]
        best = min(same, key=lambda row: row.vs_best or math.inf)
        product = ours.op.removeprefix("moe_mlp/")
        cells = [ours.model, str(ours.tokens), ours.skew, product]
        for row in (ours, best):
            cells += [row.impl.removeprefix(f"{product} "), us(row.us)]
        out.append([*cells, f"{100 * ((ours.vs_best or math.inf) - 1):.1f} %"])
    return out


_TUNED = ["layer", "heuristics", "us", "best", "us", "within"]
_TUNED_NOTE = (
    'Microseconds by `python -m benchmarks.tune`, with even routing; layers with "\\*" are in the '
    "packaged table."
)


def _tuned_rows(found: Measurements) -> list[list[str]]:
    """The tiles of the rule and the fastest pair of each layer that was tuned."""
    out = []
    for one in found.tuned:
        (best, fast), (rule, slow) = one.best, one.rule
        cells = [pair_name(rule), us(slow), pair_name(best), us(fast)]
        within = f"{100 * (slow / fast - 1):.1f} %"
        out.append([one.name + (" \\*" if one.wins else ""), *cells, within])
    return out


_STACK = ["model", "tokens", "skew", "layers", "weight sets", "us a layer", "chain", "to chain"]
_STACK_NOTE = (
    "*chain*: microseconds a layer as suite `layer` measures it, with fewer weight sets, in the "
    "same run."
)


def _stack_rows(found: Measurements) -> list[list[str]]:
    """The time a layer of each stack next to that of suite `layer`'s chain."""
    timed = [row for row in found.rows if row.suite == "stack" and row.us]
    chains = {kind(row)[:-1]: row for row in timed if row.impl == CHAIN}
    out = []
    for row in (row for row in timed if row.impl == "jaxmoe"):
        other = chains.get(kind(row)[:-1])
        counts = [str(value) for value in (row.tokens, row.skew, row.layers, row.weight_sets)]
        ratio = row.us / other.us if row.us and other and other.us else None
        out.append([row.model, *counts, us(row.us), time_of(other), number(ratio, ".2f")])
    return out


def _cells(found: Measurements, row: Row) -> list[str]:
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
        found.origin(row),
        remark(row),
    ]
