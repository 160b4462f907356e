"""Moments of any activation by Gauss-Hermite quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import ActivationMoments, MomentActivation

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Rule:
    """Nodes and weights with sum_k w_k f(x_k) = E[f(x)] for x ~ N(0, 1), exactly for polynomials.

    Kept as numbers, not tensors, so that a network moves between devices and dtypes without them.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]


def _gauss_hermite(count: int) -> _Rule:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return _Rule(tuple(nodes.tolist()), tuple((weights / weights.sum()).tolist()))


def _moments(
    mu: Tensor, var: Tensor, *, function: Function, derivative: Function | None, rule: _Rule
) -> ActivationMoments:
    """Quadrature of docs/theory.md, eqs. (4) to (6)."""
    # (K, 1, ..., 1) against (1 | B, n)
    shape = (-1, *([1] * mu.dim()))
    x = torch.tensor(rule.nodes, dtype=mu.dtype, device=mu.device).reshape(shape)
    weights = torch.tensor(rule.weights, dtype=mu.dtype, device=mu.device).reshape(shape)
    sigma = var.sqrt()
    points = mu + sigma * x
    values = function(points)
    mean = (weights * values).sum(0)
    # About the mean, not E[h^2] - E[h]^2, which is rounding error wherever sigma is small.
    variance = (weights * (values - mean).square()).sum(0)
    # Under one rule Bessel's inequality holds to the letter: gain^2 var never exceeds the variance.
    gain = (weights * x * (values - mean)).sum(0) / sigma
    if derivative is not None:
        # The sum above divides rounding error by sigma; below 0.1 it is better to average h'.
        average_slope = (weights * derivative(points)).sum(0)
        gain = torch.where(var < 0.01, average_slope, gain)
    return ActivationMoments(mean, variance, gain)


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
    return 1 - torch.tanh(x).square()


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _silu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


TANH = quadrature(torch.tanh, derivative=_tanh_slope, name="tanh")
SIGMOID = quadrature(torch.sigmoid, derivative=_sigmoid_slope, name="sigmoid")
SILU = quadrature(F.silu, derivative=_silu_slope, name="silu")
SOFTPLUS = quadrature(F.softplus, derivative=torch.sigmoid, name="softplus")
