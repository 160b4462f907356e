"""Scores: one number per sample, higher where the network is less sure.

Every score takes ``Moments`` of means (B, n) and gives (B,). ``entropy``, ``trace`` and
``largest_eigenvalue`` see the covariance alone and serve regression as well. The others take the n
outputs for the logits of n classes, and are computed in float64: confident samples differ by less
than float32 can tell. What is drawn, or averaged over points, has no gradient; ``expected_softmax``
without samples has one. A sample whose moments are not finite has a score of NaN, or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from covary.moments import Moments

Needs = Literal["covariance", "mean", "mean and covariance", "held-out data"]
# Pairs of opposite points that stand for a Gaussian, and the numbers worked on at a time.
_PAIRS = 64
_NUMBERS = 2**21
# Rivals of the first class, nearest first, whose dependence is followed.
_RIVALS = 16


@dataclass(frozen=True)
class Score:
    """One number per sample, higher where the network is less sure.

    Attributes:
        name: in results, ``max_softmax``.
        meaning: what it is, as the rest of the sentence "The score is ...".
        needs: what it looks at. Scores of the covariance alone serve regression too; those that
            need a mean take outputs for logits of classes.
        of: moments (B, n) -> (B,); None if it has to be fitted to held-out data first.
        formula: in LaTeX; docs/uncertainty.md says what its symbols are.
        title: for a reader; by default the name in words.
    """

    name: str
    meaning: str
    needs: Needs
    of: Callable[..., Tensor] | None = None
    formula: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name.replace("_", " "))

    def __call__(self, moments: Moments) -> Tensor:
        """(B,) the score of each sample."""
        if self.of is None:
            raise TypeError(
                f"The score {self.name} is fitted to held-out data first: "
                "covary.uncertainty.fit(net, held_out)."
            )
        return self.of(moments)


def entropy(moments: Moments) -> Tensor:
    """(B,) entropy of the covariance, in nats; docs/theory.md, eq. (25)."""
    return _flat(moments).entropy()


def trace(moments: Moments) -> Tensor:
    """(B,) sum of the variances."""
    return _flat(moments).variance.sum(-1)


def largest_eigenvalue(moments: Moments) -> Tensor:
    """(B,) variance along the direction that has most of it."""
    moments = _flat(moments)
    matrix = moments.cov.dense()
    finite = torch.isfinite(matrix).all(-1).all(-1)
    # A decomposition refuses a whole batch for one NaN in it, and some matrices in float32.
    safe = torch.where(finite[..., None, None], matrix, 0.0).double()
    largest = torch.linalg.eigvalsh(safe)[..., -1].clamp(min=0)
    largest = torch.where(finite, largest, math.nan).to(matrix.dtype)
    return largest.expand(moments.mean.shape[:-1])


def max_softmax(moments: Moments) -> Tensor:
    """(B,) one minus the largest softmax probability of the mean."""
    return doubt(_logits(moments, "max_softmax").softmax(-1))


def softmax_entropy(moments: Moments) -> Tensor:
    """(B,) entropy of the softmax of the mean, in nats."""
    return _softmax_and_entropy(_logits(moments, "softmax_entropy"), -1)[1]


def energy(moments: Moments) -> Tensor:
    """(B,) minus the log of the summed exponentials of the mean."""
    return -_logits(moments, "energy").logsumexp(-1)


def expected_softmax(
    moments: Moments, *, samples: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """(B, n) probabilities of the classes: the softmax, averaged over the Gaussian.

    Without samples, a formula: for two classes MacKay's approximation, for more its extension by
    pairs, ``p_k ~ 1 / sum_j exp((m_j - m_k) / sqrt(1 + pi/8 var(x_j - x_k)))``, normalised. It is
    smooth, so that parameters can be fitted through it, and the softmax of the mean where there is
    no covariance. For two classes it is off by at most 0.018. It is too flat where more of them
    have much variance: of 10 classes, single probabilities are off by up to 0.05, 0.15 and 0.3 at
    standard deviations of 0.3, 1 and 3 (``averaged_softmax`` is closer).

    ``samples`` are so many draws to average over instead, by ``generator``; here as in the scores
    below. Their error falls with the root of their number.
    """
    logits = _logits(moments, "expected_softmax")
    draws = _draws("expected_softmax", moments, samples, generator)
    if draws is not None:
        return _average(some.softmax(-1) for some in draws)
    gap = logits[..., None, :] - logits[..., :, None]
    flatter = torch.sqrt(1 + math.pi / 8 * _variance_of_differences(moments))
    return torch.softmax(-(gap / flatter).logsumexp(-1), -1)


def averaged_softmax(moments: Moments) -> Tensor:
    """(B, n) probabilities of the classes: the softmax, averaged over ``points``.

    Of 10 classes, single probabilities are off by up to 0.002, 0.01 and 0.03 at standard deviations
    of 0.3, 1 and 3: a tenth of what the formula of ``expected_softmax`` is off by. It has no
    gradient.
    """
    _logits(moments, "averaged_softmax")
    return _average(some.softmax(-1) for some in _points(moments))


def points(moments: Moments) -> Tensor:
    """(128, B, n) logits at fixed points that stand for the Gaussian, in float64.

    Scrambled Sobol points and their opposites, along the principal axes of the logits' differences.
    """
    _logits(moments, "points")
    with torch.no_grad():
        return torch.cat(list(_points(moments)))


def expected_max(
    moments: Moments, *, samples: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """(B,) one minus the largest probability of ``expected_softmax``."""
    _logits(moments, "expected_max")
    return doubt(expected_softmax(moments, samples=samples, generator=generator))


def predictive_entropy(
    moments: Moments, *, samples: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """(B,) entropy of the averaged softmax, in nats: ``expected_entropy + mutual_information``.

    Averaged as in ``mutual_information``, which is closer than the formula of ``expected_softmax``.
    """
    return _entropies("predictive_entropy", moments, samples, generator)[0]


def expected_entropy(
    moments: Moments, *, samples: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """(B,) average entropy of the softmax, in nats: doubt that knowing the logits would leave."""
    return _entropies("expected_entropy", moments, samples, generator)[1]


def mutual_information(
    moments: Moments, *, samples: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """(B,) of class and logits, in nats: doubt that knowing the logits would remove.

    The entropy of the averaged softmax minus the average entropy; never negative, at most log n.
    Without samples, the average is over 128 fixed ``points``. Of 10 classes, this and both
    entropies are off by 0.001 on average at standard deviations of 0.3, 0.006 at 1 and 0.02 at 3:
    about as much as by 1000 draws.
    """
    of_average, average = _entropies("mutual_information", moments, samples, generator)
    return (of_average - average).clamp(min=0)


def change_probability(
    moments: Moments,
    *,
    decision: Tensor | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B,) probability that another class than the one decided for has the largest logit.

    Without samples, rivals are taken one by one, the nearest first: each stays behind with its
    normal probability, and the differences to the others are made Gaussian again given that it did
    (Mendell and Elston's approximation). Exact for two classes; small probabilities keep their
    digits. Of 10 classes it is off by 0.005 on average, and where two directions have all variance
    by 0.02, and up to 0.07. Beyond the 16 nearest, rivals are taken as independent.

    Args:
        moments: of the logits of B samples.
        decision: (B,) the class of each sample, by default that of the largest mean. Where noise
            alone is in question, it is that of the network without noise.
        samples: draws of the logits, in place of the approximation.
        generator: of the draws.
    """
    draws = _draws("change_probability", moments, samples, generator)
    if draws is None:
        with torch.no_grad():
            return _overtaken(*leads(moments, decision)[:2])
    first = _decided(_logits(moments, "change_probability"), decision)
    return _average(
        (some > some.gather(-1, first.expand(len(some), *first.shape))).any(-1).double()
        for some in draws
    )


def margin(moments: Moments) -> Tensor:
    """(B,) ``-(m_1 - m_2) / sd(x_1 - x_2)`` for the two largest means.

    0 where they are the same, -inf where the lead has no variance.
    """
    logits = _logits(moments, "margin")
    means, places = logits.topk(2)
    var = _rows(_variance_of_differences(moments), places[..., :1], logits.shape)
    var = var.gather(-1, places[..., 1:])
    lead = means[..., 0] - means[..., 1]
    return torch.where(lead == 0, 0.0, -lead / var[..., 0].sqrt())


# In the order of tables: name, meaning, what it needs, function, formula.
# fmt: off
SCORES: dict[str, Score] = {score.name: score for score in (
    Score("entropy", "entropy of the covariance", "covariance", entropy,
          r"$\frac12 \log \det 2 \pi e C$"),
    Score("trace", "sum of the variances", "covariance", trace, r"$\sum_i C_{ii}$"),
    Score("largest_eigenvalue", "variance along the direction that has most", "covariance",
          largest_eigenvalue, r"$\lambda_1(C)$"),
    Score("max_softmax", "one minus the largest probability, of the mean alone", "mean",
          max_softmax, r"$1 - \max_k p_k$ with $p = \mathrm{softmax}(m)$", "max-softmax"),
    Score("softmax_entropy", "entropy of the probabilities, of the mean alone", "mean",
          softmax_entropy, r"$H(p) = -\sum_k p_k \log p_k$"),
    Score("energy", "minus the log of the summed exponentials, of the mean alone", "mean",
          energy, r"$-\log \sum_k e^{m_k}$"),
    Score("expected_max", "one minus the largest expected probability", "mean and covariance",
          expected_max, r"$1 - \max_k q_k$ with $q$ = `expected_softmax`"),
    Score("predictive_entropy", "entropy of the expected probabilities", "mean and covariance",
          predictive_entropy, r"$H(\mathrm E[\mathrm{softmax}(x)])$"),
    Score("expected_entropy", "expected entropy of the probabilities", "mean and covariance",
          expected_entropy, r"$\mathrm E[H(\mathrm{softmax}(x))]$"),
    Score("mutual_information",
          "predictive less expected entropy: doubt that is due to the covariance",
          "mean and covariance", mutual_information,
          r"the former minus the latter, in $[0, \log n]$"),
    Score("change_probability", "probability that noise changes the predicted class",
          "mean and covariance", change_probability,
          r"$P(\max_j x_j > x_k)$ for $k = \mathrm{argmax}\, m$"),
    Score("margin",
          "minus the lead of the best class over the second, in its own standard deviations",
          "mean and covariance", margin,
          r"$-(m_1 - m_2) / \sqrt{v_{12}}$ for the two largest means"),
    Score("fitted", "density of all layers' moments, and margin, fitted to held-out data",
          "held-out data"),
    Score("fitted_plain", "the same of the plain network of these weights: no covariance",
          "held-out data"),
)}
# fmt: on


def about(name: str) -> Score:
    """The words for the score of this name; one that is not known is its own title."""
    return SCORES.get(name, Score(name, "", "mean and covariance"))


def of_moments(moments: Moments, *, classify: bool) -> dict[str, Tensor]:
    """Every score of moments (B, n), by name; of no logits, those of the covariance alone."""
    return {
        name: score(moments)
        for name, score in SCORES.items()
        if score.of is not None and (classify or score.needs == "covariance")
    }


def layer_entropies(layers: Mapping[str, Moments]) -> dict[str, Tensor]:
    """The entropy (B,) of each of these layers, by name."""
    return {name: entropy(moments) for name, moments in layers.items()}


def doubt(probabilities: Tensor) -> Tensor:
    """(...,) one minus the largest of probabilities (..., n).

    Summed from the other classes: the difference itself is 0 for every confident sample, and would
    tie samples that differ.
    """
    return _without_largest(probabilities).sum(-1)


def _flat(moments: Moments) -> Moments:
    """Moments whose units have one dimension."""
    if not isinstance(moments, Moments):
        raise TypeError(
            f"Scores take Moments and got {type(moments).__name__}. Pass what the network gives, "
            "or wrap a mean: Moments(mean, Diagonal(torch.zeros_like(mean)))."
        )
    return Moments(moments.flat_mean, moments.cov)


def _logits(moments: Moments, score: str) -> Tensor:
    """The means (..., n) in float64, of at least two classes."""
    mean = _flat(moments).mean
    if len(moments.event_shape) > 1:
        raise ValueError(
            f"{score} takes outputs for logits, a number for each class, and got Moments of shape "
            f"{tuple(moments.mean.shape)}. Take the classes of one place: out.project(rows)."
        )
    if mean.shape[-1] < 2:
        others = [name for name, each in SCORES.items() if each.needs == "covariance"]
        raise ValueError(
            f"{score} compares classes and got {mean.shape[-1]} output(s). Scores for any output "
            f"are {', '.join(others)}."
        )
    return mean.double()


def _decided(logits: Tensor, decision: Tensor | None) -> Tensor:
    """(..., 1) the class of each sample of logits (..., n), if these are classes."""
    if decision is None:
        return logits.argmax(-1, keepdim=True)
    n, whole = logits.shape[-1], not (decision.is_floating_point() or decision.dtype == torch.bool)
    if decision.shape != logits.shape[:-1] or not whole or ((decision < 0) | (decision >= n)).any():
        raise ValueError(
            f"A decision is a class from 0 to {n - 1} for each sample, whole numbers of shape "
            f"{tuple(logits.shape[:-1])}, got {decision.dtype} of shape {tuple(decision.shape)}."
        )
    return decision.long()[..., None]


def _without_largest(probabilities: Tensor) -> Tensor:
    return probabilities.scatter(-1, probabilities.argmax(-1, keepdim=True), 0.0)


def _entropy(probabilities: Tensor) -> Tensor:
    """(...) entropy of probabilities (..., n) in nats; the largest is one minus the others."""
    others = _without_largest(probabilities)
    rest = others.sum(-1)
    of_others: Tensor = torch.special.entr(others).sum(-1)
    return of_others - (1 - rest) * torch.log1p(-rest)


def _softmax_and_entropy(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The softmax along a dimension, and its entropy, in which nothing cancels."""
    largest, place = logits.max(dim, keepdim=True)
    below = logits - largest
    weight = below.exp().scatter(dim, place, 0.0)
    rest = weight.sum(dim, keepdim=True)
    nats = torch.log1p(rest) - (weight * below).sum(dim, keepdim=True) / (1 + rest)
    return weight.scatter(dim, place, 1.0) / (1 + rest), nats.squeeze(dim)


def _entropies(
    score: str, moments: Moments, samples: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Entropy of the averaged softmax, and average entropy, of the same logits."""
    _logits(moments, score)
    draws = _draws(score, moments, samples, generator)
    logits = _points(moments) if draws is None else draws
    total = entropies = torch.zeros((), dtype=torch.float64)
    count = 0
    with torch.no_grad():
        for some in logits:
            # Classes first: sums over few numbers that lie side by side are slow.
            softmax, of_softmax = _softmax_and_entropy(some.movedim(-1, 0).contiguous(), 0)
            total, entropies = total + softmax.sum(1), entropies + of_softmax.sum(0)
            count += len(some)
    return _entropy((total / count).movedim(0, -1)), entropies / count


def _average(values: Iterable[Tensor]) -> Tensor:
    """The average over the first dimension of values (some, ...), all of them together."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for some in values:
            total, count = total + some.sum(0), count + len(some)
    return total / count


def _draws(
    score: str, moments: Moments, samples: int | None, generator: torch.Generator | None
) -> Iterator[Tensor] | None:
    """Logits (some, ..., n) at random, so many in all; None if none are asked for."""
    if samples is None:
        if generator is not None:
            raise ValueError(f"{score} got a generator but no samples; pass samples=1000 as well.")
        return None
    if samples < 1:
        raise ValueError(f"{score} needs samples >= 1, or None for no draws, and got {samples}.")
    step = _at_a_time(moments)
    sizes = [min(step, samples - start) for start in range(0, samples, step)]
    return (moments.sample(size, generator=generator).double() for size in sizes)


def _at_a_time(moments: Moments) -> int:
    return max(1, _NUMBERS // max(1, moments.mean.numel()))


def _points(moments: Moments) -> Iterator[Tensor]:
    """Logits (some, ..., n) at points that stand for the Gaussian, some at a time.

    Of the covariance without what all logits have in common, which no softmax sees; its principal
    axes in descending order, because Sobol points are best in their first coordinates.
    """
    mean, matrix = moments.mean.double(), moments.cov.dense().double()
    centred = matrix - matrix.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    finite = torch.isfinite(centred).all(-1).all(-1)[..., None, None]
    values, axes = torch.linalg.eigh(torch.where(finite, centred, 0.0))
    root = (axes * values.clamp(min=0).sqrt()[..., None, :]).flip(-1)
    root = torch.where(finite, root, math.nan)
    standard = _sobol(mean.shape[-1]).to(mean.device)
    step = _at_a_time(moments)
    for start in range(0, len(standard), step):
        yield mean + (root @ standard[start : start + step].mT).movedim(-1, 0)


@lru_cache(maxsize=8)
def _sobol(n: int) -> Tensor:
    """(2 _PAIRS, n) standard normal points, always the same ones."""
    engine = torch.quasirandom.SobolEngine(n, scramble=True, seed=0)  # type: ignore[no-untyped-call]
    # Their grid has a spacing of 2^-30; in the middle of a cell none is 0, where no quantile is.
    uniform = engine.draw(_PAIRS, dtype=torch.float64) + 2.0**-31
    normal = torch.special.ndtri(uniform)
    return torch.cat([normal, -normal])


def _variance_of_differences(moments: Moments) -> Tensor:
    """(1 | B, n, n) variance of x_j - x_k, in float64; what round-off alone may have left is 0."""
    matrix = moments.cov.dense()
    round_off = torch.finfo(matrix.dtype).eps
    matrix = matrix.double()
    var = matrix.diagonal(dim1=-2, dim2=-1)
    both = var[..., :, None] + var[..., None, :]
    difference = both - 2 * matrix
    return torch.where(difference >= round_off * both, difference, 0.0 * both)


def _rows(matrix: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """(B, n) the row of each matrix (1 | B, n, n) that ``rows`` (B, 1) names."""
    n = shape[-1]
    return matrix.expand(*shape, n).gather(-2, rows[..., None].expand(*rows.shape, n))[..., 0, :]


def leads(
    moments: Moments, decision: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means (..., n - 1) and covariance of x_first - x_j, of the nearest rivals j first.

    Also the first class itself (..., 1), by default that of the largest mean, and the rivals.
    """
    logits = _logits(moments, "change_probability")
    first = _decided(logits, decision)
    n = logits.shape[-1]
    var = _variance_of_differences(moments)
    of_first = _rows(var, first, logits.shape)
    lead = logits.gather(-1, first) - logits
    # cov(x_f - x_j, x_f - x_k) from the variances of x_f - x_j, x_f - x_k and x_j - x_k
    cov = (of_first[..., :, None] + of_first[..., None, :] - var) / 2
    # The first class is no rival of itself: it comes last, behind those whose lead is certain.
    certain = torch.finfo(lead.dtype).max
    near = (lead / of_first.sqrt()).nan_to_num(nan=certain, posinf=certain)
    rivals = near.scatter(-1, first, math.inf).argsort(-1)[..., : n - 1]
    lead = lead.gather(-1, rivals)
    cov = cov.gather(-2, rivals[..., :, None].expand(*rivals.shape, n))
    cov = cov.gather(-1, rivals[..., None, :].expand(*rivals.shape, n - 1))
    return lead, cov, first, rivals


def _overtaken(lead: Tensor, cov: Tensor) -> Tensor:
    """Probability that any of these Gaussian leads (..., r) is below 0."""
    log_ahead = torch.zeros_like(lead[..., 0])
    for _ in range(min(_RIVALS, lead.shape[-1])):
        var = cov[..., 0, 0]
        stddev = torch.where(var > 0, var, 1.0).sqrt()
        z = _standardised(lead, cov)[..., 0]
        log_probability = torch.special.log_ndtr(z)
        log_ahead = log_ahead + log_probability
        # Given that this lead is above 0, it is higher by hazard and varies less; others follow.
        hazard = torch.exp(-(z**2) / 2 - 0.5 * math.log(2 * math.pi) - log_probability)
        loading = cov[..., 1:, 0] / stddev[..., None]
        lead = lead[..., 1:] + loading * hazard[..., None]
        less = (hazard * (hazard + z))[..., None, None]
        cov = cov[..., 1:, 1:] - less * loading[..., :, None] * loading[..., None, :]
    log_ahead = log_ahead + torch.special.log_ndtr(_standardised(lead, cov)).sum(-1)
    return -torch.expm1(log_ahead)


def _standardised(lead: Tensor, cov: Tensor) -> Tensor:
    var = cov.diagonal(dim1=-2, dim2=-1)
    # A lead that does not vary stays, and one of 0 is never strictly below it. Beyond 40 standard
    # deviations all is certain in float64, and what follows would multiply infinity by 0.
    without = torch.where(lead < 0, -40.0, 40.0)
    z = torch.where(var > 0, lead / torch.where(var > 0, var, 1.0).sqrt(), without)
    z = z.clamp(-40, 40)
    return torch.where(torch.isfinite(lead) & torch.isfinite(var), z, math.nan)
