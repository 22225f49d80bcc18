"""The tables of experts over several devices; empty where no such row was measured."""

import dataclasses
from collections.abc import Iterable

from benchmarks.baselines import ragged_ep
from benchmarks.report.measurements import Measurements, by_model
from benchmarks.report.tables import filled, number, time_of, where
from benchmarks.rows import Row
from benchmarks.suites import ep

_BARE = "xla[all_gather+psum_scatter]"
_HEAD = [
    *("model", "devices", "tokens", "one device", "local", *ep.DISPATCHES),
    *("best", "to one device", "over local", "GB/s", "bare GB/s", "ragged_dot"),
]
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
    """Rows of a model with `tokens` on each of `devices`.

    Attributes:
      model, devices, tokens: as said.
      rows: every timed row of the model with as many tokens, on any number of devices.
    """

    model: str
    devices: int
    tokens: int
    rows: tuple[Row, ...]

    def find(self, *impls: str) -> Row | None:
        """The fastest of these on the devices, None if none was measured."""
        here = (row for row in self.rows if row.devices == self.devices)
        return _fastest(row for row in here if row.impl in impls)

    @property
    def alone(self) -> Row | None:
        """One device with all experts and as many tokens."""
        same_run = (row for row in self.rows if row.beside == self.devices)
        return _fastest(row for row in same_run if row.impl == ep.ALONE)

    @property
    def local(self) -> Row | None:
        """The part that a device computes without communication."""
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
        """The time of a row over that of one device."""
        alone = self.alone
        return row.us / alone.us if row and row.us and alone and alone.us else None


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.us or 0.0, default=None)


def points(found: Measurements) -> list[Point]:
    """Points measured on several devices, by model, devices and tokens."""
    timed = [r for r in found.rows if r.suite == "ep" and r.us and r.skew == "uniform"]
    at = lambda row: (row.model, row.tokens)  # noqa: E731
    spread = {(r.model, r.devices or 1, r.tokens) for r in timed if r.impl in ep.VARIANTS}
    return [
        Point(model, devices, tokens, tuple(r for r in timed if at(r) == (model, tokens)))
        for model, devices, tokens in by_model(spread)
    ]


def summary(found: Measurements) -> str:
    """The table of every way, "" if nothing was measured."""
    body = [_row(point) for point in points(found)]
    return f"{filled(_HEAD, body)}\n\n{_NOTE}" if body else ""


def _row(point: Point) -> list[str]:
    def ways(dispatch: str) -> Row | None:
        return point.find(*(name for name, v in ep.VARIANTS.items() if v.dispatch == dispatch))

    alone, local, best, bare = point.alone, point.local, point.best, point.bare
    by_way = [ways(dispatch) for dispatch in ep.DISPATCHES]
    best_us = (best and best.us) or 0.0
    return [
        point.model,
        str(point.devices),
        str(point.tokens),
        *map(time_of, (alone, local, *by_way)),
        best.impl.removeprefix("jaxmoe[ep_").removesuffix("]") if best else "-",
        number(point.to_one(best), ".2f"),
        f"{best_us - local.us:.0f}" if local and local.us else "-",
        *(number(r and r.sent_gbps, ".0f") for r in (by_way[0], bare)),
        time_of(point.find(ragged_ep.NAME)),
    ]


def page(found: Measurements) -> str:
    """The table of expert_parallel.md: what spreading takes, and where it loses."""
    measured = points(found)
    counts = sorted({point.devices for point in measured})
    head = ["model", "tokens", "one GPU"]
    for count in counts:
        head += [f"{count} GPUs", "part", "bare", "to one"]
    cases: dict[tuple[str, int], dict[int, Point]] = {}
    for point in measured:
        cases.setdefault((point.model, point.tokens), {})[point.devices] = point
    body = [[case[0], str(case[1]), *_cells(cases[case], counts)] for case in by_model(cases)]
    if not body:
        return ""
    marked = any(_DAGGER in cell for cells in body for cell in cells)
    parts = [filled(head, body), _PAGE_NOTE + (_DAGGER_NOTE if marked else "")]
    slower = (p for p in measured if (p.to_one(p.best) or 0.0) > 1.0)
    if names := where((f"{p.model} on {p.devices} GPUs", p.tokens) for p in slower):
        parts.append(f"Longer than one GPU with as many tokens: {names}.")
    return "\n\n".join(parts)


def _cells(by_count: dict[int, Point], counts: list[int]) -> list[str]:
    alone = next(iter(by_count.values())).alone
    out = [_marked(alone)]
    for count in counts:
        point = by_count.get(count)
        rows = (point.best, point.local, point.bare) if point else (None,) * 3
        ratio = point.to_one(point.best) if point else None
        out += [*map(_marked, rows), number(ratio, ".2f")]
    return out


def _marked(row: Row | None) -> str:
    return time_of(row) + (_DAGGER if row and row.host_bound else "")
