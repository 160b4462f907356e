"""Piecewise linear activations: identity, ReLU and leaky ReLU."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import ActivationMoments, LinearResponse, MomentActivation
from covary.activations.gaussian import below, tail

_LOG_PER_ROOT = -0.5 * math.log(4 * math.pi)


def moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Mean, variance and gain of relu(x) for x ~ N(mu, var); docs/theory.md, eqs. (11) to (13).

    Exact, without the cancellation of ``E[h^2] - E[h]^2``: the variance is the linear part plus an
    excess that is even in mu.
    """
    return leaky_moments(mu, var, slope=0.0)


def leaky_moments(mu: Tensor, var: Tensor, *, slope: float | Tensor) -> ActivationMoments:
    """The same for ``h(x) = slope x + (1 - slope) relu(x)``; docs/theory.md, eq. (14)."""
    sigma = var.sqrt()
    beyond = tail(mu, sigma)
    mean = torch.addcmul(F.relu(mu), sigma, beyond.first)
    gain = below(mu, beyond)
    excess = torch.addcmul(beyond.second, beyond.mass, beyond.mass, value=-1)
    excess = torch.addcmul(excess, beyond.first, beyond.first, value=-1)
    if isinstance(slope, Tensor) or slope != 0.0:
        mean = slope * mu + (1 - slope) * mean
        gain = slope + (1 - slope) * gain
        excess = (1 - slope) ** 2 * excess
    return ActivationMoments(mean, var * torch.addcmul(excess, gain, gain), gain)


def _response(mu: Tensor, var: Tensor) -> LinearResponse:
    """Mean, gain and excess of relu(x); docs/theory.md, eqs. (11) to (13).

    With y = z / sqrt(2) and t = mean / (sqrt(2) sigma): t = y gain + e^{-y^2} / sqrt(4 pi), and
    excess / var = gain (1 - gain) + 2 t (y - t).
    """
    doubled = 2.0 * var
    per = doubled.rsqrt()
    y = mu * per
    gain = torch.erf(y).mul_(0.5).add_(0.5)
    exponent = torch.addcmul(y.new_full((), _LOG_PER_ROOT), y, y, value=-1.0)
    # Below -80 the exponential is a subnormal number, on which processors are slow.
    t = exponent.clamp_(min=-80.0).exp_().addcmul_(y, gain)
    excess = torch.addcmul(gain, gain, gain, value=-1.0).addcmul_(t, y.sub_(t), value=2.0)
    return LinearResponse(t.mul_(doubled.mul_(per)), gain, excess.clamp_(min=0).mul_(var))


def _leaky(x: Tensor, *, slope: float | Tensor) -> Tensor:
    if isinstance(slope, Tensor):
        return torch.where(x > 0, x, slope * x)
    return F.leaky_relu(x, slope)


def _leaky_slope(x: Tensor, *, slope: float | Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, torch.ones_like(x) * slope)


def _relu_slope(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _identity(x: Tensor) -> Tensor:
    return x


def _identity_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    return ActivationMoments(mu, var.expand(mu.shape), torch.ones_like(mu))


IDENTITY = MomentActivation("identity", _identity, torch.ones_like, _identity_moments)
RELU = MomentActivation("relu", F.relu, _relu_slope, moments, response=_response)


def leaky_relu(slope: float | Tensor = 0.01) -> MomentActivation:
    """The leaky ReLU with the given slope for x < 0, as in ``torch.nn.LeakyReLU``.

    A tensor is broadcast against the means, as ``torch.nn.PReLU`` needs it: ``(C, 1, 1)`` for a
    slope per channel of ``(B, C, H, W)``. It is taken as it is, so keep it on the network's device.
    It gets gradients with ``supervise_covariance`` alone.
    """
    if isinstance(slope, Tensor):
        return _leaky_relu(slope, f"leaky_relu(slopes {tuple(slope.shape)})")
    if not math.isfinite(slope):
        raise ValueError(f"leaky_relu needs a finite slope, got {slope}.")
    return _cached_leaky_relu(float(slope))


@lru_cache
def _cached_leaky_relu(slope: float) -> MomentActivation:
    return _leaky_relu(slope, f"leaky_relu({slope:g})")


def _leaky_relu(slope: float | Tensor, name: str) -> MomentActivation:
    return MomentActivation(
        name,
        partial(_leaky, slope=slope),
        partial(_leaky_slope, slope=slope),
        partial(leaky_moments, slope=slope),
    )
