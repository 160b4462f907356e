"""Losses of networks, conventional ones and those of Moments: (x, y) -> loss and one statistic.

They are modules around the network, so that engines which wrap modules see tensors come out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.covariance import Full
from covary.moments import Moments, mean_of
from covary.nn.scales import before_rescale, check_rescale, rescale_of
from covary.settings import supervise_covariance

# Added to variances of standardised targets: one of 0 has no likelihood. Covariances of several
# targets get this part of each variance too, which is more than what rounding makes of them.
LEAST_VARIANCE, _ROUND_OFF = 1e-6, 1e-5
# What a regression may be trained on: squared error of the mean (SMUC), or the likelihood (SMSC).
LOSSES = ("mean", "likelihood")


def measured(x: Tensor, std: Tensor | None) -> Tensor | Moments:
    """Inputs (B, ...) with errors of these standard deviations, if they have any.

    As ``Moments.of``, but nothing is checked, so that it runs under vmap.
    """
    return x if std is None else Moments(x, Full(None, std.square().flatten(1)))


class ClassificationLoss(nn.Module):
    """(x, y) -> cross-entropy of the network's mean or logits, and the fraction it gets right.

    Of a network that gives ``Moments`` the mean alone is trained: SMUC.
    """

    statistic = "accuracy"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor, std: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss and accuracy, scalars, of inputs (B, ...), labels (B,) and errors of the inputs."""
        mean = mean_of(self.net(measured(x, std)))
        right = mean.detach().argmax(-1) == y
        return F.cross_entropy(mean, y), right.float().mean()


class _StandardisedLoss(nn.Module):
    """What losses of regression share: targets, and outputs of a network before its ``Rescale``."""

    statistic = "mae"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        check_rescale(net, type(self).__name__)
        self.net = net

    def standardised(self, x: Tensor | Moments, y: Tensor) -> tuple[Any, Tensor, Tensor | float]:
        """What the network gives before its outputs are rescaled, targets alike, and the scale."""
        layers, rescale = before_rescale(self.net)
        out: Any = x
        for layer in layers:
            out = layer(out)
        if rescale is None:
            rescale = rescale_of(self.net)
            if rescale is None:
                return out, y, 1.0
            out = rescale.undone(out)
        return out, (y - rescale.shift) / rescale.scale, rescale.scale


class RegressionLoss(_StandardisedLoss):
    """(x, y) -> mean squared error of the network's mean, on the scale that it computes in.

    Where the last layer is a ``covary.nn.Rescale``, also of nested ``nn.Sequential``s, the error is
    taken before it, against targets standardised alike: so targets of any size and offset are
    learnt alike, and are not rounded to what float32 has left of them. Of a compiled network the
    rescaling is undone instead; with a ``Rescale`` in float64 that rounds nothing either. A
    ``Rescale`` within a module of another class is an error: whether it is the last layer is not
    known. Of a network without any, the error is that of its outputs as they are.
    """

    def forward(self, x: Tensor, y: Tensor, std: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss, and mean absolute error on the target's scale, of (B, ...) and (B, t).

        ``std`` are errors of the inputs, of their shape.
        """
        out, y, scale = self.standardised(measured(x, std), y)
        mean = mean_of(out)
        gap = mean - y.to(mean.dtype)
        return gap.square().mean(), _mean_absolute(gap, scale)


class GaussianLikelihood(_StandardisedLoss):
    """(x, y) -> negative log-likelihood of standardised targets, by their means and covariance.

    For networks that give ``Moments``. Gradients flow through the covariance too: in a moment
    neural network this is SMSC, supervised mean and supervised covariance. Several targets have the
    joint density of their Gaussian. The scale is that of ``RegressionLoss``.
    """

    def forward(self, x: Tensor, y: Tensor, std: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss in nats per target, and mean absolute error on the target's scale."""
        with supervise_covariance():
            moments, y, scale = self.standardised(measured(x, std), y)
            gap = moments.mean - y.to(moments.mean.dtype)
            if gap.shape[-1] == 1 or moments.cov.is_diagonal:
                loss = _of_variances(gap, moments.variance)
            else:
                loss = _of_covariances(gap, moments.covariance_matrix)
        return loss.mean(), _mean_absolute(gap, scale)


def _of_variances(gap: Tensor, variance: Tensor) -> Tensor:
    """(B, t) negative log densities of errors and variances of that shape."""
    variance = variance + LEAST_VARIANCE
    return 0.5 * (gap.square() / variance + (2 * math.pi * variance).log())


def _of_covariances(gap: Tensor, matrix: Tensor) -> Tensor:
    """(B,) negative log densities of errors (B, t), of covariances (B, t, t), over t.

    NaN where rounding has made a covariance indefinite.
    """
    variance = matrix.diagonal(dim1=-2, dim2=-1)
    matrix = matrix + torch.diag_embed(LEAST_VARIANCE + _ROUND_OFF * variance)
    factor, info = torch.linalg.cholesky_ex(matrix)
    white = torch.linalg.solve_triangular(factor, gap.unsqueeze(-1), upper=False).squeeze(-1)
    logs = factor.diagonal(dim1=-2, dim2=-1).log()
    loss = (0.5 * white.square() + logs).mean(-1) + 0.5 * math.log(2 * math.pi)
    return torch.where(info == 0, loss, math.nan)


def _mean_absolute(gap: Tensor, scale: Tensor | float) -> Tensor:
    return (gap.detach() * scale).abs().mean().to(gap.dtype)
