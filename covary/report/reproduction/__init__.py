"""The paper's figures and tables beside ours, from the files of ``covary reproduce`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(record: Mapping[str, Any], folder: Path) -> Path | None:
    """Draw the figure of an experiment to ``<name>.png`` and ``.svg``; None if it has none."""
    from covary.report import drawing
    from covary.report.reproduction.figures import FIGURES

    if record["experiment"] not in FIGURES:
        return None
    drawing.save(FIGURES[record["experiment"]](record), folder)
    return folder / f"{record['experiment']}.png"
