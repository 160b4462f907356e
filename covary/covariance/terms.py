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
from covary.covariance.exact import Full
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

    def apart(self) -> Sequence[Term]:
        """Terms that add up to this one, independent variance as one of its own."""
        return [self]

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


def added_up(terms: Sequence[Term]) -> Sequence[Term]:
    """Terms of the same rows with all independent variances in one: it costs less than several."""
    terms = [part for term in terms for part in term.apart()]
    alike = [term for term in terms if isinstance(term, IndependentTerm)]
    if len(alike) < 2:
        return terms
    first, *others = alike
    var = first.var
    for other in others:
        var = var + other.var
    rest = [term for term in terms if not isinstance(term, IndependentTerm)]
    return [IndependentTerm(first.name, first.samples, var=var), *rest]


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

    def plus(self, other: IndependentTerm, shape: Sequence[int]) -> list[Term]:
        """Both terms of a value of this shape, as one where the covariance takes variances in."""
        if not isinstance(self.cov, Full):
            return [self, other]
        front = other.var.movedim(self.axis, 0)
        event = [size for dim, size in enumerate(shape) if dim != self.axis]
        added = front.expand(len(front), *event).flatten(1)
        return [replace(self, cov=self.cov.add_noise(added))]


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskTerm(Term):
    """One random factor for all elements that lie along some dimensions (spatial dropout).

    A factor of variance ``factor`` and mean 1 on elements of mean m and variance v adds the
    covariance ``factor * m m^T`` within them, and ``factor * v`` on the diagonal.

    Attributes:
        mean: of the value.
        var: of each element, to be broadcast; None for the first part alone.
        factor: the variance of the random factor.
        dims: dimensions of the value along which elements have the factor in common.
    """

    mean: Tensor
    var: Tensor | None
    factor: float
    dims: Sequence[int]

    def apart(self) -> Sequence[Term]:
        if self.var is None:
            return [self]
        own = IndependentTerm(self.name, self.samples, self.kind, var=self.var * self.factor)
        return [own, replace(self, var=None)]

    def products(self, rows: Tensor) -> Tensor:
        if self.var is not None:
            own, common = self.apart()
            return own.products(rows) + common.products(rows)
        summed = (rows * self.mean).sum([dim + 1 for dim in self.dims], keepdim=True)
        one = torch.full([1] * self.mean.dim(), self.factor).to(rows)
        return IndependentTerm(self.name, self.samples, var=one).products(summed)
