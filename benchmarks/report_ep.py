"""The report's tables of experts over several devices; empty where no such row was measured."""

import dataclasses
from collections.abc import Iterable
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
_DAGGER = "†"
_PAGE_NOTE = (
    "Microseconds of one layer, bf16, uniform routing, so many tokens on each GPU. *one GPU*: "
    "alone with as many tokens and all experts. *2 GPUs* and so on: the shortest way to spread "
    "them; *part*: what each GPU computes of that without any communication; *bare*: all_gather "
    "and psum_scatter of the same rows alone; *to one*: the shortest way over one GPU."
)
_DAGGER_NOTE = f" {_DAGGER}: the host takes as long to launch it, so the GPUs may be faster."


@dataclasses.dataclass(frozen=True)
class Point:
    """So many tokens of a model on each of so many devices, and the timed rows of model and tokens.

    Rows are None where nothing was measured.
    """

    model: str
    devices: int
    tokens: int
    rows: tuple[Row, ...]

    def find(self, *impls: str) -> Row | None:
        """Returns the fastest of these on the devices."""
        here = (row for row in self.rows if row.devices == self.devices)
        return _fastest(row for row in here if row.impl in impls)

    @property
    def alone(self) -> Row | None:
        """One device with all experts and as many tokens."""
        same_run = (row for row in self.rows if row.beside == self.devices)
        return _fastest(row for row in same_run if row.impl == ep.ALONE)

    @property
    def local(self) -> Row | None:
        """What a device computes without communication."""
        return self.find(ep.LOCAL)

    @property
    def best(self) -> Row | None:
        """The shortest of all ways and numbers of chunks."""
        return self.find(*ep.VARIANTS)

    @property
    def bare(self) -> Row | None:
        """The collectives of all_gather alone."""
        return self.find(_BARE)

    def to_one(self, row: Row | None) -> float | None:
        """Returns the time of a row over that of one device."""
        alone = self.alone
        return row.us / alone.us if row and row.us and alone and alone.us else None


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.us or 0.0, default=None)


def points(report: "Report") -> list[Point]:
    """Returns what was measured on several devices, by model, devices and tokens."""
    timed = [r for r in report.rows if r.suite == "ep" and r.us and r.skew == "uniform"]
    spread = {(r.model, r.devices or 1, r.tokens) for r in timed if r.impl in ep.VARIANTS}
    order = sorted(spread, key=lambda p: (list(MODELS).index(p[0]), *p[1:]))
    return [
        Point(*p, tuple(r for r in timed if (r.model, r.tokens) == (p[0], p[2]))) for p in order
    ]


def summary(report: "Report") -> str:
    """Returns the table of every way, "" if nothing was measured."""
    body = [_row(point) for point in points(report)]
    return f"{tables.filled(_HEAD, body)}\n\n{_NOTE}" if body else ""


def _row(point: Point) -> list[str]:
    def ways(dispatch: str) -> Row | None:
        return point.find(*(name for name, v in ep.VARIANTS.items() if v.dispatch == dispatch))

    alone, local, best, bare = point.alone, point.local, point.best, point.bare
    found = [ways(dispatch) for dispatch in ep.DISPATCHES]
    ragged, ratio = point.find(ragged_ep.NAME), point.to_one(best)
    best_us, gathered = (best and best.us) or 0.0, found[0]
    return [
        point.model,
        str(point.devices),
        str(point.tokens),
        *(us(row and row.us) for row in (alone, local, *found)),
        best.impl.removeprefix("jaxmoe[ep_").removesuffix("]") if best else "-",
        f"{ratio:.2f}" if ratio else "-",
        f"{best_us - local.us:.0f}" if local and local.us else "-",
        *(f"{r.sent_gbps:.0f}" if r and r.sent_gbps else "-" for r in (gathered, bare)),
        us(ragged and ragged.us),
    ]


def page(report: "Report") -> str:
    """Returns expert_parallel.md's section: what spreading takes, and where it loses."""
    found = points(report)
    counts = sorted({point.devices for point in found})
    head = ["model", "tokens", "one GPU"]
    for count in counts:
        head += [f"{count} GPUs", "part", "bare", "to one"]
    cases: dict[tuple[str, int], dict[int, Point]] = {}
    for point in found:
        cases.setdefault((point.model, point.tokens), {})[point.devices] = point
    order = sorted(cases, key=lambda case: (list(MODELS).index(case[0]), case[1]))
    body = [[model, str(tokens), *_cells(cases[model, tokens], counts)] for model, tokens in order]
    if not body:
        return ""
    marked = any(_DAGGER in cell for cells in body for cell in cells)
    parts = [tables.filled(head, body), _PAGE_NOTE + (_DAGGER_NOTE if marked else "")]
    if slower := _slower(found):
        parts.append(f"Longer than one GPU with as many tokens: {slower}.")
    return "\n\n".join(parts)


def _cells(by_count: dict[int, Point], counts: list[int]) -> list[str]:
    alone = next(iter(by_count.values())).alone
    out = [_marked(alone)]
    for count in counts:
        point = by_count.get(count)
        rows = (point.best, point.local, point.bare) if point else (None,) * 3
        ratio = point.to_one(point.best) if point else None
        out += [*map(_marked, rows), f"{ratio:.2f}" if ratio else "-"]
    return out


def _marked(row: Row | None) -> str:
    return us(row and row.us) + (_DAGGER if row and row.host_bound else "")


def _slower(found: list[Point]) -> str:
    """Returns where one device is faster: model, devices, tokens."""
    where: dict[str, list[str]] = {}
    for point in found:
        if (point.to_one(point.best) or 0.0) > 1.0:
            name = f"{point.model} on {point.devices} GPUs"
            where.setdefault(name, []).append(str(point.tokens))
    return "; ".join(f"{name} at {', '.join(tokens)}" for name, tokens in where.items())
