"""Panels over the number of tokens, one for each model, in a reproducible SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402


def write(
    models: Sequence[str], draw: Callable[[Any, str], None], path: Path, columns: int = 4
) -> None:
    """Writes a panel for each model, drawn by `draw(axes, model)`; equal data give equal bytes.

    Below them is one legend of so many columns: a label stands there once.
    """
    settings: dict[Any, Any] = {"svg.hashsalt": "jaxmoe", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        across = min(2, len(models))
        lines = -(-len(models) // across)
        size = (4.6 * across, 2.9 * lines + 0.6)
        figure, grid = pyplot.subplots(lines, across, figsize=size, sharey=True, squeeze=False)
        for axes, model in zip(grid.flat, models, strict=False):
            draw(axes, model)
        for axes in grid.flat[len(models) :]:
            axes.set_axis_off()
        handles = {
            label: handle
            for axes in grid.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="lower center", ncol=columns, frameon=False
        )
        figure.tight_layout(rect=(0, 0.6 / size[1], 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def scales(axes: Any, model: str, across: str, up: str, ticks: Sequence[float]) -> None:
    """Names a panel and its axes: tokens in powers of two, and ratios, logarithmic, at `ticks`."""
    axes.set_title(model)
    axes.set_xlabel(across)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(up)
    axes.grid(True, color="#dddddd", linewidth=0.5)
