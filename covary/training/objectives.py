"""Objectives of training: losses of the network's mean alone, as SMUC asks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from covary.moments import Moments
from covary.nn.units import before_units


class ClassificationLoss(nn.Module):
    """(x, y) -> cross-entropy of the network's mean, and the fraction it gets right.

    Losses are modules, with the network inside, so that engines which wrap modules (for several
    devices, say) see tensors come out and not Moments.
    """

    statistic = "accuracy"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy, scalars, of inputs (B, ...) and labels (B,)."""
        out: Moments = self.net(x)
        right = out.mean.detach().argmax(-1) == y
        return F.cross_entropy(out.mean, y), right.float().mean()


class RegressionLoss(nn.Module):
    """(x, y) -> mean squared error of the network's mean, on the scale that it computes in.

    Where the last layer is a ``covary.nn.Rescale``, also of nested ``nn.Sequential``s, the error is
    taken before it, against targets standardised alike: so targets of any size and offset are
    learnt alike, and are not rounded to what float32 has left of them. Which layer of another
    module is the last is not known: its error is taken in the target's units.
    """

    statistic = "mae"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and mean absolute error on the target's scale, of (B, ...) and (B, t)."""
        layers, units = before_units(self.net)
        out: Any = x
        for layer in layers:
            out = layer(out)
        if units is not None:
            y = (y - units.shift) / units.scale
        gap = out.mean - y.to(out.mean.dtype)
        error = gap.detach() if units is None else gap.detach() * units.scale
        return gap.square().mean(), error.abs().mean().to(gap.dtype)
