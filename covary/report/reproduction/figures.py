"""The figure of each experiment, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from covary.report.drawing import Drawing
from covary.report.reproduction import classifiers, networks

FIGURES: dict[str, Callable[[Mapping[str, Any]], Drawing]] = {
    **classifiers.FIGURES,
    **networks.FIGURES,
}
