"""The report's tables of training: a layer, and its products; empty where nothing was measured."""

from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.models import MODELS
from benchmarks.rows import Row
from benchmarks.suites.train import RECOMPUTE
from benchmarks.tables import us

if TYPE_CHECKING:
    from benchmarks.report import Report

_HEAD = [
    *("model", "tokens", "floor", "jaxmoe", "TFLOP/s", "sustained", "vs dense", "recompute z"),
    *("temporary MB", "recompute z MB", "peak MB", "ragged_dot", "SonicMoE*"),
]
_NOTE = (
    "Microseconds of forward and backward of one layer, bf16, routing given, uniform: y and the "
    "gradients of x, the routing weights and the layer's weights. *TFLOP/s*: of 18 T K H I "
    "operations. *temporary*: what XLA allocates for one such call beyond arguments and results."
)
_PEAK_NOTE = " *peak*: with those."
_PRODUCTS = ["model", "tokens", "product", "floor", "jaxmoe", "TFLOP/s", "ragged_dot", "ratio"]
_PRODUCTS_NOTE = (
    "Microseconds of one `grouped_gemm` with both gradients, bf16, uniform; *ratio*: the time of "
    "`jax.lax.ragged_dot` over jaxmoe's."
)


def summary(report: "Report") -> str:
    """Returns the tables, "" if nothing was measured."""
    timed = [r for r in report.rows if r.suite == "train" and r.us and r.skew == "uniform"]
    layers = _layers(report, [r for r in timed if r.op == "moe_mlp"])
    return "\n\n".join(filter(None, (layers, _products([r for r in timed if "/" in r.op]))))


def _products(timed: list[Row]) -> str:
    bursts = (r for r in timed if r.impl == "jaxmoe" and r.regime == "burst")
    points = {(r.model, r.tokens, r.op): r for r in bursts}
    unloaded = (r for r in timed if r.regime != "sustained")
    others = {(r.model, r.tokens, r.op, r.impl): r.us for r in unloaded}
    body = []
    for point in sorted(points, key=lambda p: (list(MODELS).index(p[0]), p[1:])):
        ours = points[point]
        slow = others.get((*point, "xla_ragged_dot"))
        model, tokens, op = point
        cells = [model, str(tokens), op.partition("/")[2], us(others.get((*point, "floor")))]
        cells += [us(ours.us), f"{ours.tflops:.0f}" if ours.tflops else "-", us(slow)]
        body.append([*cells, f"{slow / ours.us:.1f}" if slow and ours.us else "-"])
    return f"{tables.filled(_PRODUCTS, body)}\n\n{_PRODUCTS_NOTE}" if body else ""


def _layers(report: "Report", timed: list[Row]) -> str:
    points = {(r.model, r.tokens) for r in timed if r.impl == "jaxmoe"}
    order = sorted(points, key=lambda point: (list(MODELS).index(point[0]), point[1]))
    if not order:
        return ""
    peers = {(p["model"], p["tokens"]): p["us"] for p in report.peers.get("training", ())}

    def find(model: str, tokens: int, impl: str, regime: str | None = "burst") -> Row | None:
        wanted = (model, tokens, impl, regime)
        same = (r for r in timed if (r.model, r.tokens, r.impl, r.regime) == wanted)
        return next(same, None)

    body = []
    for model, tokens in order:
        ours, again = (find(model, tokens, impl) for impl in ("jaxmoe", RECOMPUTE))
        floor, ragged = find(model, tokens, "floor", None), find(model, tokens, "xla_ragged_dot")
        loaded = find(model, tokens, "jaxmoe", "sustained")
        body.append(
            [
                model,
                str(tokens),
                *(us(row and row.us) for row in (floor, ours)),
                f"{ours.tflops:.0f}" if ours and ours.tflops else "-",
                us(loaded and loaded.us),
                f"{ours.vs_dense:.2f}" if ours and ours.vs_dense else "-",
                us(again and again.us),
                *(
                    f"{r.temp_bytes / 1e6:.0f}" if r and r.temp_bytes else "-"
                    for r in (ours, again)
                ),
                f"{ours.peak_bytes / 1e6:.0f}" if ours and ours.peak_bytes else "-",
                us(ragged and ragged.us),
                us(peers.get((model, tokens))),
            ]
        )
    note = _NOTE + (_PEAK_NOTE if any(r.peak_bytes for r in timed) else "")
    return f"{tables.filled(_HEAD, body)}\n\n{note}"
