"""Draws time over floor against tokens, one panel per model, as a reproducible SVG."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

# implementation, label, colour, marker
_LINES = (
    ("jaxmoe", "jaxmoe", "#d62728", "o"),
    ("sustained", "jaxmoe, sustained", "#d62728", "x"),
    ("FlashInfer", "FlashInfer*", "#2ca02c", "s"),
    ("SonicMoE", "SonicMoE*", "#9467bd", "^"),
    ("torch_grouped_mm", "torch._grouped_mm", "#ff7f0e", "v"),
    ("tokamax", "tokamax", "#17becf", "D"),
    ("xla_ragged_dot", "lax.ragged_dot", "#7f7f7f", "P"),
)
_TICKS = (1, 1.25, 1.5, 2, 3, 4, 6, 8)
_LIMITS = (0.85, 8.0)  # lax.ragged_dot leaves the panel: it goes past 100


def series(
    report: Any, floors: dict[tuple[str, int], float], model: str, impl: str
) -> list[tuple[int, float]]:
    """Returns (tokens, time over floor) of one line, in order of tokens."""
    out = []
    for (name, tokens), floor_us in floors.items():
        if name != model:
            continue
        if impl == "sustained":
            row = report.find(name, tokens, "jaxmoe", regime="sustained")
        else:
            row = report.find(name, tokens, impl)
        us = row.us if row else report.peer_us(name, tokens, impl)
        if us:
            out.append((tokens, us / floor_us))
    return sorted(out)


def write(report: Any, floors: dict[tuple[str, int], float], path: Path) -> None:
    """Writes the figure; the same rows give the same bytes."""
    models = list(dict.fromkeys(model for model, _ in report.points()))
    settings: dict[Any, Any] = {"svg.hashsalt": "jaxmoe", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        columns = min(2, len(models))
        lines = -(-len(models) // columns)
        size = (4.6 * columns, 2.9 * lines + 0.6)
        figure, grid = pyplot.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
        for axes, model in zip(grid.flat, models, strict=False):
            _panel(axes, report, floors, model)
        for axes in grid.flat[len(models) :]:
            axes.set_axis_off()
        handles = {
            label: handle
            for axes in grid.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=4, frameon=False)
        figure.tight_layout(rect=(0, 0.6 / size[1], 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def _panel(axes: Any, report: Any, floors: dict[tuple[str, int], float], model: str) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8)
    for impl, label, colour, marker in _LINES:
        points = series(report, floors, model, impl)
        if not points:
            continue
        tokens, ratios = zip(*points, strict=True)
        style = "--" if impl == "sustained" else "-"
        width = 1.8 if impl in ("jaxmoe", "sustained") else 1.0
        axes.plot(tokens, ratios, style, label=label, color=colour, marker=marker, ms=4, lw=width)
    axes.set_title(model)
    axes.set_xlabel("tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(*_LIMITS)
    axes.set_ylabel("time / floor")
    axes.grid(True, color="#dddddd", linewidth=0.5)
