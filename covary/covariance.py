"""How the covariance of a layer is held.

Each class answers the same questions (``Covariance``); ``dense()`` is the truth they are
tested against. The batch dimension is 1 where the whole batch has the same covariance and B where
each sample has its own; nothing is expanded from one to the other before a layer needs it.

Covariances are immutable values made of tensors, and pytrees, so they pass through
``torch.func.vmap`` and ``torch.compile``. What vmap stacks in front of the batch dimension, the
methods that look at a covariance (``variance``, ``dense``, ``log_determinant``, ``color``) accept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from covary import linalg

Value = TypeVar("Value", bound=type)


def register_value(cls: Value, constants: Sequence[str] = ()) -> Value:
    """Make a dataclass a pytree: fields named as constants are its structure, the rest children."""
    children = [field.name for field in fields(cls) if field.name not in constants]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, k) for k in children], tuple(getattr(value, k) for k in constants)

    def unflatten(leaves: Iterable[Any], structure: tuple[Any, ...]) -> Any:
        named = zip((*children, *constants), (*leaves, *structure), strict=True)
        return cls(**dict(named))

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )
    return cls


class Covariance(ABC):
    """The covariance of n units for a batch: (1 | B, n, n), held in whatever way is cheapest."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """(1 | B, n) the diagonal."""

    @abstractmethod
    def dense(self) -> Tensor:
        """(1 | B, n, n) the symmetric matrix itself."""

    @abstractmethod
    def linear(self, weight: Tensor) -> Covariance:
        """W C W^T for a weight (m, n)."""

    @abstractmethod
    def add_noise(self, var: float) -> Covariance:
        """C + var I."""

    @abstractmethod
    def activate(self, gain: Tensor, variance: Tensor) -> Covariance:
        """gain_i gain_j C_ij off the diagonal, ``variance`` on it; both (1 | B, n).

        ``variance`` must not be below gain^2 times the variance here, and never is for moment
        activations (docs/theory.md, eq. 7).
        """

    @abstractmethod
    def scale(self, factor: Tensor) -> Covariance:
        """factor_i factor_j C_ij for a factor (1 | B, n)."""

    def reference(self, mean: Tensor) -> Tensor:
        """(1 | B, n) the means at which an activation takes the gain and variance of this."""
        return mean

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        """(1 | B,) log-determinant and rank within the subspace of full rank."""
        return linalg.log_determinant(self.dense(), rtol)

    def color(self, white: Tensor) -> Tensor:
        """(..., B, n) standard normal noise -> noise of this covariance."""
        root = linalg.root(self.dense())
        # Draws side by side as columns: one product per sample, and one copy of its root.
        columns = white.reshape(-1, *white.shape[white.dim() - root.dim() + 1 :]).movedim(0, -1)
        return (root @ columns).movedim(-1, 0).reshape(white.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple(self.variance.shape)}"


def _symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part: products of floating point numbers are symmetric to round-off only."""
    return (matrix + matrix.mT) / 2


class _DiagonalMatrix(Covariance):
    """What is the same for every way of holding a matrix without off-diagonal elements."""

    def dense(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        return linalg.spectrum_log_determinant(self.variance, rtol)

    def color(self, white: Tensor) -> Tensor:
        return white * self.variance.sqrt()


@partial(register_value, constants=["n"])
@dataclass(frozen=True, eq=False, repr=False)
class Isotropic(_DiagonalMatrix):
    """``var`` times the identity; what every network starts from. docs/theory.md, eq. (2)."""

    var: Tensor  # (1, 1)
    n: int

    @property
    def variance(self) -> Tensor:
        return self.var.expand(*self.var.shape[:-1], self.n)

    def linear(self, weight: Tensor) -> Full:
        # One matrix for the whole batch, however large the batch.
        return Full((self.var * weight @ weight.mT)[None], torch.zeros_like(self.var))

    def add_noise(self, var: float) -> Isotropic:
        return Isotropic(self.var + var, self.n)

    def activate(self, gain: Tensor, variance: Tensor) -> Independent:
        return Independent(variance)

    def scale(self, factor: Tensor) -> Independent:
        return Independent(self.var * factor.square())


@dataclass(frozen=True, eq=False, repr=False)
class _Variances(_DiagonalMatrix):
    """What is the same for the two classes that hold a variance per unit and nothing else."""

    var: Tensor  # (1 | B, n)

    @property
    def variance(self) -> Tensor:
        return self.var

    def add_noise(self, var: float) -> Covariance:
        return replace(self, var=self.var + var)

    def activate(self, gain: Tensor, variance: Tensor) -> Covariance:
        return replace(self, var=variance)

    def scale(self, factor: Tensor) -> Covariance:
        return replace(self, var=self.var * factor.square())


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Independent(_Variances):
    """Units that share no noise yet: a diagonal matrix, exactly, until weights mix them."""

    def linear(self, weight: Tensor) -> Full:
        def product(samples: slice) -> Tensor:
            return (weight * linalg.rows(self.var, samples)[:, None, :]) @ weight.mT

        matrix = linalg.in_chunks(product, self.var.shape[0], weight)
        return Full(matrix, torch.zeros_like(self.var[:1, :1]))


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(_Variances):
    """Variances alone, correlations dropped at every layer: the paper's dMNN."""

    def linear(self, weight: Tensor) -> Diagonal:
        return Diagonal(F.linear(self.var, weight.square()))


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Full(Covariance):
    """A matrix, and a variance that was added to its diagonal since (kept apart: no copy)."""

    matrix: Tensor  # (1 | B, n, n), symmetric to round-off
    added: Tensor  # (1, 1)

    @property
    def variance(self) -> Tensor:
        # Where weights cancel, round-off can leave -1e-9 here; a variance is never negative.
        return self.matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0) + self.added

    def dense(self) -> Tensor:
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
        return _symmetric(self.matrix) + torch.diag_embed(self.variance - diagonal)

    def linear(self, weight: Tensor) -> Full:
        def product(samples: slice) -> Tensor:
            return weight @ (linalg.rows(self.matrix, samples) @ weight.mT)

        matrix = linalg.in_chunks(product, self.matrix.shape[0], weight)
        return Full(matrix + self.added * weight @ weight.mT, torch.zeros_like(self.added))

    def add_noise(self, var: float) -> Full:
        return Full(self.matrix, self.added + var)

    def activate(self, gain: Tensor, variance: Tensor) -> Gated:
        return _gated(self.matrix, gain, variance)

    def scale(self, factor: Tensor) -> Gated:
        return Gated(self.matrix, factor, factor.square() * self.added)


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Gated(Covariance):
    """``gain_i gain_j matrix_ij`` plus ``excess`` on the diagonal: an activated covariance.

    Positive semidefinite by construction, and never formed unless asked for: the next weight takes
    it in as ``((W gain) matrix gain + W excess) W^T`` (docs/theory.md, eq. 7). ``matrix`` often is
    one for the whole batch where the gains are not.
    """

    matrix: Tensor  # (1 | B, n, n)
    gain: Tensor  # (1 | B, n)
    excess: Tensor  # (1 | B, n)

    @property
    def variance(self) -> Tensor:
        # gain * before * gain: the square of a gain can overflow.
        before = self.matrix.diagonal(dim1=-2, dim2=-1)
        return self.gain * before * self.gain + self.excess

    def dense(self) -> Tensor:
        correlated = self.gain[..., None] * self.matrix * self.gain[..., None, :]
        return _symmetric(correlated) + torch.diag_embed(self.excess)

    def linear(self, weight: Tensor) -> Full:
        matrix = linalg.gated_product(weight, self.matrix, self.gain, self.excess)
        return Full(matrix, torch.zeros_like(self.gain[:1, :1]))

    def add_noise(self, var: float) -> Gated:
        return Gated(self.matrix, self.gain, self.excess + var)

    def activate(self, gain: Tensor, variance: Tensor) -> Gated:
        return _gated(self.matrix, self.gain * gain, variance)

    def scale(self, factor: Tensor) -> Gated:
        return Gated(self.matrix, self.gain * factor, self.excess * factor.square())


def _gated(matrix: Tensor, gain: Tensor, variance: Tensor) -> Gated:
    """The activated covariance with this diagonal; docs/theory.md, eq. (7)."""
    linear_response = gain * matrix.diagonal(dim1=-2, dim2=-1) * gain
    # Never negative but for round-off.
    return Gated(matrix, gain, (variance - linear_response).clamp(min=0))


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Shared(Covariance):
    """One covariance for a whole mini-batch; docs/theory.md, eq. (21).

    Activations take its gain and variance at the batch's average mean, so it never gets a batch
    dimension. The means themselves stay per-sample.
    """

    one: Covariance  # of batch dimension 1

    @property
    def variance(self) -> Tensor:
        return self.one.variance

    def dense(self) -> Tensor:
        return self.one.dense()

    def linear(self, weight: Tensor) -> Shared:
        return Shared(self.one.linear(weight))

    def add_noise(self, var: float) -> Shared:
        return Shared(self.one.add_noise(var))

    def activate(self, gain: Tensor, variance: Tensor) -> Shared:
        return Shared(self.one.activate(gain, variance))

    def scale(self, factor: Tensor) -> Shared:
        if factor.shape[0] == 1:
            return Shared(self.one.scale(factor))
        # Factors that differ by sample (a dropout mask): the batch's average of what they make.
        pairs = factor.mT @ factor / factor.shape[0]
        return Shared(Full(self.one.dense() * pairs, torch.zeros_like(factor[:1, :1])))

    def reference(self, mean: Tensor) -> Tensor:
        return mean.mean(0, keepdim=True)

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        return self.one.log_determinant(rtol)

    def color(self, white: Tensor) -> Tensor:
        return self.one.color(white)


def _shared(var: Tensor, n: int) -> Covariance:
    return Shared(Isotropic(var, n))


def _diagonal(var: Tensor, n: int) -> Covariance:
    return Diagonal(var.expand(1, n))


# How a network may hold its covariance, by what its input's covariance starts as.
_STARTS: dict[str, Callable[[Tensor, int], Covariance]] = {
    "full": Isotropic,
    "diagonal": _diagonal,
    "shared": _shared,
}


def names() -> list[str]:
    """The ways to hold a covariance that ``start`` knows."""
    return list(_STARTS)


def check_name(covariance: str) -> str:
    """The name itself, if it is one."""
    if not isinstance(covariance, str) or covariance not in _STARTS:
        raise ValueError(f"Unknown covariance {covariance!r}; known are {', '.join(names())}.")
    return covariance


def start(covariance: str, var: Tensor, n: int) -> Covariance:
    """The covariance ``var`` I of n inputs, to be held in the way of this name; var is (1, 1)."""
    return _STARTS[check_name(covariance)](var, n)
