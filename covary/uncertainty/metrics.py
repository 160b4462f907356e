"""How good are uncertainties: one number, or one curve, per dataset.

Arrays of numpy in, numbers and arrays of numpy out. A *score* is one number per sample, higher
where the network is less sure. What is undefined (a rate among no samples) is NaN, never a guess.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def separability(higher: ArrayLike, lower: ArrayLike) -> float:
    """How far two groups of numbers are apart, in units of their spread.

    ``(mean_1 - mean_2) / sqrt(var_1 + var_2)``, the paper's measure; positive where the group that
    is expected to be higher is.
    """
    first, second = _finite(higher), _finite(lower)
    if first.size == 0 or second.size == 0:
        return math.nan
    spread = math.sqrt(first.var() + second.var())
    return float(first.mean() - second.mean()) / spread if spread > 0 else math.nan


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Probability that a positive scores higher than a negative; ties count one half.

    The area under the ROC curve: 1 is perfect, 0.5 is chance.
    """
    first, second = _numbers(positive), _numbers(negative)
    if first.size == 0 or second.size == 0:
        return math.nan
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, side="left")
    not_above = np.searchsorted(ordered, first, side="right")
    return float((below + not_above).mean() / (2 * second.size))


class RiskCoverage(NamedTuple):
    """What is answered, and how wrong, if only the k surest samples are, for k = 1 ... n."""

    threshold: Floats  # (n,) the k-th lowest score
    coverage: Floats  # (n,) k / n
    risk: Floats  # (n,) average loss of those k


def risk_coverage(score: ArrayLike, loss: ArrayLike) -> RiskCoverage:
    """The risk-coverage curve: answer the surest samples first.

    ``loss`` is 1 for a wrong and 0 for a right prediction, or a squared error. Samples of equal
    score are answered together or not at all, so each has the risk of its whole group.
    """
    scores, losses = _numbers(score), _numbers(loss)
    n = scores.size
    order = np.argsort(scores, kind="stable")
    threshold = scores[order]
    # The last of each group of equal scores stands for all of it.
    last = np.searchsorted(threshold, threshold, side="right")
    answered = np.cumsum(losses[order])
    return RiskCoverage(threshold, np.arange(1, n + 1) / n, answered[last - 1] / last)


def aurc(score: ArrayLike, loss: ArrayLike) -> float:
    """Area under the risk-coverage curve; lower is better."""
    curve = risk_coverage(score, loss)
    return float(curve.risk.mean()) if curve.risk.size else math.nan


class CalibrationBins(NamedTuple):
    """Confidence beside accuracy, in bins of confidence."""

    edges: Floats  # (bins + 1,)
    confidence: Floats  # (bins,) average within the bin, NaN where it is empty
    accuracy: Floats  # (bins,)
    samples: NDArray[np.int64]  # (bins,) how many there are


def calibration_bins(confidence: ArrayLike, right: ArrayLike, *, bins: int = 15) -> CalibrationBins:
    """Group predictions by confidence in [0, 1], in bins of equal width."""
    confident, correct = _numbers(confidence), _numbers(right)
    edges = np.linspace(0, 1, bins + 1)
    # A bin contains its upper edge, so that a confidence of 1 belongs to the last.
    place = np.clip(np.searchsorted(edges, confident, side="left") - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        average = np.bincount(place, confident, minlength=bins) / count
        accuracy = np.bincount(place, correct, minlength=bins) / count
    return CalibrationBins(edges, average, accuracy, count)


def ece(confidence: ArrayLike, right: ArrayLike, *, bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| averaged over samples, by bins."""
    grouped = calibration_bins(confidence, right, bins=bins)
    filled = grouped.samples > 0
    if not filled.any():
        return math.nan
    gap = np.abs(grouped.accuracy - grouped.confidence)[filled]
    return float(np.average(gap, weights=grouped.samples[filled]))


def nll(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average negative log-probability of the true class, (n, classes) and (n,), in nats."""
    chosen = np.take_along_axis(_numbers(probabilities), _labels(labels)[:, None], 1)
    # A probability that underflowed to 0 costs much, not infinitely much.
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average squared distance of the probabilities (n, classes) from the one-hot truth (n,)."""
    gap = _numbers(probabilities).copy()
    gap[np.arange(len(gap)), _labels(labels)] -= 1
    return float((gap**2).sum(1).mean())


def interval_coverage(error: ArrayLike, stddev: ArrayLike, level: float) -> float:
    """Fraction of errors within the central Gaussian interval of this probability."""
    half_width = normal_quantile(level) * _numbers(stddev)
    return float((np.abs(_numbers(error)) <= half_width).mean())


def normal_quantile(level: float) -> float:
    """How many standard deviations to either side hold a fraction ``level`` of a Gaussian."""
    if not 0 < level < 1:
        raise ValueError(f"An interval needs a level between 0 and 1, got {level}.")
    from statistics import NormalDist

    return NormalDist().inv_cdf(0.5 + level / 2)


def gaussian_log_likelihood(mean: ArrayLike, cov: ArrayLike, target: ArrayLike) -> Floats:
    """(n,) log-density of targets (n, t) under N(mean, cov), for (n, t) and (n, t, t).

    In the units of the target; -inf where the covariance has no full rank, and so no density.
    """
    gap, matrix = _numbers(target) - _numbers(mean), _numbers(cov)
    values, vectors = np.linalg.eigh(matrix)
    along = np.einsum("nij,ni->nj", vectors, gap)
    positive = np.where(values > 0, values, 1.0)
    density = -0.5 * (along**2 / positive + np.log(2 * math.pi * positive)).sum(-1)
    return np.where((values > 0).all(-1), density, -np.inf)


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's correlation: that of the ranks, ties sharing their average rank."""
    a, b = _ranks(_numbers(first)), _ranks(_numbers(second))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > 0 else math.nan


def _ranks(values: Floats) -> Floats:
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, side="left")
    last = np.searchsorted(ordered, values, side="right")
    return (first + last - 1) / 2


def _numbers(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _finite(values: ArrayLike) -> Floats:
    # An output without any variance has entropy -inf, and no average can take that in.
    numbers = _numbers(values)
    return numbers[np.isfinite(numbers)]


def _labels(values: ArrayLike) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
