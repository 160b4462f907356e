"""Moments of any activation by Gauss-Hermite quadrature."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covary.activations.activation import (
    ActivationMoments,
    Function,
    MomentActivation,
    known_empty,
)

T = TypeVar("T", float, Tensor)
Table = tuple[tuple[float, ...], tuple[float, ...]]  # nodes, weights


@dataclass(frozen=True, eq=False)
class Rules:
    """Nodes and weights with sum_k w_k f(x_k) = E[f(x)] for x ~ N(0, 1), for float32 and float64.

    With ``kinks`` they are those of an integral over [0, 1], for each part of the line between
    points where the function is not smooth, up to ``reach`` standard deviations.

    Kept as numbers, not tensors, so that a network moves between devices and dtypes without them.
    """

    single: Table
    double: Table
    kinks: tuple[float, ...] = ()

    def stacked(self, mu: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes and weights, (K, ...) each, of a shape that goes with mu's."""
        rule = torch.tensor(self._table(mu), dtype=mu.dtype, device=mu.device)
        nodes, weights = rule.reshape(2, -1, *[1] * mu.dim())
        if not self.kinks:
            return nodes, weights
        parts = [_within(part, nodes, weights) for part in self._parts(mu, sigma)]
        x, w = (torch.cat(some) for some in zip(*parts, strict=True))
        return x, w

    def each(self, mu: Tensor, sigma: Tensor) -> Iterator[tuple[float | Tensor, float | Tensor]]:
        """The same one after the other: numbers, or with kinks tensors of mu's shape."""
        pairs = list(zip(*self._table(mu), strict=True))
        if not self.kinks:
            yield from pairs
        for part in self._parts(mu, sigma) if self.kinks else ():
            yield from (_within(part, t, w) for t, w in pairs)

    def _table(self, mu: Tensor) -> Table:
        return self.double if mu.dtype == torch.float64 else self.single

    def _parts(self, mu: Tensor, sigma: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Lower ends and lengths of the parts between kinks, in standard deviations."""
        reach = 8.0 if mu.dtype == torch.float64 else 6.7
        far = torch.full_like(mu + sigma, reach)
        inner = [((kink - mu) / sigma).clamp(-reach, reach) for kink in self.kinks]
        ends = [-far, *inner, far]
        return [(low, high - low) for low, high in pairwise(ends)]


def _within(part: tuple[Tensor, Tensor], t: T, weight: T) -> tuple[Tensor, Tensor]:
    """Nodes of [0, 1] as nodes of a part of the line, weighted by the density there."""
    low, length = part
    x = low + t * length
    return x, weight * length * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _table(nodes: NDArray[np.float64], weights: NDArray[np.float64]) -> Table:
    return tuple(nodes.tolist()), tuple(weights.tolist())


def gauss_hermite(count: int) -> Rules:
    """Exact for polynomials of degree up to ``2 count - 1``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    table = _table(nodes, weights / weights.sum())
    return Rules(table, table)


def _legendre(count: int) -> Table:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return _table((1 + nodes) / 2, weights / 2)


def between(kinks: Sequence[float]) -> Rules:
    """Gauss-Legendre nodes between kinks."""
    return Rules(_legendre(24), _legendre(40), tuple(sorted(kinks)))


def _trapezoid(step: float, reach: float) -> Table:
    """Equidistant nodes.

    For a function without poles within d of the real axis the error falls like
    exp(-2 pi d / (step sigma)): faster, for as many nodes, than that of Gauss-Hermite.
    """
    nodes = step * np.arange(-round(reach / step), round(reach / step) + 1)
    weights = np.exp(-(nodes**2) / 2)
    weights /= weights.sum()
    return _table(nodes / np.sqrt((weights * nodes**2).sum()), weights)


# Up to sigma = 3, for functions whose poles are 2.3 or more from the real axis, and 1.5 or more.
SMOOTH = Rules(_trapezoid(0.32, 6.72), _trapezoid(0.2, 8.0))
SHARP = Rules(_trapezoid(0.21, 6.72), _trapezoid(0.13, 8.06))


# Elements up to which all nodes are evaluated at once, in one tensor: fewer, larger operations. A
# compiler makes one loop of it, which needs no memory either.
_FEW = 8192

# From the deviations of h from h(mu), the error of the variance is about eps |h| / (sigma |h'|)
# relative to it; where that exceeds 1 / _DIGITS, it is better to start from h'.
_DIGITS = 1e5


def quadrature_moments(
    mu: Tensor, var: Tensor, *, function: Function, derivative: Function | None, rules: Rules
) -> ActivationMoments:
    """Quadrature of docs/theory.md, eqs. (4) to (6).

    Sums are over deviations from h(mu), not over values, of which where sigma is small (or mu
    huge) only rounding error would be left. Memory is a few times that of mu: nodes are evaluated
    one after the other unless mu has few elements.
    """
    sigma = var.sqrt()
    with torch.no_grad():  # results do not depend on the centre, so neither do gradients
        centre = function(mu).nan_to_num(0.0, 0.0, 0.0)

    def deviation(points: Tensor) -> Tensor:
        return function(points) - centre

    first, along, second = _sums(deviation, mu, sigma, rules)
    # Under one rule Bessel's inequality holds to the letter: gain^2 var never exceeds the variance.
    # The bound makes an overflow inf, not inf - inf.
    largest = torch.finfo(mu.dtype).max
    variance = (second - first.square().clamp(max=largest)).clamp(min=0)
    gain = along / sigma
    mean = centre + first
    if derivative is None:
        return ActivationMoments(mean, variance, gain)
    # The gain divides rounding error by sigma; below 0.1 it is better to average h'. The same
    # where mu is so large that it swallows the differences between nodes.
    eps = torch.finfo(mu.dtype).eps
    narrow = sigma < (64 * eps * mu.detach().abs()).clamp(min=0.1)
    if known_empty(narrow):
        return ActivationMoments(mean, variance, gain)
    slope, bend, second = _sums(derivative, mu, sigma, rules)
    # The Hermite series of h' (docs/theory.md, eq. 22): its first two terms, and of all others what
    # the third would make of them.
    rest = (second - slope.square() - bend.square()).clamp(min=0)
    from_slopes = var * (slope.square() + bend.square() / 2 + rest / 3)
    lost = sigma * slope.abs() < _DIGITS * eps * torch.maximum(centre.abs(), (mu * slope).abs())
    return ActivationMoments(
        mean,
        torch.where(narrow & lost, from_slopes, variance),
        torch.where(narrow, slope, gain),
    )


def _sums(
    function: Function, mu: Tensor, sigma: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """E[f], E[x f] and E[f^2] of f(mu + sigma x) for x ~ N(0, 1), each of mu's shape."""
    if mu.numel() <= _FEW or torch.compiler.is_compiling():
        x, w = rules.stacked(mu, sigma)
        values = function(torch.addcmul(mu, sigma, x))
        weighted = w * values
        return weighted.sum(0), (weighted * x).sum(0), (weighted * values).sum(0)
    first, along, second = (torch.zeros_like(mu + sigma) for _ in range(3))
    for x_k, w_k in rules.each(mu, sigma):
        if isinstance(x_k, Tensor):
            values = function(torch.addcmul(mu, sigma, x_k))
            weighted = w_k * values
            along.addcmul_(weighted, x_k)
        else:
            values = function(torch.add(mu, sigma, alpha=x_k))
            weighted = w_k * values
            along.add_(weighted, alpha=x_k)
        first.add_(weighted)
        second.addcmul_(weighted, values)
    return first, along, second


def _slope(x: Tensor, *, function: Function) -> Tensor:
    """The derivative of an elementwise function, by forward-mode differentiation."""
    slope: Tensor = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    return slope


def quadrature(
    function: Function,
    *,
    derivative: Function | None = None,
    smooth: bool = True,
    nodes: int = 32,
    kinks: Sequence[float] = (),
    name: str | None = None,
) -> MomentActivation:
    """The moment activation of any elementwise ``function`` of one tensor.

    Mean and variance are Gauss-Hermite sums over ``nodes`` points, and so is the gain, as the
    correlation of h(x) with x (Stein's lemma; the paper's eq. cov_si). That loses digits as var
    tends to 0, so below sigma = 0.1 the gain is the average ``derivative`` (found by automatic
    differentiation if not given); ``smooth=False`` keeps to the correlation, for functions with
    jumps, which no derivative sees.

    How accurate this is depends on how fast the function bends within one standard deviation of x:
    near machine precision while it is smooth on that scale, a percent at a kink, anything at a jump
    (docs/theory.md has a measured table). If you say where they are, ``kinks`` and jumps cost
    nothing but time: integrals are split there, and ``nodes`` plays no part. Prefer a closed form
    where there is one. A network pickles if the function does, which a lambda does not.

    Examples:
        >>> import torch
        >>> softsign = quadrature(torch.nn.functional.softsign, nodes=64)
        >>> softsign(torch.zeros(1, 1), torch.ones(1, 1)).variance
        tensor([[0.1833]])
    """
    if not callable(function):
        raise TypeError(f"quadrature needs a function of one tensor, got {function!r}.")
    if isinstance(function, torch.nn.Module) and any(True for _ in function.parameters()):
        raise ValueError(
            f"quadrature({function}) would hide the parameters of that module from the network. "
            "Only functions without parameters can be activations."
        )
    if not 2 <= nodes <= 300:  # one sees no variance, and beyond 300 the weights underflow
        raise ValueError(f"quadrature needs 2 to 300 nodes, got {nodes}.")
    if derivative is not None and not smooth:
        raise ValueError("smooth=False ignores the derivative; pass one or the other.")
    slope = derivative if derivative is not None else partial(_slope, function=function)
    return MomentActivation(
        name or f"quadrature({getattr(function, '__name__', repr(function))})",
        function,
        slope,
        partial(
            quadrature_moments,
            function=function,
            derivative=slope if smooth else None,
            rules=between(kinks) if kinks else gauss_hermite(nodes),
        ),
    )
