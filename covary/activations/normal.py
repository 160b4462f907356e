"""Activations whose moments are tail integrals of the normal distribution: step, ReLU, GELU, ...

They are built from the density at ``a = |mu| / sigma`` and the first three iterated tail integrals
there (docs/theory.md, eq. 8),

    mass   = P(x > a),    first = E[(x - a)+],    second = E[(x - a)+^2],

each of which keeps its *relative* accuracy as far out as it can be represented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary.activations.activation import (
    ActivationMoments,
    Formula,
    Function,
    LinearResponse,
    MomentActivation,
    register,
)
from covary.activations.hermite import by_nodes, legendre
from covary.tracing import is_traced

# Beyond this many standard deviations the density underflows, and with it everything below.
_FAR = {torch.float32: 16.0, torch.float64: 40.0}

# second / first on [0, 16] as a ratio of polynomials in a (highest power first), of relative error
# 1.3e-8: twice the fit of `benchmarks/fit_tail_ratio.py`. All coefficients are positive, so nothing
# cancels.
_NUMERATOR = (
    2 * 0.0013835503711101692,
    2 * 0.017133563395674737,
    2 * 0.10308939424624684,
    2 * 0.346986745915682,
    2 * 0.6266570766653896,
)
_DENOMINATOR = (
    0.001383473685191438,
    0.017138483872372195,
    0.10710280045320783,
    0.40060232286550956,
    0.8961663419744925,
    1.0,
)
with torch.inference_mode(False):  # tensors of inference mode would be such for ever
    _RATIO = [torch.tensor(some).unbind() for some in (_NUMERATOR, _DENOMINATOR)]


class Tail(NamedTuple):
    """Density and iterated tail integrals of N(0, 1) at ``a = |mu| / sigma``, of mu's shape."""

    a: Tensor
    density: Tensor
    mass: Tensor
    first: Tensor
    second: Tensor


def tail(mu: Tensor, sigma: Tensor) -> Tail:
    """Density and tail integrals of N(0, 1) beyond a = |mu| / sigma; docs/theory.md, eqs. (8), (9).

    What is made of them is smooth, also at mu = 0, though |mu| is not: there, its derivative is
    taken from the left, as in ``F.relu`` and ``_positive``. (That of ``abs`` is 0, neither side's.)
    """
    a = (F.leaky_relu(mu, -1.0) / sigma).clamp(max=_FAR.get(mu.dtype, 16.0))
    density = torch.exp(_plus_product(-0.5 * math.log(2 * math.pi), a, a, factor=-0.5))
    # The integrals divided by the density vary slowly: g0, g1 and g2 = second / 2 are R_0, R_1 and
    # R_2 of the theory, and obey 1 = g1 + a g0 and g0 = 2 g2 + a g1.
    if mu.dtype == torch.float64:
        g0 = math.sqrt(math.pi / 2) * torch.special.erfcx(a * math.sqrt(0.5))
        g1 = 1 - a * g0
        twice_g2 = g0 - a * g1
        return Tail(a, density, density * g0, density * g1, density * twice_g2)
    # The differences above lose a^4 / 2 times the rounding error: nothing in float64, all of
    # float32. Starting from the ratio g2 / g1 the same relations only add and multiply.
    above, under = (_horner(coefficients, a) for coefficients in _RATIO)
    twice_ratio = above / under
    slope = a + twice_ratio
    first = density / _plus_product(1.0, a, slope)
    return Tail(a, density, first * slope, first, first * twice_ratio)


def _horner(coefficients: Sequence[Tensor], a: Tensor) -> Tensor:
    """The polynomial with these coefficients, highest power first, at ``a``."""
    special = is_traced() or is_functorch_wrapped_tensor(a)
    in_place = not torch.is_grad_enabled() and not special
    highest, second, *rest = coefficients if a.is_cpu else [c.to(a.device) for c in coefficients]
    value = torch.addcmul(second, highest, a)  # one pass over memory
    for coefficient in rest:
        value = torch.addcmul(coefficient, value, a, out=value if in_place else None)
    return value


def _plus_product(constant: float, x: Tensor, y: Tensor, *, factor: float = 1.0) -> Tensor:
    """``constant + factor * x * y`` in one pass over memory, which is what these formulas cost."""
    return torch.addcmul(x.new_full((), constant), x, y, value=factor)


def _positive(mu: Tensor, beyond: Tail) -> Tensor:
    """P(x > 0) for x ~ N(mu, var), from the tail beyond |mu| and the sign of mu."""
    # |1 - mass| or |0 - mass|. A torch.where on signs that come at random is far slower: no
    # processor guesses them; and so is a comparison, whose result has to be converted.
    return (mu.detach().sign().relu() - beyond.mass).abs()


def _heaviside_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """docs/theory.md, eq. (10)."""
    sigma = var.sqrt()
    beyond = tail(mu, sigma)
    variance = beyond.mass * (1 - beyond.mass)
    return ActivationMoments(_positive(mu, beyond), variance, beyond.density / sigma)


def _leaky_moments(mu: Tensor, var: Tensor, *, slope: float | Tensor = 0.0) -> ActivationMoments:
    """Moments of ``h(x) = slope x + (1 - slope) relu(x)``; docs/theory.md, eqs. (11) to (14).

    Exact, without the cancellation of ``E[h^2] - E[h]^2``: the variance is the linear part plus an
    excess that is even in mu.
    """
    sigma = var.sqrt()
    beyond = tail(mu, sigma)
    mean = torch.addcmul(F.relu(mu), sigma, beyond.first)
    gain = _positive(mu, beyond)
    excess = torch.addcmul(beyond.second, beyond.mass, beyond.mass, value=-1)
    excess = torch.addcmul(excess, beyond.first, beyond.first, value=-1)
    if isinstance(slope, Tensor) or slope != 0.0:
        mean = slope * mu + (1 - slope) * mean
        gain = slope + (1 - slope) * gain
        excess = (1 - slope) ** 2 * excess
    return ActivationMoments(mean, var * torch.addcmul(excess, gain, gain), gain)


def rectified(y: Tensor) -> tuple[Tensor, Tensor]:
    """P(x > 0) and E[x+] / sqrt(2) of x ~ N(sqrt(2) y, 1), with absolute errors far below 1."""
    positive = torch.erf(y).mul_(0.5).add_(0.5)
    exponent = _plus_product(-0.5 * math.log(4 * math.pi), y, y, factor=-1.0)
    # Below -80 the exponential is a subnormal number, on which processors are slow.
    return positive, exponent.clamp_(min=-80.0).exp_().addcmul_(y, positive)


def _relu_response(mu: Tensor, var: Tensor) -> LinearResponse:
    """With y = mu / (sqrt(2) sigma) and t = mean / (sqrt(2) sigma), in place of eqs. (11) to (13):

    excess / var = gain (1 - gain) + 2 t (y - t).
    """
    doubled = 2.0 * var
    per = doubled.rsqrt()
    y = mu * per
    gain, t = rectified(y)
    excess = torch.addcmul(gain, gain, gain, value=-1.0).addcmul_(t, y.sub_(t), value=2.0)
    return LinearResponse(t.mul_(doubled.mul_(per)), gain, excess.clamp_(min=0).mul_(var))


def _leaky(x: Tensor, *, slope: float | Tensor) -> Tensor:
    return F.leaky_relu(x, slope) if isinstance(slope, float) else torch.where(x > 0, x, slope * x)


def _leaky_slope(x: Tensor, *, slope: float | Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, torch.ones_like(x) * slope)


@register
def leaky_relu(slope: float | Tensor = 0.01) -> MomentActivation:
    """The leaky ReLU with the given slope for x < 0, as in ``torch.nn.LeakyReLU``.

    A tensor is broadcast against the means, as ``torch.nn.PReLU`` needs it: ``(C, 1, 1)`` for a
    slope per channel of ``(B, C, H, W)``. It is taken as it is, so keep it on the network's device.
    It gets gradients with ``supervise_covariance`` alone.
    """
    if isinstance(slope, Tensor):
        return _leaky_relu.__wrapped__(slope, f"slopes {tuple(slope.shape)}")
    if not math.isfinite(slope):
        raise ValueError(f"leaky_relu needs a finite slope, got {slope}.")
    return _leaky_relu(float(slope), f"{slope:g}")


@lru_cache
def _leaky_relu(slope: float | Tensor, shown: str) -> MomentActivation:
    function, derivative = partial(_leaky, slope=slope), partial(_leaky_slope, slope=slope)
    moments = partial(_leaky_moments, slope=slope)
    return MomentActivation(f"leaky_relu({shown})", function, derivative, moments)


def _abs_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """A leaky ReLU of slope -1, whose gain is odd in mu: erf keeps its digits around 0."""
    found = _leaky_moments(mu, var, slope=-1.0)
    return found._replace(gain=torch.erf(mu / (2 * var).sqrt()))


def _identity_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    return ActivationMoments(mu, var.expand(mu.shape), torch.ones_like(mu))


# Enough for 1e-6 and 1e-12 everywhere; tests/test_activations.py holds them to 1e-5 and 1e-11.
_SHORT_RULE, _LONG_RULE = legendre(16), legendre(32)


def _integrate(integrand: Callable[[Tensor], Tensor], upper: Tensor) -> Tensor:
    """The integral from 0 to ``upper`` of an elementwise function that is smooth and positive."""
    rule = upper.new_tensor(_LONG_RULE if upper.dtype == torch.float64 else _SHORT_RULE)
    nodes, weights = rule.reshape(2, -1, *[1] * upper.dim())
    average: Tensor = (weights * integrand(nodes * upper)).sum(0)
    return average * upper


def _square(mu: Tensor) -> Tensor:
    """mu squared, for exponents, which underflow long before this bound; inf would make NaNs."""
    return mu.clamp(-1e15, 1e15).square()


@by_nodes
def _probit_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Moments of Phi(x); docs/theory.md, eq. (15). The variance is an integral, Owen's T."""
    total = 1 + var
    spread = total.sqrt()
    beyond = tail(mu, spread)
    exponent = _square(mu) / total
    # The correlation var / (1 + var) as an angle: arcsin of it loses half its digits near 1.
    angle = torch.atan(var / (1 + 2 * var).sqrt())

    def integrand(theta: Tensor) -> Tensor:
        return torch.exp(-exponent / (1 + torch.sin(theta)))

    variance = _integrate(integrand, angle.expand(mu.shape)) / (2 * math.pi)
    return ActivationMoments(_positive(mu, beyond), variance, beyond.density / spread)


def _erf_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Moments of erf(x) = 2 Phi(sqrt(2) x) - 1."""
    probit = _probit_moments(math.sqrt(2) * mu, 2 * var)
    mean = torch.erf(mu / (1 + 2 * var).sqrt())
    return ActivationMoments(mean, 4 * probit.variance, 2 * math.sqrt(2) * probit.gain)


def _gelu_mean_and_gain(mu: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and gain of x Phi(x); docs/theory.md, eq. (16)."""
    total = 1 + var
    spread = total.sqrt()
    beyond = tail(mu, spread)
    mean = F.relu(mu) + (var * beyond.first - beyond.a * beyond.mass) / spread
    gain_below = beyond.mass - beyond.a * beyond.density / total
    # As in ``_positive``, without a torch.where; but gains of negative means may be negative, too.
    above = mu.detach().sign().relu()
    return mean, torch.addcmul(above, 1 - 2 * above, gain_below)


@by_nodes
def _gelu_moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Moments of x Phi(x); docs/theory.md, eqs. (16), (17)."""
    mean, gain = _gelu_mean_and_gain(mu, var)
    twice_total, twice_mu_squared = 2 + 2 * var, 2 * _square(mu)

    def integrand(twice_log_w: Tensor) -> Tensor:
        # Coordinates along and across the diagonal x1 = x2 of two correlated copies of x.
        w_squared_less_one = torch.expm1(twice_log_w)
        w_squared = w_squared_less_one + 1
        per_y_squared = (twice_total - w_squared).reciprocal()
        across = w_squared_less_one / w_squared
        twice_exponent = (twice_mu_squared * per_y_squared).clamp(max=2000)
        centre = twice_exponent * per_y_squared
        along = (1 - per_y_squared) + centre
        both = along + across
        # 4 - 2 both + (3 along^2 - 2 centre^2 - 2 along across + 3 across^2) / 4
        product = torch.addcmul(4 - 2 * both, both, both, value=0.75)
        product = torch.addcmul(product, along, across, value=-2.0)
        product = torch.addcmul(product, centre, centre, value=-0.5)
        weight = torch.exp(-0.5 * twice_exponent) * (w_squared * per_y_squared).sqrt()
        return weight * w_squared_less_one * product

    excess = _integrate(integrand, torch.log1p(var).expand(mu.shape)) / (2 * math.pi)
    return ActivationMoments(mean, gain.square() * var + excess, gain)


def _probit(x: Tensor) -> Tensor:
    # erfc, unlike 1 + erf, keeps its digits in the far negative tail.
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _relu_slope(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


_TABLE: dict[str, tuple[Function, Function, Formula]] = {
    "heaviside": (lambda x: (x >= 0).to(x.dtype), torch.zeros_like, _heaviside_moments),
    "identity": (lambda x: x, torch.ones_like, _identity_moments),
    "abs": (torch.abs, torch.sign, _abs_moments),
    "probit": (_probit, _density, _probit_moments),
    "erf": (torch.erf, lambda x: torch.exp(-x * x) * (2 / math.sqrt(math.pi)), _erf_moments),
    # Not F.gelu, which in float32 has lost every digit of the negative tail by x = -5.
    "gelu": (lambda x: x * _probit(x), lambda x: _probit(x) + x * _density(x), _gelu_moments),
}
_CHEAPER = {"gelu": _gelu_mean_and_gain}
for _name, _parts in _TABLE.items():
    register(MomentActivation(_name, *_parts, mean_and_gain=_CHEAPER.get(_name)))
register(MomentActivation("relu", F.relu, _relu_slope, _leaky_moments, response=_relu_response))
