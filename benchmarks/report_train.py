"""The report's table of training a layer; empty where no such row was measured."""

from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.models import MODELS
from benchmarks.rows import Row
from benchmarks.suites.train import RECOMPUTE
from benchmarks.tables import us

if TYPE_CHECKING:
    from benchmarks.report import Report

_HEAD = ["model", "tokens", "floor", "jaxmoe", "TFLOP/s", "sustained", "vs dense", "recompute z"]
_HEAD += ["temporary MB", "recompute z MB", "ragged_dot", "SonicMoE*"]
_NOTE = (
    "Microseconds of forward and backward of one layer, bf16, routing given, uniform: y and the "
    "gradients of x, the routing weights and the layer's weights. *TFLOP/s*: of 18 T K H I "
    "operations. *temporary*: what XLA allocates for one such call beyond arguments and results."
)


def summary(report: "Report") -> str:
    """Returns the table, "" if nothing was measured."""
    timed = [r for r in report.rows if r.suite == "train" and r.us and r.skew == "uniform"]
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
                us(ragged and ragged.us),
                us(peers.get((model, tokens))),
            ]
        )
    return f"{tables.filled(_HEAD, body)}\n\n{_NOTE}"
