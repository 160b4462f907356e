"""Numbers and verdicts in words, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from covary.experiments import Claim


def number(value: float | None) -> str:
    """Four significant digits, or what stands for none."""
    if value is None or not math.isfinite(value):
        return "undefined"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def spread(values: Sequence[float | None]) -> str:
    """The average over seeds, the least and the largest, and of how many."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not values:
        return "not measured"
    if not known:
        return "undefined"
    undefined = len(values) - len(known)
    tail = f"; undefined in {undefined}" if undefined else ""
    if len(values) == 1:
        return number(known[0])
    low, high = number(min(known)), number(max(known))
    middle = number(statistics.fmean(known))
    return f"{middle} ({low} to {high}; n = {len(values)}{tail})"


def bounds(claim: Claim) -> str:
    """When a number is taken to be in accord with the claim; nothing if it only is shown."""
    if claim.least is None and claim.most is None:
        return ""
    if claim.least is not None and claim.most is not None:
        return f"{number(claim.least)} to {number(claim.most)}"
    if claim.least is not None:
        return f">= {number(claim.least)}"
    assert claim.most is not None  # it has a bound
    return f"<= {number(claim.most)}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
