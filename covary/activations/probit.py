"""Activations made of the normal distribution function: probit, erf and GELU.

Mean and gain are closed forms. The variance is a one-dimensional integral of a smooth, positive
function (for the probit it is Owen's T in disguise), so that Gauss-Legendre nodes give it to full
relative accuracy for every mu and var.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import ActivationMoments, MomentActivation
from covary.activations.gaussian import below, tail


def _legendre(count: int) -> list[tuple[float, float]]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return [((1 + float(x)) / 2, float(w) / 2) for x, w in zip(nodes, weights, strict=True)]


# Enough for 1e-6 and 1e-12 everywhere; tests/test_activations.py holds them to 1e-5 and 1e-11.
_SHORT_RULE = _legendre(16)
_LONG_RULE = _legendre(32)


def _integrate(integrand: Callable[[Tensor], Tensor], upper: Tensor) -> Tensor:
    """The integral of an elementwise function from 0 to ``upper``."""
    total = torch.zeros_like(upper)
    for node, weight in _LONG_RULE if upper.dtype == torch.float64 else _SHORT_RULE:
        total = total + weight * integrand(node * upper)
    return total * upper


def _square(mu: Tensor) -> Tensor:
    """mu squared, for exponents, which underflow long before this bound; inf would make NaNs."""
    return mu.clamp(-1e15, 1e15).square()


def probit_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Mean, variance and gain of Phi(x) for x ~ N(mu, var); docs/theory.md, eq. (15)."""
    total = 1 + var
    spread = total.sqrt()
    beyond = tail(mu, spread)
    mean = below(mu, beyond)
    exponent = _square(mu) / total
    # The correlation var / (1 + var) as an angle: arcsin of it loses half its digits near 1.
    angle = torch.atan(var / (1 + 2 * var).sqrt())

    def integrand(theta: Tensor) -> Tensor:
        return torch.exp(-exponent / (1 + torch.sin(theta)))

    variance = _integrate(integrand, angle.expand(mu.shape)) / (2 * math.pi)
    return ActivationMoments(mean, variance, beyond.density / spread)


def erf_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Mean, variance and gain of erf(x) = 2 Phi(sqrt(2) x) - 1."""
    probit = probit_moments(math.sqrt(2) * mu, 2 * var)
    mean = torch.erf(mu / (1 + 2 * var).sqrt())
    return ActivationMoments(mean, 4 * probit.variance, 2 * math.sqrt(2) * probit.gain)


def gelu_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Mean, variance and gain of x Phi(x) for x ~ N(mu, var); docs/theory.md, eqs. (16), (17)."""
    total = 1 + var
    spread = total.sqrt()
    beyond = tail(mu, spread)
    mean = F.relu(mu) + (var * beyond.first - beyond.a * beyond.mass) / spread
    gain_below = beyond.mass - beyond.a * beyond.density / total
    gain = torch.where(mu > 0, 1 - gain_below, gain_below)
    mu_squared = _square(mu)

    def integrand(log_w: Tensor) -> Tensor:
        # Coordinates along and across the diagonal x1 = x2 of two correlated copies of x.
        w_squared = torch.exp(2 * log_w)
        y_squared = 2 * total - w_squared
        across = -torch.expm1(-2 * log_w)
        spread_along = 1 - 1 / y_squared
        exponent = (mu_squared / y_squared).clamp(max=1000)
        centre = 2 * exponent / y_squared
        along = spread_along + centre
        along_fourth = 3 * spread_along.square() + centre * (6 * spread_along + centre)
        product = (
            4 - 2 * (along + across) + (along_fourth - 2 * along * across + 3 * across.square()) / 4
        )
        weight = torch.exp(log_w - exponent) / y_squared.sqrt()
        return weight * torch.expm1(2 * log_w) * product

    excess = _integrate(integrand, 0.5 * torch.log1p(var).expand(mu.shape)) / math.pi
    return ActivationMoments(mean, gain.square() * var + excess, gain)


def _probit(x: Tensor) -> Tensor:
    # erfc, unlike 1 + erf, keeps its digits in the far negative tail.
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)


def _probit_slope(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _erf_slope(x: Tensor) -> Tensor:
    return torch.exp(-x * x) * (2 / math.sqrt(math.pi))


def _gelu(x: Tensor) -> Tensor:
    # Not F.gelu, which in float32 has lost every digit of the negative tail by x = -5.
    return x * _probit(x)


def _gelu_slope(x: Tensor) -> Tensor:
    return _probit(x) + x * _probit_slope(x)


PROBIT = MomentActivation("probit", _probit, _probit_slope, probit_moments)
ERF = MomentActivation("erf", torch.erf, _erf_slope, erf_moments)
GELU = MomentActivation("gelu", _gelu, _gelu_slope, gelu_moments)
