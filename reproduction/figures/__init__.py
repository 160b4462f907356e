"""The figure and the table of each experiment that has one, drawn from its results alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from covary.report import drawing
from covary.report.drawing import Drawing
from reproduction.figures import (
    beyond,
    classifiers,
    images,
    mechanism,
    networks,
    photographs,
    supervision,
    theory,
    uci,
    uci_printed,
)
from reproduction.figures.layout import Record, ShownTable

__all__ = ["FIGURES", "TABLES", "draw"]

FIGURES: dict[str, Callable[[Record], Drawing]] = {
    **classifiers.FIGURES,
    **networks.FIGURES,
    **mechanism.FIGURES,
    **theory.FIGURES,
    **beyond.FIGURES,
    **images.FIGURES,
    **uci.FIGURES,
    **supervision.FIGURES,
    **photographs.FIGURES,
}
TABLES: dict[str, Callable[[Record], ShownTable]] = {
    **networks.TABLES,
    **images.TABLES,
    **uci.TABLES,
    **uci_printed.TABLES,
    **supervision.TABLES,
    **photographs.TABLES,
}


def draw(record: Record, folder: Path) -> Path | None:
    """Draw the figure of an experiment to ``<name>.png`` and ``.svg``; None if it has none."""
    if record["experiment"] not in FIGURES:
        return None
    drawing.save(FIGURES[record["experiment"]](record), folder)
    return folder / f"{record['experiment']}.png"
