"""What is minimised: a loss of the mean alone, which is what SMUC says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.moments import Moments


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
    """(x, y) -> mean squared error of the network's mean in units of ``scale``.

    Targets of any size are learnt alike: the error counts in standard deviations of the target.
    """

    statistic = "mae"

    scale: Tensor

    def __init__(self, net: nn.Module, scale: Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.where(scale == 0, 1.0, scale), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and mean absolute error in the target's units, of (B, ...) and (B, t)."""
        out: Moments = self.net(x)
        gap = out.mean - y.to(out.mean.dtype)
        loss = (gap / self.scale.to(gap.dtype)).square().mean()
        return loss, gap.detach().abs().mean()
