"""Mean, gain and excess of an activation, in few passes over memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation

_RELU = activations.get("relu")
_PER_ROOT = 1 / math.sqrt(4 * math.pi)
# A variance above this has a square root and an inverse that single precision can hold.
_TINY = 1e-30


class Response(NamedTuple):
    """What h(x) is like for x ~ N(mu, var): h = mean + gain (x - mu) + what is left over."""

    mean: Tensor
    gain: Tensor
    excess: Tensor  # variance - gain^2 var: of what is left over; docs/theory.md, eq. (7)


def respond(
    activation: MomentActivation, mu: Tensor, var: Tensor, *, least: float = 0.0
) -> Response:
    """The response for means (B, ...) and variances (1 | B, ...), var >= least >= 0."""
    is_relu = activation is _RELU and not torch.is_grad_enabled()
    if is_relu and (least > _TINY or bool(var.min() > _TINY)):
        return _relu(mu, var)
    out = activation(mu, var)
    excess = (out.variance - out.gain * var * out.gain).clamp(min=0)
    return Response(out.mean, out.gain, excess)


def _relu(mu: Tensor, var: Tensor) -> Response:
    """docs/theory.md, eqs. (11) to (13), to rounding errors relative to sigma, not to the result.

    With y = z / sqrt(2), t = mean / (sqrt(2) sigma): t = y gain + e^{-y^2} / sqrt(4 pi), and
    excess / var = gain (1 - gain) + 2 t (y - t). The moment activation itself keeps relative digits
    of means and variances far below threshold, which no sum over units ever sees.
    """
    per_sigma = torch.mul(var, 2.0).rsqrt_()  # 1 / (sqrt(2) sigma)
    y = mu * per_sigma
    gain = torch.erf(y).mul_(0.5).add_(0.5)
    # Beyond 80 the exponential is a subnormal number, on which processors are slow.
    t = torch.square(y).clamp_(max=80.0).neg_().exp_().mul_(_PER_ROOT).addcmul_(y, gain)
    excess = torch.addcmul(gain, gain, gain, value=-1.0).addcmul_(t, y.sub_(t), value=2.0)
    return Response(t.div_(per_sigma), gain, excess.clamp_(min=0).mul_(var))
