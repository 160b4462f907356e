"""Moments of any activation by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary.activations.activation import ActivationMoments, MomentActivation

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Rule:
    """Nodes and weights with sum_k w_k f(x_k) = E[f(x)] for x ~ N(0, 1), up to quadratic f exactly.

    Kept as numbers, not tensors, so that a network moves between devices and dtypes without them.
    """

    table: NDArray[np.float64]  # nodes, weights: (2, K)


def _gauss_hermite(count: int) -> _Rule:
    """Exact for polynomials of degree up to ``2 count - 1``."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return _Rule(np.stack([nodes, weights / weights.sum()]))


# Elements up to which all nodes are evaluated at once, in one tensor: fewer, larger operations.
_FEW = 8192

# From the deviations of h from h(mu), the error of the variance is about eps |h| / (sigma |h'|)
# relative to it; where that exceeds 1 / _DIGITS, it is better to start from h'.
_DIGITS = 1e5


def _moments(
    mu: Tensor, var: Tensor, *, function: Function, derivative: Function | None, rule: _Rule
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

    first, along, second = _sums(deviation, mu, sigma, rule)
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
    if _known_empty(narrow):
        return ActivationMoments(mean, variance, gain)
    slope, bend, second = _sums(derivative, mu, sigma, rule)
    # The Hermite series of h' (docs/theory.md, eq. 33): its first two terms, and of all others what
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
    function: Function, mu: Tensor, sigma: Tensor, rule: _Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """E[f], E[x f] and E[f^2] of f(mu + sigma x) for x ~ N(0, 1), each of mu's shape."""
    if mu.numel() <= _FEW:
        table = torch.tensor(rule.table, dtype=mu.dtype, device=mu.device)
        x, w = table.reshape(2, -1, *[1] * mu.dim())  # (K, 1, ..., 1) against (1 | B, n)
        values = function(torch.addcmul(mu, sigma, x))
        weighted = w * values
        return weighted.sum(0), (weighted * x).sum(0), (weighted * values).sum(0)
    first, along, second = (torch.zeros_like(mu + sigma) for _ in range(3))
    for x_k, w_k in rule.table.T.tolist():
        values = function(torch.add(mu, sigma, alpha=x_k))
        first.add_(values, alpha=w_k)
        along.add_(values, alpha=w_k * x_k)
        second.addcmul_(values, values, value=w_k)
    return first, along, second


def _known_empty(mask: Tensor) -> bool:
    """Whether it is known, without waiting for a device, that nothing is marked."""
    if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(mask):
        return False
    return mask.device.type == "cpu" and not bool(mask.any())


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
    (docs/theory.md has a measured table). Prefer a closed form where there is one. A network
    pickles if the function does, which a lambda does not.

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
            _moments,
            function=function,
            derivative=slope if smooth else None,
            rule=_gauss_hermite(nodes),
        ),
    )


def _tanh_slope(x: Tensor) -> Tensor:
    # Not 1 - tanh(x)^2, which in float32 has lost every digit by x = 9.
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _silu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


TANH = quadrature(torch.tanh, derivative=_tanh_slope, name="tanh")
SIGMOID = quadrature(torch.sigmoid, derivative=_sigmoid_slope, name="sigmoid")
SILU = quadrature(F.silu, derivative=_silu_slope, name="silu")
SOFTPLUS = quadrature(F.softplus, derivative=torch.sigmoid, name="softplus")
