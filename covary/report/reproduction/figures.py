"""The figure and the table of each experiment that has one, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from covary.report.drawing import Drawing
from covary.report.reproduction import classifiers, networks
from covary.report.reproduction.table import Table

FIGURES: dict[str, Callable[[Mapping[str, Any]], Drawing]] = {
    **classifiers.FIGURES,
    **networks.FIGURES,
}
TABLES: dict[str, Callable[[Mapping[str, Any]], Table]] = {}
