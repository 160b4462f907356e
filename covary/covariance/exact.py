"""Covariances that are formed: full, diagonal, shared by the batch, and of rows of features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covary import linalg
from covary.activations import MomentActivation
from covary.covariance.base import Covariance, Selection, register_value


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Full(Covariance):
    """``gain_i gain_j matrix_ij`` off the diagonal, plus ``added`` on it: an exact covariance.

    It is kept in these parts, and never formed unless asked for: one matrix often serves the whole
    batch where gains differ, noise is added without a copy of the matrix, and the next weight takes
    an activated covariance in as ``((W gain) matrix gain + W added) W^T`` (docs/theory.md, eq. 7).

    Attributes:
        matrix: (1 | B, n, n), symmetric to round-off; None for 0: units that share no noise yet.
        added: (1 | B, n) or (1, 1), or None for 0; without a matrix it has to be there, (1 | B, n).
        gain: (1 | B, n), or None for 1.
    """

    matrix: Tensor | None
    added: Tensor | None = None
    gain: Tensor | None = None

    def __post_init__(self) -> None:
        if self.matrix is None and self.added is None:
            raise TypeError("Full needs a matrix (1 | B, n, n), or variances, added (1 | B, n).")

    @classmethod
    def of(cls, inputs: Covariance) -> Full:
        """The same, exactly."""
        if isinstance(inputs, Full):
            return inputs
        return cls(None, inputs.variance) if inputs.is_diagonal else cls(inputs.dense())

    @classmethod
    def independent(cls, var: Tensor, n: int) -> Full:
        """n independent units of variance (B, n), or (1, 1) where all have the same."""
        return cls(None, var.expand(*var.shape[:-1], n))

    @property
    def is_diagonal(self) -> bool:
        return self.matrix is None

    @property
    def variance(self) -> Tensor:
        if self.matrix is None:
            assert self.added is not None
            return self.added
        variance = self._correlated_variance(self.gain)
        return variance if self.added is None else variance + self.added

    def dense(self) -> Tensor:
        if self.matrix is None:
            return torch.diag_embed(self.variance)
        matrix = self.matrix
        if self.gain is not None:
            matrix = self.gain[..., None] * matrix * self.gain[..., None, :]
        matrix = (matrix + matrix.mT) / 2  # products are symmetric to round-off only
        return matrix + torch.diag_embed(self.variance - matrix.diagonal(dim1=-2, dim2=-1))

    def linear(self, weight: Tensor) -> Full:
        return Full(self.quadratic(weight[None]))

    def add_noise(self, var: float | Tensor) -> Full:
        if self.added is None:
            assert self.matrix is not None
            return Full(self.matrix, self.matrix.new_zeros(1, 1) + var, self.gain)
        return Full(self.matrix, self.added + var, self.gain)

    def gate(self, gain: Tensor, variance: Tensor) -> Full:
        if self.matrix is None:
            return Full(None, variance)
        gain = gain if self.gain is None else self.gain * gain
        # Never negative but for round-off.
        return Full(self.matrix, (variance - self._correlated_variance(gain)).clamp(min=0), gain)

    def scale(self, factor: Tensor) -> Full:
        added = None if self.added is None else factor * self.added * factor
        if self.matrix is None:
            return Full(None, added)
        return Full(self.matrix, added, factor if self.gain is None else self.gain * factor)

    def select(self, samples: Selection) -> Full:
        added, gain = linalg.select(self.added, samples), linalg.select(self.gain, samples)
        return Full(linalg.select(self.matrix, samples, dim=-3), added, gain)

    def quadratic(self, rows: Tensor) -> Tensor:
        return linalg.gated_quadratic(rows, self.matrix, self.gain, self.added)

    def _correlated_variance(self, gain: Tensor | None) -> Tensor:
        """(1 | B, n) gain^2 times the matrix's diagonal."""
        assert self.matrix is not None
        # Where weights cancel, round-off can leave -1e-5 here; a variance is never negative.
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        # Not gain^2: the square of a gain can overflow.
        return diagonal if gain is None else gain * diagonal * gain


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Covariance):
    """F F^T, plus ``added`` on the diagonal: errors of many units that have few causes.

    Attributes:
        factor: F (1 | B, n, k), a column for each cause.
        added: (1 | B, n), or None for 0.
    """

    factor: Tensor
    added: Tensor | None = None

    @classmethod
    def of(cls, inputs: Covariance) -> LowRank:
        raise TypeError("A LowRank covariance is that of inputs: Moments.of(values, factor=...).")

    @property
    def variance(self) -> Tensor:
        found = self.factor.square().sum(-1)
        return found if self.added is None else found + self.added

    def dense(self) -> Tensor:
        found = self.factor @ self.factor.mT
        return found if self.added is None else found + torch.diag_embed(self.added)

    def quadratic(self, rows: Tensor) -> Tensor:
        turned = rows @ self.factor
        found = turned @ turned.mT
        return found if self.added is None else found + (rows * self.added[..., None, :]) @ rows.mT

    def linear(self, weight: Tensor) -> Covariance:
        return LowRank(weight @ self.factor) if self.added is None else Full(self.quadratic(weight))

    def add_noise(self, var: float) -> LowRank:
        before = torch.zeros_like(self.factor[..., 0]) if self.added is None else self.added
        return LowRank(self.factor, before + var)

    def gate(self, gain: Tensor, variance: Tensor) -> LowRank:
        factor = gain[..., None] * self.factor
        return LowRank(factor, (variance - factor.square().sum(-1)).clamp(min=0))

    def scale(self, factor: Tensor) -> LowRank:
        added = None if self.added is None else factor * self.added * factor
        return LowRank(factor[..., None] * self.factor, added)

    def select(self, samples: Selection) -> LowRank:
        factor = linalg.select(self.factor, samples, dim=-3)
        assert factor is not None
        return LowRank(factor, linalg.select(self.added, samples))


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Covariance):
    """Variances alone, correlations dropped at every layer: the paper's dMNN."""

    var: Tensor  # (1 | B, n)

    @classmethod
    def of(cls, inputs: Covariance) -> Diagonal:
        return cls(inputs.variance)

    @property
    def is_diagonal(self) -> bool:
        return True

    @property
    def variance(self) -> Tensor:
        return self.var

    def dense(self) -> Tensor:
        return torch.diag_embed(self.var)

    def linear(self, weight: Tensor) -> Diagonal:
        return Diagonal(F.linear(self.var, weight.square()))

    def add_noise(self, var: float) -> Diagonal:
        return Diagonal(self.var + var)

    def gate(self, gain: Tensor, variance: Tensor) -> Diagonal:
        return Diagonal(variance)

    def scale(self, factor: Tensor) -> Diagonal:
        return Diagonal(self.var * factor.square())

    def select(self, samples: Selection) -> Diagonal:
        return Diagonal(linalg.select(self.var, samples))


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Shared(Covariance):
    """One covariance for a whole mini-batch; docs/theory.md, eq. (26).

    Activations take its gain and variance at the batch's average mean, so it never gets a batch
    dimension. The means themselves stay per-sample.
    """

    one: Full  # of batch dimension 1

    @classmethod
    def of(cls, inputs: Covariance) -> Shared:
        if inputs.shape[0] > 1:  # the batch's average
            matrix = None if inputs.is_diagonal else inputs.dense().mean(0, keepdim=True)
            added = inputs.variance.mean(0, keepdim=True) if matrix is None else None
            return cls(Full(matrix, added))
        return cls(Full.of(inputs))

    @property
    def is_diagonal(self) -> bool:
        return self.one.is_diagonal

    @property
    def variance(self) -> Tensor:
        return self.one.variance

    def dense(self) -> Tensor:
        return self.one.dense()

    def linear(self, weight: Tensor) -> Shared:
        return Shared(self.one.linear(weight))

    def add_noise(self, var: float) -> Shared:
        return Shared(self.one.add_noise(var))

    def gate(self, gain: Tensor, variance: Tensor) -> Shared:
        return Shared(self.one.gate(gain, variance))

    def scale(self, factor: Tensor) -> Shared:
        if factor.shape[0] == 1:
            return Shared(self.one.scale(factor))
        # Factors that differ by sample (a dropout mask): the batch's average of what they make.
        pairs = factor.mT @ factor / factor.shape[0]
        return Shared(Full(self.one.dense() * pairs))

    def select(self, samples: Selection) -> Shared:
        return self

    def activate(self, activation: MomentActivation, mean: Tensor) -> tuple[Tensor, Tensor, Shared]:
        variance = self.variance
        common = activation(mean.mean(0, keepdim=True), variance)
        # The variances of single samples are not wanted.
        return *activation.first(mean, variance), self.gate(common.gain, common.variance)


@partial(register_value, constants=["rows"])
@dataclass(frozen=True, eq=False, repr=False)
class Rows(Covariance):
    """The covariance of T rows of n features each, as that of B T samples of n features.

    Its units are the T n features of a sample, end to end; those of different rows are not
    correlated. Layers of ``covary.nn`` act on the rows (``each_row``); whatever else mixes or
    scales units takes it ``flattened``.

    Attributes:
        each_row: the covariance of the rows, (1 | B T, n, n).
        rows: the number T of rows.
    """

    each_row: Covariance
    rows: int

    @classmethod
    def of(cls, inputs: Covariance) -> Rows:
        raise TypeError("Rows are made by a Lift of inputs (B, T, n), not chosen by name.")

    @property
    def is_diagonal(self) -> bool:
        return self.each_row.is_diagonal

    @property
    def variance(self) -> Tensor:
        return self._by_sample(self.each_row.variance, -2).flatten(-2)

    @property
    def unit_variance(self) -> Tensor:
        return self._by_sample(self.each_row.unit_variance, -2).flatten(-2)

    def dense(self) -> Tensor:
        blocks = self._by_sample(self.each_row.dense(), -3)
        # (B, T, n, n) -> (B, n, n, T, T) -> (B, T, n, T, n)
        apart = torch.diag_embed(blocks.movedim(-3, -1)).movedim((-2, -1), (-4, -2))
        return apart.flatten(-4, -3).flatten(-2)

    def quadratic(self, rows: Tensor) -> Tensor:
        if rows.dim() > 3:  # of what vmap stacked
            return super().quadratic(rows)
        count, r, units = rows.shape
        apart = rows.reshape(count, r, self.rows, units // self.rows).transpose(1, 2)
        samples = self.each_row.shape[-2] // self.rows
        if count == 1 and samples > 1:
            apart = apart.expand(samples, *apart.shape[1:])
        found = self.each_row.quadratic(apart.flatten(0, 1))  # (B T, r, r)
        return found.reshape(-1, self.rows, r, r).sum(1)

    def select(self, samples: Selection) -> Rows:
        count = self.each_row.shape[-2]
        if count == 1:
            return self
        chosen = torch.arange(count).reshape(-1, self.rows)[samples].flatten()
        return Rows(self.each_row.select(chosen), self.rows)

    def flattened(self) -> Covariance:
        """The same as the covariance of one row of T n features, stored alike if exact."""
        if isinstance(self.each_row, Diagonal):
            return Diagonal(self.variance)
        full = Full(self.dense())
        return Shared(full) if isinstance(self.each_row, Shared) else full

    def linear(self, weight: Tensor) -> Covariance:
        return self.flattened().linear(weight)

    def add_noise(self, var: float) -> Rows:
        return Rows(self.each_row.add_noise(var), self.rows)

    def gate(self, gain: Tensor, variance: Tensor) -> Covariance:
        return self.flattened().gate(gain, variance)

    def scale(self, factor: Tensor) -> Covariance:
        return self.flattened().scale(factor)

    def _by_sample(self, values: Tensor, dim: int) -> Tensor:
        """(1 | B T, ...) of rows, in dimension ``dim``, -> (1 | B, T, ...) of samples."""
        front, rest = values.shape[:dim], values.shape[dim + 1 :]
        if values.shape[dim] == 1:
            values = values.expand(*front, self.rows, *rest)
        return values.reshape(*front, -1, self.rows, *rest)
