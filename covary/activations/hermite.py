"""Moments of any activation by quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covary.activations.activation import (
    ActivationMoments,
    Function,
    MomentActivation,
    in_blocks,
    is_readable,
)

Table = tuple[tuple[float, ...], tuple[float, ...]]  # nodes, weights


@dataclass(frozen=True, eq=False)
class Rules:
    """Nodes and weights with sum_k w_k f(x_k) = E[f(x)] for x ~ N(0, 1), for float32 and float64.

    With ``kinks``, points where the function is not smooth, they are those of an integral over
    [0, 1], for each part of the line between kinks.

    Kept as numbers, not tensors, so that a network moves between devices and dtypes without them.
    """

    single: Table
    double: Table
    kinks: tuple[float, ...] = ()

    def at(self, mu: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes and weights, (K, ...) each, of a shape that goes with mu's."""
        is_double = mu.dtype == torch.float64
        rule = torch.tensor(
            self.double if is_double else self.single, dtype=mu.dtype, device=mu.device
        )
        nodes, weights = rule.reshape(2, -1, *[1] * mu.dim())
        if not self.kinks:
            return nodes, weights
        reach = 8.0 if is_double else 6.7  # standard deviations
        far = torch.full_like(mu + sigma, reach)
        inner = [((kink - mu) / sigma).clamp(-reach, reach) for kink in self.kinks]
        ends = list(pairwise([-far, *inner, far]))
        x = torch.cat([low + nodes * (high - low) for low, high in ends])
        lengths = torch.cat([weights * (high - low) for low, high in ends])
        return x, lengths * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _table(nodes: NDArray[np.float64], weights: NDArray[np.float64]) -> Table:
    return tuple(nodes.tolist()), tuple(weights.tolist())


def gauss_hermite(count: int) -> Rules:
    """Exact for polynomials of degree up to ``2 count - 1``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    table = _table(nodes, weights / weights.sum())
    return Rules(table, table)


def legendre(count: int) -> Table:
    """The Gauss-Legendre rule on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return _table((1 + nodes) / 2, weights / 2)


def between(kinks: Sequence[float]) -> Rules:
    """Gauss-Legendre nodes between kinks."""
    return Rules(legendre(24), legendre(40), tuple(sorted(kinks)))


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

# Of elements for which all nodes are evaluated at once.
_BYTES = 32768

# From the deviations of h from h(mu), the error of the variance is about eps |h| / (sigma |h'|)
# relative to it; where that exceeds 1 / _DIGITS, it is better to start from h'.
_DIGITS = 1e5


def by_nodes(formula: Callable[..., ActivationMoments]) -> Callable[..., ActivationMoments]:
    """Let a formula of (mu, var) evaluate all nodes at once, for a block of elements at a time."""

    @wraps(formula)
    def apply(mu: Tensor, var: Tensor, **options: Any) -> ActivationMoments:
        block, size = partial(formula, **options), _BYTES // mu.element_size()
        return ActivationMoments(*in_blocks(block, mu, var, size=size, dtype=mu.dtype))

    return apply


@by_nodes
def quadrature_moments(
    mu: Tensor, var: Tensor, *, function: Function, derivative: Function | None, rules: Rules
) -> ActivationMoments:
    """Quadrature of docs/theory.md, eqs. (4) to (6)."""
    # Deviations from h(mu) are summed, not values, of which only rounding error would be left where
    # sigma is small (or mu huge).
    sigma = var.sqrt()
    x, w = rules.at(mu, sigma)
    points = torch.addcmul(mu, sigma, x)
    with torch.no_grad():  # results do not depend on the centre, so neither do gradients
        centre = function(mu).nan_to_num(0.0, 0.0, 0.0)
    first, along, second = _sums(function(points) - centre, x, w)
    # Under one rule Bessel's inequality holds to the letter: gain^2 var never exceeds the variance.
    # The bound makes an overflow inf, not inf - inf.
    largest = torch.finfo(mu.dtype).max
    variance = (second - first.square().clamp(max=largest)).clamp(min=0)
    found = ActivationMoments(centre + first, variance, along / sigma)
    if derivative is None:
        return found
    # The gain divides rounding error by sigma; below 0.1 it is better to average h'. The same
    # where mu is so large that it swallows the differences between nodes.
    eps = torch.finfo(mu.dtype).eps
    narrow = sigma < (64 * eps * mu.detach().abs()).clamp(min=0.1)
    if is_readable(narrow) and not bool(narrow.any()):
        return found
    slope, bend, second = _sums(derivative(points), x, w)
    # The Hermite series of h' (docs/theory.md, eq. 22): its first two terms, and of all others what
    # the third would make of them.
    rest = (second - slope.square() - bend.square()).clamp(min=0)
    from_slopes = var * (slope.square() + bend.square() / 2 + rest / 3)
    lost = sigma * slope.abs() < _DIGITS * eps * torch.maximum(centre.abs(), (mu * slope).abs())
    return found._replace(
        variance=torch.where(narrow & lost, from_slopes, variance),
        gain=torch.where(narrow, slope, found.gain),
    )


def _sums(values: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[f], E[x f] and E[f^2] of values f (K, ...) at nodes x."""
    weighted = w * values
    return weighted.sum(0), (weighted * x).sum(0), (weighted * values).sum(0)


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

    Mean, variance and gain (as the correlation of h(x) with x) are Gauss-Hermite sums. They are
    accurate to many digits where the function is smooth within one standard deviation of x, to a
    percent at a kink, and not at all at a jump (docs/theory.md has a measured table). A network
    pickles if the function does, which a lambda does not.

    Args:
        function: h.
        derivative: h', the average of which is the gain below sigma = 0.1, where the correlation
            loses digits; found by automatic differentiation if not given.
        smooth: False keeps to the correlation, for functions with jumps, which no derivative sees.
        nodes: how many points sums are over.
        kinks: where h has kinks or jumps. Integrals are split there, which costs nothing but time,
            and ``nodes`` plays no part.
        name: what the activation is shown as.

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
    slope = derivative or partial(_slope, function=function)
    rules = between(kinks) if kinks else gauss_hermite(nodes)
    name = name or f"quadrature({getattr(function, '__name__', repr(function))})"
    return by_rules(name, function, slope, rules, smooth=smooth)


def by_rules(
    name: str, function: Function, slope: Function, rules: Rules, *, smooth: bool = True
) -> MomentActivation:
    """The moment activation of a function by these rules."""
    derivative = slope if smooth else None
    moments = partial(quadrature_moments, function=function, derivative=derivative, rules=rules)
    return MomentActivation(name, function, slope, moments)
