"""Terms of a covariance: what each source of noise adds to a value, as a sweep meets it.

The covariance of an output is the sum over terms of R D R^T, where R are the output's rows pulled
back to the value that the term is added to, and D is the covariance that it adds there
(docs/theory.md, eq. 27). A class knows D in one form and never makes a matrix of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covary.covariance.base import Covariance
from covary.covariance.samples import Samples

# What a source is, for whoever reads a budget.
INPUT, NOISE, DROPOUT, WEIGHTS = "input", "noise", "dropout", "weights"


@dataclass(frozen=True, eq=False)
class Term(ABC):
    """What a source adds to a value, independent of all that happened before.

    Attributes:
        name: of the call that it belongs to, as ``print(net)`` shows it.
        samples: which sample each element of the value belongs to.
        kind: what the source is: input, noise, dropout or weights.
    """

    name: str
    samples: Samples
    kind: str = NOISE

    @abstractmethod
    def products(self, rows: Tensor) -> Tensor:
        """(B, r, r) R D R^T for rows (r, *shape) of the value."""

    def variances(self, rows: Tensor) -> Tensor:
        """(B, r) the diagonal of R D R^T."""
        return self.products(rows).diagonal(dim1=-2, dim2=-1)

    def by_element(self, rows: Tensor) -> Tensor:
        """(r, *shape) what each element of the value has in R D R^T; adds up to ``variances``.

        Element e of a row R has R_e (D R)_e, and D R is half the slope of the variance.
        """
        with torch.enable_grad():
            at = rows.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.variances(at).sum(), at)
        return rows * slope / 2

    @property
    def is_linearised(self) -> bool:
        """Whether nonlinearities behind it do not see its variance, and so add nothing for it."""
        return False

    @property
    def label(self) -> str:
        """The name of the source in a budget."""
        path, _, function = self.name.rpartition(":")
        if self.kind == INPUT:
            return f"{INPUT} at {path}" if path else self.name
        if self.kind == WEIGHTS:
            return f"weights of {path or 'model'}"
        place = path or ("output" if function == self.kind else function)  # of the model itself
        return f"{self.kind} at {place}"


def deviation_of(var: Tensor) -> Tensor:
    """The root of a variance, never 0: what is divided by it is 0 there."""
    return var.detach().clamp(min=torch.finfo(var.dtype).tiny).sqrt()


@dataclass(frozen=True, eq=False)
class Response:
    """That a term is what a nonlinearity makes of variance that arrives: it has no source itself.

    Attributes:
        deviations: of each parent, what a random sign on an element is divided by, so that the
            variance that is pulled back from there adds up to 1: broadcasts to the value.
        noise: the variance of noise that entered before the nonlinearity; it is the part
            ``noise * gain**2`` of the term, and a source.
        gain: of the nonlinearity, where there is noise before it.
        is_split: whether parents count each for itself, as the factors of a product do, and not
            as one sum of them.
    """

    deviations: tuple[Tensor, ...]
    noise: float = 0.0
    gain: Tensor | None = None
    is_split: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class IndependentTerm(Term):
    """Independent variance on every element.

    Attributes:
        var: of each element, (1 | B, ...) to be broadcast to the value's shape.
        response: of what a nonlinearity adds, where it comes from; None for a source.
    """

    var: Tensor
    response: Response | None = None

    def products(self, rows: Tensor) -> Tensor:
        flat, var = self.samples.flattened(rows, self.var)
        if self.var.numel() == 1:  # one variance for all elements
            product = (flat @ flat.mT) * self.var.reshape(())
        else:
            product = (flat * var[:, None]) @ flat.mT
        return self.samples.add_up(product)

    def variances(self, rows: Tensor) -> Tensor:
        return self.weighted(rows, self.var)

    def by_element(self, rows: Tensor) -> Tensor:
        return rows.square() * self.var

    def noise_alone(self) -> IndependentTerm:
        """Of what a nonlinearity adds, the part of the noise before it, which is a source."""
        assert self.response is not None
        assert self.response.gain is not None
        return replace(self, var=self.response.gain.square() * self.response.noise, response=None)

    def without_noise(self) -> IndependentTerm:
        """Of what a nonlinearity adds, the part that has no source there."""
        assert self.response is not None
        if not self.response.noise or self.response.gain is None:
            return self
        noise = self.response.gain.square() * self.response.noise
        return replace(self, var=(self.var - noise).clamp(min=0))

    def weighted(self, rows: Tensor, var: Tensor | float) -> Tensor:
        """(B, r) sums of squared rows times variances, over the elements of each sample."""
        var = rows.new_full([1] * (rows.dim() - 1), var) if isinstance(var, float) else var
        flat, var = self.samples.flattened(rows.square(), var)
        return self.samples.add_up((flat @ var.expand(len(flat), -1)[..., None])[..., 0])


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrelatedTerm(Term):
    """The covariance of a sample's elements, as a ``Covariance`` of the flat event.

    Attributes:
        cov: (1 | B, n, n); the batch is the dimension ``axis`` of the value.
        axis: which dimension of the value is the batch.
    """

    cov: Covariance
    axis: int

    def products(self, rows: Tensor) -> Tensor:
        front = rows.movedim(self.axis + 1, 0)
        return self.cov.quadratic(front.flatten(2))

    def by_element(self, rows: Tensor) -> Tensor:
        front = rows.movedim(self.axis + 1, 0)
        flat = front.flatten(2)
        shares = flat * (flat @ self.cov.dense())
        return shares.reshape(front.shape).movedim(0, self.axis + 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskTerm(Term):
    """One random factor for all elements that lie along some dimensions (spatial dropout).

    A factor of variance ``factor`` and mean 1 on elements of mean m and variance v adds the
    covariance ``factor * m m^T`` within them, and ``factor * v`` on the diagonal.

    Attributes:
        mean: of the value.
        var: of each element, to be broadcast.
        factor: the variance of the random factor.
        dims: dimensions of the value along which elements have the factor in common.
    """

    mean: Tensor
    var: Tensor
    factor: float
    dims: Sequence[int]

    def products(self, rows: Tensor) -> Tensor:
        summed = (rows * self.mean).sum([dim + 1 for dim in self.dims], keepdim=True)
        one = torch.full([1] * self.mean.dim(), self.factor).to(rows)
        common = IndependentTerm(self.name, self.samples, var=one)
        own = IndependentTerm(self.name, self.samples, var=self.var * self.factor)
        return common.products(summed) + own.products(rows)

    def by_element(self, rows: Tensor) -> Tensor:
        summed = (rows * self.mean).sum([dim + 1 for dim in self.dims], keepdim=True)
        return (rows * self.mean * summed + rows.square() * self.var) * self.factor
