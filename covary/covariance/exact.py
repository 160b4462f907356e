"""Covariances held exactly, but for what their names say: correlations dropped, or shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covary import linalg
from covary.covariance.base import EVERY, Covariance, Response, register_value, symmetric


class _DiagonalMatrix(Covariance):
    """What is the same for every way of holding a matrix without off-diagonal elements."""

    def dense(self) -> Tensor:
        return torch.diag_embed(self.variance)

    def quadratic(self, rows: Tensor, samples: slice = EVERY) -> Tensor:
        return (rows * linalg.rows(self.variance, samples)[..., None, :]) @ rows.mT

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

        matrix = linalg.in_chunks(product, len(self.var), weight.numel(), weight.device)
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
        return symmetric(self.matrix) + torch.diag_embed(self.variance - diagonal)

    def linear(self, weight: Tensor) -> Full:
        def product(samples: slice) -> Tensor:
            return weight @ (linalg.rows(self.matrix, samples, dim=-3) @ weight.mT)

        matrix = linalg.in_chunks(product, len(self.matrix), weight.numel(), weight.device)
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
        return symmetric(correlated) + torch.diag_embed(self.excess)

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

    def respond(
        self, activation: Callable[[Tensor, Tensor], Response], mean: Tensor, response: Response
    ) -> Covariance:
        common = activation(mean.mean(0, keepdim=True), self.variance)
        return self.activate(common.gain, common.variance)

    def log_determinant(self, rtol: float) -> tuple[Tensor, Tensor]:
        return self.one.log_determinant(rtol)

    def color(self, white: Tensor) -> Tensor:
        return self.one.color(white)
