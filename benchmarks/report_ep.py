"""The report's table of experts over several devices; empty where no such row was measured."""

from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.baselines import ragged_ep
from benchmarks.models import MODELS
from benchmarks.rows import Row
from benchmarks.suites import ep
from benchmarks.tables import us

if TYPE_CHECKING:
    from benchmarks.report import Report

_BARE = "xla[all_gather+psum_scatter]"
_HEAD = ["model", "devices", "tokens", "one device", "local", "all_gather", "all_to_all", "ragged"]
_HEAD += ["best", "to one device", "over local", "GB/s", "bare GB/s", "ragged_dot"]
_NOTE = (
    "Microseconds of one layer, bf16, uniform routing, so many tokens on each device. *one "
    "device*: alone with as many tokens and all experts. *local*: what a device computes without "
    "any communication. Each way in its best number of chunks; *best* is the shortest of them. "
    "*GB/s*: what a device sends in the whole time of all_gather; *bare*: what all_gather and "
    "psum_scatter of the same rows reach alone."
)


def summary(report: "Report") -> str:
    """Returns the table, "" if nothing was measured."""
    timed = [r for r in report.rows if r.suite == "ep" and r.us and r.skew == "uniform"]
    spread = {(r.model, r.devices or 1, r.tokens) for r in timed if r.impl in ep.VARIANTS}
    order = sorted(spread, key=lambda p: (list(MODELS).index(p[0]), *p[1:]))
    body = [_row([r for r in timed if (r.model, r.tokens) == (p[0], p[2])], *p) for p in order]
    return f"{tables.filled(_HEAD, body)}\n\n{_NOTE}" if body else ""


def _row(timed: list[Row], model: str, devices: int, tokens: int) -> list[str]:
    def find(*impls: str, on: int | None = devices) -> Row | None:
        rows = [r for r in timed if r.impl in impls and r.devices == on]
        return min(rows, key=lambda r: r.us or 0.0, default=None)

    def ways(dispatch: str) -> Row | None:
        return find(*(ep.variant(dispatch, chunks) for chunks in ep.CHUNKS))

    alone, local, bare = find(ep.ALONE, on=None), find(ep.LOCAL), find(_BARE)
    found = [ways(dispatch) for dispatch in ep.DISPATCHES]
    best = find(*ep.VARIANTS)
    ragged = find(ragged_ep.NAME)
    best_us, gathered = (best and best.us) or 0.0, found[0]
    return [
        model,
        str(devices),
        str(tokens),
        *(us(row and row.us) for row in (alone, local, *found)),
        best.impl.removeprefix("jaxmoe[ep_").removesuffix("]") if best else "-",
        f"{best_us / alone.us:.2f}" if alone and alone.us else "-",
        f"{best_us - local.us:.0f}" if local and local.us else "-",
        *(f"{r.sent_gbps:.0f}" if r and r.sent_gbps else "-" for r in (gathered, bare)),
        us(ragged and ragged.us),
    ]
