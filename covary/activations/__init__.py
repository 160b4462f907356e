"""Moment activations: from (mu, var) the mean, variance and gain of h(x), x ~ N(mu, var)."""

from __future__ import annotations

import difflib

from covary.activations.activation import ActivationMoments, MomentActivation
from covary.activations.heaviside import HEAVISIDE
from covary.activations.hermite import SIGMOID, SILU, SOFTPLUS, TANH, quadrature
from covary.activations.integrate_and_fire import lif
from covary.activations.neuron import LIF
from covary.activations.probit import ERF, GELU, PROBIT
from covary.activations.relu import IDENTITY, RELU, leaky_relu

__all__ = [
    "LIF",
    "ActivationMoments",
    "MomentActivation",
    "get",
    "leaky_relu",
    "lif",
    "names",
    "quadrature",
]

_REGISTRY = {
    "erf": ERF,
    "gelu": GELU,
    "heaviside": HEAVISIDE,
    "identity": IDENTITY,
    "leaky_relu": leaky_relu(),
    "probit": PROBIT,
    "relu": RELU,
    "sigmoid": SIGMOID,
    "silu": SILU,
    "softplus": SOFTPLUS,
    "tanh": TANH,
}


def names() -> list[str]:
    """The names that ``get`` knows."""
    return sorted([*_REGISTRY, "lif"])


def get(activation: str | MomentActivation) -> MomentActivation:
    """The moment activation of this name; one that already is one is returned as it is.

    Examples:
        >>> get("relu")
        relu
    """
    if isinstance(activation, MomentActivation):
        return activation
    if activation == "lif":  # made when it is wanted, as its tables take a moment
        return lif()
    if not isinstance(activation, str) or activation not in _REGISTRY:
        name = activation if isinstance(activation, str) else type(activation).__name__
        close = difflib.get_close_matches(name.lower(), names(), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        maker = getattr(activation, "__name__", None)
        if maker in ("lif", "leaky_relu"):
            hint = f" (did you mean {maker}(), called?)"
        raise ValueError(
            f"Unknown activation {activation!r}{hint}; known are {', '.join(names())}. Any other "
            "function h works as covary.activations.quadrature(h)."
        )
    return _REGISTRY[activation]
