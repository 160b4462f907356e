"""Full, diagonal (no correlations) and shared (one for the batch) covariances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from covary import linalg
from covary.covariance.base import Covariance, Response, Selection, as_covariance, register_value


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Full(Covariance):
    """``gain_i gain_j matrix_ij`` off the diagonal, plus ``added`` on it: an exact covariance.

    It is kept in these parts, and never formed unless asked for: one matrix often serves the whole
    batch where gains differ, noise is added without a copy of the matrix, and the next weight takes
    an activated covariance in as ``((W gain) matrix gain + W added) W^T`` (docs/theory.md, eq. 7).

    Attributes:
        matrix: (1 | B, n, n), symmetric to round-off; None for 0: units that share no noise yet.
        gain: (1 | B, n), or None for 1.
        added: (1 | B, n) or (1, 1), or None for 0; without a matrix it has to be there, (1 | B, n).
    """

    matrix: Tensor | None
    added: Tensor | None = None
    gain: Tensor | None = None

    def __post_init__(self) -> None:
        if self.matrix is None and self.added is None:
            raise TypeError("Full needs a matrix (1 | B, n, n), or variances, added (1 | B, n).")

    @classmethod
    def start(cls, var: Tensor, n: int) -> Full:
        return cls(None, var.expand(*var.shape[:-1], n))

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
        return as_covariance(matrix, self.variance)

    def linear(self, weight: Tensor) -> Full:
        if self.matrix is None:
            return Full(linalg.diagonal_product(weight, self.variance))
        gain = self.matrix.new_ones(1, 1) if self.gain is None else self.gain
        added = self.matrix.new_zeros(1, 1) if self.added is None else self.added
        return Full(linalg.gated_product(weight, self.matrix, gain, added))

    def add_noise(self, var: float) -> Full:
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
        matrix = None if self.matrix is None else linalg.rows(self.matrix, samples, dim=-3)
        added, gain = (
            None if part is None else linalg.rows(part, samples) for part in (self.added, self.gain)
        )
        return Full(matrix, added, gain)

    def quadratic(self, rows: Tensor) -> Tensor:
        diagonal = None
        if self.added is not None:
            diagonal = linalg.row_products(rows * self.added[..., None, :], rows)
        if self.matrix is None:
            assert diagonal is not None
            return diagonal
        if self.gain is not None:
            rows = rows * self.gain[..., None, :]
        product = linalg.row_products(linalg.times_matrices(rows, self.matrix), rows)
        return product if diagonal is None else product + diagonal

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        if self.matrix is None:
            return linalg.spectrum_log_determinant(self.variance, rtol)
        return super().log_determinant(rtol)

    def color(self, white: Tensor) -> Tensor:
        return white * self.variance.sqrt() if self.matrix is None else super().color(white)

    def _correlated_variance(self, gain: Tensor | None) -> Tensor:
        """(1 | B, n) gain^2 times the matrix's diagonal."""
        assert self.matrix is not None
        # Where weights cancel, round-off can leave -1e-5 here; a variance is never negative.
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        # Not gain^2: the square of a gain can overflow.
        return diagonal if gain is None else gain * diagonal * gain


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Covariance):
    """Variances alone, correlations dropped at every layer: the paper's dMNN."""

    var: Tensor  # (1 | B, n)

    @classmethod
    def start(cls, var: Tensor, n: int) -> Diagonal:
        return cls(var.expand(*var.shape[:-1], n))

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
        return Diagonal(linalg.rows(self.var, samples))

    def quadratic(self, rows: Tensor) -> Tensor:
        return linalg.row_products(rows * self.var[..., None, :], rows)

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        return linalg.spectrum_log_determinant(self.var, rtol)

    def color(self, white: Tensor) -> Tensor:
        return white * self.var.sqrt()


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Shared(Covariance):
    """One covariance for a whole mini-batch; docs/theory.md, eq. (26).

    Activations take its gain and variance at the batch's average mean, so it never gets a batch
    dimension. The means themselves stay per-sample.
    """

    one: Covariance  # of batch dimension 1

    @classmethod
    def start(cls, var: Tensor, n: int) -> Shared:
        return cls(Full.start(var.mean(0, keepdim=True), n))

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

    def activate(
        self, activation: Callable[[Tensor, Tensor], Response], mean: Tensor
    ) -> tuple[Response, Shared]:
        variance = self.variance
        common = activation(mean.mean(0, keepdim=True), variance)
        return activation(mean, variance), self.gate(common.gain, common.variance)

    def quadratic(self, rows: Tensor) -> Tensor:
        return self.one.quadratic(rows)

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        return self.one.log_determinant(rtol)

    def color(self, white: Tensor) -> Tensor:
        return self.one.color(white)
