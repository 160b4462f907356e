"""Elementary functions: sin, cos, square, abs, and powers and logarithms.

A power (but for whole exponents >= 0) and the logarithm have no moments under a Gaussian, which
reaches numbers where they are not defined. What is computed are the moments of h(max(x, mu / 16)),
and for the reciprocal of a negative mu of the same, mirrored. Where mu is many standard deviations
from 0 the bound does not matter: for sigma < 0.1 |mu| relative errors are below 1e-9 in float64
and 1e-5 in float32. Where mu is few from 0, results are finite and of the right size, but depend on
the bound. For a mu where h itself is not defined, the result is what torch gives: inf or NaN.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from covary.activations.activation import ActivationMoments, Function, MomentActivation
from covary.activations.hermite import gauss_hermite, quadrature, quadrature_moments
from covary.activations.relu import IDENTITY, leaky_moments

_RULES = gauss_hermite(24)
_LOWEST = 1 / 16  # of what x / mu may be
_LARGEST = 100.0  # of sigma / mu; where it is larger, results are those of this


def _sin_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """docs/theory.md, eq. (21)."""
    return _wave(torch.sin(mu), torch.cos(mu), var)


def _cos_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """docs/theory.md, eq. (21)."""
    return _wave(torch.cos(mu), -torch.sin(mu), var)


def _wave(value: Tensor, slope: Tensor, var: Tensor) -> ActivationMoments:
    damped, lost = torch.exp(-var / 2), -torch.expm1(-var)
    gain = damped * slope
    return ActivationMoments(damped * value, lost * (lost / 2 + gain.square()), gain)


def _square_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    variance = 2 * var * (2 * mu.square() + var)
    return ActivationMoments(mu.square() + var, variance, 2 * mu)


def _abs_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """A leaky ReLU of slope -1, whose gain is odd in mu: erf keeps its digits around 0."""
    found = leaky_moments(mu, var, slope=-1.0)
    return found._replace(gain=torch.erf(mu / (2 * var).sqrt()))


def _square_slope(x: Tensor) -> Tensor:
    return 2 * x


def _minus_sin(x: Tensor) -> Tensor:
    return -torch.sin(x)


def _of_ratio(mu: Tensor, var: Tensor, function: Function, slope: Function) -> ActivationMoments:
    """Moments of a function of x / mu ~ N(1, var / mu^2), by quadrature."""
    # Never 0 and never infinite, so that mu = 0 gives what torch gives, too.
    finfo = torch.finfo(var.dtype)
    ratio = (var.sqrt() / mu.abs()).clamp(max=finfo.max)
    relative = ratio.square().clamp(100 * finfo.tiny, _LARGEST**2)
    ones = torch.ones_like(mu)
    found = quadrature_moments(ones, relative, function=function, derivative=slope, rules=_RULES)
    return found._replace(gain=found.gain * (_LARGEST / ratio).clamp(max=1))


def _power_moments(mu: Tensor, var: Tensor, *, exponent: float) -> ActivationMoments:
    """mu^p times the moments of (x / mu)^p."""
    function = partial(_bounded_power, exponent=exponent)
    derivative = partial(_bounded_power_slope, exponent=exponent)
    found = _of_ratio(mu, var, function, derivative)
    size = mu.pow(exponent)
    return ActivationMoments(
        size * found.mean, size.square() * found.variance, mu.pow(exponent - 1) * found.gain
    )


def _bounded_power(x: Tensor, *, exponent: float) -> Tensor:
    return x.clamp(min=_LOWEST).pow(exponent)


def _bounded_power_slope(x: Tensor, *, exponent: float) -> Tensor:
    return torch.where(x > _LOWEST, exponent * x.clamp(min=_LOWEST).pow(exponent - 1), 0.0)


def _log_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """log(mu) and the moments of log(x / mu)."""
    found = _of_ratio(mu, var, _bounded_log, _bounded_log_slope)
    return ActivationMoments(torch.log(mu) + found.mean, found.variance, found.gain / mu)


def _log1p_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """log(1 + mu) and the moments of log((1 + x) / (1 + mu))."""
    found = _of_ratio(1 + mu, var, _bounded_log, _bounded_log_slope)
    return ActivationMoments(torch.log1p(mu) + found.mean, found.variance, found.gain / (1 + mu))


def _bounded_log(x: Tensor) -> Tensor:
    return x.clamp(min=_LOWEST).log()


def _bounded_log_slope(x: Tensor) -> Tensor:
    return torch.where(x > _LOWEST, 1 / x.clamp(min=_LOWEST), 0.0)


def _log1p_slope(x: Tensor) -> Tensor:
    return 1 / (1 + x)


def _power(x: Tensor, *, exponent: float) -> Tensor:
    return x.pow(exponent)


def _power_slope(x: Tensor, *, exponent: float) -> Tensor:
    return exponent * x.pow(exponent - 1)


def power(exponent: float) -> MomentActivation:
    """x to a constant power, as in ``torch.pow(x, exponent)``.

    Whole exponents from 0 to 100 are polynomials, whose moments are exact. Any other power has no
    moments under a Gaussian: see the top of this module for what is computed, and where it holds.

    Examples:
        >>> import torch
        >>> power(3)(torch.ones(1, 1), torch.ones(1, 1)).mean.round(decimals=3)
        tensor([[4.]])
        >>> power(-1)(torch.full((1, 1), 10.0), torch.ones(1, 1)).mean
        tensor([[0.1010]])
    """
    if not math.isfinite(exponent):
        raise ValueError(f"power needs a finite exponent, got {exponent}.")
    return _power_of(float(exponent))


@lru_cache
def _power_of(exponent: float) -> MomentActivation:
    special = {1.0: IDENTITY, 2.0: SQUARE}
    if exponent in special:
        return special[exponent]
    names = {0.5: "sqrt", -1.0: "reciprocal", -0.5: "rsqrt"}
    name = names.get(exponent, f"power({exponent:g})")
    function = partial(_power, exponent=exponent)
    slope = partial(_power_slope, exponent=exponent)
    if exponent in range(101):
        nodes = max(2, int(exponent) + 1)  # exact for the square, whose degree is 2 p
        return quadrature(function, derivative=slope, nodes=nodes, name=name)
    named = {"sqrt": torch.sqrt, "reciprocal": torch.reciprocal, "rsqrt": torch.rsqrt}
    moments = partial(_power_moments, exponent=exponent)
    return MomentActivation(name, named.get(name, function), slope, moments)


SIN = MomentActivation("sin", torch.sin, torch.cos, _sin_moments)
COS = MomentActivation("cos", torch.cos, _minus_sin, _cos_moments)
SQUARE = MomentActivation("square", torch.square, _square_slope, _square_moments)
ABS = MomentActivation("abs", torch.abs, torch.sign, _abs_moments)
LOG = MomentActivation("log", torch.log, torch.reciprocal, _log_moments)
LOG1P = MomentActivation("log1p", torch.log1p, _log1p_slope, _log1p_moments)
SQRT, RECIPROCAL, RSQRT = power(0.5), power(-1), power(-0.5)
