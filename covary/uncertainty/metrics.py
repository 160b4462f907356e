"""Metrics: how good predictions and scores are, as one number or one curve per dataset.

Arrays of numpy in, numbers and arrays of numpy out. A *score* is one number per sample, higher
where the network is less sure. What is undefined (a rate among no samples) is NaN, never a guess;
NaN among what is given is an error. Infinite scores are numbers like others for what ranks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
# Probabilities of float32 may exceed 1 by its round-off.
_ROUND_OFF = 1e-5
_CORRELATION_ROUND_OFF = 1e-6
_INTERVALS = (50, 90, 95)  # percent


@dataclass(frozen=True)
class Metric:
    """One number per data set: how good predictions or scores are.

    Attributes:
        name: in results, ``brier``.
        title: for a reader.
        best: ``"higher"``, ``"lower"``, the value that it should have (``"90%"``), or ``""``.
        needs: ``"probabilities"`` (n, classes) and labels (n,), ``"moments"`` (means, covariances
            and targets), or ``"scores"`` of samples of two groups.
        of: computes it, from what it needs; None where that takes more, such as a score.
        meaning: what it is, in a sentence or two.
        short: for a column of a narrow table; by default the title.
        is_share: whether it is shown as a percentage.
    """

    name: str
    title: str
    best: str = ""
    needs: Literal["probabilities", "moments", "scores"] = "scores"
    of: Callable[..., float] | None = None
    _: KW_ONLY
    meaning: str
    short: str = ""
    is_share: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "short", self.short or self.title)


def separability(higher: ArrayLike, lower: ArrayLike) -> float:
    """``(mean_1 - mean_2) / sqrt(var_1 + var_2)`` of two groups of numbers, as in the paper.

    Positive where the group that is expected to be higher is. Infinite numbers, such as entropies
    without any variance, are left out. NaN for groups without spread.
    """
    groups = _per_sample("separability", higher, lower)
    first, second = (group[np.isfinite(group)] for group in groups)
    if first.size == 0 or second.size == 0:
        return math.nan
    spread = math.sqrt(first.var() + second.var())
    return float(first.mean() - second.mean()) / spread if spread > 0 else math.nan


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Probability that a positive scores higher than a negative; ties count one half.

    The area under the ROC curve: 1 is perfect, 0.5 is chance, and what constant scores have. NaN
    if either group is empty.
    """
    first, second = _per_sample("auroc", positive, negative)
    if first.size == 0 or second.size == 0:
        return math.nan
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, side="left")
    not_above = np.searchsorted(ordered, first, side="right")
    return float((below + not_above).mean() / (2 * second.size))


def aupr(positive: ArrayLike, negative: ArrayLike) -> float:
    """Area under the precision-recall curve, as average precision.

    Precision among all that score at least as high, averaged over the positives: 1 is perfect, the
    fraction of positives is chance, and what constant scores have. NaN if either group is empty.
    """
    first, second = _per_sample("aupr", positive, negative)
    if first.size == 0 or second.size == 0:
        return math.nan
    found = first.size - np.searchsorted(np.sort(first), first, side="left")
    called = second.size - np.searchsorted(np.sort(second), first, side="left")
    return float((found / (found + called)).mean())


def fpr95(positive: ArrayLike, negative: ArrayLike) -> float:
    """Rate of negatives called positive where at least 95% of the positives are found.

    At the highest threshold that finds so many: 0 is perfect, 0.95 is chance, and constant scores
    have 1. NaN if either group is empty.
    """
    first, second = _per_sample("fpr95", positive, negative)
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
    scores, losses = _per_sample("risk_coverage", *_alike("risk_coverage", score=score, loss=loss))
    order = np.argsort(scores, kind="stable")
    threshold = scores[order]
    # The last of each group of equal scores stands for all of it.
    last = np.searchsorted(threshold, threshold, side="right")
    risk = np.cumsum(losses[order])[last - 1] / last
    return RiskCoverage(threshold, np.arange(1, scores.size + 1) / max(1, scores.size), risk)


def aurc(score: ArrayLike, loss: ArrayLike) -> float:
    """Area under the risk-coverage curve; lower is better."""
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
    """Expected calibration error: |accuracy - confidence| averaged over bins of equal width."""
    return _gap(*calibration_bins(confidence, right, bins=bins)[1:])


def adaptive_ece(confidence: ArrayLike, right: ArrayLike, *, bins: int = 15) -> float:
    """The same in bins of as many samples each; samples of equal confidence stay together."""
    confident, correct = _confidences(confidence, right, bins, "adaptive_ece")
    place = (_ranks(confident) * bins / max(1, confident.size)).astype(np.int64)
    return _gap(*_binned(confident, correct, place, bins))


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Fraction of the samples whose most probable class, of (n, classes), is the true one, (n,)."""
    chances, classes = _predicted(probabilities, labels, "accuracy")
    return _mean(chances.argmax(1) == classes)


def nll(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average negative log-probability of the true class, (n, classes) and (n,), in nats."""
    chances, classes = _predicted(probabilities, labels, "nll")
    chosen = chances[np.arange(len(chances)), classes]
    # A probability that underflowed to 0 costs much, not infinitely much.
    return _mean(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)))


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Average squared distance of the probabilities (n, classes) from the one-hot truth (n,)."""
    chances, classes = _predicted(probabilities, labels, "brier")
    gap = chances.copy()
    gap[np.arange(len(gap)), classes] -= 1
    return _mean((gap**2).sum(1))


def mse(mean: ArrayLike, target: ArrayLike) -> float:
    """Average squared error, of arrays of one shape, over all numbers; NaN of none."""
    predicted, true = _alike("mse", mean=mean, target=target)
    return _mean((predicted - true) ** 2)


def rmse(mean: ArrayLike, target: ArrayLike) -> float:
    """Root of the average squared error, on the scale of the target."""
    return math.sqrt(mse(mean, target))


def crps_gaussian(mean: ArrayLike, stddev: ArrayLike, target: ArrayLike) -> float:
    """Average continuous ranked probability score of N(mean, stddev^2), of arrays of one shape.

    ``s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))`` with ``z = (target - mean) / s``: on the
    scale of the target, lower is better, and the absolute error where ``s`` is 0. NaN of none.
    """
    centre, spread, true = _alike("crps_gaussian", mean=mean, stddev=stddev, target=target)
    gap = true - centre
    certain = np.copysign(np.full_like(gap, np.inf), gap)
    with np.errstate(over="ignore"):
        z = np.divide(gap, spread, out=certain, where=spread > 0)
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1, without the cancellation near 0
    within = torch.special.erf(torch.from_numpy(z / math.sqrt(2))).numpy()
    return _mean(gap * within + spread * (2 * density - 1 / math.sqrt(math.pi)))


def interval_coverage(error: ArrayLike, stddev: ArrayLike, level: float) -> float:
    """Fraction of errors within the central Gaussian interval of this probability; NaN of none."""
    errors, spread = _alike("interval_coverage", error=error, stddev=stddev)
    return _mean(np.abs(errors) <= normal_quantile(level) * spread)


def interval_width(stddev: ArrayLike, level: float) -> float:
    """Average width, end to end, of the central Gaussian interval of this probability."""
    (spread,) = _alike("interval_width", stddev=stddev)
    return 2 * normal_quantile(level) * _mean(spread)


def normal_quantile(level: float) -> float:
    """How many standard deviations to either side contain a fraction ``level`` of a Gaussian."""
    _need(0 < level < 1, f"An interval needs a level between 0 and 1, got {level}.")
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
    (matrix,) = _numbers(name, cov)
    centre, true = _alike(name, mean=mean, target=target)
    _need(
        centre.ndim == 2 and matrix.shape == (*centre.shape, centre.shape[1]),
        f"{name} needs means (n, t) and covariances (n, t, t), with t = 1 for a single target, got "
        f"{centre.shape} and {matrix.shape}.",
    )
    variance = np.einsum("nii->ni", matrix)
    some = (variance > 0).all(-1)
    # As correlations, so that what counts as rank does not depend on the targets' scales.
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
    be compared between data sets, and does not change with the targets' scales.
    """
    own, scales = _numbers("standardised_log_likelihood", log_likelihood, scale)
    _need((scales > 0).all(), f"standardised_log_likelihood needs scales above 0, got {scales}.")
    return own + float(np.log(scales).sum())


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's correlation: that of the ranks, ties sharing their average rank.

    NaN where either is constant, or there are no samples.
    """
    name = "rank_correlation"
    one, other = _per_sample(name, *_alike(name, first=first, second=second))
    if one.size == 0:
        return math.nan
    a, b = (ranks - ranks.mean() for ranks in (_ranks(one), _ranks(other)))
    scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > 0 else math.nan


def of_probabilities(probabilities: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Every metric of probabilities (n, classes) and labels (n,), by name."""
    return _every("probabilities", np.asarray(probabilities), np.asarray(labels))


def of_moments(mean: ArrayLike, covariance: ArrayLike, target: ArrayLike) -> dict[str, float]:
    """Every metric of means (n, t), covariances (n, t, t) and targets (n, t), by name.

    Errors and widths are on the scale of the targets.
    """
    matrices = np.asarray(covariance, dtype=np.float64)
    return _every("moments", Predicted(np.asarray(mean), matrices, np.asarray(target)))


class Distribution(Protocol):
    """What is predicted of the targets of n rows, as ``scipy.stats.norm(mean, std)`` has it."""

    def mean(self) -> Floats:
        """(n,) of each row."""
        ...

    def std(self) -> Floats:
        """(n,) of each row."""
        ...

    def logpdf(self, y: ArrayLike) -> Floats:
        """(n,) log-density at y, (n,)."""
        ...

    def cdf(self, y: ArrayLike) -> Floats:
        """(n,) probability of at most y, (n,)."""
        ...

    def ppf(self, q: ArrayLike) -> Floats:
        """(n,) quantiles at one probability or at one for each row, (n,)."""
        ...


def of_distribution(distribution: Distribution, target: ArrayLike) -> dict[str, float]:
    """The metrics of moments for n rows of any distribution and their targets (n,), by name.

    Likelihood, CRPS and intervals are those of the distribution; intervals are central ones.
    """
    (true,) = _per_sample("of_distribution", target)
    mean, stddev = distribution.mean(), distribution.std()
    found = of_moments(mean[:, None], stddev[:, None, None] ** 2, true[:, None])
    return found | of_distributions([distribution], true[:, None])


def of_distributions(each: Sequence[Distribution], target: ArrayLike) -> dict[str, float]:
    """Those of them that a mean and a variance do not decide, for t targets (n, t); none of none.

    The targets are taken to be independent: log-likelihoods add up, the others are averaged.
    """
    if not each:
        return {}
    pairs = list(zip(each, np.asarray(target, dtype=np.float64).T, strict=True))
    found = {
        "log_likelihood": sum(_mean(one.logpdf(true)) for one, true in pairs),
        "crps": _mean([crps(*pair) for pair in pairs]),
    }
    for percent in _INTERVALS:
        level = percent / 100
        ends = [(one.ppf(0.5 - level / 2), one.ppf(0.5 + level / 2), true) for one, true in pairs]
        inside = [_mean((low <= true) & (true <= high)) for low, high, true in ends]
        found[f"coverage_{percent}"] = _mean(inside)
        if percent == 90:
            found["width_90"] = _mean([_mean(high - low) for low, high, _ in ends])
    return found


def crps(distribution: Distribution, target: ArrayLike, *, nodes: int = 32) -> float:
    """Average continuous ranked probability score of any distribution at targets (n,).

    Twice the quantile loss, integrated over levels: by quadrature below the level of the target
    and above it, as the integrand has a kink there.
    """
    (true,) = _per_sample("crps", target)
    level = np.clip(distribution.cdf(true), 0, 1)
    places, weights = np.polynomial.legendre.leggauss(nodes)
    total = np.zeros_like(true)
    for place, weight in zip((places + 1) / 2, weights / 2, strict=True):
        below, above = level * place, 1 - (1 - level) * place
        # A level whose part of the integral is empty may have an infinite quantile.
        for chance, part in ((below, level * below), (above, (1 - level) * (1 - above))):
            loss = np.abs(true - distribution.ppf(chance))
            total += 2 * weight * np.where(part > 0, loss, 0) * part
    return _mean(total)


def _every(needs: str, *known: object) -> dict[str, float]:
    metrics = (metric for metric in METRICS.values() if metric.needs == needs)
    return {metric.name: metric.of(*known) for metric in metrics if metric.of}


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
    """Rank correlation of error size and stddev, averaged over the targets."""
    pairs = zip(np.abs(known.error).T, known.stddev.T, strict=True)
    return _mean([rank_correlation(*pair) for pair in pairs])


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
           meaning="Root of the mean squared error, on the scale of the target. Lower is better."),
    Metric("mae", "Mean absolute error", "lower", "moments",
           lambda known: float(np.abs(known.error).mean()),
           meaning="On the scale of the target. Lower is better."),
    Metric("log_likelihood", "Log-likelihood", "higher", "moments", _log_likelihood,
           meaning="Logarithm of the predicted density at the truth, on average, in "
                   "nats. Higher is better."),
    Metric("log_likelihood_standardised", "Log-likelihood, standardised", "higher", "moments",
           meaning="The same for targets over their standard deviation in the training set, to "
                   "compare data sets."),
    Metric("crps", "CRPS", "lower", "moments",
           lambda known: crps_gaussian(known.mean, known.stddev, known.target),
           meaning="Continuous ranked probability score: the absolute error of a whole "
                   "distribution, on the scale of the target. Lower is better."),
    *(Metric(f"coverage_{percent}", f"Coverage of {percent}% intervals", f"{percent}%", "moments",
             lambda known, level=percent / 100: interval_coverage(known.error, known.stddev, level),
             short=f"{percent}% coverage", is_share=True,
             meaning=f"How many hold the truth. It should be {percent}%.")
      for percent in _INTERVALS),
    Metric("width_90", "Width of 90% intervals", "lower", "moments",
           lambda known: interval_width(known.stddev, 0.9),
           meaning="On average, on the scale of the target. Narrower is better if the coverage is "
                   "right."),
    Metric("spearman_error", "Rank correlation of error and stddev", "higher", "moments",
           _spearman, short="|error|, Spearman",
           meaning="Whether larger predicted standard deviations come with larger errors: 1 if "
                   "always, 0 if there is no relation."),
    Metric("fit_seconds", "Seconds of fitting", "lower", short="fit, s",
           meaning="How long a method's networks were trained, or its model was fitted and tuned, "
                   "on this machine."),
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


def _need(holds: bool | np.bool_, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _numbers(name: str, *values: ArrayLike) -> list[Floats]:
    """As float64, and an error for NaN: no rank or average can take it in."""
    arrays = [np.asarray(each, dtype=np.float64) for each in values]
    for numbers in arrays:
        missing = np.argwhere(np.isnan(numbers))
        if len(missing):
            where = ", ".join(map(str, missing[0]))
            raise ValueError(
                f"{name} got NaN for {len(missing)} of {numbers.size} numbers, the first at index "
                f"{where}. Find out what made them, or leave these samples out."
            )
    return arrays


def _per_sample(name: str, *values: ArrayLike) -> list[Floats]:
    """The same for arrays of one number per sample."""
    arrays = _numbers(name, *values)
    for each in arrays:
        _need(each.ndim == 1, f"{name} needs one number per sample, (n,), got shape {each.shape}.")
    return arrays


def _alike(name: str, **values: ArrayLike) -> list[Floats]:
    """The same for arrays of one shape; one called ``stddev`` has no negative numbers."""
    arrays = dict(zip(values, _numbers(name, *values.values()), strict=True))
    shapes = ", ".join(f"{key} {array.shape}" for key, array in arrays.items())
    same = len({array.shape for array in arrays.values()}) == 1
    _need(same, f"{name} needs arrays of one shape, got {shapes}.")
    least = arrays["stddev"].min(initial=0.0) if "stddev" in arrays else 0.0
    _need(least >= 0, f"{name} needs standard deviations >= 0, got {least}.")
    return list(arrays.values())


def _check_probabilities(numbers: Floats, name: str) -> None:
    if ((numbers < -_ROUND_OFF) | (numbers > 1 + _ROUND_OFF) | np.isnan(numbers)).any():
        raise ValueError(
            f"{name} needs probabilities in [0, 1], got {numbers.min()} to {numbers.max()}. "
            "Logits become probabilities by a softmax."
        )


def _confidences(
    confidence: ArrayLike, right: ArrayLike, bins: int, name: str
) -> tuple[Floats, Floats]:
    _need(bins >= 1, f"{name} needs at least one bin, got {bins}.")
    confident, correct = _per_sample(name, *_alike(name, confidence=confidence, right=right))
    _check_probabilities(confident, name)
    return confident, correct


def _predicted(
    probabilities: ArrayLike, labels: ArrayLike, name: str
) -> tuple[Floats, NDArray[np.int64]]:
    """Probabilities (n, classes) and labels (n,) that fit each other."""
    (chances,), (given,) = _numbers(name, probabilities), _per_sample(name, labels)
    _check_probabilities(chances, name)
    if len(chances) == len(given) == 0:
        return chances.reshape(0, 1), given.astype(np.int64)
    _need(
        chances.ndim == 2 and len(chances) == len(given),
        f"{name} needs probabilities (n, classes) and labels (n,), got {chances.shape} and "
        f"{given.shape}.",
    )
    classes, last = given.astype(np.int64), chances.shape[1] - 1
    _need(
        (classes == given).all() and classes.min() >= 0 and classes.max() <= last,
        f"{name} needs labels 0 ... {last}, whole numbers, for {last + 1} classes, got "
        f"{given.min():g} to {given.max():g}.",
    )
    return chances, classes
