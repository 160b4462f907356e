"""Analytic moments held against sampled ones: how far off, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covary.stochastic.chain import Stage
from covary.stochastic.statistics import Estimate

# Directions of less variance, of the largest, are left out of entropies: in the layers of a trained
# network they hang on units that fire once in thousands of draws, or never while anyone looks.
ENTROPY_RTOL = 1e-3
# Of the largest, where all should be about 1: a direction in which the simulation never varied.
_NOTHING = 1e-6


class Error(NamedTuple):
    """A relative error: norm of the difference over norm of what was sampled.

    A sampled value is off by itself. ``floor`` is the relative error that this alone makes, to be
    expected of exact moments; squares add up, so ``squared`` is the square of what was found less
    that of the floor, zero on average for exact moments, and so at times below zero.
    """

    squared: float
    squared_error: float  # standard error of the former, by the jackknife
    floor: float

    @property
    def value(self) -> float:
        """The error with the noise of sampling taken out of it."""
        return math.sqrt(max(self.squared, 0.0))

    @property
    def bar(self) -> float:
        """How far up from ``value`` its standard error reaches."""
        return math.sqrt(self.value**2 + self.squared_error) - self.value

    def is_above(self, limit: float) -> bool:
        """Whether it is, beyond doubt: by three standard errors."""
        return self.squared - 3 * self.squared_error > limit**2

    @classmethod
    def average(cls, errors: Sequence[Error]) -> Error:
        """Of several inputs: the root of the mean square."""
        n = len(errors)
        return cls(
            squared=sum(error.squared for error in errors) / n,
            squared_error=math.sqrt(sum(error.squared_error**2 for error in errors)) / n,
            floor=math.sqrt(sum(error.floor**2 for error in errors) / n),
        )


class EntropyGap(NamedTuple):
    """Simulated entropy less the analytic one, in nats, within ``dimensions`` that they share.

    NaN where the simulation has too few samples to vary in all of them.
    """

    value: float
    bar: float
    dimensions: int


class Comparison(NamedTuple):
    """Analytic moments of one layer for one input, against those of a simulation."""

    mean: Error
    variance: Error
    covariance: Error
    off_diagonal: Error
    entropy: EntropyGap
    samples: float  # effective, of all units

    @property
    def errors(self) -> dict[str, Error]:
        """Those that are relative, by name."""
        return {name: getattr(self, name) for name in ERRORS}


ERRORS = ("mean", "variance", "covariance", "off_diagonal")


def compare(estimate: Estimate, mean: Tensor, covariance: Tensor) -> Comparison:
    """Hold a mean (n,) and a covariance (n, n) against the estimate for one input."""
    mean, covariance = mean.double(), covariance.double()
    variance = covariance.diagonal()

    return Comparison(
        mean=relative_error(estimate, lambda sampled, _: sampled, mean),
        variance=relative_error(estimate, lambda _, sampled: _diagonal(sampled), variance),
        covariance=relative_error(estimate, lambda _, sampled: sampled, covariance),
        off_diagonal=relative_error(
            estimate, lambda _, sampled: _off_diagonal(sampled), _off_diagonal(covariance)
        ),
        entropy=entropy_gap(estimate, covariance),
        samples=estimate.effective_samples_of_all.item(),
    )


def relative_error(
    estimate: Estimate, pick: Callable[[Tensor, Tensor], Tensor], truth: Tensor
) -> Error:
    """Of what is picked from a sampled mean (1, n) and covariance (1, n, n), for one input."""
    sampled = pick(estimate.mean, estimate.covariance_matrix)[0]
    size = sampled.square().sum()
    if size == 0:  # nothing varies, or nothing is correlated
        found = 0.0 if truth.square().sum() == 0 else math.inf
        return Error(found, 0.0, 0.0)
    noise = estimate.standard_error(pick)[0].square().sum()

    def squared(mean: Tensor, covariance: Tensor) -> Tensor:
        return (pick(mean, covariance)[0] - truth).square().sum() / size

    raw = squared(estimate.mean, estimate.covariance_matrix)
    return Error(
        squared=(raw - noise / size).item(),
        squared_error=estimate.standard_error(squared).item(),
        floor=(noise / size).sqrt().item(),
    )


def entropy_gap(
    estimate: Estimate, covariance: Tensor, *, rtol: float = ENTROPY_RTOL
) -> EntropyGap:
    """Compare entropies within the directions in which the analytic covariance has variance.

    Both are taken there, as two subspaces of different dimension have no entropies to compare.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    kept = values > rtol * values[-1].clamp_min(0)
    if not kept.any():
        return EntropyGap(0.0, 0.0, 0)
    rank = int(kept.sum())
    white = estimate.linear((vectors[:, kept] / values[kept].sqrt()).mT)
    seen = torch.linalg.eigvalsh(white.covariance_matrix[0])
    if seen[0] <= _NOTHING * seen[-1]:
        return EntropyGap(math.nan, math.nan, rank)
    entropy, error = white.entropy(rtol=0.0)
    analytic = 0.5 * rank * (1 + math.log(2 * math.pi))
    return EntropyGap((entropy - analytic).item(), error.item(), rank)


def variance_share(estimate: Estimate, other: Estimate) -> tuple[float, float]:
    """The variance of all units, over that in another simulation of the same input; its error."""
    total, whole = estimate.variance.sum(), other.variance.sum()
    errors = [
        one.standard_error(lambda _, covariance: _diagonal(covariance).sum())
        for one in (estimate, other)
    ]
    share = total / whole
    error = (errors[0].square() + (share * errors[1]).square()).sqrt() / whole
    return share.item(), error.item()


class Reasons(NamedTuple):
    """What makes linear response good or poor at one layer for one input.

    Linear response keeps the first term of a series in the correlation rho of two inputs.

    Attributes:
        pairs: the most correlated pairs of inputs, as (unit, unit, rho).
        strong_pairs: part of all pairs with |rho| above 0.5.
        error_at_strong_pairs: part of the squared error of covariances that these pairs have.
        saturated: part of the units with |mu| above 2 sigma.
        error_at_saturated: part of the squared error at pairs with such a unit.
        own: relative error of the covariance where the moments before the layer are the sampled
            ones: what the layer adds, whatever those before it did.
    """

    pairs: tuple[tuple[int, int, float], ...]
    strong_pairs: float
    error_at_strong_pairs: float
    saturated: float
    error_at_saturated: float
    own: float


STRONG = 0.5
SATURATED = 2.0


def correlations(covariance: Tensor) -> Tensor:
    """(n, n) of a covariance; 0 where nothing varies, and on the diagonal."""
    deviation = covariance.diagonal().sqrt()
    scale = torch.where(deviation > 0, 1 / deviation, 0.0)
    return _off_diagonal((covariance * scale * scale[:, None]).clamp(-1, 1))


def inputs_of(stage: Stage, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of W v + b + noise from those of v."""
    weight, bias = stage.weight.double(), stage.bias.double()
    noise = stage.noise**2 * torch.eye(len(weight), dtype=torch.float64, device=weight.device)
    return weight @ mean.double() + bias, weight @ covariance.double() @ weight.mT + noise


def reasons(
    stage: Stage,
    estimate: Estimate,
    covariance: Tensor,
    before: tuple[Tensor, Tensor],
    sampled_before: tuple[Tensor, Tensor],
    *,
    top: int = 3,
) -> Reasons:
    """Look for what makes a layer's covariances (n, n) wrong.

    Args:
        stage: the layer.
        estimate: its sampled moments, for one input.
        covariance: its analytic covariance.
        before: analytic mean and covariance of the layer before it.
        sampled_before: the same, sampled.
        top: how many pairs to name.
    """
    mu, var = inputs_of(stage, *before)
    rho = correlations(var)
    sampled = estimate.covariance_matrix[0]
    noise = estimate.covariance_error[0].square()
    squares = _off_diagonal((sampled - covariance.double()).square() - noise)
    strong = rho.abs() > STRONG
    deviation = var.diagonal().clamp_min(0).sqrt()
    far = mu.abs() > SATURATED * deviation
    off = _off_diagonal(torch.ones_like(rho))
    return Reasons(
        pairs=_top_pairs(rho, top),
        strong_pairs=_part(strong * off, off),
        error_at_strong_pairs=_part(squares * strong, squares),
        saturated=far.double().mean().item(),
        error_at_saturated=_part(squares * (far | far[:, None]), squares),
        own=_own_error(stage, sampled, sampled_before),
    )


def _own_error(stage: Stage, sampled: Tensor, before: tuple[Tensor, Tensor]) -> float:
    mu, covariance = inputs_of(stage, *before)
    out = stage.activation(mu[None], covariance.diagonal()[None])
    response = out.gain[0] * out.gain[0][:, None] * covariance
    predicted = _off_diagonal(response) + torch.diag(out.variance[0])
    return float((predicted - sampled).norm() / sampled.norm())


def _top_pairs(rho: Tensor, top: int) -> tuple[tuple[int, int, float], ...]:
    rows, columns = torch.triu_indices(len(rho), len(rho), 1)
    values = rho[rows, columns]
    order = values.abs().argsort(descending=True)[:top].tolist()
    return tuple((int(rows[i]), int(columns[i]), values[i].item()) for i in order)


def _part(some: Tensor, whole: Tensor) -> float:
    """Of a sum that noise was taken out of, and which so may be a little below 0."""
    total = whole.sum().item()
    return min(1.0, max(0.0, some.sum().item() / total)) if total > 0 else 0.0


def _diagonal(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1)


def _off_diagonal(covariance: Tensor) -> Tensor:
    return covariance - torch.diag_embed(_diagonal(covariance))
