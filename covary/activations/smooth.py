"""Smooth activations: tanh, sigmoid, SiLU and others by quadrature; waves, exponentials, powers.

By quadrature, errors of the mean (relative to max(|mean|, sigma)), the variance and the gain
(relative) are below 1e-5 in float32 and 1e-9 in float64 up to sigma = 3, and grow beyond. Where a
function is all but constant (tanh at 8), gains and variances are exact to rounding errors of its
values only.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import (
    ActivationMoments,
    Formula,
    Function,
    MomentActivation,
    get,
    register,
)
from covary.activations.hermite import (
    SHARP,
    SMOOTH,
    Rules,
    between,
    by_rules,
    gauss_hermite,
    quadrature_moments,
)


def _tanh_slope(x: Tensor) -> Tensor:
    # Not 1 - tanh(x)^2, which in float32 has lost every digit by x = 9.
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _mish_slope(x: Tensor) -> Tensor:
    soft = F.softplus(x)
    return torch.tanh(soft) + x * torch.sigmoid(x) * _tanh_slope(soft)


def _gelu_exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """u with gelu_tanh(x) = x sigmoid(u), and x u'."""
    x = x.clamp(-100.0, 100.0)  # beyond, u grows like x^3, far from mattering
    root = math.sqrt(8 / math.pi)
    u = root * (x + 0.044715 * x.pow(3))
    return u, x * (root * (1 + 3 * 0.044715 * x.square()))


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 = sigmoid(2 u) keeps its digits in the negative tail.
    return x * torch.sigmoid(_gelu_exponent(x)[0])


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    u, bend = _gelu_exponent(x)
    return torch.sigmoid(u) * (1 + torch.sigmoid(-u) * bend)


# Functions and slopes, by rules as fine as the function needs.
_BY_QUADRATURE: dict[str, tuple[Function, Function, Rules]] = {
    "tanh": (torch.tanh, _tanh_slope, SHARP),
    "sigmoid": (torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x), SMOOTH),
    "silu": (F.silu, lambda x: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)), SMOOTH),
    "mish": (F.mish, _mish_slope, SMOOTH),
    "logsigmoid": (F.logsigmoid, lambda x: torch.sigmoid(-x), SMOOTH),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope, SMOOTH),
    "tanhshrink": (F.tanhshrink, lambda x: torch.tanh(x).square(), SHARP),
    "softsign": (F.softsign, lambda x: (1 + x.abs()).pow(-2), between([0.0])),
}
for _name, (_function, _slope, _rules) in _BY_QUADRATURE.items():
    register(by_rules(_name, _function, _slope, _rules))


def _softplus_slope(x: Tensor, *, beta: float) -> Tensor:
    return torch.sigmoid(beta * x)


@register
@lru_cache
def softplus(beta: float = 1.0, threshold: float = 20.0) -> MomentActivation:
    """``log(1 + exp(beta x)) / beta``, and x where beta x > threshold, as in ``torch.nn.Softplus``.

    For beta > 1 the errors named above hold up to sigma = 6 / beta.
    """
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"softplus needs a finite beta > 0, got {beta}.")
    standard = (beta, threshold) == (1.0, 20.0)
    return by_rules(
        "softplus" if standard else f"softplus({beta:g}, {threshold:g})",
        partial(F.softplus, beta=beta, threshold=threshold),
        partial(_softplus_slope, beta=beta),
        SMOOTH if beta <= 1 else SHARP,
    )


def _wave(value: Tensor, slope: Tensor, var: Tensor) -> ActivationMoments:
    """A sine or cosine; docs/theory.md, eq. (21)."""
    damped, lost = torch.exp(-var / 2), -torch.expm1(-var)
    gain = damped * slope
    return ActivationMoments(damped * value, lost * (lost / 2 + gain.square()), gain)


def _square_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    variance = 2 * var * (2 * mu.square() + var)
    return ActivationMoments(mu.square() + var, variance, 2 * mu)


def _exp_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """The lognormal distribution; docs/theory.md, eq. (20)."""
    mean = torch.exp(mu + var / 2)
    return ActivationMoments(mean, torch.exp(2 * (mu + var)) * -torch.expm1(-var), mean)


def _expm1_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    return _exp_moments(mu, var)._replace(mean=torch.expm1(mu + var / 2))


# Of powers and logarithms, which have no moments under a Gaussian; see ``power``.
_LOWEST = 1 / 16  # of what x / mu may be
_LARGEST = 100.0  # of sigma / mu; where it is larger, results are those of this
_RULES = gauss_hermite(24)


def _bounded(x: Tensor, *, exponent: float) -> Tensor:
    x = x.clamp(min=_LOWEST)
    return x.pow(exponent) if exponent else x.log()


def _bounded_slope(x: Tensor, *, exponent: float) -> Tensor:
    return torch.where(x > _LOWEST, (exponent or 1.0) * x.clamp(min=_LOWEST).pow(exponent - 1), 0.0)


def _of_ratio(mu: Tensor, var: Tensor, exponent: float) -> ActivationMoments:
    """Moments of (x / mu)^p, by quadrature; for p = 0, of log(x / mu)."""
    # Never 0 and never infinite, so that mu = 0 gives what torch gives, too.
    finfo = torch.finfo(var.dtype)
    ratio = (var.sqrt() / mu.abs()).clamp(max=finfo.max)
    found = quadrature_moments(
        torch.ones_like(mu),
        ratio.square().clamp(100 * finfo.tiny, _LARGEST**2),
        function=partial(_bounded, exponent=exponent),
        derivative=partial(_bounded_slope, exponent=exponent),
        rules=_RULES,
    )
    return found._replace(gain=found.gain * (_LARGEST / ratio).clamp(max=1))


def _power_moments(mu: Tensor, var: Tensor, *, exponent: float) -> ActivationMoments:
    """mu^p times the moments of (x / mu)^p."""
    mean, variance, gain = _of_ratio(mu, var, exponent)
    size = mu.pow(exponent)
    return ActivationMoments(size * mean, size.square() * variance, mu.pow(exponent - 1) * gain)


def _log_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """log(mu) and the moments of log(x / mu)."""
    mean, variance, gain = _of_ratio(mu, var, 0.0)
    return ActivationMoments(torch.log(mu) + mean, variance, gain / mu)


def _log1p_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """log(1 + mu) and the moments of log((1 + x) / (1 + mu))."""
    mean, variance, gain = _of_ratio(1 + mu, var, 0.0)
    return ActivationMoments(torch.log1p(mu) + mean, variance, gain / (1 + mu))


def _power(x: Tensor, *, exponent: float) -> Tensor:
    return x.pow(exponent)


def _power_slope(x: Tensor, *, exponent: float) -> Tensor:
    return exponent * x.pow(exponent - 1)


def _parts_of_power(function: Function, exponent: float) -> tuple[Function, Function, Formula]:
    slope = partial(_power_slope, exponent=exponent)
    return function, slope, partial(_power_moments, exponent=exponent)


def power(exponent: float) -> MomentActivation:
    """x to a constant power, as in ``torch.pow(x, exponent)``.

    Whole exponents from 0 to 100 are polynomials, whose moments are exact. Any other power, as the
    logarithm, has no moments under a Gaussian, which reaches numbers where it is not defined. What
    is computed are those of max(x, mu / 16), mirrored for the reciprocal of a negative mu. For
    sigma < 0.1 |mu| the bound does not matter: relative errors are below 1e-9 in float64 and 1e-5
    in float32. Beyond, results are finite and of the right size, but depend on it. For a mu where
    the function itself is not defined, the result is what torch gives: inf or NaN.

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


_NAMED_POWERS = {1.0: "identity", 2.0: "square", 0.5: "sqrt", -1.0: "reciprocal", -0.5: "rsqrt"}


@lru_cache
def _power_of(exponent: float) -> MomentActivation:
    if exponent in _NAMED_POWERS:
        return get(_NAMED_POWERS[exponent])
    name, function = f"power({exponent:g})", partial(_power, exponent=exponent)
    parts = _parts_of_power(function, exponent)
    if exponent in range(101):  # nodes that are exact for the square, whose degree is 2 p
        return by_rules(name, *parts[:2], gauss_hermite(max(2, int(exponent) + 1)))
    return MomentActivation(name, *parts)


_BY_FORMULA: dict[str, tuple[Function, Function, Formula]] = {
    "sin": (torch.sin, torch.cos, lambda mu, var: _wave(mu.sin(), mu.cos(), var)),
    "cos": (torch.cos, lambda x: -x.sin(), lambda mu, var: _wave(mu.cos(), -mu.sin(), var)),
    "exp": (torch.exp, torch.exp, _exp_moments),
    "expm1": (torch.expm1, torch.exp, _expm1_moments),
    "square": (torch.square, lambda x: 2 * x, _square_moments),
    "log": (torch.log, torch.reciprocal, _log_moments),
    "log1p": (torch.log1p, lambda x: 1 / (1 + x), _log1p_moments),
    "sqrt": _parts_of_power(torch.sqrt, 0.5),
    "reciprocal": _parts_of_power(torch.reciprocal, -1.0),
    "rsqrt": _parts_of_power(torch.rsqrt, -0.5),
}
for _name, _parts in _BY_FORMULA.items():
    register(MomentActivation(_name, *_parts), for_networks=_name in ("sin", "cos"))
