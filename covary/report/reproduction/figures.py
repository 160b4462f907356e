"""The figure and the table of each experiment that has one, by its name."""

from __future__ import annotations

from collections.abc import Callable

from covary.report.drawing import Drawing
from covary.report.reproduction import classifiers, images, mechanism, networks, theory, uci
from covary.report.reproduction.layout import Record
from covary.report.reproduction.table import Table

FIGURES: dict[str, Callable[[Record], Drawing]] = {
    **classifiers.FIGURES,
    **networks.FIGURES,
    **mechanism.FIGURES,
    **theory.FIGURES,
    **images.FIGURES,
    **uci.FIGURES,
}
TABLES: dict[str, Callable[[Record], Table]] = {**images.TABLES, **uci.TABLES}
