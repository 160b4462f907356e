"""Figures of several panels, lettered as in the paper, and tables beside or instead of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from covary.report.drawing import Drawing, house_style, lay_out

Record = Mapping[str, Any]
WIDTH = 7.4  # inches: what a page shows beside its margins


class ShownTable(NamedTuple):
    """Cells of a table as the page shows them; the first column names the row."""

    columns: list[str]
    rows: list[list[str]]
    caption: str


def composed(draw: Callable[[Record], Drawing]) -> Callable[[Record], Drawing]:
    """Run a function that draws panels in the house style, and give them the room they need."""

    @wraps(draw)
    def in_style(record: Record) -> Drawing:
        with house_style():
            drawing = draw(record)
            lay_out(drawing.figure)
        return drawing

    return in_style


def panels(rows: int, columns: int, *, height: float = 5.6) -> tuple[Figure, list[Axes]]:
    """An empty figure of several panels, row by row."""
    figure = blank(height=height)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [each for row in axes for each in row]


def blank(*, height: float = 5.6) -> Figure:
    """An empty figure."""
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def letter(axes: Axes, name: str, title: str) -> None:
    """The panel's letter, as in the paper, and what it shows."""
    axes.set_title(f"{name}  {title}".strip(), loc="left", fontsize=9.5, fontweight="bold")


def plain_ticks(axes: Axes, axis: str) -> None:
    """Ticks of a logarithmic axis as plain numbers: the house style parses no mathematics."""
    getattr(axes, f"{axis}axis").set_major_formatter(lambda value, _: f"{value:g}")
