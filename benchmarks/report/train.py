"""The tables of training: a layer, and its products; empty where nothing was measured."""

from benchmarks.report.measurements import Measurements, by_model
from benchmarks.report.tables import filled, number, time_of, us
from benchmarks.suites.train import RECOMPUTE

PEER_FIELDS = (("pass", "forward+backward"),)

_HEAD = [
    *("model", "tokens", "floor", "jaxmoe", "TFLOP/s", "sustained", "vs dense", "recompute z"),
    *("temporary MB", "recompute z MB", "peak MB", "ragged_dot", "SonicMoE*", "run"),
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


def summary(found: Measurements) -> str:
    """The tables, "" if nothing was measured."""
    return "\n\n".join(filter(None, (_layers(found), _products(found))))


def _layers(found: Measurements) -> str:
    body, peaks = [], False
    for point in found.points(suite="train"):
        ours, again = (found.find(*point, i, suite="train") for i in ("jaxmoe", RECOMPUTE))
        peaks |= bool(ours and ours.peak_bytes)
        body.append(
            [
                point[0],
                str(point[1]),
                time_of(found.find(*point, "floor", suite="train", regime=None)),
                time_of(ours),
                number(ours and ours.tflops, ".0f"),
                time_of(found.find(*point, "jaxmoe", suite="train", regime="sustained")),
                number(ours and ours.vs_dense, ".2f"),
                time_of(again),
                *(number(r and (r.temp_bytes or 0) / 1e6, ".0f") for r in (ours, again)),
                number(ours and (ours.peak_bytes or 0) / 1e6, ".0f"),
                time_of(found.find(*point, "xla_ragged_dot", suite="train")),
                us(found.peer_us(*point, "SonicMoE", **dict(PEER_FIELDS))),
                found.origin(ours),
            ]
        )
    return f"{filled(_HEAD, body)}\n\n{_NOTE}{_PEAK_NOTE if peaks else ''}" if body else ""


def _products(found: Measurements) -> str:
    timed = [r for r in found.rows if r.suite == "train" and r.us and r.skew == "uniform"]
    timed = [r for r in timed if "/" in r.op and r.regime != "sustained"]
    times = {(r.model, r.tokens, r.op, r.impl): r.us for r in timed}
    body = []
    for ours in by_model((r.model, r.tokens, r.op, r) for r in timed if r.impl == "jaxmoe"):
        *point, row = ours
        slow = times.get((*point, "xla_ragged_dot"))
        model, tokens, op = point
        cells = [model, str(tokens), op.partition("/")[2], us(times.get((*point, "floor")))]
        cells += [us(row.us), number(row.tflops, ".0f"), us(slow)]
        body.append([*cells, number(slow and slow / row.us, ".1f")])
    return f"{filled(_PRODUCTS, body)}\n\n{_PRODUCTS_NOTE}" if body else ""
