"""The abstract class of all covariances, and how values made of tensors become pytrees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary import linalg
from covary.activations import MomentActivation

Value = TypeVar("Value", bound=type)
# Which samples of a batch: whatever indexes the first dimension of a tensor and keeps it.
Selection = slice | Tensor | Sequence[int]


def register_value(
    cls: Value,
    constants: Sequence[str] = (),
    derived: Sequence[str] = (),
    check: Callable[[Any], None] | None = None,
) -> Value:
    """Make a dataclass a pytree; ``check`` looks at a value before it is taken apart.

    Constants belong to its structure, derived fields are computed again, the rest are children.
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
    """The covariance of n units for a batch: (1 | B, n, n), stored in whatever way is cheapest.

    The batch dimension is 1 where the whole batch has the same covariance, and is not expanded
    before a layer needs it. Methods that look at a covariance (``variance``, ``dense``,
    ``quadratic``, ``log_determinant``, ``color``) accept what vmap stacks in front of it.
    """

    @classmethod
    @abstractmethod
    def of(cls, inputs: Covariance) -> Covariance:
        """From the covariance of the inputs of a network: an exact one, ``Full``."""

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
    def is_diagonal(self) -> bool:
        """Whether ``variance`` is all there is, so that no matrix need be formed."""
        return False

    @property
    def shape(self) -> torch.Size:
        """(1 | B, n): samples and units; what vmap stacks stands in front."""
        return self.unit_variance.shape

    def each(self, change: Callable[[Tensor], Tensor]) -> Covariance:
        """The same with every tensor changed: moved, converted or detached."""
        changed: Covariance = pytree.tree_map(change, self)
        return changed

    def activate(
        self, activation: MomentActivation, mean: Tensor
    ) -> tuple[Tensor, Tensor, Covariance]:
        """Mean and gain of the activation at the means (B, n), and the covariance behind it."""
        found = activation(mean, self.unit_variance)
        return found.mean, found.gain, self.gate(found.gain, found.variance)

    def quadratic(self, rows: Tensor) -> Tensor:
        """R C R^T for rows (1 | B, r, n): (1 | B, r, r)."""
        if self.is_diagonal:
            return linalg.gated_quadratic(rows, None, None, self.variance)
        return rows @ self.dense() @ rows.mT

    def budget(self, rows: Tensor | None = None, *, matrices: bool = False) -> dict[str, Tensor]:
        """(B, r) variances of rows (1 | B, r, n), or of all units, by source; or (B, r, r) each."""
        raise self._forgot_its_sources()

    def elements(self, source: str, rows: Tensor | None = None) -> Tensor:
        """(B, r, *shape) the part of each element of what a source enters."""
        raise self._forgot_its_sources()

    def _forgot_its_sources(self) -> TypeError:
        return TypeError(
            f"A {type(self).__name__} covariance does not remember where it comes from. That of an "
            "output of a converted network does, and covary.convert takes networks of covary.nn "
            "layers too: covary.convert(net)(x).budget(). Of a projection, ask for its rows: "
            "out.budget(rows=rows)."
        )

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        """(1 | B,) log-determinant and rank within the subspace of full rank."""
        if self.is_diagonal:
            return linalg.spectrum_log_determinant(self.variance, rtol)
        return linalg.log_determinant(self.dense(), rtol)

    def color(self, white: Tensor) -> Tensor:
        """(..., B, n) standard normal noise -> noise of this covariance."""
        if self.is_diagonal:
            return white * self.variance.sqrt()
        root = linalg.root(self.dense())
        # Draws side by side as columns: one product per sample, and one copy of its root.
        columns = white.reshape(-1, *white.shape[white.dim() - root.dim() + 1 :]).movedim(0, -1)
        return (root @ columns).movedim(-1, 0).reshape(white.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple(self.shape)}"
