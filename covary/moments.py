"""Moments: the value that flows through a moment neural network."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex, overload

import numpy as np
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from covary import linalg
from covary.budget import Budget
from covary.covariance import Covariance, Full, LowRank, Selection, register_value

_REMEDY = (
    "Pass .mean, .variance or .covariance_matrix to functions and losses; inside a network use "
    "the layer of covary.nn instead."
)


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Mean and covariance of a layer's activity for a batch of B samples.

    Named as in ``torch.distributions``; a Gaussian with these moments is ``distribution()``. The n
    units of a sample may have any shape, the event shape; covariances are those of the flattened
    event. What vmap stacks, as for replicas, stands in front of the batch, in the mean and in the
    variances of ``cov``, (*stack, 1 | B, n).

    Indexing selects samples and always keeps the batch dimension: ``out[3]`` is a batch of one,
    ``out[2:5]`` and ``out[mask]`` batches of several; a loop goes through batches of one.

    Attributes:
        mean: (B, *event), usually (B, n): the mean of each unit.
        cov: the covariance, an object of ``covary.covariance``, of batch dimension B, or 1 where
            the whole batch has the same.

    Examples:
        >>> import covary, torch
        >>> out = covary.mlp([4, 8, 3], noise=0.2)(torch.ones(2, 4))
        >>> out
        Moments(mean=(2, 3), cov=Full)
        >>> out.covariance_matrix.shape
        torch.Size([2, 3, 3])
        >>> lead = out.project(torch.tensor([[1.0, -1.0, 0.0]]))  # the first output over the second
        >>> lead.mean.shape, lead.stddev.shape
        (torch.Size([2, 1]), torch.Size([2, 1]))
    """

    mean: Tensor
    cov: Covariance

    def __post_init__(self) -> None:
        if isinstance(self.cov, Tensor):
            raise TypeError(
                "Moments need a covary.covariance.Covariance and got a Tensor. Wrap a (B, n, n) "
                "matrix: covary.covariance.Full(matrix)."
            )

    @classmethod
    def of(
        cls,
        values: Tensor | np.ndarray,
        *,
        std: Tensor | np.ndarray | float | None = None,
        cov: Tensor | np.ndarray | None = None,
        factor: Tensor | np.ndarray | None = None,
        repair: bool = False,
    ) -> Moments:
        """Measured values and their errors, to be put into a network.

        Args:
            values: (B, *event) what was measured.
            std: standard deviations of independent errors: one for all, or any shape that
                broadcasts to that of the values, such as (n,) for each feature.
            cov: (n, n) or (B, n, n) covariance of the errors of a sample's n units, in place of
                ``std``.
            factor: (n, k) or (B, n, k) in place of both: errors of covariance F F^T, that have k
                causes in common.
            repair: take the nearest positive semidefinite matrix where ``cov`` is not one.

        Examples:
            >>> import covary, torch
            >>> x = covary.Moments.of(torch.rand(5, 3), std=torch.tensor([0.1, 0.1, 0.5]))
            >>> covary.mlp([3, 8, 1], noise=0.0)(x).stddev.shape
            torch.Size([5, 1])
        """
        mean = torch.as_tensor(values)
        if not mean.is_floating_point() or mean.dim() < 2:
            raise ValueError(
                "Moments.of takes values (batch, features) of real numbers, got "
                f"{mean.dtype} of shape {tuple(mean.shape)}."
            )
        if sum(given is not None for given in (std, cov, factor)) != 1:
            raise ValueError(
                "Moments.of takes one of std (errors), cov (their covariance), factor (its root)."
            )
        if factor is not None:
            return cls(mean, LowRank(_checked_factor(torch.as_tensor(factor), mean)))
        if cov is not None:
            return cls(mean, Full(_checked_covariance(torch.as_tensor(cov), mean, repair=repair)))
        errors = _checked_errors(torch.as_tensor(std, dtype=mean.dtype, device=mean.device), mean)
        return cls(mean, Full(None, errors.square().flatten(1)))

    @property
    def event_shape(self) -> torch.Size:
        """The shape of one sample's units, usually (n,)."""
        return self.mean.shape[self._batch_dim + 1 :]

    @property
    def flat_mean(self) -> Tensor:
        """(B, n) the mean of each unit of the flattened event."""
        return self.mean if self.mean.dim() == 2 else self.mean.reshape(self._flat_shape)

    @property
    def variance(self) -> Tensor:
        """(B, *event) the variance of each unit."""
        return self.cov.variance.expand(self._flat_shape).reshape(self.mean.shape)

    @property
    def stddev(self) -> Tensor:
        """(B, *event) the standard deviation of each unit."""
        return self.variance.sqrt()

    @property
    def covariance_matrix(self) -> Tensor:
        """(B, n, n) the covariance, symmetric and positive semidefinite to round-off."""
        shape = self._flat_shape
        return self.cov.dense().expand(*shape, shape[-1])

    def project(self, rows: Tensor) -> Moments:
        """The moments of ``rows @ y`` for outputs y: a batch of B with r units.

        This costs as much as r units, not n. The lead of the best class over the second, for one,
        is a single row: 1 and -1 in their places, another row for each sample.

        Args:
            rows: (r, n) or (r, *event), or one of them for each sample, (B, r, n) or
                (B, r, *event). Tensors or arrays.
        """
        rows = self._flat_rows(rows)
        projected = (rows @ self.flat_mean[..., None]).squeeze(-1)
        return Moments(projected, Full(self.cov.quadratic(rows)))

    @overload
    def budget(self, source: None = None, *, rows: Tensor | None = None) -> Budget: ...

    @overload
    def budget(self, source: str, *, rows: Tensor | None = None) -> Tensor: ...

    def budget(self, source: str | None = None, *, rows: Tensor | None = None) -> Budget | Tensor:
        """What the variance is made of: a part (B, *event) for each source.

        The parts add up to the variance. For ``rows`` as ``project`` takes them, they are those of
        the variance of ``rows @ y``, (B, r): of the difference of two outputs, for one.

        ``budget("input")`` is the part of the input, element by element, (B, *event, *input) or
        (B, r, *input): which measurement should be improved? Of several inputs, the second is
        ``"input#2"``. Elements whose errors are correlated may have negative parts.

        Examples:
            >>> import covary, torch
            >>> _ = torch.manual_seed(0)
            >>> net = covary.convert(covary.mlp([3, 8, 2], noise=0.1).eval())
            >>> x = covary.Moments.of(torch.randn(64, 3), std=torch.tensor([0.1, 0.1, 0.3]))
            >>> _ = covary.track(net, x)
            >>> list(net(x).budget())
            ['noise at activation1', 'input']
            >>> net(x).budget("input").shape
            torch.Size([64, 2, 3])
        """
        flat = None if rows is None else self._flat_rows(rows)
        parts = self._parts(flat)
        if source is None:
            shape = self.mean.shape if rows is None else next(iter(parts.values())).shape
            return Budget({name: part.reshape(shape) for name, part in parts.items()})
        if source not in parts or not source.startswith("input"):
            inputs = [name for name in parts if name.startswith("input")]
            raise ValueError(
                f"A budget by element is that of an input ({', '.join(inputs) or 'none here'}), "
                f"got {source!r}."
            )
        found = self.cov.elements(source, flat)
        return found if rows is not None else found.reshape(*self.mean.shape, *found.shape[2:])

    def covariance_budget(self, *, rows: Tensor | None = None) -> Budget:
        """What the covariance is made of: a part (B, n, n), or (B, r, r), for each source.

        What nonlinearities add is shared out alike for all elements of a sample's matrix, so that
        parts on the diagonal differ a little from those of ``budget``.
        """
        flat = None if rows is None else self._flat_rows(rows)
        return Budget(self._parts(flat, matrices=True), are_matrices=True)

    def _parts(self, rows: Tensor | None, *, matrices: bool = False) -> dict[str, Tensor]:
        parts = self.cov.budget(rows, matrices=matrices)
        if not parts:
            raise ValueError(
                "Nothing varies here, so there is no budget: this network has no noise, dropout or "
                "uncertain weights, and its input no errors."
            )
        return parts

    def entropy(self, *, rtol: float | None = None) -> Tensor:
        """(B,) entropy of N(mean, covariance) in nats; docs/theory.md, eq. (25).

        Of a singular covariance, the entropy within the subspace of full rank: eigenvalues up to
        ``rtol`` times the sample's largest do not count (default: 1e-6, or n times the machine
        epsilon if that is more). No variance at all gives -inf.
        """
        shape = self._flat_shape
        if rtol is None:
            rtol = linalg.default_rtol(shape[-1], self.mean.dtype)
        if not 0 <= rtol < 1:
            raise ValueError(f"entropy needs a relative tolerance in [0, 1), got {rtol}.")
        log_determinant, rank = self.cov.log_determinant(rtol)
        entropy = 0.5 * (rank * (1 + math.log(2 * math.pi)) + log_determinant)
        return torch.where(rank > 0, entropy, -math.inf).expand(shape[:-1])

    def sample(
        self, sample_shape: int | Sequence[int] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """(*sample_shape, B, *event) draws from N(mean, covariance), singular ones included."""
        shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        with torch.no_grad():
            white = torch.randn(
                (*shape, *self._flat_shape),
                generator=generator,
                dtype=self.mean.dtype,
                device=self.mean.device,
            )
            return self.mean + self.cov.color(white).reshape(*shape, *self.mean.shape)

    def distribution(self, *, jitter: float = 0.0) -> MultivariateNormal:
        """The Gaussian with these moments, as a ``torch.distributions`` object of n flat units.

        A density needs a covariance of full rank. For samples that lack it, ``jitter`` times their
        average variance is added to the diagonal.
        """
        matrix = self.covariance_matrix
        factor, info = torch.linalg.cholesky_ex(matrix)
        if jitter and info.any():
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            amount = jitter * variance.mean(-1, keepdim=True) * (info != 0)[..., None]
            matrix = matrix + torch.diag_embed(amount.expand_as(variance))
            factor, info = torch.linalg.cholesky_ex(matrix)
        if info.any():
            singular = info.nonzero().squeeze(-1).tolist()
            raise ValueError(
                f"The covariance is singular for {len(singular)} of {info.numel()} samples (the "
                f"first at index {singular[0]}), so they have no density. Add noise to the "
                "network, pass jitter=1e-4 (which helps where there is some variance), or use "
                "entropy() and sample(), which work all the same."
            )
        return MultivariateNormal(self.flat_mean, scale_tril=factor)

    def to(self, *args: Any, **kwargs: Any) -> Moments:
        """The same on another device or of another type, as ``Tensor.to`` takes them."""
        return self._each(lambda value: value.to(*args, **kwargs))

    def cpu(self) -> Moments:
        """The same in the memory of the CPU."""
        return self.to("cpu")

    def float(self) -> Moments:
        """The same in single precision."""
        return self.to(torch.float32)

    def double(self) -> Moments:
        """The same in double precision."""
        return self.to(torch.float64)

    def detach(self) -> Moments:
        """The same without gradients."""
        return self._each(Tensor.detach)

    def __len__(self) -> int:
        return self.mean.shape[self._batch_dim]

    def __getitem__(self, samples: SupportsIndex | Selection | np.ndarray) -> Moments:
        chosen = _samples(samples, len(self))
        mean = self.mean[(slice(None),) * self._batch_dim + (chosen,)]
        return Moments(mean, self.cov.select(chosen))

    def __iter__(self) -> Iterator[Moments]:
        return (self[index] for index in range(len(self)))

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"numpy takes a Tensor and got Moments. {_REMEDY}")

    @property
    def _batch_dim(self) -> int:
        """How many dimensions are stacked in front of the batch."""
        return 0 if self.mean.dim() == 2 else len(self.cov.shape) - 2

    @property
    def _flat_shape(self) -> tuple[int, ...]:
        """(*stack, B, n)"""
        front = self.mean.shape[: self._batch_dim + 1]
        return *front, self.mean.shape[len(front) :].numel()

    def _flat_rows(self, rows: Tensor) -> Tensor:
        """(*stack, 1 | B, r, n) of rows in any of the shapes that ``project`` takes."""
        event, (*front, n) = self.event_shape, self._flat_shape
        flat = rows = torch.as_tensor(rows).to(self.mean)
        if len(event) > 1 and rows.shape[-len(event) :] == event:
            flat = rows.reshape(*rows.shape[: -len(event)], n)
        if flat.dim() > 1 and flat.shape[-1] == n and list(flat.shape[:-2]) in ([], front):
            return flat.expand(*[1] * (len(front) + 2 - flat.dim()), *flat.shape)
        shapes = [f"(r, {n})", f"({', '.join(map(str, front))}, r, {n})"]
        if len(event) > 1:
            shapes.append(f"(r, {', '.join(map(str, event))})")
        raise ValueError(
            f"project takes rows of shape {' or '.join(shapes)} here, got {tuple(rows.shape)}. "
            "Give a single row another dimension: rows[None]."
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> Moments:
        return Moments(change(self.mean), self.cov.each(change))

    def __repr__(self) -> str:
        shape = tuple(getattr(self.mean, "shape", ()))
        return f"Moments(mean={shape}, cov={type(self.cov).__name__})"

    def __getattr__(self, name: str) -> NoReturn:
        # Reached by names that do not exist, such as the x.dim() of an ordinary module.
        if not name.startswith("_") and hasattr(Tensor, name):
            raise AttributeError(f"Moments have no {name}, which Tensors have. {_REMEDY}")
        raise AttributeError(f"'Moments' object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: Any) -> NoReturn:
        # Without this, a loss or layer that is handed Moments fails with a message about C++ types.
        name = getattr(function, "__name__", str(function))
        raise TypeError(f"{name} takes a Tensor and got Moments. {_REMEDY}")


def mean_of(out: Moments | Tensor) -> Tensor:
    """The mean of moments; what a conventional network gives is its own mean."""
    return out.mean if isinstance(out, Moments) else out


def _samples(samples: Any, count: int) -> Selection:
    """What selects from a batch of so many and keeps its dimension."""
    if isinstance(samples, np.ndarray):
        samples = torch.from_numpy(samples)
    if isinstance(samples, slice | list) or (isinstance(samples, Tensor) and samples.dim() == 1):
        return samples
    try:
        index = operator.index(samples)
    except TypeError:
        raise TypeError(
            "Moments are indexed by samples: a number, a slice, a mask, or a list or tensor of "
            f"indices (of one dimension). Got {samples!r}. For units, index .mean or .variance, or "
            "use project()."
        ) from None
    if not -count <= index < count:
        raise IndexError(f"Moments of {count} samples have no sample {index}.")
    return slice(index % count, index % count + 1)


def _checked_errors(std: Tensor, mean: Tensor) -> Tensor:
    """Standard deviations (1 | B, *event) of values (B, *event)."""
    pairs = zip(reversed(std.shape), reversed(mean.shape), strict=False)
    if std.dim() > mean.dim() or any(size not in (1, of) for size, of in pairs):
        raise ValueError(
            f"std has the shape {tuple(std.shape)}, and values have {tuple(mean.shape)}. Give one "
            "number, one for each feature, or one for each value."
        )
    if not bool((torch.isfinite(std) & (std >= 0)).all()):
        wrong = std[~(torch.isfinite(std) & (std >= 0))]
        raise ValueError(
            f"std are standard deviations, finite and 0 or more; {len(wrong)} are not, the first "
            f"is {wrong[0].item():g}."
        )
    is_common = std.dim() < mean.dim() or len(std) == 1
    return std.expand(1 if is_common else len(mean), *mean.shape[1:])


def _checked_factor(factor: Tensor, mean: Tensor) -> Tensor:
    """(1 | B, n, k) of values (B, *event)."""
    n, found = mean[0].numel(), factor.to(mean)
    found = found[None] if found.dim() == 2 else found
    if found.dim() != 3 or found.shape[1] != n or len(found) not in (1, len(mean)):
        raise ValueError(
            f"factor has the shape {tuple(factor.shape)}; of {n} units it is ({n}, k), or "
            f"({len(mean)}, {n}, k) if samples differ."
        )
    if not bool(torch.isfinite(found).all()):
        raise ValueError("factor has values that are NaN or infinite.")
    return found


def _checked_covariance(cov: Tensor, mean: Tensor, *, repair: bool) -> Tensor:
    """(1 | B, n, n) of values (B, *event), symmetric and positive semidefinite."""
    n, matrix = mean[0].numel(), cov.to(mean)
    matrix = matrix[None] if matrix.dim() == 2 else matrix
    if matrix.shape[1:] != (n, n) or len(matrix) not in (1, len(mean)):
        raise ValueError(
            f"cov has the shape {tuple(cov.shape)}; of {n} units it is ({n}, {n}), or "
            f"({len(mean)}, {n}, {n}) if samples differ."
        )
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("cov has values that are NaN or infinite.")
    size = matrix.abs().amax((1, 2), keepdim=True)
    if not repair and bool(((matrix - matrix.mT).abs() > 1e-5 * size).any()):
        raise ValueError("cov is not symmetric. Take (cov + cov.mT) / 2, if that is meant.")
    # In float64: eigenvalues that are 0 come out as far below it as digits go.
    values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
    least = values[:, 0]
    if bool((least >= -1e-5 * values[:, -1].abs()).all()):
        return matrix
    if not repair:
        worst = int(least.argmin())
        raise ValueError(
            f"cov is not positive semidefinite: the least eigenvalue of sample {worst} is "
            f"{least[worst].item():.3g}, the largest {values[worst, -1].item():.3g}. With "
            "repair=True the nearest matrix that is one is taken."
        )
    nearest: Tensor = (vectors * values.clamp(min=0)[:, None]) @ vectors.mT
    return nearest.to(mean)
