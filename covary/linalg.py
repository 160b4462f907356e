"""Determinants and roots of positive semidefinite matrices that may be singular."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def default_rtol(n: int, dtype: torch.dtype) -> float:
    """Eigenvalues below this fraction of the largest count as zero.

    At least 1e-6, so that float32 and float64 agree on the rank, and more where the rounding error
    of an n x n matrix exceeds that.
    """
    return max(1e-6, n * torch.finfo(dtype).eps)


def spectrum_log_determinant(eigenvalues: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Log pseudo-determinant and rank from eigenvalues (..., n); both of shape (...)."""
    largest = eigenvalues.amax(-1, keepdim=True)
    kept = (eigenvalues > rtol * largest) & (eigenvalues > 0)
    value = torch.where(kept, eigenvalues, 1.0).log().sum(-1)
    # No number must come of NaN or infinity, least of all one that looks like certainty.
    finite = torch.isfinite(eigenvalues).all(-1)
    return torch.where(finite, value, math.nan), torch.where(finite, kept.sum(-1), kept.shape[-1])


def log_determinant(matrix: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Log pseudo-determinant and rank of (..., n, n) matrices, each by itself; both (...).

    The product of the eigenvalues above ``rtol`` times the largest. Cholesky finds it for matrices
    that are certainly of full rank in that sense; only the others pay for their eigenvalues.
    """
    n = matrix.shape[-1]
    eye = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    flat, finite = _finite(matrix.reshape(-1, n, n))
    factor, info = torch.linalg.cholesky_ex(flat)
    with torch.no_grad():
        # The smallest eigenvalue is at least 1 / trace(C^-1), the largest at most trace(C).
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
        trace = flat.diagonal(dim1=-2, dim2=-1).sum(-1)
        condition = trace * inverse.square().sum((-2, -1))
        full_rank = (info == 0) & (condition * rtol < 1)
    rest = (~full_rank).nonzero()[:, 0]
    if rest.numel():
        # Not even in a gradient may a failed factor show: replace the matrix, not the result.
        factor = torch.linalg.cholesky(torch.where(full_rank[:, None, None], flat, eye))
    value = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    rank = torch.full_like(info, n, dtype=torch.int64)
    if rest.numel():
        eigenvalues = torch.linalg.eigvalsh(flat[rest])
        rest_value, rest_rank = spectrum_log_determinant(eigenvalues, rtol)
        value = value.index_put((rest,), rest_value)
        rank = rank.index_put((rest,), rest_rank)
    value = torch.where(finite, value, math.nan)
    return value.reshape(matrix.shape[:-2]), rank.reshape(matrix.shape[:-2])


def root(matrix: Tensor) -> Tensor:
    """R with R R^T = matrix for (..., n, n) positive semidefinite matrices, singular or not."""
    flat, finite = _finite(matrix.reshape(-1, *matrix.shape[-2:]))
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(flat)
    failed = info.nonzero()[:, 0]
    if failed.numel():
        eigenvalues, vectors = torch.linalg.eigh(flat[failed])
        # Round-off leaves a zero eigenvalue slightly to either side of zero.
        scales = eigenvalues.clamp(min=0).sqrt()
        factor = factor.index_put((failed,), vectors * scales[:, None, :])
    return torch.where(finite[:, None, None], factor, math.nan).reshape(matrix.shape)


def _finite(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, n) with the identity in place of what is not finite, and (B,) which are.

    Decompositions refuse a whole batch for one NaN in it.
    """
    finite = torch.isfinite(matrices).all(-1).all(-1)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return torch.where(finite[:, None, None], matrices, eye), finite
