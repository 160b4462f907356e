"""How well approximate moments agree with exact ones; moments of several batches as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covary.covariance import Full
from covary.moments import Moments
from covary.uncertainty.metrics import rank_correlation


class Agreement(NamedTuple):
    """How well approximate moments agree with exact ones, over N samples.

    Errors are relative: the norm of the difference over that of what is exact, sample by sample,
    and then averaged.
    """

    mean: float
    variance: float
    covariance: float
    rank: float  # Spearman's correlation of the entropies; NaN where they are all the same
    argmax: float  # the fraction of samples whose largest mean is that of another unit


def agreement(exact: Moments, other: Moments) -> Agreement:
    """Compare moments of the same N samples."""
    entropies = [moments.entropy().detach().cpu().numpy() for moments in (exact, other)]
    differs = exact.flat_mean.argmax(-1) != other.flat_mean.argmax(-1)
    return Agreement(
        mean=_relative(other.mean, exact.mean),
        variance=_relative(other.variance, exact.variance),
        covariance=_relative(other.covariance_matrix, exact.covariance_matrix),
        rank=rank_correlation(*entropies),
        argmax=differs.double().mean().item(),
    )


def gathered(batches: Sequence[Moments]) -> Moments:
    """The moments of several batches as those of one, with each sample's covariance formed."""
    means = torch.cat([moments.mean for moments in batches])
    return Moments(means, Full(torch.cat([moments.covariance_matrix for moments in batches])))


def _relative(value: Tensor, exact: Tensor) -> float:
    difference = (value - exact).detach().double().flatten(1).norm(dim=1)
    size = exact.detach().double().flatten(1).norm(dim=1)
    # Nothing where nothing should be is no error.
    return torch.where(difference > 0, difference / size, 0.0).mean().item()
