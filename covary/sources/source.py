"""Sources that act on a value as it is: noise, relative errors, rounding, dropout."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from covary.covariance import Covariance
from covary.covariance.samples import Samples
from covary.covariance.terms import DROPOUT, NOISE, CorrelatedTerm, IndependentTerm, MaskTerm, Term
from covary.linalg import significant


def check_number(source: str, what: str, value: object) -> None:
    """Raise an error unless this is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{source} needs {what}, a number, got {value!r}.")
    if not (math.isfinite(value) and float(value) >= 0):
        raise ValueError(f"{source} needs {what}, a finite number >= 0, got {value}.")


class Source(ABC):
    """Something that varies: what it adds to the covariance of a value, and how it is drawn.

    Attributes:
        word: its own name where no module has one, if it is another than its kind.
        kind: what it is in a budget; at the input of a model, it counts as ``"input"``.
        needs_variance: whether what it adds depends on the variance that the value has already.
    """

    word: ClassVar[str] = ""
    kind: ClassVar[str] = NOISE
    needs_variance: ClassVar[bool] = False

    @abstractmethod
    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        """The variance that it adds to each element of this mean and variance, to be broadcast.

        With a gradient if the mean has one: covariances may be supervised.
        """

    @abstractmethod
    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        """A draw of a value with the source in it; a new tensor."""

    def term(self, name: str, samples: Samples, kind: str, mean: Tensor, var: Tensor) -> Term:
        """The covariance that it adds to a value of this mean and variance, for a sweep."""
        return IndependentTerm(name, samples, kind, var=self.variance(mean, var))


@dataclass(frozen=True)
class GaussianNoise(Source):
    """Independent Gaussian noise of one standard deviation on every element: adds sigma^2."""

    sigma: float

    def __post_init__(self) -> None:
        check_number("GaussianNoise", "a standard deviation", self.sigma)

    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        return mean.detach().new_full([1] * mean.dim(), self.sigma**2)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        if not self.sigma:
            return value.clone()
        return value + torch.empty_like(value).normal_(0.0, self.sigma, generator=generator)


NO_NOISE = GaussianNoise(0.0)


@dataclass(frozen=True, eq=False)
class InputErrors(Source):
    """Errors of an input that has a covariance of its own: adds that covariance.

    Attributes:
        cov: (1 | B, n, n) of a sample's n elements.
        axis: which dimension of the input is the batch.
    """

    cov: Covariance
    axis: int

    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        event = mean.movedim(self.axis, 0).shape[1:]
        flat = self.cov.variance
        return flat.reshape(len(flat), *event).movedim(0, self.axis)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        front = value.movedim(self.axis, 0)
        white = torch.empty_like(front.flatten(1)).normal_(generator=generator)
        return (front + self.cov.color(white).reshape(front.shape)).movedim(0, self.axis)

    def term(self, name: str, samples: Samples, kind: str, mean: Tensor, var: Tensor) -> Term:
        if self.cov.is_diagonal:
            return super().term(name, samples, kind, mean, var)
        return CorrelatedTerm(name, samples, kind, cov=self.cov, axis=self.axis)


@dataclass(frozen=True)
class Relative(Source):
    """Independent Gaussian errors that are a share of the value: adds share^2 (mean^2 + var)."""

    needs_variance: ClassVar[bool] = True
    share: float

    def __post_init__(self) -> None:
        check_number("Relative", "a share of the value, 0.01 for 1%", self.share)

    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        return significant((mean.square() + var) * self.share**2)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        return value * torch.empty_like(value).normal_(1.0, self.share, generator=generator)


@dataclass(frozen=True)
class Rounding(Source):
    """Values that were rounded to multiples of a step: an even error of variance step^2 / 12."""

    step: float

    def __post_init__(self) -> None:
        check_number("Rounding", "the step between two values", self.step)

    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        return mean.detach().new_full([1] * mean.dim(), self.step**2 / 12)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        half = self.step / 2
        return value + torch.empty_like(value).uniform_(-half, half, generator=generator)


@dataclass(frozen=True, eq=False)
class Targets(Source):
    """Noise of targets around the output of a network: a Gaussian of a variance for each output."""

    word: ClassVar[str] = "targets"
    var: Tensor

    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        return self.var.to(mean)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        return value + self.var.to(value).sqrt() * torch.empty_like(value).normal_(
            generator=generator
        )


@dataclass(frozen=True)
class DropoutMask(Source):
    """Elements dropped with probability p, and the others divided by 1 - p.

    It adds p / (1 - p) (mean^2 + var). Elements that lie along ``common`` dimensions are dropped
    together, as the channels of spatial dropout are, and what it adds to them is correlated.
    """

    kind: ClassVar[str] = DROPOUT
    needs_variance: ClassVar[bool] = True
    p: float
    common: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_number(type(self).__name__, "a probability", self.p)
        if not 0 <= self.p < 1:
            raise ValueError(f"DropoutMask needs a probability in [0, 1), got {self.p}.")

    @property
    def odds(self) -> float:
        """p / (1 - p): the variance of the random factor."""
        return self.p / (1 - self.p)

    def variance(self, mean: Tensor, var: Tensor) -> Tensor:
        return significant((mean.square() + var) * self.odds)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        shape = [1 if dim in self.common else size for dim, size in enumerate(value.shape)]
        keep = torch.empty(shape, dtype=value.dtype, device=value.device)
        return value * keep.bernoulli_(1 - self.p, generator=generator) / (1 - self.p)

    def term(self, name: str, samples: Samples, kind: str, mean: Tensor, var: Tensor) -> Term:
        if not self.common:
            return super().term(name, samples, kind, mean, var)
        return MaskTerm(name, samples, kind, mean=mean, var=var, factor=self.odds, dims=self.common)
