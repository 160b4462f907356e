"""Elementwise nonlinearities: which moment activation each torch function has.

Each function here takes the arguments behind the first, by torch's names for them.
"""

from __future__ import annotations

from typing import Any

from covary import activations
from covary.activations import MomentActivation
from covary.rules.registry import composed, elementwise


def _by_name(name: str) -> None:
    def activation(inplace: bool = False) -> MomentActivation:
        return activations.get(name)

    elementwise(name)(activation)


for _name in ("relu", "tanh", "sigmoid", "erf", "silu"):
    _by_name(_name)


@elementwise("leaky_relu")
def leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> MomentActivation:
    """Slope below 0."""
    return activations.leaky_relu(negative_slope)


@elementwise("gelu")
def gelu(approximate: str = "none") -> MomentActivation:
    """x Phi(x)."""
    return activations.get("gelu")


@elementwise("softplus")
def softplus(beta: float = 1.0, threshold: float = 20.0) -> MomentActivation:
    """log(1 + e^(beta x)) / beta."""
    return activations.get("softplus")


@composed("glu")
def glu(input: Any, dim: int = -1) -> Any:
    """Half of the elements times the sigmoid of the other half."""
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()
