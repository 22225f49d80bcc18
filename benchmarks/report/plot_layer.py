"""Draws time over floor against tokens, one panel per model."""

from pathlib import Path
from typing import Any

from benchmarks.models import OTHERS
from benchmarks.report import figure
from benchmarks.report.measurements import Measurements, Point

# implementation, label, colour, marker
_LINES = (
    ("jaxmoe", "jaxmoe", "#d62728", "o"),
    ("sustained", "jaxmoe, sustained", "#d62728", "x"),
    ("FlashInfer", "FlashInfer*", "#2ca02c", "s"),
    ("FlashInfer CuTe DSL", "FlashInfer CuTe DSL*", "#1f77b4", "s"),
    ("SonicMoE", "SonicMoE*", "#9467bd", "^"),
    ("torch_grouped_mm", "torch._grouped_mm", "#ff7f0e", "v"),
    ("tokamax", "tokamax", "#17becf", "D"),
    ("xla_ragged_dot", "lax.ragged_dot", "#7f7f7f", "P"),
)
_TICKS = (1, 1.25, 1.5, 2, 3, 4, 6, 8)
_LIMITS = (0.85, 8.0)  # lax.ragged_dot leaves the panel: it goes past 100


def series(
    found: Measurements, floors: dict[Point, float], model: str, impl: str
) -> list[tuple[int, float]]:
    """One line: tokens, and the time over the floor, in order of tokens."""
    out = []
    for (name, tokens), floor_us in floors.items():
        if name != model:
            continue
        if impl == "sustained":
            row = found.find(name, tokens, "jaxmoe", regime="sustained")
        else:
            row = found.find(name, tokens, impl)
        times = (found.peer_us(name, tokens, impl, regime=r) for r in ("burst", "loaded"))
        us = row.us if row else next(filter(None, times), None)
        if us:
            out.append((tokens, us / floor_us))
    return sorted(out)


def write(found: Measurements, path: Path) -> None:
    """Writes the figure; the same rows give the same bytes."""
    known = dict.fromkeys(model for model, _ in found.points() if model not in OTHERS)
    models, floors = list(known), found.floors()
    figure.write(models, lambda axes, model: _panel(axes, found, floors, model), path)


def _panel(axes: Any, found: Measurements, floors: dict[Point, float], model: str) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8)
    for impl, label, colour, marker in _LINES:
        points = series(found, floors, model, impl)
        if not points:
            continue
        tokens, ratios = zip(*points, strict=True)
        style = "--" if impl == "sustained" else "-"
        width = 1.8 if impl in ("jaxmoe", "sustained") else 1.0
        axes.plot(tokens, ratios, style, label=label, color=colour, marker=marker, ms=4, lw=width)
    figure.scales(axes, model, "tokens", "time / floor", _TICKS)
    axes.set_ylim(*_LIMITS)
