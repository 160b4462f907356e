"""Moments: the value that flows through a moment neural network."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from covary import linalg
from covary.covariance import Covariance, Full, Selection, register_value

_REMEDY = (
    "Pass .mean, .variance or .covariance_matrix to functions and losses; inside a network use "
    "the layer of covary.nn instead."
)


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Mean and covariance of a layer's activity for a batch of B samples.

    Named as in ``torch.distributions``; a Gaussian with these moments is ``distribution()``. The
    units of a sample usually are n features, but may have any shape, the event shape: covariances
    are those of the n units of the flattened event. What vmap stacks, as for replicas, stands in
    front of the batch: as many dimensions as the variances of ``cov``, (*stack, 1 | B, n), have
    there. The dimensions of the mean behind stack and batch are the event.

    Indexing selects samples and always keeps the batch dimension: ``out[3]`` is a batch of one,
    ``out[2:5]`` and ``out[mask]`` batches of several; ``len(out)`` is B, and a loop goes through
    batches of one.

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
        >>> out[0].mean.shape
        torch.Size([1, 3])
    """

    mean: Tensor
    cov: Covariance

    def __post_init__(self) -> None:
        if isinstance(self.cov, Tensor):
            raise TypeError(
                "Moments need a covary.covariance.Covariance and got a Tensor. Wrap a (B, n, n) "
                "matrix: covary.covariance.Full(matrix)."
            )

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
            rows: (r, n), or (B, r, n) for other rows for each sample, over the n units of the
                flattened event; or (r, *event), or (B, r, *event). Tensors or arrays.
        """
        rows = self._flat_rows(rows)
        projected = (rows @ self.flat_mean[..., None]).squeeze(-1)
        return Moments(projected, Full(self.cov.quadratic(rows)))

    def entropy(self, *, rtol: float | None = None) -> Tensor:
        """(B,) entropy of N(mean, covariance) in nats; docs/theory.md, eq. (25).

        Where a sample's covariance is singular, this is the entropy within the subspace of full
        rank: eigenvalues up to ``rtol`` times the sample's largest do not count (default: 1e-6, or
        n times the machine epsilon if that is more). No variance at all gives -inf.
        """
        shape = self._flat_shape
        if rtol is None:
            rtol = linalg.default_rtol(shape[-1], self.mean.dtype)
        if not 0 <= rtol < 1:
            raise ValueError(f"entropy needs a relative tolerance in [0, 1), got {rtol}.")
        log_determinant, rank = self.cov.log_determinant(rtol)
        entropy = 0.5 * (rank * (1 + math.log(2 * math.pi)) + log_determinant)
        entropy = torch.where(rank > 0, entropy, -math.inf)
        return entropy.expand(shape[:-1])

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
        return self._each(lambda tensor: tensor.to(*args, **kwargs))

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
        if self.mean.dim() == 2:
            return tuple(self.mean.shape)
        shape = self.cov.shape
        return *self.mean.shape[: len(shape) - 1], shape[-1]

    def _flat_rows(self, rows: Tensor) -> Tensor:
        """(*stack, 1 | B, r, n) of rows in any of the shapes that ``project`` takes."""
        event, (*front, n) = self.event_shape, self._flat_shape
        flat = rows = torch.as_tensor(rows).to(self.mean)
        if len(event) > 1 and rows.shape[-len(event) :] == event:
            flat = rows.reshape(*rows.shape[: -len(event)], n)
        if flat.shape[-1:] == (n,) and flat.dim() == 2:
            return flat.expand(*[1] * len(front), *flat.shape)
        if flat.shape[-1:] == (n,) and [*flat.shape[:-2]] == front:
            return flat
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
        held = type(self.cov).__name__
        return f"Moments(mean={tuple(getattr(self.mean, 'shape', ()))}, cov={held})"

    def __getattr__(self, name: str) -> NoReturn:
        # Reached by names that do not exist, such as the x.dim() of an ordinary module.
        if not name.startswith("_") and hasattr(Tensor, name):
            raise AttributeError(f"Moments have no {name}, which Tensors have. {_REMEDY}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
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
        chosen: Selection = samples
        return chosen
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
