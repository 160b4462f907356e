"""Analytic moments compared with sampled ones: how far off, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from covary.stochastic.chain import Chain, Stage
from covary.stochastic.statistics import Estimate

# Directions of less variance, of the largest, are left out of entropies: in the layers of a trained
# network they hang on units that fire once in thousands of draws, or never.
ENTROPY_RTOL = 1e-3
# Of the largest, where all should be about 1: a direction in which the simulation never varied.
_NOTHING = 1e-6
# Correlations above this are strong; a unit whose variance is linear in its noise by less than
# this part is saturated.
STRONG, SATURATED = 0.5, 0.2

Pair = tuple[int, int, float]  # two units, and the correlation of their inputs


class Error(NamedTuple):
    """A relative error: norm of the difference over norm of what was sampled.

    ``floor`` is the error that sampling alone makes, to be expected of exact moments. Squares add
    up, so ``squared`` is the square of what was found less that of the floor: zero on average for
    exact moments, and so at times below zero.
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
        """Whether the error is above a limit by at least three standard errors."""
        return self.squared - 3 * self.squared_error > limit**2

    @classmethod
    def average(cls, errors: Sequence[Error]) -> Error:
        """The error over several inputs: the root of the mean square."""
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


class LayerComparison(NamedTuple):
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


def _diagonal(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1)


def _off_diagonal(covariance: Tensor) -> Tensor:
    return covariance - torch.diag_embed(_diagonal(covariance))


# What is compared, of a mean (1, n) and a covariance (1, n, n).
_Pick = Callable[[Tensor, Tensor], Tensor]
_PICKS: dict[str, _Pick] = {
    "mean": lambda mean, _: mean,
    "variance": lambda _, covariance: _diagonal(covariance),
    "covariance": lambda _, covariance: covariance,
    "off_diagonal": lambda _, covariance: _off_diagonal(covariance),
}
ERRORS = tuple(_PICKS)


def compare(estimate: Estimate, mean: Tensor, covariance: Tensor) -> LayerComparison:
    """Compare a mean (n,) and a covariance (n, n) with the estimate for one input."""
    mean, covariance = mean.double(), covariance.double()
    return LayerComparison(
        **{
            name: relative_error(estimate, pick, pick(mean[None], covariance[None])[0])
            for name, pick in _PICKS.items()
        },
        entropy=entropy_gap(estimate, covariance),
        samples=estimate.effective_samples_of_all.item(),
    )


def relative_error(estimate: Estimate, pick: _Pick, truth: Tensor) -> Error:
    """Error of what ``pick`` takes from a sampled mean (1, n) and covariance (1, n, n)."""
    sampled = pick(estimate.mean, estimate.covariance_matrix)[0]
    size = sampled.square().sum()
    if size == 0:  # nothing varies, or nothing happened in the simulation
        return Error(0.0, 0.0, 0.0) if truth.square().sum() == 0 else Error(*[math.nan] * 3)
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


def moments_of_inputs(chain: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (n,) and covariance (n, n) of the first units, for one input (1, ...)."""
    chain, means = chain.prepared(x)
    return means[0].double(), torch.diag(chain.input_stddev(means)[0].double().square())


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


class Reasons(NamedTuple):
    """What may make the covariances of a layer wrong, for one input.

    Linear response keeps the first term of a series in the correlation rho of two inputs.

    Attributes:
        pairs: the most correlated pairs of inputs.
        strong_pairs: part of all pairs with |rho| above 0.5.
        error_at_strong_pairs: part of the squared error of covariances that these pairs have.
        saturated: part of the units whose response to noise is hardly linear: of their variance,
            gain^2 var is less than a fifth (a step function more than 2 sigma away, say).
        error_at_saturated: part of the squared error at pairs with such a unit.
        own: relative error of the covariance where the moments before the layer are the sampled
            ones: what the layer itself adds. Noise is taken out.
    """

    pairs: tuple[Pair, ...]
    strong_pairs: float
    error_at_strong_pairs: float
    saturated: float
    error_at_saturated: float
    own: float


def reasons(
    stage: Stage,
    estimate: Estimate,
    covariance: Tensor,
    before: tuple[Tensor, Tensor],
    sampled_before: tuple[Tensor, Tensor],
) -> Reasons:
    """Look for what makes a layer's covariance (n, n) differ from its estimate, for one input.

    ``before`` and ``sampled_before`` are mean and covariance of the layer before it.
    """
    mu, var = inputs_of(stage, *before)
    rho = correlations(var)
    noise = estimate.covariance_error[0].square()
    off_by = (estimate.covariance_matrix[0] - covariance.double()).square()
    squares = _off_diagonal(off_by - noise)
    strong = rho.abs() > STRONG
    out = stage.activation(mu[None], var.diagonal()[None])
    far = (out.gain.square() * var.diagonal() < SATURATED * out.variance)[0]
    off = _off_diagonal(torch.ones_like(rho))
    return Reasons(
        pairs=top_pairs(rho),
        strong_pairs=_part(strong * off, off),
        error_at_strong_pairs=_part(squares * strong, squares),
        saturated=far.double().mean().item(),
        error_at_saturated=_part(squares * (far | far[:, None]), squares),
        own=_own_error(stage, estimate, sampled_before),
    )


def _own_error(stage: Stage, estimate: Estimate, before: tuple[Tensor, Tensor]) -> float:
    mu, covariance = inputs_of(stage, *before)
    out = stage.activation(mu[None], covariance.diagonal()[None])
    response = out.gain[0] * out.gain[0][:, None] * covariance
    predicted = _off_diagonal(response) + torch.diag(out.variance[0])
    return relative_error(estimate, _PICKS["covariance"], predicted).value


def _part(some: Tensor, whole: Tensor) -> float:
    """The share of ``some`` in ``whole``; sums without their noise may be a little below 0."""
    total = whole.sum().item()
    return min(1.0, max(0.0, some.sum().item() / total)) if total > 0 else 0.0


def some_pairs(
    size: Tensor, count: int, key: tuple[int, ...], *, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and columns of up to ``count`` pairs of n units, for a figure.

    Half of them are the largest by ``size`` (n, n), the others any; only ``among`` (n,) units.
    """
    rows, columns = torch.triu_indices(len(size), len(size), 1, device=size.device)
    if among is not None:
        both = (among[rows] & among[columns]).nonzero().squeeze(1)
        rows, columns = rows[both], columns[both]
    order = size[rows, columns].abs().argsort(descending=True)
    large, rest = order[: count // 2], order[count // 2 :]
    chosen = np.random.default_rng(key).permutation(len(rest))[: count // 2]
    kept = torch.cat([large, rest[torch.from_numpy(chosen).to(rest.device)]])
    return rows[kept], columns[kept]


def top_pairs(rho: Tensor) -> tuple[Pair, ...]:
    """The three most correlated pairs of units."""
    rows, columns = torch.triu_indices(len(rho), len(rho), 1, device=rho.device)
    values = rho[rows, columns]
    order = values.abs().argsort(descending=True)[:3].tolist()
    return tuple((int(rows[i]), int(columns[i]), values[i].item()) for i in order)
