"""Moments: the value that flows through a moment neural network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from covary import linalg
from covary.covariance import Covariance, register_value

_REMEDY = (
    "Pass .mean, .variance or .covariance_matrix to functions and losses; inside a network use "
    "the layer of covary.nn instead."
)


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Mean and covariance of a layer's activity for a batch of B samples and n units.

    Named as in ``torch.distributions``; a Gaussian with these moments is ``distribution()``.

    Attributes:
        mean: (B, n) the mean of each unit.
        cov: the covariance in the way it is held, of batch dimension B, or 1 where the whole batch
            has the same.

    Examples:
        >>> import covary, torch
        >>> out = covary.mlp([4, 8, 3], noise=0.2)(torch.ones(2, 4))
        >>> out
        Moments(mean=(2, 3), cov=Full)
        >>> out.covariance_matrix.shape
        torch.Size([2, 3, 3])
    """

    mean: Tensor
    cov: Covariance

    def __post_init__(self) -> None:
        if isinstance(self.cov, Tensor):
            raise TypeError(
                "Moments need a covary.covariance.Covariance and got a Tensor. Wrap a (B, n, n) "
                "matrix: Full(matrix, added=torch.zeros(1, 1))."
            )

    @property
    def variance(self) -> Tensor:
        """(B, n) the variance of each unit."""
        return self.cov.variance.expand(self.mean.shape)

    @property
    def stddev(self) -> Tensor:
        """(B, n) the standard deviation of each unit."""
        return self.variance.sqrt()

    @property
    def covariance_matrix(self) -> Tensor:
        """(B, n, n) the covariance, symmetric and positive semidefinite to round-off."""
        return self.cov.dense().expand(*self.mean.shape, self.mean.shape[-1])

    def entropy(self, *, rtol: float | None = None) -> Tensor:
        """(B,) entropy of N(mean, covariance) in nats; docs/theory.md, eq. (20).

        Where a sample's covariance is singular, this is the entropy within the subspace of full
        rank: eigenvalues up to ``rtol`` times the sample's largest do not count (default: 1e-6, or
        n times the machine epsilon if that is more). No variance at all gives -inf.
        """
        n = self.mean.shape[-1]
        if rtol is None:
            rtol = linalg.default_rtol(n, self.mean.dtype)
        if not 0 <= rtol < 1:
            raise ValueError(f"entropy needs a relative tolerance in [0, 1), got {rtol}.")
        log_determinant, rank = self.cov.log_determinant(rtol)
        entropy = 0.5 * (rank * (1 + math.log(2 * math.pi)) + log_determinant)
        entropy = torch.where(rank > 0, entropy, -math.inf)
        return entropy.expand(self.mean.shape[:-1])

    def sample(
        self, sample_shape: int | Sequence[int] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """(*sample_shape, B, n) draws from N(mean, covariance), singular covariances included."""
        shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        with torch.no_grad():
            white = torch.randn(
                (*shape, *self.mean.shape),
                generator=generator,
                dtype=self.mean.dtype,
                device=self.mean.device,
            )
            return self.mean + self.cov.color(white)

    def distribution(self, *, jitter: float = 0.0) -> MultivariateNormal:
        """The Gaussian with these moments, as a ``torch.distributions`` object.

        A density needs a covariance of full rank. For samples that lack it, ``jitter`` times their
        average variance is added to the diagonal.
        """
        matrix = self.covariance_matrix
        factor, info = torch.linalg.cholesky_ex(matrix)
        if jitter and info.any():
            amount = jitter * self.variance.mean(-1) * (info != 0)
            matrix = matrix + torch.diag_embed(amount[..., None].expand(self.mean.shape))
            factor, info = torch.linalg.cholesky_ex(matrix)
        if info.any():
            singular = info.nonzero().squeeze(-1).tolist()
            raise ValueError(
                f"The covariance is singular for {len(singular)} of {info.numel()} samples (the "
                f"first at index {singular[0]}), so they have no density. Add noise to the "
                "network, pass jitter=1e-4 (which helps where there is some variance), or use "
                "entropy() and sample(), which work all the same."
            )
        return MultivariateNormal(self.mean, scale_tril=factor)

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
