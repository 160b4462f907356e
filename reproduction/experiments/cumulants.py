"""What a Gaussian leaves out: third and fourth cumulants of draws, and the entropy they take.

A stochastic network is drawn as ``covary.stochastic.sample_steady`` draws it, and looked at in
front of each activation, where moments take it to be Gaussian, and at the output. Draws come in
groups that are independent of each other; standard errors are those of the jackknife over groups.

Of a distribution that is standardised (mean 0, covariance 1), the entropy is less than a Gaussian's
by its negentropy J >= 0. The first terms of Edgeworth's series are, with the cumulants k of all
triples and quadruples of its d coordinates,

    J = sum k_abc^2 / 12 + sum k_abcd^2 / 48 + ...

(P. Comon, Independent component analysis, a new concept? Signal Processing 36, 1994, has it for
d = 1). Beside it stands an estimate that is no series: by distances to the nearest neighbours
(L. F. Kozachenko and N. N. Leonenko, Problems of Information Transmission 23, 1987), less those of
as many draws of a Gaussian, whose bias is about the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from covary.stochastic import Chain

GROUPS = 16
# Rows of all inputs, groups and copies that are drawn together.
_ROWS = 4096
# Directions of less variance, of the largest, do not count: draws are in float32.
_RTOL = 1e-6
_NEIGHBOURS = 4
# Sets of Gaussian draws that distances are compared with.
_REFERENCES = 8

Progress = Callable[[Sequence[Any], str], Any]


class PowerSums:
    """Sums of the first four powers of values of each group, (4, G, B, n), as they come in.

    Values are taken about the mean of the first ones, in units of their deviation.
    """

    def __init__(self, first: Tensor) -> None:
        self.centre = first.mean((0, 2))[:, None]
        deviation = first.std((0, 2))[:, None]
        self.scale = torch.where(deviation > 0, deviation, 1.0)
        groups, batch, _, units = first.shape
        self.sums = torch.zeros(4, groups, batch, units, dtype=torch.float64)
        self.count = 0  # of each group

    def add(self, values: Tensor) -> None:
        """Take in (G, B, c, n): c more values of each group and input."""
        z = (values - self.centre) / self.scale
        square = z.square()
        powers = (z, square, z * square, square.square())
        self.sums += torch.stack([power.sum(2, dtype=torch.float64) for power in powers])
        self.count += values.shape[2]


class Shape(NamedTuple):
    """Skewness and excess kurtosis, both 0 of a Gaussian, with standard errors; each (B, n).

    NaN of what does not vary.
    """

    skewness: Tensor
    kurtosis: Tensor
    skewness_error: Tensor
    kurtosis_error: Tensor


def shape_of(powers: PowerSums) -> Shape:
    """From sums of powers by group."""
    groups = powers.sums.shape[1]
    total = powers.sums.sum(1)
    skewness, kurtosis = _standardised(total / (groups * powers.count))
    rest = (total[:, None] - powers.sums) / ((groups - 1) * powers.count)
    errors = ((each.var(0, correction=0) * (groups - 1)).sqrt() for each in _standardised(rest))
    return Shape(skewness, kurtosis, *errors)


def _standardised(powers: Tensor) -> tuple[Tensor, Tensor]:
    """Third and fourth cumulant over powers of the deviation, of averages of powers (4, ...)."""
    m1, m2, m3, m4 = powers
    variance = m2 - m1.square()
    variance = torch.where(variance > 0, variance, math.nan)
    third = m3 - 3 * m1 * m2 + 2 * m1**3
    fourth = m4 - 4 * m1 * m3 + 6 * m1.square() * m2 - 3 * m1**4
    return third / variance**1.5, fourth / variance.square() - 3


def size(values: Tensor, errors: Tensor) -> tuple[float, float]:
    """Root of the mean square, the noise of sampling taken out of it, and the least to be told.

    The latter is what is left of noise on average: a size below it may be 0.
    """
    known = values.isfinite()
    squares, noise = values[known].square(), errors[known].square()
    least = math.sqrt(noise.mean().item() * math.sqrt(2 / max(1, len(noise))))
    return math.sqrt(max(0.0, (squares.mean() - noise.mean()).item())), least


class Draws(NamedTuple):
    """Shapes by stage, in front of its activation; and the output, (G, B, c, d)."""

    shapes: dict[str, Shape]
    output: Tensor


@torch.no_grad()
def drawn(
    chain: Chain,
    x: Tensor,
    *,
    copies: int,
    seed: int,
    progress: Progress = lambda items, _: items,
) -> Draws:
    """Draw a network ``copies`` times for each input (B, ...)."""
    chain, means = chain.prepared(x)
    each = copies // GROUPS
    generator = torch.Generator().manual_seed(seed)
    centre, spread = (value[None, :, None] for value in (means, chain.input_stddev(means)))
    powers: dict[str, PowerSums] = {}
    outputs = []
    step = max(1, _ROWS // (GROUPS * len(means)))

    def noise(like: Tensor) -> Tensor:
        return torch.empty_like(like).normal_(generator=generator)

    for start in progress(range(0, each, step), "draws"):
        signal = centre.expand(GROUPS, -1, min(step, each - start), -1).contiguous()
        signal = signal + spread * noise(signal)
        for stage in chain.stages:
            signal = stage.drive(signal)
            if stage.noise:
                signal += stage.noise * noise(signal)
            if stage.name not in powers:
                powers[stage.name] = PowerSums(signal)
            powers[stage.name].add(signal)
            signal = stage.activation.function(signal)
        outputs.append(signal)
    return Draws({name: shape_of(each) for name, each in powers.items()}, torch.cat(outputs, 2))


def white(values: Tensor) -> Tensor:
    """(..., c, r) of values (..., c, d) without their mean and covariance, over all of them.

    Of r <= d directions, which are those that vary.
    """
    spectrum, vectors = _spectrum(values)
    mean = values.flatten(0, -2).double().mean(0)
    return (values.double() - mean) @ (vectors / spectrum.sqrt())


def log_determinant(values: Tensor) -> float:
    """Of the covariance of values (..., d), in the directions that vary."""
    return _spectrum(values)[0].log().sum().item()


def _spectrum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (r,) and vectors (d, r) of their covariance."""
    flat = values.flatten(0, -2).double()
    centred = flat - flat.mean(0)
    spectrum, vectors = torch.linalg.eigh(centred.mT @ centred / len(flat))
    kept = spectrum > _RTOL * spectrum[-1].clamp(min=torch.finfo(torch.float64).tiny)
    return spectrum[kept], vectors[:, kept]


class Estimated(NamedTuple):
    """A number with its standard error."""

    value: float
    error: float


def edgeworth(values: Tensor) -> Estimated:
    """Negentropy of white values (G, c, d) by the first terms of Edgeworth's series.

    Squares of sampled cumulants are too large by their noise: products of different groups are not.
    """
    groups, count, _ = values.shape
    # About each group's own mean and covariance, so that groups are independent of each other.
    own = values - values.mean(1, keepdim=True)
    pairs = (own[..., :, None] * own[..., None, :]).flatten(2)  # (G, c, d^2)
    cov = own.mT @ own / count
    products = (
        torch.einsum("gij,gkl->gijkl", cov, cov)
        + torch.einsum("gik,gjl->gijkl", cov, cov)
        + torch.einsum("gil,gjk->gijkl", cov, cov)
    )
    third = (pairs.mT @ own / count).flatten(1) / math.sqrt(12)
    fourth = ((pairs.mT @ pairs / count).flatten(1) - products.flatten(1)) / math.sqrt(48)
    each = torch.cat([third, fourth], 1)  # (G, d^3 + d^4)
    total, squares = each.sum(0), each.square().sum(1)
    found = (total.square().sum() - squares.sum()) / (groups * (groups - 1))
    rest = (total - each).square().sum(1) - (squares.sum() - squares)
    without = rest / ((groups - 1) * (groups - 2))
    error = (without.var(correction=0) * (groups - 1)).sqrt()
    return Estimated(found.item(), error.item())


def mean_log_distance(points: Tensor) -> float:
    """Average logarithm of the distance to the fourth nearest of points (N, d).

    Minus infinity where five are the same, as those of a discrete distribution are.
    """
    distance = cKDTree(points.numpy()).query(points.numpy(), k=_NEIGHBOURS + 1)[0][:, -1]
    with np.errstate(divide="ignore"):
        return float(np.log(distance).mean())


@lru_cache
def gaussian_log_distances(count: int, d: int, seed: int) -> tuple[float, ...]:
    """The same of sets of white Gaussian draws."""
    generator = torch.Generator().manual_seed(seed)
    sets = torch.randn(_REFERENCES, count, d, generator=generator, dtype=torch.float64)
    return tuple(mean_log_distance(white(each)) for each in sets)


def by_neighbours(points: Tensor, references: Sequence[float]) -> float:
    """Negentropy of white points (N, d) by their distances, beside those of Gaussian draws.

    Infinity where there is no density.
    """
    return points.shape[1] * (float(np.mean(references)) - mean_log_distance(points))


def repeated(points: Tensor) -> float:
    """The share of points (N, d) that are equal to another one."""
    counts = torch.unique(points, dim=0, return_counts=True)[1]
    return float(counts[counts > 1].sum()) / len(points)


def shares_within(z: Tensor, levels: Sequence[float]) -> Tensor:
    """(levels, ...) of standardised values (N, ...) those in a Gaussian's central intervals."""
    reach = torch.special.ndtri(torch.tensor([(1 + level) / 2 for level in levels]).double())
    return torch.stack([(z.abs() <= each).double().mean(0) for each in reach])
