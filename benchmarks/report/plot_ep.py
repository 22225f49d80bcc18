"""Draws what spreading experts over devices takes, over one device with as many tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from benchmarks.report import figure
from benchmarks.report.ep import Point
from benchmarks.rows import Row

_TICKS = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4)
_LIMIT = "launching takes as long: an upper limit"


def series(points: list[Point], row: Callable[[Point], Row | None]) -> list[tuple[int, float]]:
    """One line: tokens, and the time over that of one device."""
    found = ((point.tokens, point.to_one(row(point))) for point in points)
    return [(tokens, ratio) for tokens, ratio in found if ratio]


def write(points: list[Point], path: Path) -> None:
    """Writes the figure; `points` are in order of tokens, and the same give the same bytes."""
    models = list(dict.fromkeys(point.model for point in points))
    figure.write(models, lambda axes, model: _panel(axes, points, model), path, columns=3)


def _panel(axes: Any, points: list[Point], model: str) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8, label="1 GPU, all experts")
    counts = sorted({point.devices for point in points})
    for number, count in enumerate(counts):
        mine = [p for p in points if (p.model, p.devices) == (model, count)]
        colour, label = f"C{number}", f"{count} GPUs"
        _line(axes, series(mine, lambda p: p.best), "o-", colour, label, lw=1.8)
        local = series(mine, lambda p: p.local)
        _line(axes, local, "--", colour, f"{label}, without communication", lw=0.9)
    limits = [p for p in points if p.model == model and _host_bound(p)]
    at = series(limits, lambda p: p.best)
    _line(axes, at, "o", "black", _LIMIT, mfc="white", mew=0.8)
    across, up = "tokens on each GPU", "time / 1 GPU with as many tokens"
    figure.scales(axes, model, across, up, _TICKS)
    axes.xaxis.set_major_locator(LogLocator(base=8))  # most of the numbers measured


def _host_bound(point: Point) -> bool:
    return any(row and row.host_bound for row in (point.best, point.alone))


def _line(
    axes: Any, points: list[tuple[int, float]], style: str, colour: str, label: str, **how: Any
) -> None:
    if points:
        tokens, ratios = zip(*points, strict=True)
        axes.plot(tokens, ratios, style, color=colour, label=label, ms=4, **how)
