"""Moment activations: from (mu, var) the mean, variance and gain of h(x), x ~ N(mu, var)."""

from __future__ import annotations

import difflib

from covary.activations.activation import ActivationMoments, MomentActivation
from covary.activations.elementary import (
    ABS,
    COS,
    LOG,
    LOG1P,
    RECIPROCAL,
    RSQRT,
    SIN,
    SQRT,
    SQUARE,
    power,
)
from covary.activations.exponential import EXP, EXPM1, SELU, celu, elu
from covary.activations.heaviside import HEAVISIDE
from covary.activations.hermite import quadrature
from covary.activations.integrate_and_fire import lif
from covary.activations.neuron import LIF
from covary.activations.piecewise import (
    HARDSIGMOID,
    HARDSWISH,
    RELU6,
    hardshrink,
    hardtanh,
    softshrink,
    threshold,
)
from covary.activations.probit import ERF, GELU, PROBIT
from covary.activations.relu import IDENTITY, RELU, leaky_relu
from covary.activations.smooth import (
    GELU_TANH,
    LOGSIGMOID,
    MISH,
    SIGMOID,
    SILU,
    SOFTSIGN,
    TANH,
    TANHSHRINK,
    softplus,
)

# Functions that make an activation of their arguments.
_MAKERS = (
    "celu", "elu", "hardshrink", "hardtanh", "leaky_relu", "lif", "power", "softplus", "softshrink",
    "threshold",
)  # fmt: skip
__all__ = [
    "LIF", "ActivationMoments", "MomentActivation", "celu", "elu", "functions", "get", "hardshrink",
    "hardtanh", "leaky_relu", "lif", "names", "power", "quadrature", "softplus", "softshrink",
    "threshold",
]  # fmt: skip

_NETWORKS = (
    ABS, COS, ERF, GELU, GELU_TANH, HARDSIGMOID, HARDSWISH, HEAVISIDE, IDENTITY, LOGSIGMOID, MISH,
    PROBIT, RELU, RELU6, SELU, SIGMOID, SILU, SIN, SOFTSIGN, TANH, TANHSHRINK,
    celu(), elu(), hardshrink(), hardtanh(), softplus(), softshrink(),
)  # fmt: skip
_FUNCTIONS = (EXP, EXPM1, LOG, LOG1P, RECIPROCAL, RSQRT, SQRT, SQUARE)
_REGISTRY = {found.name: found for found in (*_NETWORKS, *_FUNCTIONS)}
_REGISTRY["leaky_relu"] = leaky_relu()


def names() -> list[str]:
    """The names of activations for networks: defined everywhere, growing at most linearly."""
    return sorted([*(found.name for found in _NETWORKS), "leaky_relu", "lif"])


def functions() -> list[str]:
    """The other names that ``get`` takes: functions that grow faster, or have a limited domain."""
    return sorted(found.name for found in _FUNCTIONS)


def get(activation: str | MomentActivation) -> MomentActivation:
    """The moment activation of this name; a moment activation is returned as it is.

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
        close = difflib.get_close_matches(name.lower(), [*names(), *functions()], n=1, cutoff=0.7)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        maker = getattr(activation, "__name__", None)
        if maker in _MAKERS:
            hint = f" (did you mean {maker}(), called?)"
        raise ValueError(
            f"Unknown activation {activation!r}{hint}; known are {', '.join(names())}, and the "
            f"functions {', '.join(functions())}. Any other function h works as "
            "covary.activations.quadrature(h)."
        )
    return _REGISTRY[activation]
