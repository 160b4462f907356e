"""Decisions that noise on the input changes, closer than one Gaussian tells.

Moments, and the score ``change_probability`` of them, miss some of the changes, since a network
bends on the way to the boundary of a class (docs/uncertainty-measured.md). Both functions here give
the covariance another scale: ``bent`` for each sample, by one more pass; ``fit`` for all of them,
by draws of held-out inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from covary.covariance import Full
from covary.moments import Moments
from covary.uncertainty.calibration import LogitCalibration
from covary.uncertainty.scores import change_probability, leads

# The largest change of a variance by ``bent``, and of a scale by ``fit``.
_MOST_BENT, _MOST_SCALED = 4.0, 16.0


def bent(net: nn.Module, x: Tensor, noise: float, *, decision: Tensor | None = None) -> Moments:
    """Moments of the logits, with the slope that the network has on the way to a change.

    The lead d of the decision over its nearest rival falls fastest along -u, where u is the
    direction of its gradient. With v = var(d) and r = noise |grad d| / sqrt(v), the likeliest
    change is d r / sqrt(v) standard deviations of the noise away. The lead is taken again half way
    there, t = max(1, d r / sqrt(v)) / 2, and its fall for each of them, a, replaces the slope at x:

        C -> C (1 - r^2 + a^2 / v),    a = (d(x) - d(x - noise t u)) / t

    The factor is kept between 1/4 and 4; where no noise of the input reaches the lead it is 1. It
    costs a backward pass and another forward pass, of means.

    Args:
        net: gives moments of logits for inputs (B, ...), in evaluation mode.
        x: inputs (B, ...) of real numbers.
        noise: standard deviation of the input's noise that is in the network, on the scale of x.
        decision: (B,) the class of each sample, by default that of the largest mean.
    """
    if not x.is_floating_point():
        raise TypeError(f"bent needs inputs of real numbers, got {x.dtype}. Pass x.float().")
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        out = net(at)
        with torch.no_grad():
            ahead, cov, first, rivals = leads(out, decision)
        rival = rivals[..., :1]
        lead = _lead(out.mean, first, rival)
        (slope,) = torch.autograd.grad(lead.sum(), at)
    with torch.no_grad():
        steep = slope.flatten(1).norm(dim=1)
        var = cov[..., 0, 0]
        stddev = torch.where(var > 0, var, 1.0).sqrt()
        share = torch.where(var > 0, noise * steep / stddev, 0.0).clamp(max=1)
        away = (ahead[..., 0] / stddev * share).clamp(min=1, max=40) / 2
        step = (noise * away / torch.where(steep > 0, steep, 1.0)).to(x)
        there = _lead(net(x - step.view(-1, *[1] * (x.dim() - 1)) * slope).mean, first, rival)
        fall = (lead - there) / away
        factor = 1 - share.square() + (fall / stddev).square()
        factor = torch.where(share > 0, factor, 1.0).clamp(1 / _MOST_BENT, _MOST_BENT)
        matrix = out.covariance_matrix
        return Moments(out.mean.detach(), Full(matrix * factor.to(matrix)[:, None, None]))


def _lead(mean: Tensor, first: Tensor, rival: Tensor) -> Tensor:
    """(B,) by how much the mean of one class is above that of another."""
    return (mean.gather(-1, first) - mean.gather(-1, rival))[..., 0].double()


def fit(moments: Moments, changed: Tensor, *, decision: Tensor | None = None) -> LogitCalibration:
    """The scale of the covariance with which decisions change as often as in draws.

    That of the least squared difference between ``change_probability`` and the draws, from 1/16 to
    16. A few hundred inputs, that the network was not trained on, with a hundred draws each tell
    it.

    Args:
        moments: of the logits of n samples.
        changed: (n,) the fraction of draws in which the decision was another.
        decision: (n,) the class of each sample, by default that of the largest mean.
    """
    changed = changed.detach().to(moments.mean.device, torch.float64)
    allowed = (changed >= 0) & (changed <= 1)
    if changed.shape != moments.mean.shape[:1] or not len(changed) or not allowed.all():
        raise ValueError(
            f"changes.fit needs a fraction from 0 to 1 for each of {len(moments)} samples (one or "
            f"more), got shape {tuple(changed.shape)}, {int((~allowed).sum())} of them outside."
        )

    def error(log_scale: float) -> float:
        scaled = LogitCalibration(1.0, math.exp(log_scale))(moments)
        return (change_probability(scaled, decision=decision) - changed).square().mean().item()

    middle, width = 0.0, math.log(_MOST_SCALED)
    while width > 1e-3:
        # The middle comes first: where nothing can be told it stays.
        steps = sorted(range(-8, 9), key=abs)
        middle = min((middle + width * step / 8 for step in steps), key=error)
        width /= 8
    return LogitCalibration(1.0, math.exp(middle))
