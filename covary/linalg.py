"""Determinants and roots of matrices that may be singular, and products of a batch with one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary.tracing import is_exported, is_traced

Part = TypeVar("Part", Tensor, Tensor | None)
# Work on so many elements at a time that they stay in a CPU's cache; a GPU wants it large.
_CHUNK_ELEMENTS = {"cpu": 2**19}
_CHUNK_ELEMENTS_ELSEWHERE = 2**26
# Columns of a triangular matrix that are multiplied at a time, without the zeros above them.
_BLOCK = 64


def default_rtol(n: int, dtype: torch.dtype) -> float:
    """Eigenvalues of an n x n matrix below this fraction of the largest count as zero.

    At least 1e-6, so that float32 and float64 agree on the rank; more where rounding errors are.
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

    Eigenvalues up to ``rtol`` times the largest do not count. Cholesky serves for matrices that are
    certainly of full rank in that sense; only the others pay for their eigenvalues.
    """
    n = matrix.shape[-1]
    eye = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    flat, finite = _finite(matrix)
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
    flat, finite = _finite(matrix)
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
    """(B, n, n) with the identity in place of what is not finite, and (B,) which are."""
    # Decompositions refuse a whole batch for one NaN in it.
    n = matrices.shape[-1]
    flat = matrices.reshape(-1, n, n)
    finite = torch.isfinite(flat).all(-1).all(-1)
    eye = torch.eye(n, dtype=flat.dtype, device=flat.device)
    return torch.where(finite[:, None, None], flat, eye), finite


def _decomposed(decompose: Callable[[Tensor], Any], matrices: Tensor) -> Any:
    """Eigenvalues, and vectors, of (B, n, n) matrices; in float64 where float32 fails."""
    # In float32, LAPACK gives up on some matrices with many dead units, and with one of them on the
    # whole batch; or it gives NaN, and does not say so.
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
    """Matrices (B, n, n) with 0 for elements below eps^2 times the largest of their matrix.

    With subnormal numbers, which dead units leave, LAPACK's iteration may not converge.
    """
    sizes = matrices.abs()
    negligible = sizes.amax((-2, -1), keepdim=True) * torch.finfo(matrices.dtype).eps ** 2
    return torch.where(sizes > negligible, matrices, 0.0)


def in_chunks(
    compute: Callable[[slice], Tensor], batch: int, numbers: int, device: torch.device
) -> Tensor:
    """``compute`` of all samples, of so many ``numbers`` each, in chunks that fit the cache."""
    limit = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    step = max(1, limit // max(1, numbers))
    # A compiled graph fuses as it sees fit, and must fit every batch size: it asks for none.
    if is_traced() or step >= batch:
        return compute(slice(None))
    first, *rest = [slice(start, start + step) for start in range(0, batch, step)]
    found = compute(first)
    if not is_plain(found):
        return torch.cat([found, *map(compute, rest)])
    result = found.new_empty(batch, *found.shape[1:])
    result[first] = found
    for samples in rest:
        result[samples] = compute(samples)  # while it is in the cache
    return result


def gated_quadratic(
    rows: Tensor,
    matrix: Tensor | None,
    gain: Tensor | None,
    added: Tensor | None,
    half: Tensor | None = None,
) -> Tensor:
    """R (gain gain^T * M + diag(added)) R^T for each sample, (1 | B, r, r).

    The matrix in brackets is never formed: this is ``((R gain) M gain + R added) R^T``.

    Args:
        rows: R (1 | B, r, n).
        matrix: M (1 | B, n, n), or None for 0.
        gain: (1 | B, 1 | n), or None for 1.
        added: (1 | B, 1 | n), or None for 0.
        half: ``lower_half`` of one M for all samples, in place of ``matrix``; without gradients.
    """
    parts = [part for part in (rows, matrix, gain, added) if part is not None]
    has_gain, gain = gain is not None, rows.new_ones(1, 1) if gain is None else gain
    added = rows.new_zeros(1, 1) if added is None else added
    is_stacked = rows.dim() > 3  # by vmap
    batch = batch_of(*parts)
    is_common = matrix is not None and not is_stacked and matrix.shape[0] == 1
    if is_common and (is_exported() or (is_plain(*parts) and batch > 1)):
        assert matrix is not None
        half = lower_half(matrix[0])

    def some(samples: slice) -> Tensor:
        r = select(rows, samples, dim=-3)
        g, a = select(gain, samples)[..., None, :], select(added, samples)[..., None, :]
        if half is not None:
            scaled = r.expand(batch_of(r, g, a), -1, -1)
            left = _times_lower_half(scaled * g if has_gain else scaled, half)
            left = (left.mul_(g) if has_gain else left).addcmul_(r, a, value=0.5)
            product = row_products(left, r)
            return product + product.mT
        if matrix is None:
            return row_products(r * a, r)
        left = times_matrices(r * g, select(matrix, samples, dim=-3))
        return row_products(torch.addcmul(r * a, left, g), r)

    if is_stacked:
        return some(slice(None))
    return in_chunks(some, batch, rows.shape[-2] * rows.shape[-1], rows.device)


def lower_half(matrix: Tensor) -> Tensor:
    """The triangle L (n, n) with L + L^T = M of a symmetric matrix.

    X + X^T = R M R^T for X = R L R^T, of half the multiplications in its first product.
    """
    return (matrix.tril() + matrix.tril(-1)) / 2


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


def _times_lower_half(rows: Tensor, half: Tensor) -> Tensor:
    """Rows (B, r, n) times a triangle, without the zeros in it."""
    if is_traced():
        flat, columns = rows.reshape(-1, rows.shape[-1]), range(0, half.shape[0], _BLOCK)
        parts = [flat[:, low:] @ half[low:, low : low + _BLOCK] for low in columns]
        return torch.cat(parts, -1).reshape(rows.shape)
    is_swapped = rows.transpose(0, 1).is_contiguous()  # (r, B, n) in memory, as a tape has them
    rows = rows.transpose(0, 1) if is_swapped else rows
    tall = rows.reshape(-1, len(half))
    out = torch.empty_like(tall)
    for low in range(0, len(half), _BLOCK):
        high = low + _BLOCK
        torch.mm(tall[:, low:], half[low:, low:high], out=out[:, low:high])
    out = out.view(rows.shape)
    return out.transpose(0, 1) if is_swapped else out


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """(1 | B, r, r) A B^T of rows (1 | B, r, n); single rows without a matrix product."""
    if left.shape[-2] == 1:
        return (left * right).sum(-1, keepdim=True)
    return times_matrices(left, right.mT)


def times_matrices(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows (1 | B, r, m) times matrices (1 | B, m, n), as one product where there is one matrix."""
    if matrices.shape[-3] != 1:
        return rows @ matrices
    *front, batch, r, m = rows.shape
    product = rows.reshape(*front, batch * r, m) @ matrices.squeeze(-3)
    return product.reshape(*product.shape[:-2], batch, r, matrices.shape[-1])


def batch_of(*parts: Tensor) -> int:
    """How many samples tensors (1 | B, ...) are of together; there may be none."""
    return next((part.shape[0] for part in parts if part.shape[0] != 1), 1)


def select(value: Part, samples: slice | Tensor | Sequence[int], dim: int = -2) -> Part:
    """The part of these samples, or what all samples have in common, be it None.

    Samples are dimension ``dim``, counted from the end: the last but one of (B, n).
    """
    if value is None or value.shape[dim] == 1:
        return value
    return value[(..., samples) + (slice(None),) * (-1 - dim)]


def is_plain(*values: Tensor) -> bool:
    """Whether values can be computed in place: no gradient, no compiler, no vmap."""
    if is_traced() or torch.is_grad_enabled():
        return False
    return not any(map(is_functorch_wrapped_tensor, values))


def may_have_gradients(value: Tensor) -> bool:
    """Whether gradients may flow through a value: within vmap, where it cannot be asked, too."""
    if value.requires_grad or is_traced():
        return value.requires_grad
    return is_functorch_wrapped_tensor(value)


def is_finite(x: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in x."""
    # Both survive a sum, which takes one pass over memory; large numbers may overflow in it.
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def significant(var: Tensor) -> Tensor:
    """Variances, and 0 for those next to nothing: what is made of them has fewer digits than others
    and takes a processor many times as long.
    """
    return F.threshold(var, torch.finfo(var.dtype).tiny * 2**24, 0.0)


# glibc gives freed blocks above a threshold back to the system, and every batch would pay for
# getting them again, page by page: a quarter of a sweep's time. The threshold is the largest block
# freed so far, up to 32 MB; so this frees one.
torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


def summed_to(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows (r, *broadcast) -> (r, *shape): the transpose of broadcasting."""
    extra = rows.dim() - 1 - len(shape)
    if extra:
        rows = rows.sum(tuple(range(1, 1 + extra)))
    dims = [i + 1 for i, size in enumerate(shape) if size == 1 and rows.shape[i + 1] != 1]
    return rows.sum(dims, keepdim=True) if dims else rows
