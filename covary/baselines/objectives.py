"""What the networks to compare with minimise."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from covary.moments import Moments
from covary.nn.units import before_units
from covary.settings import supervise_covariance

# Of standardised targets: a variance that is 0 has no likelihood.
LEAST_VARIANCE = 1e-6


class CrossEntropy(nn.Module):
    """(x, y) -> cross-entropy of a network's logits, and the fraction it gets right."""

    statistic = "accuracy"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy, scalars, of inputs (B, ...) and labels (B,)."""
        logits: Tensor = self.net(x)
        right = logits.detach().argmax(-1) == y
        return F.cross_entropy(logits, y), right.float().mean()


class SquaredError(nn.Module):
    """(x, y) -> mean squared error of standardised targets, as ``covary.training`` has it."""

    statistic = "mae"

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and mean absolute error in the target's units, of (B, ...) and (B, t)."""
        out, y, scale = _standardised(self.net, x, y)
        gap = out - y.to(out.dtype)
        return gap.square().mean(), (gap.detach() * scale).abs().mean().to(gap.dtype)


class GaussianLikelihood(nn.Module):
    """(x, y) -> negative log-likelihood of standardised targets, by means and variances.

    For networks that give ``Moments``. Gradients flow through the covariance too: in a moment
    neural network this is SMSC, supervised mean and supervised covariance.
    """

    statistic = "mae"

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss in nats per target, and mean absolute error in the target's units."""
        with supervise_covariance():
            moments: Moments
            moments, y, scale = _standardised(self.net, x, y)
            variance = moments.variance.clamp(min=LEAST_VARIANCE)
        gap = moments.mean - y.to(moments.mean.dtype)
        loss = 0.5 * (gap.square() / variance + (2 * math.pi * variance).log())
        return loss.mean(), (gap.detach() * scale).abs().mean().to(gap.dtype)


def _standardised(net: nn.Sequential, x: Tensor, y: Tensor) -> tuple[Any, Tensor, Tensor | float]:
    """What a network gives before its outputs get their units, targets alike, and the units."""
    layers, units = before_units(net)
    out: Any = x
    for layer in layers:
        out = layer(out)
    if units is None:
        return out, y, 1.0
    return out, (y - units.shift) / units.scale, units.scale
