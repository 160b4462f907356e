"""What the scripts of the gallery have in common: their options, and saving their picture."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"axes.spines.right": False, "axes.spines.top": False, "figure.dpi": 100, "font.size": 10}
)
BLUE, ORANGE, GREEN, GREY = "#2f5d9b", "#d9772b", "#3a8f5c", "#8a8a8a"


def options(doc: str) -> argparse.Namespace:
    """``quick``: whether to do little, for a test; ``figure``: where to write the picture."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less training: does it run?")
    parser.add_argument("--figure", type=Path, default=None, help="picture, such as out.png")
    return parser.parse_args()


def save(figure: Figure, path: Path | None) -> None:
    """Write the picture, or say how to get it."""
    if path is None:
        print("(--figure out.png writes the picture)")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)
