"""Exponential functions: ELU, CELU, SELU, exp and expm1, with closed forms.

The ELUs are computed in float64 whatever the arguments are, where the device has it. Errors of the
mean (relative to max(|mean|, sigma)), the variance and the gain (relative) stay below 1e-9 in
float64 and 1e-6 in float32.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import (
    ActivationMoments,
    Function,
    MomentActivation,
    known_empty,
)
from covary.activations.piecewise import expectations, in_blocks


def _elu_moments(
    mu: Tensor, var: Tensor, *, alpha: float, rate: float, scale: float
) -> ActivationMoments:
    """``scale x`` for x > 0, else ``scale alpha (exp(rate x) - 1)``; docs/theory.md, eq. (19)."""
    return in_blocks(partial(_block, alpha=alpha, rate=rate, scale=scale), mu, var)


def _block(
    mu: Tensor, var: Tensor, *, alpha: float, rate: float, scale: float
) -> ActivationMoments:
    sigma = var.sqrt()
    s = rate * sigma
    # Deviations are from h(mu). Results do not depend on that choice, so neither do gradients.
    left = mu.detach().clamp(max=0)
    centre = mu.detach() - left + alpha * torch.expm1(rate * left)
    found = _whole(mu, sigma, centre, alpha, rate)
    # There terms of the size of 1 cancel down to s^2; here the rest of a series is s^3.
    narrow = s < 1e-3
    if not known_empty(narrow):
        series = _expanded(mu, sigma, centre, alpha, rate)
        found = tuple(torch.where(narrow, a, b) for a, b in zip(series, found, strict=True))
    first, second, gain = found
    variance = (second - first.square()).clamp(min=0)
    return ActivationMoments(scale * (centre + first), scale**2 * variance, scale * gain)


Triple = tuple[Tensor, ...]  # E[d], E[d^2] and E[h'] of the deviation d = h(x) - centre


def _whole(mu: Tensor, sigma: Tensor, centre: Tensor, alpha: float, rate: float) -> Triple:
    z = (mu / sigma).clamp(-50.0, 50.0)
    density = torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))
    below, above = (0.5 * torch.erfc(sign * math.sqrt(0.5) * z) for sign in (1, -1))
    # E[exp(j rate x); x < 0] for j = 1, 2
    once, twice = (_tilted(z, density, rate * mu, rate * sigma, j) for j in (1, 2))
    level = 1 + centre / alpha
    right = mu - centre
    first = alpha * (once - level * below) + right * above + sigma * density
    second = (
        alpha**2 * (twice - 2 * level * once + level.square() * below)
        + right.square() * above
        + sigma * (2 * right * density + sigma * (above - z * density))
    )
    return first, second, alpha * rate * once + above


def _tilted(z: Tensor, density: Tensor, m: Tensor, s: Tensor, j: int) -> Tensor:
    """E[exp(j (m + s y)); m + s y < 0], y ~ N(0, 1), as density(z) times a Mills ratio at z + j s.

    Where z + j s <= 0 it is the whole expectation less what lies beyond 0, which is of that form.
    """
    a = z + j * s
    # |a| has its derivative at 0 from the left, as 0 is among those that are not positive.
    mills: Tensor = torch.special.erfcx(math.sqrt(0.5) * F.leaky_relu(a, -1.0))
    positive = (a > 0).to(a.dtype)
    whole = torch.exp((j * m + (0.5 * j * j) * s.square()).clamp(max=0))
    beyond = math.sqrt(math.pi / 2) * density * mills
    return (1 - positive) * whole + (2 * positive - 1) * beyond


def _expanded(mu: Tensor, sigma: Tensor, centre: Tensor, alpha: float, rate: float) -> Triple:
    """The same with exp(rate x) as a cubic around mu."""
    z = (mu / sigma).clamp(-50.0, 50.0)
    s = rate * sigma
    m = (rate * mu).clamp(max=1.0)  # beyond, this piece has no probability where s is small
    e = alpha * torch.exp(m)
    left = [alpha * torch.expm1(m) - centre, e * s, e * s.square() / 2, e * s.pow(3) / 6]
    first, second, slope = expectations([-z], [left, [mu - centre, sigma]])
    return first, second, slope / sigma


def _elu_slope(x: Tensor, *, alpha: float, rate: float, scale: float) -> Tensor:
    slope = alpha * rate * torch.exp(rate * x.clamp(max=0))
    return scale * torch.where(x > 0, 1.0, slope)


def _elu(
    name: str, function: Function, *, alpha: float, rate: float = 1.0, scale: float = 1.0
) -> MomentActivation:
    return MomentActivation(
        name,
        function,
        partial(_elu_slope, alpha=alpha, rate=rate, scale=scale),
        partial(_elu_moments, alpha=alpha, rate=rate, scale=scale),
    )


def _positive(alpha: float, name: str) -> float:
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"{name} needs a finite alpha > 0, got {alpha}.")
    return alpha


@lru_cache
def elu(alpha: float = 1.0) -> MomentActivation:
    """x for x > 0, else ``alpha (exp(x) - 1)``, as in ``torch.nn.ELU``."""
    name = "elu" if alpha == 1 else f"elu({alpha:g})"
    return _elu(name, partial(F.elu, alpha=_positive(alpha, "elu")), alpha=alpha)


@lru_cache
def celu(alpha: float = 1.0) -> MomentActivation:
    """x for x > 0, else ``alpha (exp(x / alpha) - 1)``, as in ``torch.nn.CELU``."""
    name = "celu" if alpha == 1 else f"celu({alpha:g})"
    return _elu(name, partial(F.celu, alpha=_positive(alpha, "celu")), alpha=alpha, rate=1 / alpha)


def _exp_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """The lognormal distribution; docs/theory.md, eq. (20)."""
    mean = torch.exp(mu + var / 2)
    return ActivationMoments(mean, torch.exp(2 * (mu + var)) * -torch.expm1(-var), mean)


def _expm1_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    exponential = _exp_moments(mu, var)
    return exponential._replace(mean=torch.expm1(mu + var / 2))


SELU = _elu("selu", F.selu, alpha=1.6732632423543772848, scale=1.0507009873554804934)
EXP = MomentActivation("exp", torch.exp, torch.exp, _exp_moments)
EXPM1 = MomentActivation("expm1", torch.expm1, torch.exp, _expm1_moments)
