"""Metrics: how good predictions and scores are, as one number or one curve per dataset.

Arrays of numpy in, numbers and arrays of numpy out. A *score* is one number per sample, higher
where the network is less sure. What is undefined (a rate among no samples) is NaN, never a guess;
NaN among what is given is an error. Infinite scores are numbers like others for what ranks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from covary.uncertainty.registry import Metric

Floats = NDArray[np.float64]
# Probabilities of float32 may exceed 1 by its round-off.
_ROUND_OFF = 1e-5
_CORRELATION_ROUND_OFF = 1e-6


def separability(higher: ArrayLike, lower: ArrayLike) -> float:
    """How far two groups of numbers are apart, over their spread.

    ``(mean_1 - mean_2) / sqrt(var_1 + var_2)``, the paper's measure; positive where the group that
    is expected to be higher is. Infinite numbers are left out; NaN for groups without spread.
    """
    first, second = _finite(higher, "separability"), _finite(lower, "separability")
    if first.size == 0 or second.size == 0:
        return math.nan
    spread = math.sqrt(first.var() + second.var())
    return float(first.mean() - second.mean()) / spread if spread > 0 else math.nan


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Probability that a positive scores higher than a negative; ties count one half.

    The area under the ROC curve: 1 is perfect, 0.5 is chance, and what constant scores have. NaN
    if either group is empty.
    """
    first, second = _scores(positive, "auroc"), _scores(negative, "auroc")
    if first.size == 0 or second.size == 0:
        return math.nan
    # Exact, where that of torchmetrics is rounded to float32, and ten times as fast.
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, side="left")
    not_above = np.searchsorted(ordered, first, side="right")
    return float((below + not_above).mean() / (2 * second.size))


def aupr(positive: ArrayLike, negative: ArrayLike) -> float:
    """Area under the precision-recall curve, as average precision.

    Precision among all that score at least as high, averaged over the positives: 1 is perfect, the
    fraction of positives is chance, and what constant scores have. NaN if either group is empty.
    Needs torchmetrics.
    """
    first, second = _scores(positive, "aupr"), _scores(negative, "aupr")
    if first.size == 0 or second.size == 0:
        return math.nan
    try:
        from torchmetrics.functional.classification import binary_average_precision
    except ImportError as error:
        raise ImportError(
            "aupr needs torchmetrics, which is not installed: pip install 'covary[metrics]'."
        ) from error
    # Scores outside [0, 1] are squashed there by a sigmoid, which ties the large ones, and infinite
    # ones are never equal; ranks are safe from both.
    scores = np.concatenate([first, second])
    distinct, rank = np.unique(scores, return_inverse=True)
    is_positive = torch.arange(scores.size) < first.size
    ranks = torch.from_numpy(rank.reshape(-1) / max(1, distinct.size - 1))
    return float(binary_average_precision(ranks, is_positive.long()))


def fpr95(positive: ArrayLike, negative: ArrayLike) -> float:
    """Rate of negatives called positive where at least 95% of the positives are found.

    At the highest threshold that finds so many: 0 is perfect, 0.95 is chance, and constant scores
    have 1. NaN if either group is empty.
    """
    first, second = _scores(positive, "fpr95"), _scores(negative, "fpr95")
    if first.size == 0 or second.size == 0:
        return math.nan
    # In whole numbers: 0.95 n need not be one where it should.
    found = -(-95 * first.size // 100)
    threshold = np.sort(first)[first.size - found]
    return float((second >= threshold).mean())


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
    scores, losses = _scores(score, "risk_coverage"), _scores(loss, "risk_coverage")
    _same_shape("risk_coverage", score=scores, loss=losses)
    n = scores.size
    order = np.argsort(scores, kind="stable")
    threshold = scores[order]
    # The last of each group of equal scores stands for all of it.
    last = np.searchsorted(threshold, threshold, side="right")
    answered = np.cumsum(losses[order])
    return RiskCoverage(threshold, np.arange(1, n + 1) / max(1, n), answered[last - 1] / last)


def aurc(score: ArrayLike, loss: ArrayLike) -> float:
    """Area under the risk-coverage curve; lower is better. NaN of no samples."""
    return _mean(risk_coverage(score, loss).risk)


class CalibrationBins(NamedTuple):
    """Confidence beside accuracy, in bins of confidence."""

    edges: Floats  # (bins + 1,)
    confidence: Floats  # (bins,) average within the bin, NaN where it is empty
    accuracy: Floats  # (bins,)
    samples: NDArray[np.int64]  # (bins,) how many there are


def calibration_bins(confidence: ArrayLike, right: ArrayLike, *, bins: int = 15) -> CalibrationBins:
    """Group predictions by confidence in [0, 1], in bins of equal width."""
    confident, correct = _confidences(confidence, right, bins, "calibration_bins")
    edges = np.linspace(0, 1, bins + 1)
    # A bin contains its upper edge, so that a confidence of 1 belongs to the last.
    place = np.clip(np.searchsorted(edges, confident, side="left") - 1, 0, bins - 1)
    return CalibrationBins(edges, *_binned(confident, correct, place, bins))


def ece(confidence: ArrayLike, right: ArrayLike, *, bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| averaged over samples, by bins.

    In bins of equal width; NaN of no samples.
    """
    # torchmetrics has a bin more, of confidences of exactly 1, which saturated networks give.
    return _gap(*calibration_bins(confidence, right, bins=bins)[1:])


def adaptive_ece(confidence: ArrayLike, right: ArrayLike, *, bins: int = 15) -> float:
    """The same in bins of as many samples each; samples of equal confidence stay together."""
    confident, correct = _confidences(confidence, right, bins, "adaptive_ece")
    place = (_ranks(confident) * bins / max(1, confident.size)).astype(np.int64)
    return _gap(*_binned(confident, correct, place, bins))


def nll(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average negative log-probability of the true class, (n, classes) and (n,), in nats.

    NaN of no samples.
    """
    chances, classes = _predicted(probabilities, labels, "nll")
    chosen = chances[np.arange(len(chances)), classes]
    # A probability that underflowed to 0 costs much, not infinitely much.
    return _mean(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)))


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average squared distance of the probabilities (n, classes) from the one-hot truth (n,).

    NaN of no samples.
    """
    chances, classes = _predicted(probabilities, labels, "brier")
    gap = chances.copy()
    gap[np.arange(len(gap)), classes] -= 1
    return _mean((gap**2).sum(1))


def mse(mean: ArrayLike, target: ArrayLike) -> float:
    """Average squared error, of arrays of one shape, over all numbers; NaN of none."""
    predicted, true = _numbers(mean, "mse"), _numbers(target, "mse")
    _same_shape("mse", mean=predicted, target=true)
    return _mean((predicted - true) ** 2)


def rmse(mean: ArrayLike, target: ArrayLike) -> float:
    """Root of the average squared error, on the scale of the target."""
    return math.sqrt(mse(mean, target))


def crps_gaussian(mean: ArrayLike, stddev: ArrayLike, target: ArrayLike) -> float:
    """Average continuous ranked probability score of N(mean, stddev^2), of arrays of one shape.

    ``s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))`` with ``z = (target - mean) / s``: in the
    scale of the target, lower is better, and the absolute error where ``s`` is 0. NaN of none.
    """
    centre, true = _numbers(mean, "crps_gaussian"), _numbers(target, "crps_gaussian")
    spread = _deviations(stddev, "crps_gaussian")
    _same_shape("crps_gaussian", mean=centre, stddev=spread, target=true)
    gap = true - centre
    with np.errstate(over="ignore"):
        z = np.divide(
            gap, spread, out=np.copysign(np.full_like(gap, np.inf), gap), where=spread > 0
        )
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1, without the cancellation near 0
    within = torch.special.erf(torch.from_numpy(z / math.sqrt(2))).numpy()
    return _mean(gap * within + spread * (2 * density - 1 / math.sqrt(math.pi)))


def interval_coverage(error: ArrayLike, stddev: ArrayLike, level: float) -> float:
    """Fraction of errors within the central Gaussian interval of this probability; NaN of none."""
    errors, spread = _numbers(error, "interval_coverage"), _deviations(stddev, "interval_coverage")
    _same_shape("interval_coverage", error=errors, stddev=spread)
    return _mean(np.abs(errors) <= normal_quantile(level) * spread)


def interval_width(stddev: ArrayLike, level: float) -> float:
    """Average width, end to end, of the central Gaussian interval of this probability.

    On the scale of the target; NaN of none.
    """
    return 2 * normal_quantile(level) * _mean(_deviations(stddev, "interval_width"))


def normal_quantile(level: float) -> float:
    """How many standard deviations to either side contain a fraction ``level`` of a Gaussian."""
    if not 0 < level < 1:
        raise ValueError(f"An interval needs a level between 0 and 1, got {level}.")
    from statistics import NormalDist

    return NormalDist().inv_cdf(0.5 + level / 2)


def gaussian_log_likelihood(
    mean: ArrayLike, cov: ArrayLike, target: ArrayLike, *, rtol: float | None = None
) -> Floats:
    """(n,) log-density of targets (n, t) under N(mean, cov), for (n, t) and (n, t, t), in nats.

    On the scale of the target, on which it depends: ``standardised_log_likelihood`` does not.
    -inf where the covariance has no full rank, and so no density: eigenvalues of the correlations
    up to ``rtol`` count as zero (by default the round-off of float64).
    """
    name = "gaussian_log_likelihood"
    centre, matrix, true = _numbers(mean, name), _numbers(cov, name), _numbers(target, name)
    _same_shape(name, mean=centre, target=true)
    if centre.ndim != 2 or matrix.shape != (*centre.shape, centre.shape[1]):
        raise ValueError(
            f"{name} needs means (n, t) and covariances (n, t, t), got {centre.shape} and "
            f"{matrix.shape}. A single target has t = 1."
        )
    variance = np.einsum("nii->ni", matrix)
    some = (variance > 0).all(-1)
    # As correlations, so that what counts as rank does not depend on the targets' units.
    stddev = np.sqrt(np.where(some[:, None], variance, 1.0))
    values, vectors = np.linalg.eigh(matrix / stddev[:, :, None] / stddev[:, None, :])
    if rtol is None:
        rtol = 10 * centre.shape[1] * float(np.finfo(np.float64).eps)
    positive = values > rtol
    values = np.where(positive, values, 1.0)
    along = np.einsum("nij,ni->nj", vectors, (true - centre) / stddev)
    density = -0.5 * (along**2 / values + np.log(2 * math.pi * values)).sum(-1)
    density -= np.log(stddev).sum(-1)
    return np.where(some & positive.all(-1), density, -np.inf)


def standardised_log_likelihood(log_likelihood: ArrayLike, scale: ArrayLike) -> Floats:
    """(n,) log-density of targets divided by ``scale`` (t,), from that on their own scale, (n,).

    ``log p + sum_t log scale_t``. With the targets' standard deviations of the training set, it can
    be compared between data sets, and does not change with the targets' units.
    """
    name = "standardised_log_likelihood"
    own, scales = _numbers(log_likelihood, name), _numbers(scale, name)
    if not (scales > 0).all():
        raise ValueError(f"{name} needs scales above 0, got {scales.min()}.")
    return own + float(np.log(scales).sum())


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's correlation: that of the ranks, ties sharing their average rank.

    NaN where either is constant, or there are no samples.
    """
    one, other = _scores(first, "rank_correlation"), _scores(second, "rank_correlation")
    _same_shape("rank_correlation", first=one, second=other)
    if one.size == 0:
        return math.nan
    a, b = _ranks(one), _ranks(other)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > 0 else math.nan


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Fraction of the samples whose most probable class, of (n, classes), is the true one, (n,)."""
    chances, classes = _predicted(probabilities, labels, "accuracy")
    return _mean(chances.argmax(1) == classes)


def of_probabilities(probabilities: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Every metric of probabilities (n, classes) and labels (n,), by name."""
    chances, given = np.asarray(probabilities), np.asarray(labels)
    found = (metric for metric in METRICS.values() if metric.needs == "probabilities")
    return {metric.name: metric.of(chances, given) for metric in found if metric.of}


def of_moments(mean: ArrayLike, covariance: ArrayLike, target: ArrayLike) -> dict[str, float]:
    """Every metric of means (n, t), covariances (n, t, t) and targets (n, t), by name.

    In the units of the targets.
    """
    matrices = np.asarray(covariance, dtype=np.float64)
    known = Predicted(np.asarray(mean), matrices, np.asarray(target))
    found = (metric for metric in METRICS.values() if metric.needs == "moments")
    return {metric.name: metric.of(known) for metric in found if metric.of}


class Predicted(NamedTuple):
    """Moments of n samples of t targets, and the targets."""

    mean: Floats  # (n, t)
    covariance: Floats  # (n, t, t)
    target: Floats  # (n, t)

    @property
    def error(self) -> Floats:
        """(n, t) target minus mean."""
        return self.target - self.mean

    @property
    def stddev(self) -> Floats:
        """(n, t) of each target."""
        variance = np.diagonal(self.covariance, axis1=-2, axis2=-1)
        found: Floats = np.sqrt(variance.clip(min=0))
        return found


def _of_confidence(metric: Callable[..., float]) -> Callable[[Floats, Floats], float]:
    """A metric of confidences and what is right as one of probabilities and labels."""
    return lambda chances, labels: metric(chances.max(1), chances.argmax(1) == labels)


def _log_likelihood(known: Predicted) -> float:
    # Correlations that a network has computed in float32; one target has a variance of any size.
    rtol = _CORRELATION_ROUND_OFF if known.covariance.shape[-1] > 1 else 0.0
    return float(gaussian_log_likelihood(*known, rtol=rtol).mean())


def _spearman(known: Predicted) -> float:
    """Averaged over the targets."""
    pairs = zip(np.abs(known.error).T, known.stddev.T, strict=True)
    return _mean([rank_correlation(*pair) for pair in pairs])


def _coverage(percent: int) -> Metric:
    return Metric(
        f"coverage_{percent}", f"Coverage of {percent}% intervals", f"{percent}%", "moments",
        lambda known: interval_coverage(known.error, known.stddev, percent / 100),
        meaning=f"How many hold the truth. It should be {percent}%.",
        short=f"{percent}% coverage", is_share=True,
    )  # fmt: skip


# In the order of tables: name, title, what is best, what it needs, function; and its meaning.
# fmt: off
METRICS: dict[str, Metric] = {metric.name: metric for metric in (
    Metric("samples", "Inputs",
           meaning="How many inputs the other numbers of the column are taken over."),
    Metric("accuracy", "Accuracy", "higher", "probabilities", accuracy, is_share=True,
           meaning="The part of the inputs whose predicted class is the true one."),
    Metric("nll", "Negative log-likelihood", "lower", "probabilities", nll, short="NLL",
           meaning="Minus the logarithm of the probability given to the true class, on average, "
                   "in nats. Lower is better; one confident mistake costs much."),
    Metric("brier", "Brier score", "lower", "probabilities", brier,
           meaning="Squared distance of the probabilities from the truth, from 0 (best) to 2."),
    Metric("ece", "Calibration error (ECE)", "lower", "probabilities", _of_confidence(ece),
           short="ECE",
           meaning="How far the probability of the predicted class is from the accuracy, on "
                   "average over bins of inputs. 0 is best."),
    Metric("adaptive_ece", "Calibration error, adaptive", "lower", "probabilities",
           _of_confidence(adaptive_ece), meaning="The same with as many inputs in every bin."),
    Metric("entropy", "Mean entropy",
           meaning="Entropy of the output covariance, in nats, on average."),
    Metric("entropy_right", "Mean entropy, right",
           meaning="Entropy of the output covariance where the prediction is right, in nats."),
    Metric("entropy_wrong", "Mean entropy, wrong",
           meaning="The same where the prediction is wrong. It should be higher."),
    Metric("auroc_entropy", "AUROC of entropy", "higher",
           meaning="The chance that entropy is higher on a wrong prediction than on a right one "
                   "(on an out-of-distribution input than on a test input). 0.5 is a coin toss, 1 "
                   "is perfect."),
    Metric("auroc_max_softmax", "AUROC of max-softmax", "higher",
           meaning="The same for the probability of the predicted class, which needs no "
                   "covariance: what entropy has to be compared with."),
    Metric("auroc_errors", "AUROC, errors", "higher", short="errors",
           meaning="The chance that a score is higher on a wrong prediction than on a right one."),
    Metric("attack_awareness", "AUROC, attacked inputs", "higher", short="attacks",
           meaning="The chance that a score is higher on an attacked input than on a clean one."),
    Metric("aurc", "AURC", "lower",
           meaning="Loss among the answered inputs, averaged over how many are answered, the "
                   "lowest score first. Lower is better."),
    Metric("aurc_entropy", "AURC of entropy", "lower",
           meaning="Error rate among the answered inputs, averaged over how many are answered, "
                   "the lowest entropy first. Lower is better."),
    Metric("aurc_max_softmax", "AURC of max-softmax", "lower",
           meaning="The same, the largest probability first."),
    Metric("rmse", "RMSE", "lower", "moments", lambda known: rmse(known.mean, known.target),
           meaning="Root of the mean squared error, in units of the target. Lower is better."),
    Metric("mae", "Mean absolute error", "lower", "moments",
           lambda known: float(np.abs(known.error).mean()),
           meaning="In units of the target. Lower is better."),
    Metric("log_likelihood", "Log-likelihood", "higher", "moments", _log_likelihood,
           meaning="Logarithm of the predicted Gaussian density at the truth, on average, in "
                   "nats. Higher is better."),
    Metric("log_likelihood_standardised", "Log-likelihood, standardised", "higher", "moments",
           meaning="The same in units of the training targets' standard deviation, to compare "
                   "data sets."),
    Metric("crps", "CRPS", "lower", "moments",
           lambda known: crps_gaussian(known.mean, known.stddev, known.target),
           meaning="Continuous ranked probability score: the absolute error of a whole "
                   "distribution, in units of the target. Lower is better."),
    *(_coverage(percent) for percent in (50, 90, 95)),
    Metric("width_90", "Width of 90% intervals", "lower", "moments",
           lambda known: interval_width(known.stddev, 0.9),
           meaning="On average, in units of the target. Narrower is better if the coverage is "
                   "right."),
    Metric("spearman_error", "Rank correlation of error and stddev", "higher", "moments",
           _spearman, short="|error|, Spearman",
           meaning="Whether larger predicted standard deviations come with larger errors: 1 if "
                   "always, 0 if there is no relation."),
)}
# fmt: on


def _ranks(values: Floats) -> Floats:
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, side="left")
    last = np.searchsorted(ordered, values, side="right")
    return (first + last - 1) / 2


def _binned(
    confident: Floats, correct: Floats, place: NDArray[np.int64], bins: int
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Average confidence, accuracy and number of samples, by bins."""
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        average = np.bincount(place, confident, minlength=bins) / count
        accuracy = np.bincount(place, correct, minlength=bins) / count
    return average, accuracy, count


def _gap(confidence: Floats, accuracy: Floats, samples: NDArray[np.int64]) -> float:
    filled = samples > 0
    if not filled.any():
        return math.nan
    return float(np.average(np.abs(accuracy - confidence)[filled], weights=samples[filled]))


def _mean(values: ArrayLike) -> float:
    numbers = np.asarray(values, dtype=np.float64)
    return float(numbers.mean()) if numbers.size else math.nan


def _numbers(values: ArrayLike, name: str) -> Floats:
    """As float64, and an error for NaN: no rank or average can take it in."""
    numbers = np.asarray(values, dtype=np.float64)
    missing = np.argwhere(np.isnan(numbers))
    if len(missing):
        where = ", ".join(map(str, missing[0]))
        raise ValueError(
            f"{name} got NaN for {len(missing)} of {numbers.size} numbers, the first at index "
            f"{where}. Find out what made them, or leave these samples out."
        )
    return numbers


def _scores(values: ArrayLike, name: str) -> Floats:
    numbers = _numbers(values, name)
    if numbers.ndim != 1:
        raise ValueError(f"{name} needs one number per sample, (n,), got shape {numbers.shape}.")
    return numbers


def _finite(values: ArrayLike, name: str) -> Floats:
    # An output without any variance has entropy -inf, and no average can take that in.
    numbers = _scores(values, name)
    return numbers[np.isfinite(numbers)]


def _deviations(values: ArrayLike, name: str) -> Floats:
    numbers = _numbers(values, name)
    if (numbers < 0).any():
        raise ValueError(f"{name} needs standard deviations >= 0, got {numbers.min()}.")
    return numbers


def _same_shape(name: str, **arrays: Floats) -> None:
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
        raise ValueError(f"{name} needs arrays of one shape, got {shapes}.")


def _probabilities(values: ArrayLike, name: str) -> Floats:
    numbers = _numbers(values, name)
    if ((numbers < -_ROUND_OFF) | (numbers > 1 + _ROUND_OFF)).any():
        raise ValueError(
            f"{name} needs probabilities in [0, 1], got {numbers.min()} to {numbers.max()}. "
            "Logits become probabilities by a softmax."
        )
    return numbers


def _confidences(
    confidence: ArrayLike, right: ArrayLike, bins: int, name: str
) -> tuple[Floats, Floats]:
    if bins < 1:
        raise ValueError(f"{name} needs at least one bin, got {bins}.")
    confident, correct = _probabilities(confidence, name), _scores(right, name)
    _same_shape(name, confidence=confident, right=correct)
    return confident, correct


def _predicted(
    probabilities: ArrayLike, labels: ArrayLike, name: str
) -> tuple[Floats, NDArray[np.int64]]:
    """Probabilities (n, classes) and labels (n,) that fit each other."""
    chances, given = _probabilities(probabilities, name), _scores(labels, name)
    if len(chances) == len(given) == 0:
        return chances.reshape(0, 1), given.astype(np.int64)
    if chances.ndim != 2 or len(chances) != len(given):
        raise ValueError(
            f"{name} needs probabilities (n, classes) and labels (n,), got {chances.shape} and "
            f"{given.shape}."
        )
    classes = given.astype(np.int64)
    if (classes != given).any() or classes.min() < 0 or classes.max() >= chances.shape[1]:
        raise ValueError(
            f"{name} needs labels 0 ... {chances.shape[1] - 1}, whole numbers, for "
            f"{chances.shape[1]} classes, got {given.min():g} to {given.max():g}."
        )
    return chances, classes
