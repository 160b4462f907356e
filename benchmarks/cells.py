"""Tables in markdown, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable


def markdown(header: list[str], rows: Iterable[list[str]], *, left: bool = False) -> str:
    """A table of numbers, to the right, or of words, to the left."""
    lines = [header, ["---"] + ["---" if left else "---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(value: float) -> str:
    return f"{100 * value:.{2 if value < 0.01 else 1 if value < 0.1 else 0}f}%"
