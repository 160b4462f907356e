"""Tables that stand beside a figure, or in its place."""

from __future__ import annotations

from typing import NamedTuple


class Table(NamedTuple):
    """Cells as they are shown; the first column names the row."""

    columns: list[str]
    rows: list[list[str]]
    caption: str
