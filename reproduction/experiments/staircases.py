"""Sums of shifted Heaviside steps that stand for other activations, and their moments.

The paper carries its theorems from Heaviside units to others by such sums,

    g_n(x) = sum_r a_r h(x - b_r) -> g(x)   with   |g_n(x)| <= |g(x)|        (eq. g_abs_g_n).

Of x ~ N(mu, var), with p_r = P(x >= b_r) and the density f_r of x at b_r, g_n(x) has

    mean sum_r a_r p_r,   gain sum_r a_r f_r,   E[g_n(x)^2] = sum_r (c_r^2 - c_{r-1}^2) p_r,

where c_r = a_1 + ... + a_r is the level behind step r. Made a layer of Heaviside units, with a
readout that sums them, it has another variance: there the covariance activation (eq. cov_map)
takes two units, here steps of one x, to be weakly correlated, whatever they are. That gives

    sum_r a_r^2 (p_r (1 - p_r) - f_r^2 var) + (sum_r a_r f_r)^2 var,

and with more and lower steps the first sum goes to 0: what is left is gain^2 var, the linear
response of g, less than the variance of g(x) by all that bends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.activations.activation import ActivationMoments

Function = Callable[[Tensor], Tensor]


class Staircase(NamedTuple):
    """``sum_r heights[r] h(x - edges[r])``, each (R,), edges in their order."""

    edges: Tensor
    heights: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The value at x, of any shape."""
        # Steps at x count: h(0) = 1.
        place = torch.searchsorted(self.edges, x.contiguous(), right=True)
        levels = torch.cat([self.heights.new_zeros(1), self.heights.cumsum(0)])
        return levels[place]


def staircase(function: Function, n: int) -> Staircase:
    """The n-th of the series: steps of width 2^-n, from -2 (n + 1) to 2 (n + 1).

    Between two edges it is what the function is at one of them, whichever is nearer to 0; and 0 if
    they have different signs, and left of all edges. So it is never larger in size than a function
    that between edges rises or falls, and whose size does not fall right of the last one.
    """
    reach = 2 * (n + 1)
    edges = torch.arange(-reach * 2**n, reach * 2**n + 1, dtype=torch.float64) / 2**n
    values = function(edges)
    left, right = values[:-1], values[1:]
    nearer = torch.where(left.abs() < right.abs(), left, right)
    levels = torch.where(left * right > 0, nearer, 0.0)
    heights = levels.diff(prepend=levels.new_zeros(1))
    steps = heights != 0
    return Staircase(edges[:-1][steps], heights[steps])


class _Steps(NamedTuple):
    """Of each step, (..., R): the probability to be beyond it, and the density there."""

    beyond: Tensor
    density: Tensor


def _steps(stairs: Staircase, mu: Tensor, var: Tensor) -> _Steps:
    sigma = var.sqrt()[..., None]
    z = (mu[..., None] - stairs.edges) / sigma
    density = torch.exp(-z.square() / 2) / (math.sqrt(2 * math.pi) * sigma)
    return _Steps(torch.special.ndtr(z), density)


def moments(mu: Tensor, var: Tensor, *, stairs: Staircase) -> ActivationMoments:
    """Mean, variance and gain of g_n(x); see the top of this file."""
    beyond, density = _steps(stairs, mu, var)
    mean = beyond @ stairs.heights
    levels = stairs.heights.cumsum(0)
    squares = levels.square().diff(prepend=levels.new_zeros(1))
    variance = (beyond @ squares - mean.square()).clamp(min=0)
    return ActivationMoments(mean, variance, density @ stairs.heights)


def network_moments(mu: Tensor, var: Tensor, *, stairs: Staircase) -> ActivationMoments:
    """The same of the layer of Heaviside units that g_n is; all see one noise."""
    beyond, density = _steps(stairs, mu, var)
    gain = density @ stairs.heights
    own = beyond * (1 - beyond) - density.square() * var[..., None]
    variance = own @ stairs.heights.square() + gain.square() * var
    return ActivationMoments(beyond @ stairs.heights, variance.clamp(min=0), gain)


def activation(name: str, n: int, *, network: bool = False) -> MomentActivation:
    """The staircase of an activation of covary, as an activation.

    ``network``: with the variance that a layer of Heaviside units has.
    """
    stairs = staircase(activations.get(name).function, n)
    formula = network_moments if network else moments
    kind = "network" if network else "staircase"
    return MomentActivation(
        f"{kind} {n} of {name}", stairs.__call__, torch.zeros_like, partial(formula, stairs=stairs)
    )
