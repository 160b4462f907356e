"""Small statistics that several experiments share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray
# Of histograms: enough to see the shape of a distribution at the width of a panel.
_BINS = 50
# Values beyond these quantiles of all would leave the rest in a few bins.
_RANGE = (0.002, 0.998)
# Of 95% intervals: standard deviations to each side.
TWO_SIDED = NormalDist().inv_cdf(0.975)
_DRAWS = 1000


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


def resampled_separabilities(
    values: Floats, higher: Floats, *, seed: int, draws: int = _DRAWS
) -> Floats:
    """Covariance (k, k) of k separabilities of the same samples, by the bootstrap.

    The samples of either group are drawn again with replacement, the same ones for all k, so that
    what separabilities have in common cancels in their differences. NaN if a group has fewer than
    two samples, or one of the k no spread.

    Args:
        values: (n, k) of n samples; infinite ones are left out, as ``metrics.separability`` does.
        higher: (n,) which samples are of the group that is expected to be higher.
        seed: of the draws.
        draws: how many times.
    """
    if min(higher.sum(), (~higher).sum()) < 2:
        return np.full((values.shape[1],) * 2, math.nan)
    generator = np.random.default_rng(seed)
    means, variances = [], []
    for group in (values[higher], values[~higher]):
        known = np.isfinite(group)
        centre = np.where(known, group, 0.0).sum(0) / np.maximum(1, known.sum(0))
        moved = np.where(known, group - centre, 0.0)  # squares of large numbers would cancel
        count = len(group)
        times = generator.multinomial(count, np.full(count, 1 / count), draws).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = times @ moved / (times @ known)
            variances.append(times @ moved**2 / (times @ known) - mean**2)
        means.append(mean + centre)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (means[0] - means[1]) / np.sqrt(variances[0] + variances[1])
        return np.atleast_2d(np.cov(drawn, rowvar=False))


def deviation_by_sizes(separability: float, sizes: tuple[int, int]) -> float:
    """The standard deviation of a separability, of groups whose sizes alone are known.

    To first order, as if both groups were Gaussian with the same variance. NaN without two
    samples in each.
    """
    if min(sizes) < 2:
        return math.nan
    means = sum(1 / size for size in sizes) / 2
    variances = separability**2 / 8 * sum(1 / (size - 1) for size in sizes)
    return math.sqrt(means + variances)


def deviation_by_shares(
    edges: Sequence[float], higher: Sequence[float], lower: Sequence[float], sizes: tuple[int, int]
) -> float:
    """The standard deviation of a separability of groups that are known as histograms.

    To first order in the errors of means and variances (the delta method), whose own variances and
    covariances are those of the histograms. NaN where they are empty or without spread.

    Args:
        edges: (b + 1,) of the bins.
        higher, lower: (b,) shares of either group.
        sizes: how many samples each of them has.
    """
    if not len(edges) or min(sizes) < 2:
        return math.nan
    centre = (np.asarray(edges)[:-1] + np.asarray(edges)[1:]) / 2
    groups = [_moments(centre, np.asarray(each)) for each in (higher, lower)]
    gap, spread = groups[0][0] - groups[1][0], groups[0][1] + groups[1][1]
    if spread <= 0:
        return math.nan
    total = 0.0
    for sign, (_, variance, third, fourth), size in zip((1, -1), groups, sizes, strict=True):
        by_mean, by_variance = sign / math.sqrt(spread), -gap / (2 * spread**1.5)
        total += by_mean**2 * variance / size
        total += by_variance**2 * (fourth - variance**2) / size
        total += 2 * by_mean * by_variance * third / size
    return math.sqrt(max(total, 0.0))


def _moments(values: Floats, shares: Floats) -> tuple[float, float, float, float]:
    """Mean and the second to fourth central moments of numbers with these shares."""
    mean = float(values @ shares / shares.sum())
    second, third, fourth = (
        float((values - mean) ** power @ shares / shares.sum()) for power in (2, 3, 4)
    )
    return mean, second, third, fourth


def falls(levels: Sequence[float], covariance: Floats) -> int:
    """How many pairs of levels are in the wrong order, the later one lower, beyond their noise.

    All pairs are looked at, so that a slow fall is seen too. The intervals of all of them together
    have 95% (Bonferroni), or some of many pairs would be out of order by chance.

    Args:
        levels: (k,) in the order in which they should not fall.
        covariance: (k, k) of their errors.
    """
    pairs = list(itertools.combinations(range(len(levels)), 2))
    bound = NormalDist().inv_cdf(1 - 0.025 / max(1, len(pairs)))
    return sum(
        levels[j] - levels[i] < -bound * deviation_of_difference(covariance, i, j) for i, j in pairs
    )


def deviation_of_difference(covariance: Floats, i: int, j: int) -> float:
    """The standard deviation of the difference of two numbers, by the covariance of errors."""
    return math.sqrt(max(0.0, covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]))


def correlation_interval(correlation: float, count: int) -> tuple[float, float]:
    """A 95% interval of a correlation over so many points (Fisher), as if they were independent.

    NaN for three points or fewer.
    """
    if count <= 3 or not abs(correlation) < 1:
        return math.nan, math.nan
    middle, reach = math.atanh(correlation), TWO_SIDED / math.sqrt(count - 3)
    return math.tanh(middle - reach), math.tanh(middle + reach)
