"""Activations in pieces, polynomials or exponentials: hardtanh, hardswish, the shrinks, ELU, ...

Moments are closed forms, sums over pieces of truncated Gaussian moments (docs/theory.md, eq. 18).
They are computed in float64 whatever the arguments are, where the device has it: what cancels in a
piece far from mu, about z^4 rounding errors, then does not matter. Relative errors of mean
(relative to max(|mean|, sigma)), variance and gain are about 1e-12 in float64 (1e-9 for the ELUs)
and 1e-6 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import (
    ActivationMoments,
    Function,
    LinearResponse,
    MomentActivation,
    in_blocks,
    is_readable,
    register,
)
from covary.activations.normal import rectified

_FAR = 50.0  # standard deviations, beyond which nothing has any probability


class Pieces(NamedTuple):
    """Polynomials (coefficients of 1, x, x^2) left of, between and right of the edges."""

    edges: tuple[float, ...]
    polynomials: tuple[tuple[float, ...], ...]


def _piecewise(name: str, function: Function, pieces: Pieces) -> MomentActivation:
    moments = partial(_moments, function=function, pieces=pieces)
    return MomentActivation(name, function, partial(_slope, pieces=pieces), moments)


def _slope(x: Tensor, *, pieces: Pieces) -> Tensor:
    """The derivative; at an edge the smaller one of the two, in size, as torch has it."""
    slopes = [[k * c for k, c in enumerate(p)][1:] for p in pieces.polynomials]
    found: Tensor = _value(slopes[0], x)
    for edge, (left, right) in zip(pieces.edges, pairwise(slopes), strict=True):
        is_smaller = abs(_value(right, edge)) < abs(_value(left, edge))
        found = torch.where(x >= edge if is_smaller else x > edge, _value(right, x), found)
    return found


def _value(polynomial: Sequence[float], x: Any) -> Any:
    total = 0 * x
    for coefficient in reversed(polynomial):
        total = total * x + coefficient
    return total


def _moments(mu: Tensor, var: Tensor, *, function: Function, pieces: Pieces) -> ActivationMoments:
    """Mean, variance and gain of a piecewise polynomial; docs/theory.md, eq. (18)."""
    return ActivationMoments(*in_blocks(partial(_block, function=function, pieces=pieces), mu, var))


def _block(mu: Tensor, var: Tensor, *, function: Function, pieces: Pieces) -> ActivationMoments:
    sigma = var.sqrt()
    # Deviations are from h(mu). Results do not depend on that choice, so neither do gradients.
    centre = function(mu).detach()
    # What lies far off has no probability, but could be 0 * inf.
    z = [((edge - mu) / sigma).clamp(-_FAR, _FAR) for edge in pieces.edges]
    deviations = [_about(p, mu, sigma, centre) for p in pieces.polynomials]
    first, second, slope = _expectations(z, deviations)
    for at, edge, (left, right) in zip(z, pieces.edges, pairwise(pieces.polynomials), strict=True):
        jump = _value(right, edge) - _value(left, edge)
        if abs(jump) > 1e-12:
            slope = slope + jump * _density(at)
    variance = (second - first.square()).clamp(min=0)
    return ActivationMoments(centre + first, variance, slope / sigma)


def _about(polynomial: Sequence[float], mu: Tensor, sigma: Tensor, centre: Tensor) -> list[Tensor]:
    """Coefficients in y of ``polynomial(mu + sigma y) - centre``, lowest power first."""
    c0, c1, c2 = (*polynomial, 0.0, 0.0)[:3]
    if c2:
        value = torch.addcmul(c0 - centre, mu, c1 + c2 * mu)
        return [value, sigma * (c1 + 2 * c2 * mu), c2 * sigma.square()]
    return [c1 * mu + (c0 - centre), c1 * sigma] if c1 else [c0 - centre]


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _expectations(
    edges: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """E[d(y)], E[d(y)^2] and E[d'(y)], y ~ N(0, 1), of a d that is a polynomial between edges.

    Pieces are coefficients, lowest power first; there is one more of them than of edges.
    """
    first = second = slope = torch.zeros_like(edges[0])
    ends = [_End(-_FAR, 0.0, 0.0, 0.0), *(_End.at(z) for z in edges), _End(_FAR, 0.0, 1.0, 0.0)]
    for piece, (left, right) in zip(pieces, pairwise(ends), strict=True):
        square = _square(piece)
        powers = _truncated(left, right, len(square))
        for n, coefficient in enumerate(piece):
            first = torch.addcmul(first, coefficient, powers[n])
            if n > 0:
                slope = torch.addcmul(slope, coefficient, powers[n - 1], value=n)
        for coefficient, power in zip(square, powers, strict=True):
            second = torch.addcmul(second, coefficient, power)
    return first, second, slope


def _square(p: Sequence[Tensor]) -> list[Tensor]:
    """Coefficients of the square of a polynomial."""
    total = []
    for k in range(2 * len(p) - 1):
        terms = [p[i] * p[k - i] for i in range(max(0, k + 1 - len(p)), min(k + 1, len(p)))]
        total.append(sum(terms[1:], terms[0]))
    return total


class _End(NamedTuple):
    """An end of an interval, z, and the density there; P(y < z) = positive - beyond.

    Each is a tensor, or a number at the ends of the line.
    """

    z: Any
    density: Any
    positive: Any  # 1 if z > 0, else 0
    beyond: Any  # P(y > z) if z > 0, else -P(y < z)

    @classmethod
    def at(cls, z: Tensor) -> _End:
        positive = (z > 0).to(z.dtype)
        # |z| has its derivative at 0 from the left, as 0 is among those that are not positive.
        beyond = torch.erfc(math.sqrt(0.5) * F.leaky_relu(z, -1.0)) * (positive - 0.5)
        return cls(z, _density(z), positive, beyond)


def _truncated(left: _End, right: _End, count: int) -> list[Tensor]:
    """E[y^n; left < y < right] for n < count."""
    # Of full relative accuracy in either tail: there, 0 or 1 cancel.
    powers = [(right.positive - left.positive) - (right.beyond - left.beyond)]
    # What integration by parts leaves at the ends: z^{n - 1} phi(z).
    lower, upper = left.density, right.density
    for n in range(1, count):
        boundary = lower - upper
        powers.append(boundary if n == 1 else boundary + (n - 1) * powers[n - 2])
        lower, upper = left.z * lower, right.z * upper
    return powers


@register
@lru_cache
def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> MomentActivation:
    """x between two bounds, and the bounds outside, as in ``torch.nn.Hardtanh``.

    Examples:
        >>> import torch
        >>> hardtanh(0.0, 1.0)(torch.zeros(1, 1), torch.ones(1, 1)).mean
        tensor([[0.3156]])
    """
    if not (math.isfinite(min_val) and math.isfinite(max_val) and min_val < max_val):
        raise ValueError(
            f"hardtanh needs finite bounds min_val < max_val, got {min_val} and {max_val}."
        )
    name = "hardtanh" if (min_val, max_val) == (-1, 1) else f"hardtanh({min_val:g}, {max_val:g})"
    return _clamp(name, min_val, max_val)


def _clamp(name: str, low: float, high: float) -> MomentActivation:
    """x between two bounds, with its linear response in fewer passes."""
    function = partial(F.hardtanh, min_val=low, max_val=high)
    found = _piecewise(name, function, Pieces((low, high), ((low,), (0.0, 1.0), (high,))))
    return replace(found, response=partial(_clamp_response, low=low, high=high))


def _clamp_response(mu: Tensor, var: Tensor, *, low: float, high: float) -> LinearResponse:
    block = partial(_clamp_block, low=low, high=high)
    return LinearResponse(*in_blocks(block, mu, var, dtype=mu.dtype))


def _clamp_block(mu: Tensor, var: Tensor, *, low: float, high: float) -> LinearResponse:
    """Mean, gain and excess of x between two bounds.

    It is x + u - w with u = (low - x)+ and w = (x - high)+, of which at most one is not 0, so that
    Cov(u, w) = -E[u] E[w]: excess = excess of u + excess of w + 2 (E[u] E[w] - var P(u) P(w)),
    where P(u) is the probability that u > 0, and minus its gain. Those of u and w are a ReLU's.
    """
    scale = torch.mul(var, 2.0).rsqrt_()  # 1 / (sqrt(2) sigma)
    below, above = (low - mu) * scale, (mu - high) * scale
    (p_below, u), (p_above, w) = rectified(below), rectified(above)
    outside = p_below + p_above
    # p (1 - p) of both and -2 p p' are outside (1 - outside); 2 t (y - t) of both and 4 t t'.
    excess = torch.addcmul(outside, outside, outside, value=-1.0)
    excess.addcmul_(u, below.sub_(u), value=2.0).addcmul_(w, above.sub_(w), value=2.0)
    excess.addcmul_(u, w, value=4.0).clamp_(min=0).mul_(var)
    mean = torch.addcdiv(mu, u.sub_(w), scale)
    return LinearResponse(mean, outside.neg_().add_(1.0), excess)


@lru_cache
def threshold(threshold: float, value: float) -> MomentActivation:
    """x above ``threshold`` and ``value`` elsewhere, as in ``torch.nn.Threshold``."""
    if not (math.isfinite(threshold) and math.isfinite(value)):
        raise ValueError(f"threshold needs finite numbers, got {threshold} and {value}.")
    function = partial(F.threshold, threshold=threshold, value=value)
    pieces = Pieces((threshold,), ((value,), (0.0, 1.0)))
    return _piecewise(f"threshold({threshold:g}, {value:g})", function, pieces)


@register
@lru_cache
def hardshrink(lambd: float = 0.5) -> MomentActivation:
    """x where |x| > lambd, and 0 elsewhere, as in ``torch.nn.Hardshrink``."""
    return _shrink(F.hardshrink, lambd, moved=0.0)


@register
@lru_cache
def softshrink(lambd: float = 0.5) -> MomentActivation:
    """x moved towards 0 by up to lambd, as in ``torch.nn.Softshrink``."""
    return _shrink(F.softshrink, lambd, moved=lambd)


def _shrink(function: Callable[..., Tensor], lambd: float, *, moved: float) -> MomentActivation:
    """0 where |x| <= lambd, and x moved towards 0 elsewhere."""
    if not (math.isfinite(lambd) and lambd >= 0):
        raise ValueError(f"A shrink needs a finite lambd >= 0, got {lambd}.")
    name = function.__name__ + ("" if lambd == 0.5 else f"({lambd:g})")
    pieces = Pieces((-lambd, lambd), ((moved, 1.0), (0.0,), (-moved, 1.0)))
    return _piecewise(name, partial(function, lambd=lambd), pieces)


_HARDSIGMOID = Pieces((-3.0, 3.0), ((0.0,), (0.5, 1 / 6), (1.0,)))
_HARDSWISH = Pieces((-3.0, 3.0), ((0.0,), (0.0, 0.5, 1 / 6), (0.0, 1.0)))
register(_clamp("relu6", 0.0, 6.0))
register(_piecewise("hardsigmoid", F.hardsigmoid, _HARDSIGMOID))
register(_piecewise("hardswish", F.hardswish, _HARDSWISH))


class Exponential(NamedTuple):
    """``scale x`` for x > 0, else ``scale alpha (exp(rate x) - 1)``."""

    alpha: float
    rate: float = 1.0
    scale: float = 1.0

    def slope(self, x: Tensor) -> Tensor:
        """The derivative; at 0 that from the left."""
        slope = self.alpha * self.rate * torch.exp(self.rate * x.clamp(max=0))
        return self.scale * torch.where(x > 0, 1.0, slope)

    def moments(self, mu: Tensor, var: Tensor) -> ActivationMoments:
        """docs/theory.md, eq. (19)."""
        return ActivationMoments(*in_blocks(self._block, mu, var))

    def _block(self, mu: Tensor, var: Tensor) -> ActivationMoments:
        sigma = var.sqrt()
        # Deviations are from h(mu). Results do not depend on that choice, so neither do gradients.
        left = mu.detach().clamp(max=0)
        centre = mu.detach() - left + self.alpha * torch.expm1(self.rate * left)
        z = (mu / sigma).clamp(-_FAR, _FAR)
        found = self._whole(mu, sigma, centre, z)
        # There terms of the size of 1 cancel down to s^2; here the rest of a series is s^3.
        narrow = self.rate * sigma < 1e-3
        if not is_readable(narrow) or bool(narrow.any()):
            series = self._expanded(mu, sigma, centre, z)
            found = tuple(torch.where(narrow, a, b) for a, b in zip(series, found, strict=True))
        first, second, gain = found
        variance = (second - first.square()).clamp(min=0)
        scale = self.scale
        return ActivationMoments(scale * (centre + first), scale**2 * variance, scale * gain)

    def _whole(self, mu: Tensor, sigma: Tensor, centre: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        """E[d], E[d^2] and E[h'] of the deviation d = h(x) - centre."""
        alpha, rate = self.alpha, self.rate
        density = _density(z)
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

    def _expanded(self, mu: Tensor, sigma: Tensor, centre: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        """The same with exp(rate x) as a cubic around mu."""
        s = self.rate * sigma
        m = (self.rate * mu).clamp(max=1.0)  # beyond, this piece has no probability if s is small
        e = self.alpha * torch.exp(m)
        left = [self.alpha * torch.expm1(m) - centre, e * s, e * s.square() / 2, e * s.pow(3) / 6]
        first, second, slope = _expectations([-z], [left, [mu - centre, sigma]])
        return first, second, slope / sigma


def _tilted(z: Tensor, density: Tensor, m: Tensor, s: Tensor, j: int) -> Tensor:
    """E[exp(j (m + s y)); m + s y < 0], y ~ N(0, 1), as density(z) times a Mills ratio at z + j s.

    Where z + j s <= 0 it is the whole expectation less what lies beyond 0, which is of that form.
    """
    a = z + j * s
    mills: Tensor = torch.special.erfcx(math.sqrt(0.5) * F.leaky_relu(a, -1.0))  # of |a|
    positive = (a > 0).to(a.dtype)
    whole = torch.exp((j * m + (0.5 * j * j) * s.square()).clamp(max=0))
    beyond = math.sqrt(math.pi / 2) * density * mills
    return (1 - positive) * whole + (2 * positive - 1) * beyond


@register
@lru_cache
def elu(alpha: float = 1.0) -> MomentActivation:
    """x for x > 0, else ``alpha (exp(x) - 1)``, as in ``torch.nn.ELU``."""
    return _exponential(F.elu, alpha)


@register
@lru_cache
def celu(alpha: float = 1.0) -> MomentActivation:
    """x for x > 0, else ``alpha (exp(x / alpha) - 1)``, as in ``torch.nn.CELU``."""
    return _exponential(F.celu, alpha)


def _exponential(function: Callable[..., Tensor], alpha: float) -> MomentActivation:
    name = function.__name__
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"{name} needs a finite alpha > 0, got {alpha}.")
    name += "" if alpha == 1 else f"({alpha:g})"
    shape = Exponential(alpha, 1 / alpha if function is F.celu else 1.0)
    return MomentActivation(name, partial(function, alpha=alpha), shape.slope, shape.moments)


_SELU = Exponential(1.6732632423543772848, scale=1.0507009873554804934)
register(MomentActivation("selu", F.selu, _SELU.slope, _SELU.moments))
