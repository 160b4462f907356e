"""Piecewise polynomial activations: hardtanh, ReLU6, hardsigmoid, hardswish and the shrinks.

Moments are closed forms, sums over pieces of truncated Gaussian moments (docs/theory.md, eq. 18).
They are computed in float64 whatever the arguments are, where the device has it: what cancels in a
piece far from mu, about z^4 units in the last place, then does not matter. Relative errors of mean
(relative to max(|mean|, sigma)), variance and gain are about 1e-12 in float64 and 1e-6 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import (
    ActivationMoments,
    Function,
    LinearResponse,
    MomentActivation,
)


@dataclass(frozen=True)
class Pieces:
    """Polynomials (coefficients of 1, x, x^2) left of, between and right of the edges."""

    edges: tuple[float, ...]
    polynomials: tuple[tuple[float, ...], ...]
    jumps: tuple[float, ...]  # at the edges


def _moments(mu: Tensor, var: Tensor, *, function: Function, pieces: Pieces) -> ActivationMoments:
    """Mean, variance and gain of a piecewise polynomial; docs/theory.md, eq. (18)."""
    return in_blocks(partial(_block, function=function, pieces=pieces), mu, var)


_PER_ROOT = 1 / math.sqrt(4 * math.pi)
# Elements of a block, whose intermediate results stay in a processor's cache.
_BLOCK = 16384


def in_blocks(
    moments: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    mu: Tensor,
    var: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> ActivationMoments:
    """``moments(mu, var)`` in this type, else the widest there is; on a CPU a block at a time.

    A block is some samples, or, where one sample is larger than a block, a part of one.
    """
    if dtype is None:
        dtype = mu.dtype if mu.device.type == "mps" else torch.float64
    if mu.numel() <= _BLOCK or mu.device.type != "cpu" or torch.compiler.is_compiling():
        found = moments(mu.to(dtype), var.to(dtype))
        return ActivationMoments(*(value.to(mu.dtype) for value in found))
    # Samples (B, n) in the order in which they lie in memory: channels may be last there.
    stride = mu.stride()
    order = [0, *sorted(range(1, mu.dim()), key=lambda dim: -stride[dim])]
    means = mu.permute(order)
    shape, means = means.shape, means.reshape(len(means), -1)
    noises = var.expand(len(var), *mu.shape[1:]).permute(order).reshape(len(var), -1)
    rows = max(1, _BLOCK // means.shape[1])
    columns = max(1, _BLOCK // rows)
    by_rows = []
    for low in range(0, len(means), rows):
        near = noises if len(noises) == 1 else noises[low : low + rows]
        far = torch.split(means[low : low + rows], columns, 1)
        blocks = zip(far, torch.split(near, columns, 1), strict=True)
        parts = [moments(m.to(dtype), v.to(dtype)) for m, v in blocks]
        by_rows.append([torch.cat(some, 1).to(mu.dtype) for some in zip(*parts, strict=True)])
    back = sorted(range(mu.dim()), key=lambda dim: order[dim])
    return ActivationMoments(
        *(torch.cat(some).view(shape).permute(back) for some in zip(*by_rows, strict=True))
    )


def _block(mu: Tensor, var: Tensor, *, function: Function, pieces: Pieces) -> ActivationMoments:
    sigma = var.sqrt()
    # Deviations are from h(mu). Results do not depend on that choice, so neither do gradients.
    centre = function(mu).detach()
    # What lies beyond 50 standard deviations has no probability, but could be 0 * inf.
    z = [((edge - mu) / sigma).clamp(-50.0, 50.0) for edge in pieces.edges]
    deviations = [_about(p, mu, sigma, centre) for p in pieces.polynomials]
    first, second, slope = expectations(z, deviations)
    gain = slope / sigma
    for jump, at in zip(pieces.jumps, z, strict=True):
        if jump:
            gain = gain + jump * _density(at) / sigma
    variance = (second - first.square()).clamp(min=0)
    return ActivationMoments(centre + first, variance, gain)


def _about(polynomial: Sequence[float], mu: Tensor, sigma: Tensor, centre: Tensor) -> list[Tensor]:
    """Coefficients in y of ``polynomial(mu + sigma y) - centre``, lowest power first."""
    c0, c1, c2 = (*polynomial, 0.0, 0.0)[:3]
    if c2:
        value = torch.addcmul(c0 - centre, mu, c1 + c2 * mu)
        return [value, sigma * (c1 + 2 * c2 * mu), c2 * sigma.square()]
    if c1:
        return [c1 * mu + (c0 - centre), c1 * sigma]
    return [c0 - centre]


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def expectations(
    edges: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """E[d(y)], E[d(y)^2] and E[d'(y)], y ~ N(0, 1), of a d that is a polynomial between edges.

    Pieces are coefficients, lowest power first; there is one more of them than of edges.
    """
    ends = [None, *(_end(z) for z in edges), None]
    first = second = slope = torch.zeros_like(edges[0])
    for k, piece in enumerate(pieces):
        square = _square(piece)
        powers = _truncated(ends[k], ends[k + 1], len(square))
        for n, (coefficient, power) in enumerate(zip(piece, powers, strict=False)):
            first = torch.addcmul(first, coefficient, power)
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
    """An end of an interval, z, and the density there; P(y < z) = positive - beyond."""

    z: Tensor
    density: Tensor
    positive: Tensor  # 1 if z > 0, else 0
    beyond: Tensor  # P(y > z) if z > 0, else -P(y < z)


def _end(z: Tensor) -> _End:
    positive = (z > 0).to(z.dtype)
    # |z| has its derivative at 0 from the left, as 0 is among those that are not positive.
    beyond = torch.erfc(math.sqrt(0.5) * F.leaky_relu(z, -1.0)) * (positive - 0.5)
    return _End(z, _density(z), positive, beyond)


def _truncated(left: _End | None, right: _End | None, count: int) -> list[Tensor]:
    """E[y^n; left < y < right] for n < count; an end that is None is infinite."""
    powers = [_mass(left, right)]
    # What integration by parts leaves at the ends: z^{n - 1} phi(z).
    lower, upper = (None if end is None else end.density for end in (left, right))
    for n in range(1, count):
        if left is None or lower is None:
            boundary = torch.neg(upper) if upper is not None else torch.zeros_like(powers[0])
        else:
            boundary = lower if upper is None else lower - upper
        powers.append(boundary if n == 1 else boundary + (n - 1) * powers[n - 2])
        lower = None if left is None or lower is None else left.z * lower
        upper = None if right is None or upper is None else right.z * upper
    return powers


def _mass(left: _End | None, right: _End | None) -> Tensor:
    """P(left < y < right), of full relative accuracy in either tail: there, 0 or 1 cancel."""
    if left is None:
        assert right is not None
        return right.positive - right.beyond
    if right is None:
        return (1 - left.positive) + left.beyond
    return (right.positive - left.positive) - (right.beyond - left.beyond)


def _made(
    name: str, function: Function, slope: Function, edges: Sequence[float], *pieces: Sequence[float]
) -> MomentActivation:
    values = [
        [_value(p, edge) for p in near] for near, edge in zip(pairwise(pieces), edges, strict=True)
    ]
    jumps = tuple(b - a if abs(b - a) > 1e-12 else 0.0 for a, b in values)
    shape = Pieces(tuple(edges), tuple(tuple(piece) for piece in pieces), jumps)
    return MomentActivation(
        name, function, slope, partial(_moments, function=function, pieces=shape)
    )


def _clamped(activation: MomentActivation, low: float, high: float) -> MomentActivation:
    """The same activation, of x between two bounds, with its linear response in fewer passes."""
    return replace(activation, response=partial(_response, low=low, high=high))


def _response(mu: Tensor, var: Tensor, *, low: float, high: float) -> LinearResponse:
    found = in_blocks(partial(_block_response, low=low, high=high), mu, var, dtype=mu.dtype)
    return LinearResponse(*found)


def _block_response(mu: Tensor, var: Tensor, *, low: float, high: float) -> LinearResponse:
    """Mean, gain and excess of x between two bounds.

    It is x + u - w with u = (low - x)+ and w = (x - high)+, of which at most one is not 0, so that
    Cov(u, w) = -E[u] E[w]: excess = excess of u + excess of w + 2 (E[u] E[w] - var P(u) P(w)),
    where P(u) is the probability that u > 0, and minus its gain. Those of u and w are a ReLU's.
    """
    scale = torch.mul(var, 2.0).rsqrt_()  # 1 / (sqrt(2) sigma)
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
    mean = torch.addcdiv(mu, u.sub_(w), scale)
    return LinearResponse(mean, outside.neg_().add_(1.0), excess)


def _value(polynomial: Sequence[float], x: float) -> float:
    return sum(c * x**k for k, c in enumerate(polynomial))


def _inside(x: Tensor, *, low: float, high: float) -> Tensor:
    """1 between the two, 0 outside and at them."""
    return ((x > low) & (x < high)).to(x.dtype)


def _outside(x: Tensor, *, size: float) -> Tensor:
    """1 where |x| > size, else 0."""
    return (x.abs() > size).to(x.dtype)


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
    made = _made(
        name,
        partial(F.hardtanh, min_val=min_val, max_val=max_val),
        partial(_inside, low=min_val, high=max_val),
        (min_val, max_val),
        (min_val,),
        (0.0, 1.0),
        (max_val,),
    )
    return _clamped(made, min_val, max_val)


@lru_cache
def threshold(threshold: float, value: float) -> MomentActivation:
    """x above ``threshold`` and ``value`` elsewhere, as in ``torch.nn.Threshold``."""
    if not (math.isfinite(threshold) and math.isfinite(value)):
        raise ValueError(f"threshold needs finite numbers, got {threshold} and {value}.")
    return _made(
        f"threshold({threshold:g}, {value:g})",
        partial(F.threshold, threshold=threshold, value=value),
        partial(_inside, low=threshold, high=math.inf),
        (threshold,),
        (value,),
        (0.0, 1.0),
    )


@lru_cache
def hardshrink(lambd: float = 0.5) -> MomentActivation:
    """x where |x| > lambd, and 0 elsewhere, as in ``torch.nn.Hardshrink``."""
    return _shrink("hardshrink", F.hardshrink, lambd, moved=0.0)


@lru_cache
def softshrink(lambd: float = 0.5) -> MomentActivation:
    """x moved towards 0 by up to lambd, as in ``torch.nn.Softshrink``."""
    return _shrink("softshrink", F.softshrink, lambd, moved=lambd)


def _shrink(
    name: str, function: Callable[..., Tensor], lambd: float, *, moved: float
) -> MomentActivation:
    """0 where |x| <= lambd, and x moved towards 0 elsewhere."""
    return _made(
        name if lambd == 0.5 else f"{name}({lambd:g})",
        partial(function, lambd=_shrinking(lambd)),
        partial(_outside, size=lambd),
        (-lambd, lambd),
        (moved, 1.0),
        (0.0,),
        (-moved, 1.0),
    )


def _shrinking(lambd: float) -> float:
    if not (math.isfinite(lambd) and lambd >= 0):
        raise ValueError(f"A shrink needs a finite lambd >= 0, got {lambd}.")
    return lambd


def _hardsigmoid_slope(x: Tensor) -> Tensor:
    return _inside(x, low=-3.0, high=3.0) / 6


def _hardswish_slope(x: Tensor) -> Tensor:
    middle = torch.where(x < 3, x / 3 + 0.5, 1.0)
    return torch.where(x <= -3, 0.0, middle)


RELU6 = _clamped(
    _made(
        "relu6",
        F.relu6,
        partial(_inside, low=0.0, high=6.0),
        (0.0, 6.0),
        (0.0,),
        (0.0, 1.0),
        (6.0,),
    ),
    0.0,
    6.0,
)
HARDSIGMOID = _made(
    "hardsigmoid", F.hardsigmoid, _hardsigmoid_slope, (-3.0, 3.0), (0.0,), (0.5, 1 / 6), (1.0,)
)
HARDSWISH = _made(
    "hardswish", F.hardswish, _hardswish_slope, (-3.0, 3.0), (0.0,), (0.0, 0.5, 1 / 6), (0.0, 1.0)
)
