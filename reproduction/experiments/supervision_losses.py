"""Losses that supervise the covariance too (SMSC), of one network and of many small ones at once.

The paper compares its training (SMUC) with variational inference. There, the biases of the hidden
layers are random: their posterior is q = N(b, sigma_l^2 I), sigma_l being the noise of the layer,
which is not trained. With the prior p = N(0, I)

    KL(q || p) = |b|^2 / 2 + a constant that sigma_l decides,

and the constant is left out, as it trains nothing (and is infinite where sigma_l is 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary import activations
from covary.nn import Linear
from covary.settings import supervise_covariance
from covary.training import GaussianLikelihood
from covary.training.objectives import LEAST_VARIANCE
from covary.uncertainty.calibration import VarianceCalibration
from reproduction.experiments.supervision import ELBO, LIKELIHOOD, SUPERVISED, TRACE
from reproduction.experiments.uci_training import Stack

# So many times faster than weights the logarithm of the targets' noise is trained: Adam moves each
# parameter by about the learning rate, and there are a thousand steps for several units of it.
_FASTER = 10.0
_RELU = activations.get("relu")


def expected_square(gap: Tensor, variance: Tensor) -> Tensor:
    """E (o - y)^2 = (m - y)^2 + C_ii for o ~ N(m, C), target by target; Eq. mean_cov_super."""
    return gap.square() + variance


def bias_divergence(bias: Tensor) -> Tensor:
    """() the part of KL(N(b, sigma^2 I) || N(0, I)) that trains biases b: |b|^2 / 2."""
    return bias.square().sum() / 2


def hidden_biases(net: nn.Module) -> list[Tensor]:
    """Those that noise is added to: of every linear layer but the last."""
    linear = [each for each in net.modules() if isinstance(each, Linear)]
    return [cast(Tensor, each.bias) for each in linear[:-1]]


class TraceLoss(nn.Module):
    """(x, y) -> the expected squared error |m - y|^2 + tr C of targets, divided by their number."""

    statistic = "mae"

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and mean absolute error, scalars, of inputs (B, n) and targets (B, t)."""
        with supervise_covariance():
            out = self.net(x)
            gap = out.mean - y
            loss = expected_square(gap, out.variance).mean()
        return loss, gap.detach().abs().mean()


class RegressionBound(nn.Module):
    """(x, y) -> the variational loss of a regression, for each sample; Eq. vi_loss.

    Targets are N(o, s^2) around the network's random output o, and the logarithm of s is trained:
    (|m - y|^2 + tr C) / (2 s^2) + log s + log(2 pi) / 2, and KL over the number of samples. The
    parameter is a tenth of that logarithm.

    Args:
        net: gives Moments of one target.
        samples: how many there are to train on.
    """

    statistic = "mae"

    def __init__(self, net: nn.Module, samples: int) -> None:
        super().__init__()
        self.net, self.samples = net, samples
        self.slow_log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and mean absolute error, scalars, of inputs (B, n) and targets (B, 1)."""
        with supervise_covariance():
            out = self.net(x)
            gap = out.mean - y
            log_noise = _FASTER * self.slow_log_noise
            loss = expected_surprise(gap, out.variance, log_noise).mean()
        divergence = sum(map(bias_divergence, hidden_biases(self.net)), torch.zeros(()))
        return loss + divergence / self.samples, gap.detach().abs().mean()


def expected_surprise(gap: Tensor, variance: Tensor, log_noise: Tensor) -> Tensor:
    """E of -log N(y; o, s^2) for o ~ N(m, C), target by target, given m - y, C_ii and log s."""
    square = expected_square(gap, variance)
    return square / (2 * (2 * log_noise).exp()) + log_noise + 0.5 * math.log(2 * math.pi)


class ClassificationBound(nn.Module):
    """(x, labels) -> the variational loss of a classification, for each sample; Eq. vi_loss.

    The expected cross-entropy of the random output o is taken to second order about its mean,
    -log p_y + (sum_k p_k C_kk - p^T C p) / 2 with p = softmax(m), and KL goes over the number of
    samples.

    Args:
        net: gives Moments of the logits.
        samples: how many there are to train on.
    """

    statistic = "accuracy"

    def __init__(self, net: nn.Module, samples: int) -> None:
        super().__init__()
        self.net, self.samples = net, samples

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy, scalars, of inputs (B, n) and labels (B,)."""
        with supervise_covariance():
            out = self.net(x)
            loss = expected_cross_entropy(out.mean, out.covariance_matrix, y)
        divergence = sum(map(bias_divergence, hidden_biases(self.net)), torch.zeros(()))
        right = out.mean.detach().argmax(-1) == y
        return loss + divergence / self.samples, right.float().mean()


def expected_cross_entropy(mean: Tensor, matrix: Tensor, label: Tensor) -> Tensor:
    """() average over a batch of E of the cross-entropy, to second order, of N(mean, matrix)."""
    p = mean.softmax(-1)
    variance = (p * matrix.diagonal(dim1=-2, dim2=-1)).sum(-1)
    of_average = torch.einsum("bi,bij,bj->b", p, matrix, p)
    return F.cross_entropy(mean, label) + (variance - of_average).mean() / 2


def regression_loss(name: str, net: nn.Module, samples: int) -> nn.Module:
    """The loss of this name of a network with one target: SMSC."""
    if name == TRACE:
        return TraceLoss(net)
    return GaussianLikelihood(net) if name == LIKELIHOOD else RegressionBound(net, samples)


class _ReluResponse(torch.autograd.Function):
    """What ``activations.get("relu").respond`` gives, with derivatives in fewer passes over memory.

    With m, g and e the mean, gain and excess of relu(x) for x ~ N(mu, v), and f the density of x at
    0: m' = g and g' = f by mu, m' = f / 2 and g' = -mu f / (2 v) by v. The variance e + g^2 v has
    2 m (1 - g) by mu and g - m f by v.
    """

    @staticmethod
    def forward(ctx: Any, mu: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, gain, excess = _RELU.respond(mu, var)
        density = (mu.square() / (-2 * var)).exp_().mul_((2 * math.pi * var).rsqrt())
        ctx.save_for_backward(mu, var, mean, gain, density)
        return mean, gain, excess

    @staticmethod
    def backward(
        ctx: Any, to_mean: Tensor, to_gain: Tensor, to_excess: Tensor
    ) -> tuple[Tensor, Tensor]:
        mu, var, mean, gain, density = ctx.saved_tensors
        rest = torch.addcmul(mean, mean, gain, value=-1).addcmul_(gain * density, var, value=-1)
        by_mu = (to_mean * gain).addcmul_(to_gain, density).addcmul_(to_excess, rest, value=2)
        rest = torch.addcmul(gain, gain, gain, value=-1)
        rest = rest.addcmul_(torch.addcmul(mean, mu, gain, value=-1), density, value=-1)
        half = torch.addcdiv(to_mean, to_gain * mu, var, value=-1).mul_(density).div_(2)
        return by_mu, half.addcmul_(to_excess, rest).sum(1, keepdim=True)


class SupervisedStack(Stack):
    """Losses of R networks with one hidden layer and one target that supervise the covariance.

    It trains as ``regression_loss`` of each of them would, with full covariances, which nobody has
    to form: with u_i = w_i g_i, for weights w of the output and gains g, the variance of the output
    is u^T S u + sum_i w_i^2 (C_ii - g_i^2 S_ii), where S = sigma^2 V V^T is the covariance that the
    weights V of the hidden layer make of the noise at the input (docs/theory.md, eq. 7).

    Args:
        nets: made by ``covary.mlp``, alike but for weights and noise.
        activation: of the hidden layer.
        loss: a name in ``SUPERVISED``.
        samples: how many there are to train on.
    """

    def __init__(
        self, nets: Sequence[nn.Module], activation: str, *, loss: str, samples: int
    ) -> None:
        super().__init__(nets, activation)
        if len(self.weights) != 2 or self.weights[1].shape[-1] != 1 or loss not in SUPERVISED:
            raise ValueError("SupervisedStack takes one hidden layer, one target and a SMSC loss.")
        self.loss, self.samples = loss, samples
        if loss == ELBO:
            self.slow_log_noise = nn.Parameter(torch.zeros(len(nets), 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the networks' losses, and mean absolute error; of (B, R, ...)."""
        mean, variance = self.outputs(x.transpose(0, 1))
        gap = mean - y.transpose(0, 1)
        if self.loss == TRACE:
            each = expected_square(gap, variance)
        elif self.loss == LIKELIHOOD:
            # Nothing is clamped: variances are above ``eps`` already.
            each = F.gaussian_nll_loss(
                gap,
                torch.zeros_like(gap),
                variance + LEAST_VARIANCE,
                full=True,
                eps=LEAST_VARIANCE / 2,
                reduction="none",
            )
        else:
            divergence = bias_divergence(self.biases[0]) / self.samples
            each = expected_surprise(gap, variance, _FASTER * self.slow_log_noise)
            return each.mean((1, 2)).sum() + divergence, gap.detach().abs().mean()
        return each.mean((1, 2)).sum(), gap.detach().abs().mean()

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(R, B, 1) means and variances of the outputs for inputs (R, B, d)."""
        noises = cast(Tensor, self.noises)
        weight, readout = self.weights  # (R, d, h) and (R, h, 1)
        entering = noises[0] * weight.square().sum(1, keepdim=True)  # (R, 1, h) of the input
        hidden = torch.baddbmm(self.biases[0], x, weight)
        respond = _ReluResponse.apply if self.moments.name == "relu" else self.moments.respond
        mean, gain, excess = respond(hidden, entering + noises[1])
        back = (gain * readout.mT) @ weight.mT  # (R, B, d)
        own = torch.addcmul(excess, noises[1], gain.square())
        variance = noises[0] * back.square().sum(-1, keepdim=True) + own @ readout.square()
        return torch.baddbmm(self.biases[1], mean, readout), variance

    def unstack(self) -> list[nn.Module]:
        """The networks one by one; behind those of a variational bound, the noise of targets."""
        nets = super().unstack()
        if self.loss != ELBO:
            return nets
        variances = (2 * _FASTER * self.slow_log_noise.detach()).exp().flatten().tolist()
        return [
            nn.Sequential(*net.children(), VarianceCalibration(1.0, variance))
            for net, variance in zip(nets, variances, strict=True)
        ]
