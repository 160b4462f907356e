"""Figures of several panels, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from covary.report.drawing import SLATE, WIDTH
from covary.runs.predictions import Array
from covary.runs.results import RelativeError

_SMALL = 8.5


def grid_of_panels(
    rows: int, columns: int, height: float, *, widths: Sequence[float] | None = None
) -> tuple[Figure, Axes, list[list[Axes]]]:
    """An empty figure of panels, below axes of no height that title and legend stand on.

    They would push a panel aside if they stood on that.
    """
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    heights = [0.01, *[1.0] * rows]
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=heights, width_ratios=widths)
    top = figure.add_subplot(grid[0, :])
    top.set_axis_off()
    panels = [
        [figure.add_subplot(grid[row + 1, column]) for column in range(columns)]
        for row in range(rows)
    ]
    return figure, top, panels


def name_panel(axes: Axes, text: str) -> None:
    """What one of several panels shows."""
    axes.set_title(text, loc="left", fontsize=_SMALL, pad=4)


def identity(axes: Axes, *values: Array) -> None:
    """A dotted line on which both axes agree."""
    ends = [min(float(each.min()) for each in values), max(float(each.max()) for each in values)]
    axes.plot(ends, ends, ":", color=SLATE, lw=1.2, zorder=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(3))


def said(error: RelativeError) -> str:
    """An error in words."""
    return "undefined" if error.value is None else f"{100 * error.value:.1f}%"
