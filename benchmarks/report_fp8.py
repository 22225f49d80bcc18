"""The report's tables of the layer with FP8 weights; empty where no such row was measured."""

import math
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.models import MODELS
from benchmarks.rows import Row
from benchmarks.tables import us

if TYPE_CHECKING:
    from benchmarks.report import Report

_FLOOR = "floor[fp8]"
# Formats that a peer has too: heading, format.
_COMPARED = (("tensor", "fp8_tensor"), ("block", "fp8_block"))
# All ways to run the layer: heading, implementation.
_ALL = (
    ("tensor", "jaxmoe[fp8_tensor]"),
    ("dynamic", "jaxmoe[fp8_tensor_dynamic]"),
    ("promoted", "jaxmoe[fp8_tensor_promoted]"),
    ("channel", "jaxmoe[fp8_channel]"),
    ("block", "jaxmoe[fp8_block]"),
)
_DAGGER = "†"
_TENSOR = _ALL[0][1]
_DEQUANTIZED = "xla_ragged_dot[dequantized]"


def points(report: "Report") -> list[tuple[str, int]]:
    """Returns (model, tokens) of every layer with FP8 weights, in the order of `MODELS`."""
    ours = dict(_ALL).values()
    found = {(r.model, r.tokens) for r in report.rows if r.impl in ours and r.us}
    return sorted(found, key=lambda point: (list(MODELS).index(point[0]), point[1]))


def summary(report: "Report") -> str:
    """Returns the README's table: the formats that FlashInfer has too, and how they compare."""
    if not points(report):
        return ""
    head = ["model", "tokens", "floor"]
    for heading, _ in _COMPARED:
        head += [heading, "sustained", "FlashInfer*", "ratio"]
    body = [_summary_row(report, model, tokens) for model, tokens in points(report)]
    parts = [
        tables.filled(head, body),
        "The same layer with FP8 weights (e4m3): bf16 tokens in and out, quantized inside the "
        "measurement. *tensor*: a scale for each expert's matrix, static scales of tokens and "
        'activations, `accum="fast"`. *block*: a scale for 128 x 128 weights and for 128 '
        "neighbours of a token. *floor*: with one byte for each weight and 1350 TFLOP/s. *ratio*: "
        "FlashInfer's time over jaxmoe's, sustained where there is one.",
    ]
    if any(_DAGGER in cell for cells in body for cell in cells):
        parts.append(f"{_DAGGER} Not measured again since an older commit, see below.")
    for heading, format in _COMPARED:
        ratios = _ratios(report, format)
        if not ratios:
            continue
        mean = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios))
        text = f"FP8 {heading}: geometric mean of the ratios {mean:.2f} ({len(ratios)} points)."
        slower: dict[str, list[str]] = {}
        for (model, tokens), ratio in ratios.items():
            if ratio < 1:
                slower.setdefault(model, []).append(str(tokens))
        if slower:
            where = "; ".join(f"{m} at {', '.join(t)} tokens" for m, t in slower.items())
            text += f" FlashInfer* is faster than jaxmoe here: {where}."
        parts.append(text)
    if note := report.peers.get("fp8", {}).get("conditions"):
        parts.append(f"\\* FP8: {note}")
    return "\n\n".join(parts)


def details(report: "Report") -> str:
    """Returns performance.md's section: every format, next to a dense product and to bf16."""
    if not points(report):
        return ""
    head = ["model", "tokens", "floor", *(heading for heading, _ in _ALL)]
    head += ["of floor", "vs dense", "ragged_dot", "bf16", "bf16 / tensor"]
    body = [_detail_row(report, model, tokens) for model, tokens in points(report)]
    note = (
        "Microseconds per whole layer in bursts, uniform routing. *tensor*: static scales and "
        '`accum="fast"`; *promoted*: the same with `accum="promoted"`; *dynamic*: scales made of '
        "all tokens and rows, default `accum`, as in *channel*. *of floor* and *vs dense* (TFLOP/s "
        "over those of two FP8 products of equal FLOPs through cuBLASLt) are those of *tensor*. "
        "*ragged_dot*: `jax.lax.ragged_dot` on weights that the program dequantizes to bf16."
    )
    return "\n\n".join(["## The layer with FP8 weights", tables.filled(head, body), note])


def _summary_row(report: "Report", model: str, tokens: int) -> list[str]:
    floor = report.find(model, tokens, _FLOOR, regime=None)
    cells = [model, str(tokens), us(floor and floor.us)]
    for _, format in _COMPARED:
        ours, loaded = _ours(report, model, tokens, format)
        ratio = _ratio(report, model, tokens, format)
        cells += [
            f"**{us(ours.us)}**" + (_DAGGER if report.older(ours) else "") if ours else "-",
            us(loaded and loaded.us),
            us(_peer_us(report, model, tokens, format)),
            f"{ratio:.2f}" if ratio else "-",
        ]
    return cells


def _detail_row(report: "Report", model: str, tokens: int) -> list[str]:
    floor = report.find(model, tokens, _FLOOR, regime=None)
    rows = [report.find(model, tokens, impl) for _, impl in _ALL]
    tensor, plain = report.find(model, tokens, _TENSOR), report.find(model, tokens, "jaxmoe")
    other = report.find(model, tokens, _DEQUANTIZED)
    gain = plain.us / tensor.us if tensor and plain and tensor.us and plain.us else None
    return [
        model,
        str(tokens),
        us(floor and floor.us),
        *(us(row and row.us) for row in rows),
        f"{tensor.floor_fraction:.0%}" if tensor and tensor.floor_fraction else "-",
        f"{tensor.vs_dense:.2f}" if tensor and tensor.vs_dense else "-",
        us(other and other.us),
        us(plain and plain.us),
        f"{gain:.2f}" if gain else "-",
    ]


def _ours(report: "Report", model: str, tokens: int, format: str) -> tuple[Row | None, Row | None]:
    impl = f"jaxmoe[{format}]"
    loaded = report.find(model, tokens, impl, regime="sustained")
    return report.find(model, tokens, impl), loaded


def _peer_us(report: "Report", model: str, tokens: int, format: str) -> float | None:
    for row in report.peers.get("fp8", {}).get("rows", ()):
        if (row["model"], row["tokens"], row["format"]) == (model, tokens, format):
            return row["us"]
    return None


def _ratio(report: "Report", model: str, tokens: int, format: str) -> float | None:
    ours, loaded = _ours(report, model, tokens, format)
    row, theirs = loaded or ours, _peer_us(report, model, tokens, format)  # they ran under load
    return theirs / row.us if row and row.us and theirs else None


def _ratios(report: "Report", format: str) -> dict[tuple[str, int], float]:
    found = {point: _ratio(report, *point, format) for point in points(report)}
    return {point: ratio for point, ratio in found.items() if ratio}
