"""The abstract class of all covariances, and how values made of tensors become pytrees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from covary import linalg

Value = TypeVar("Value", bound=type)
# Which samples of a batch: whatever indexes the first dimension of a tensor and keeps it.
Selection = slice | Tensor | Sequence[int]
EVERY = slice(None)


class Response(Protocol):
    """What an activation makes of its units, each (B, n)."""

    @property
    def mean(self) -> Tensor:
        """(B, n) mean of each unit."""

    @property
    def variance(self) -> Tensor:
        """(B, n) variance of each unit."""

    @property
    def gain(self) -> Tensor:
        """(B, n) gain of each unit: the derivative of its mean by that of its input."""


def register_value(
    cls: Value,
    constants: Sequence[str] = (),
    derived: Sequence[str] = (),
    check: Callable[[Any], None] | None = None,
) -> Value:
    """Make a dataclass a pytree: constants are its structure, the other fields its children.

    Fields that are derived from the others are neither; each value finds its own. ``check`` looks
    at a value before it is taken apart.
    """
    apart = {*constants, *derived}
    children = [field.name for field in fields(cls) if field.name not in apart]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        if check is not None:
            check(value)
        # What is not there (None) belongs to the structure: a leaf is a tensor.
        there = tuple(name for name in children if getattr(value, name) is not None)
        fixed = tuple(getattr(value, name) for name in constants)
        return [getattr(value, name) for name in there], (there, fixed)

    def unflatten(leaves: Iterable[Any], structure: tuple[Any, ...]) -> Any:
        there, fixed = structure
        known = dict(zip((*there, *constants), (*leaves, *fixed), strict=True))
        return cls(**dict.fromkeys(children) | known)

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )
    return cls


class Covariance(ABC):
    """The covariance of n units for a batch: (1 | B, n, n), stored in whatever way is cheapest."""

    @classmethod
    @abstractmethod
    def start(cls, var: Tensor, n: int) -> Covariance:
        """The covariance of n independent inputs.

        Their variance is (1, 1) where all inputs of all samples have the same, else (B, n).
        """

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
    def gate(self, gain: Tensor, variance: Tensor) -> Covariance:
        """gain_i gain_j C_ij off the diagonal, ``variance`` on it; both (1 | B, n).

        ``variance`` must not be below gain^2 times the variance here, and never is for moment
        activations (docs/theory.md, eq. 7).
        """

    @abstractmethod
    def scale(self, factor: Tensor) -> Covariance:
        """factor_i factor_j C_ij for a factor (1 | B, n)."""

    @abstractmethod
    def select(self, samples: Selection) -> Covariance:
        """The covariance of these samples; what all samples have in common stays as it is."""

    @property
    def unit_variance(self) -> Tensor:
        """(1 | B, n) the variances that activations take: the diagonal, or an estimate of it."""
        return self.variance

    @property
    def shape(self) -> torch.Size:
        """(1 | B, n): samples and units; what vmap stacks stands in front."""
        return self.unit_variance.shape

    def each(self, change: Callable[[Tensor], Tensor]) -> Covariance:
        """The same with every tensor changed: moved, converted or detached."""
        changed: Covariance = pytree.tree_map(change, self)
        return changed

    def activate(
        self, activation: Callable[[Tensor, Tensor], Response], mean: Tensor
    ) -> tuple[Response, Covariance]:
        """The activation's response at the means (B, n), and the covariance behind it."""
        response = activation(mean, self.unit_variance)
        return response, self.gate(response.gain, response.variance)

    def quadratic(self, rows: Tensor) -> Tensor:
        """R C R^T for rows (1 | B, r, n): (1 | B, r, r)."""
        return rows @ self.dense() @ rows.mT

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
        return f"{type(self).__name__}{tuple(self.shape)}"


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part: products of floating point numbers are symmetric to round-off only."""
    return (matrix + matrix.mT) / 2


def as_covariance(matrix: Tensor, variance: Tensor | None = None) -> Tensor:
    """The symmetric part (B, n, n) with ``variance`` (B, n) on the diagonal.

    By default that is the diagonal itself, without the negative numbers that round-off leaves.
    """
    made = symmetric(matrix)
    diagonal = made.diagonal(dim1=-2, dim2=-1)
    if variance is None:
        if not torch.is_grad_enabled() and not is_functorch_wrapped_tensor(made):
            diagonal.clamp_(min=0)
            return made
        variance = diagonal.clamp(min=0)
    return made + torch.diag_embed(variance - diagonal)
