"""Determinants and roots of matrices that may be singular, and products of many with one weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

# Work on so many elements at a time that they stay in a CPU's cache; a GPU wants it large.
_CHUNK_ELEMENTS = {"cpu": 2**19}
_CHUNK_ELEMENTS_ELSEWHERE = 2**26
# Columns of a triangular matrix that are multiplied at a time, without the zeros above them.
_BLOCK = 64


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
        eigenvalues = _decomposed(torch.linalg.eigvalsh, flat[rest])
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
        eigenvalues, vectors = _decomposed(torch.linalg.eigh, flat[failed])
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


def _decomposed(decompose: Callable[[Tensor], Any], matrices: Tensor) -> Any:
    """Eigenvalues, and vectors, of (B, n, n) matrices, found in float64 if they must.

    In float32, LAPACK's iteration gives up on some matrices of layers where many units are dead,
    and with one of them on the whole batch; or it gives NaN, and does not say so.
    """
    matrices = _without_dust(matrices)
    try:
        found = decompose(matrices)
        eigenvalues = found if isinstance(found, Tensor) else found[0]
        if bool(torch.isfinite(eigenvalues).all()):
            return found
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    found = decompose(matrices.double())
    if isinstance(found, Tensor):
        return found.to(matrices.dtype)
    return tuple(part.to(matrices.dtype) for part in found)


def _without_dust(matrices: Tensor) -> Tensor:
    """Matrices (B, n, n) with elements set to 0 that are tiny compared with the matrix's largest.

    Dead units leave subnormal numbers in a covariance, and with those in it LAPACK's iteration for
    eigenvalues may not converge. Elements below eps^2 move no eigenvalue by more than n eps^2.
    """
    largest = matrices.abs().amax((-2, -1), keepdim=True)
    negligible = largest * torch.finfo(matrices.dtype).eps ** 2
    return torch.where(matrices.abs() > negligible, matrices, 0.0)


def in_chunks(
    compute: Callable[[slice], Tensor], batch: int, numbers: int, device: torch.device
) -> Tensor:
    """``compute`` for all samples, as many at a time as have so many numbers each in the cache."""
    step = _chunk(numbers, device)
    # A compiled graph fuses as it sees fit, and with a loop in it would fit one batch size only.
    if step >= batch or torch.compiler.is_compiling():
        return compute(slice(None))
    return torch.cat([compute(slice(start, start + step)) for start in range(0, batch, step)])


def diagonal_product(weight: Tensor, var: Tensor) -> Tensor:
    """W diag(var) W^T for a weight (m, n) and variances (1 | B, n): (1 | B, m, m)."""

    def product(samples: slice) -> Tensor:
        return (weight * rows(var, samples)[:, None, :]) @ weight.mT

    return in_chunks(product, len(var), weight.numel(), weight.device)


def gated_product(weight: Tensor, matrix: Tensor, gain: Tensor, added: Tensor) -> Tensor:
    """W (gain gain^T * M + diag(added)) W^T for each sample, (1 | B, m, m).

    For a weight (m, n), matrices (1 | B, n, n), gains and what is added (1 | B, 1 | n). The matrix
    in brackets is never formed: it is ``((W gain) M gain + W added) W^T``.
    """
    batch = batch_of(matrix, gain, added)
    special = torch.compiler.is_compiling() or is_functorch_wrapped_tensor(gain)
    if not torch.is_grad_enabled() and not special and batch > 1:
        return _gated_product_in_place(weight, matrix, gain, added, batch)

    def product(samples: slice) -> Tensor:
        some_gain = rows(gain, samples)[:, None, :]
        left = times_matrices(weight * some_gain, rows(matrix, samples, dim=-3))
        return torch.addcmul(weight * rows(added, samples)[:, None, :], left, some_gain) @ weight.mT

    return in_chunks(product, batch, weight.numel(), weight.device)


def _gated_product_in_place(
    weight: Tensor, matrix: Tensor, gain: Tensor, added: Tensor, batch: int
) -> Tensor:
    """The same in buffers that stay in the cache, for when no gradient is wanted."""
    m, n = weight.shape
    step = min(batch, _chunk(weight.numel(), weight.device))
    result = weight.new_empty(batch, m, m)
    scaled, left = weight.new_empty(2, step, m, n)
    half = lower_half(matrix[0]) if matrix.shape[0] == 1 else None
    if half is not None:
        added = 0.5 * added
        product = weight.new_empty(step, m, m)
    for start in range(0, batch, step):
        samples = slice(start, start + step)
        out = result[samples]
        count = len(out)
        # One gain for all samples, as a normalisation between two weights leaves it, is expanded.
        some_gain = rows(gain, samples)[:, None, :].expand(count, 1, n)
        torch.mul(weight, some_gain, out=scaled[:count])
        if half is not None:
            _times_lower_half(scaled[:count].view(-1, n), half, out=left[:count].view(-1, n))
        else:
            torch.bmm(scaled[:count], matrix[samples], out=left[:count])
        left[:count].mul_(some_gain).addcmul_(weight, rows(added, samples)[:, None, :])
        target = out if half is None else product[:count]
        torch.mm(left[:count].view(-1, n), weight.mT, out=target.view(-1, m))
        if half is not None:
            torch.add(target, target.mT, out=out)
    return result


def lower_half(matrix: Tensor) -> Tensor:
    """The triangle L (n, n) with L + L^T = M of a symmetric matrix.

    One matrix for a whole batch, the widest of a network, is multiplied in this way: X + X^T =
    R M R^T for an X = R L R^T of half the multiplications in its first product.
    """
    half = matrix.tril()
    half.diagonal().mul_(0.5)
    return half


def lower_half_of_gram(left: Tensor, right: Tensor) -> Tensor:
    """The same for A B^T, symmetric, of (n, k) matrices: its other half is never computed."""
    n = len(left)
    half = left.new_zeros(n, n)
    for low in range(0, n, _BLOCK):
        high = min(low + _BLOCK, n)
        torch.mm(left[low:], right[low:high].mT, out=half[low:, low:high])
        half[low:high, low:high].tril_()
    half.diagonal().mul_(0.5)
    return half


def _times_lower_half(tall: Tensor, half: Tensor, out: Tensor) -> None:
    for low in range(0, len(half), _BLOCK):
        high = low + _BLOCK
        torch.mm(tall[:, low:], half[low:, low:high], out=out[:, low:high])


def gated_quadratic(rows_: Tensor, half: Tensor, gain: Tensor, added: Tensor) -> Tensor:
    """R (gain gain^T * M + diag(added)) R^T for rows (1 | B, r, n), (B, r, r); without gradients.

    For gains and what is added (1 | B, 1 | n) and one matrix for all samples, as ``lower_half``.
    """
    batch, n = batch_of(rows_, gain, added), rows_.shape[-1]
    # As a copy where a weight is the transpose of another, or samples differ in ``added`` alone.
    scaled = (rows_ * gain[:, None, :]).expand(batch, -1, -1).contiguous()
    left = torch.empty_like(scaled)
    _times_lower_half(scaled.view(-1, n), half, out=left.view(-1, n))
    left.mul_(gain[:, None, :]).addcmul_(rows_, added[:, None, :], value=0.5)
    product = row_products(left, rows_)
    return product + product.mT


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """(..., r, r) A B^T of rows (..., r, n); single rows without the detour of a matrix product."""
    if left.shape[-2] == 1:
        return (left * right).sum(-1, keepdim=True)
    if left.dim() == 3 and left.shape == right.shape:
        return torch.bmm(left, right.mT)  # what the next line comes to, but sooner
    return left @ right.mT


def times_matrices(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows (1 | B, r, m) times matrices (1 | B, m, n), as one product where there is one matrix."""
    if matrices.shape[-3] != 1:
        return rows @ matrices
    return tall_product(rows, matrices.squeeze(-3))


def tall_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows (..., B, r, m) times one matrix (..., m, n) for all of the B, as one product."""
    *front, batch, r, m = rows.shape
    product = rows.reshape(*front, batch * r, m) @ matrix
    return product.reshape(*product.shape[:-2], batch, r, matrix.shape[-1])


def is_finite(x: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in x."""
    # Both survive a sum, which takes one pass over memory; large numbers may overflow in it.
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def batch_of(*parts: Tensor) -> int:
    """How many samples tensors (1 | B, ...) are of together; there may be none."""
    return next((part.shape[0] for part in parts if part.shape[0] != 1), 1)


def rows(value: Tensor, samples: slice | Tensor | Sequence[int], dim: int = -2) -> Tensor:
    """The rows of these samples, or the one row that all samples have in common.

    Samples are dimension ``dim``, counted from the end: the last but one of (B, n).
    """
    if value.shape[dim] == 1:
        return value
    return value[(..., samples) + (slice(None),) * (-1 - dim)]


def _chunk(numbers: int, device: torch.device) -> int:
    """How many samples fit the cache, with so many numbers each."""
    limit = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    return max(1, limit // max(1, numbers))


def _keep_freed_memory() -> None:
    """Have the C library keep the memory that one batch frees for the next one.

    glibc gives blocks above a threshold back to the system as soon as they are free, and every
    batch then pays for getting them again, page by page: a quarter of a sweep's time. The threshold
    is that of the largest block freed so far, up to 32 MB; so this frees one. Elsewhere it has no
    effect.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


_keep_freed_memory()
