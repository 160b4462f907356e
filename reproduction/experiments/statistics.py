"""Small statistics that several experiments share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray
# Of histograms: enough to see the shape of a distribution at the width of a panel.
_BINS = 50
# Values beyond these quantiles of all would leave the rest in a few bins.
_RANGE = (0.002, 0.998)


class Line(NamedTuple):
    """A straight line through points, by least squares."""

    slope: float
    intercept: float
    correlation: float

    @property
    def r_squared(self) -> float:
        """The part of the variance that the line explains."""
        return self.correlation**2


def line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares of y on x; NaN where there are fewer than three points, or x is constant."""
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = np.isfinite(first) & np.isfinite(second)
    first, second = first[known], second[known]
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return Line(math.nan, math.nan, math.nan)
    slope, intercept = np.polyfit(first, second, 1)
    return Line(float(slope), float(intercept), float(np.corrcoef(first, second)[0, 1]))


def groups(values: Floats, wrong: Floats) -> tuple[Floats, Floats]:
    """Values of right and of wrong predictions."""
    return values[~wrong], values[wrong]


def shares(values: Floats, wrong: Floats) -> dict[str, Any]:
    """Histograms of right and wrong predictions in the same bins; see ``histograms``."""
    right, bad = groups(values, wrong)
    return histograms({"right": right, "wrong": bad})


def histograms(by_group: dict[str, Floats]) -> dict[str, Any]:
    """The share of each group in bins of equal width that all groups have in common.

    The few values beyond the range count in its first and last bin.
    """
    finite = {name: values[np.isfinite(values)] for name, values in by_group.items()}
    everything = np.concatenate(list(finite.values()))
    if everything.size == 0:
        return {"edges": [], "shares": {name: [] for name in by_group}}
    # Each group counts alike for the range, however many samples it has.
    quantiles = [np.quantile(values, _RANGE) for values in finite.values() if values.size]
    low, high = min(each[0] for each in quantiles), max(each[1] for each in quantiles)
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, _BINS + 1)
    counted = {
        name: np.histogram(np.clip(values, low, high), edges)[0] / max(1, values.size)
        for name, values in finite.items()
    }
    return {
        "edges": edges.tolist(),
        "shares": {name: values.tolist() for name, values in counted.items()},
    }
