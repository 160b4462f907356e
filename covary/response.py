"""Mean, gain and excess of an activation, in few passes over memory."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.activations.piecewise import bounds_of, in_blocks

_RELU = activations.get("relu")
_SQRT_HALF, _PER_ROOT = math.sqrt(0.5), 1 / math.sqrt(4 * math.pi)


class Response(NamedTuple):
    """What h(x) is like for x ~ N(mu, var): h = mean + gain (x - mu) + what is left over."""

    mean: Tensor
    gain: Tensor
    excess: Tensor  # variance - gain^2 var: of what is left over; docs/theory.md, eq. (7)


def respond(activation: MomentActivation, mu: Tensor, var: Tensor) -> Response:
    """The response for means (B, ...) and variances (1 | B, ...), var >= 0."""
    bounds = bounds_of(activation)
    is_simple = activation is _RELU or bounds is not None
    if is_simple and not torch.is_grad_enabled() and bool(var.min() > 1e-30):
        if bounds is None:
            return _relu(mu, var)
        found = in_blocks(partial(_clamp, low=bounds[0], high=bounds[1]), mu, var, dtype=mu.dtype)
        return Response(*found)
    out = activation(mu, var)
    excess = (out.variance - out.gain * var * out.gain).clamp(min=0)
    return Response(out.mean, out.gain, excess)


def _relu(mu: Tensor, var: Tensor) -> Response:
    """docs/theory.md, eqs. (11) to (13), to rounding errors relative to sigma, not to the result.

    With y = z / sqrt(2), t = mean / (sqrt(2) sigma): t = y gain + e^{-y^2} / sqrt(4 pi), and
    excess / var = gain (1 - gain) + 2 t (y - t). The moment activation itself keeps relative digits
    of means and variances far below threshold, which no sum over units ever sees.
    """
    sigma = var.sqrt()
    y = mu * (_SQRT_HALF / sigma)
    gain = torch.erf(y).mul_(0.5).add_(0.5)
    # Beyond 80 the exponential is a subnormal number, on which processors are slow.
    t = torch.square(y).clamp_(max=80.0).neg_().exp_().mul_(_PER_ROOT).addcmul_(y, gain)
    excess = torch.addcmul(gain, gain, gain, value=-1.0).addcmul_(t, y.sub_(t), value=2.0)
    return Response(t.mul_(sigma / _SQRT_HALF), gain, excess.clamp_(min=0).mul_(var))


def _clamp(mu: Tensor, var: Tensor, *, low: float, high: float) -> Response:
    """Of x between two bounds, to rounding errors relative to sigma and mu.

    It is x + u - w with u = (low - x)+ and w = (x - high)+, of which at most one is not 0, so that
    Cov(u, w) = -E[u] E[w]: excess = excess of u + excess of w + 2 (E[u] E[w] - var P(u) P(w)),
    where P(u) is the probability that u > 0, and minus its gain. Those of u and w are as in
    ``_relu``.
    """
    sigma = var.sqrt()
    scale = _SQRT_HALF / sigma
    below, above = (low - mu) * scale, (mu - high) * scale
    p_below, p_above = (torch.erf(y).mul_(0.5).add_(0.5) for y in (below, above))
    u, w = (
        torch.square(y).clamp_(max=80.0).neg_().exp_().mul_(_PER_ROOT).addcmul_(y, p)
        for y, p in ((below, p_below), (above, p_above))
    )
    outside = p_below + p_above
    # p (1 - p) of both and -2 p p' are outside (1 - outside); 2 t (y - t) of both and 4 t t'.
    excess = torch.addcmul(outside, outside, outside, value=-1.0)
    excess.addcmul_(u, below.sub_(u), value=2.0).addcmul_(w, above.sub_(w), value=2.0)
    excess.addcmul_(u, w, value=4.0).clamp_(min=0).mul_(var)
    mean = torch.addcmul(mu, u.sub_(w), sigma, value=1 / _SQRT_HALF)
    return Response(mean, outside.neg_().add_(1.0), excess)
