"""Means and covariances of a running simulation, with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from covary import linalg

# Standard errors come from so many groups of copies, and are sure to 1 / sqrt(2 (16 - 1)) = 18%.
GROUPS = 16
# Values of a group that wait for each other: a product of matrices for all, not one for each.
_AT_ONCE = 64


def unshown(items: Sequence[Any], _name: str) -> Iterator[Any]:
    """The items as they are: a progress that shows nothing."""
    yield from items


def check_groups(copies: int, groups: int) -> int:
    """The number of copies in each group; an error if groups are not equally large."""
    if groups < 3:
        raise ValueError(
            f"Standard errors come from the spread between groups: 3 or more, got {groups}."
        )
    if copies < groups or copies % groups:
        above = max(groups, math.ceil(copies / groups) * groups)
        raise ValueError(
            f"The copies of a network are divided into {groups} groups of one size, so their "
            f"number must be a multiple of {groups}; got {copies}. Take {above}."
        )
    return copies // groups


class StreamingMoments:
    """Mean and covariance of values that come in chunks, group by group, in constant memory.

    Chunks are merged by the rule of Welford and Chan: sums of squares are taken about the mean, in
    float64, so that nothing cancels where means are large. Groups are independent of each other
    (copies with noise of their own); values of one group may depend on each other.

    Examples:
        >>> moments = StreamingMoments(groups=3, batch=1, units=1)
        >>> moments.add(torch.arange(6.0).reshape(3, 1, 2, 1))
        >>> moments.estimate().mean
        tensor([[2.5000]], dtype=torch.float64)
    """

    def __init__(
        self, groups: int, batch: int, units: int, *, device: torch.device | None = None
    ) -> None:
        self._count = 0  # of each group, taken in
        self._waiting: list[Tensor] = []
        self._mean = torch.zeros(groups, batch, units, dtype=torch.float64, device=device)
        self._scatter = torch.zeros(groups, batch, units, units, dtype=torch.float64, device=device)

    def add(self, values: Tensor) -> None:
        """Take in (groups, batch, c, units): c more values of each group and input."""
        # A copy: what is simulated may go on in the same place.
        self._waiting.append(values.to(torch.float64, copy=True))
        if sum(each.shape[2] for each in self._waiting) >= _AT_ONCE:
            self._take_in()

    def _take_in(self) -> None:
        values = torch.cat(self._waiting, 2)
        self._waiting.clear()
        more = values.shape[2]
        total = self._count + more
        mean = values.mean(2)
        centred = values - mean[:, :, None]
        shift = mean - self._mean
        self._scatter += centred.mT @ centred
        self._scatter += (self._count * more / total) * _products(shift)
        self._mean += (more / total) * shift
        self._count = total

    def estimate(self) -> Estimate:
        """The moments of all values so far."""
        if self._waiting:
            self._take_in()
        if self._count < 2:
            raise ValueError(
                f"A covariance needs 2 values of each group, got {self._count}. Take twice as many "
                "copies, or simulate for longer."
            )
        return Estimate(self._count, self._mean.clone(), self._scatter.clone())


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """Sampled moments of n units for B inputs, with Monte-Carlo standard errors.

    Errors are those of the jackknife: each group is left out once, and the function of interest is
    computed again. That serves any smooth function of the moments, and holds however the values
    within a group depend on each other, since groups do not.

    Attributes:
        count: values of each group.
        group_mean: (G, B, n) float64.
        group_scatter: (G, B, n, n) sums of products about the group's mean.
    """

    count: int
    group_mean: Tensor
    group_scatter: Tensor

    @property
    def groups(self) -> int:
        """How many, G."""
        return len(self.group_mean)

    @cached_property
    def mean(self) -> Tensor:
        """(B, n)."""
        return self.group_mean.mean(0)

    @cached_property
    def covariance_matrix(self) -> Tensor:
        """(B, n, n), unbiased: the average covariance within groups plus that of their means."""
        within = self.group_scatter.mean(0) / self.count
        return within + _products(self.group_mean - self.mean).sum(0) / (self.groups - 1)

    @property
    def variance(self) -> Tensor:
        """(B, n)."""
        return self.covariance_matrix.diagonal(dim1=-2, dim2=-1)

    @cached_property
    def mean_error(self) -> Tensor:
        """(B, n) standard error of the mean."""
        return self.standard_error(lambda mean, _: mean)

    @property
    def variance_error(self) -> Tensor:
        """(B, n) standard error of the variance."""
        return self.covariance_error.diagonal(dim1=-2, dim2=-1)

    @cached_property
    def covariance_error(self) -> Tensor:
        """(B, n, n) standard error of each covariance."""
        return self.standard_error(lambda _, covariance: covariance)

    def standard_error(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Standard error of each element of a function of mean (B, n) and covariance (B, n, n)."""
        values = torch.stack([function(*moments) for moments in self.without_each()])
        return (values.var(0, correction=0) * (self.groups - 1)).sqrt()

    def without_each(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean and covariance of all groups but the first, but the second, and so on."""
        rest = self.groups - 1
        within = self.group_scatter.sum(0)
        between = _products(self.group_mean - self.mean).sum(0)
        for mean, scatter in zip(self.group_mean, self.group_scatter, strict=True):
            shift = self.mean - mean
            of_means = between - self.groups / rest * _products(shift)
            covariance = (within - scatter) / (rest * self.count) + of_means / (rest - 1)
            yield self.mean + shift / rest, covariance

    @property
    def effective_samples(self) -> Tensor:
        """(B, n) how many independent values would give as good a mean: variance over error^2.

        NaN for a unit that never changes. From G groups, it is sure to sqrt(2 / (G - 1)).
        """
        return self.variance / self.mean_error.square()

    @property
    def effective_samples_of_all(self) -> Tensor:
        """(B,) the same for all units together: sums of variances over sums of errors^2."""
        return self.variance.sum(-1) / self.mean_error.square().sum(-1)

    def linear(self, weight: Tensor) -> Estimate:
        """The estimate of W v, for a weight (m, n)."""
        weight = weight.double()
        return Estimate(
            self.count, self.group_mean @ weight.mT, weight @ self.group_scatter @ weight.mT
        )

    def entropy(self, *, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        """(B,) entropy of a Gaussian with this covariance in nats, and its standard error.

        As ``Moments.entropy`` has it, within the subspace of full rank, less the bias of sampling
        (``wishart_bias``). NaN where degrees of freedom are no more than the dimensions.
        """
        found = [self._entropy(i, rtol) for i in range(self.mean.shape[0])]
        entropy, error = (torch.stack(values) for values in zip(*found, strict=True))
        return entropy, error

    def _entropy(self, i: int, rtol: float | None) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.covariance_matrix[i])
        least = linalg.default_rtol(len(values), torch.float64) if rtol is None else rtol
        kept = values > least * values[-1].clamp_min(0)
        values, vectors = values[kept], vectors[:, kept]
        rank = len(values)
        if rank == 0:
            return values.new_tensor(-math.inf), values.new_tensor(0.0)
        one = Estimate(self.count, self.group_mean[:, i : i + 1], self.group_scatter[:, i : i + 1])
        white = one.linear((vectors / values.sqrt()).mT)
        log_determinant = values.log().sum() - wishart_bias(white.degrees_of_freedom.item(), rank)
        entropy = 0.5 * (rank * (1 + math.log(2 * math.pi)) + log_determinant)
        error = white.standard_error(lambda _, covariance: 0.5 * torch.logdet(covariance))
        return entropy, error[0]

    @property
    def degrees_of_freedom(self) -> Tensor:
        """(B,) of a Wishart distribution that would spread the covariances of groups as they are.

        For units that are white (uncorrelated, of variance 1; see ``linear``): the effective
        sample size of second moments.
        """
        n = self.mean.shape[-1]
        covariances = self.group_scatter / (self.count - 1)
        spread = covariances.var(0).sum((-2, -1)) / self.groups
        return n * (n + 1) / spread

    def __repr__(self) -> str:
        _, batch, units = self.group_mean.shape
        return f"Estimate(inputs={batch}, units={units}, count={self.groups * self.count:,})"


def _products(values: Tensor) -> Tensor:
    """(..., n) -> (..., n, n)."""
    return values[..., None] * values[..., None, :]


def wishart_bias(freedom: float, dimensions: int) -> float:
    """E[log det S] - log det C of S = W / freedom, W ~ Wishart(C, freedom): negative.

    The sum of digamma((freedom - i) / 2) over the dimensions i = 0, 1, ..., and log(2 / freedom)
    for each. NaN for a covariance of too low a rank to have a determinant.
    """
    if not freedom > dimensions:
        return math.nan
    if math.isinf(freedom):
        return 0.0
    rest = freedom - torch.arange(dimensions, dtype=torch.float64)
    return float(torch.digamma(rest / 2).sum() + dimensions * math.log(2 / freedom))
