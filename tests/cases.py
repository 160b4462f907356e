"""Inputs that tests share, as data."""

from __future__ import annotations

from covary import activations
from covary.testing.activations import grid, wide_grid

__all__ = ["grid", "wide_grid"]

CLOSED_FORM = {
    "heaviside": activations.get("heaviside"),
    "relu": activations.get("relu"),
    "identity": activations.get("identity"),
    "leaky_relu": activations.get("leaky_relu"),
    "leaky_relu_half": activations.leaky_relu(0.5),
    "gelu": activations.get("gelu"),
    "probit": activations.get("probit"),
    "erf": activations.get("erf"),
}
PIECEWISE = {
    "relu6": activations.get("relu6"),
    "hardtanh": activations.get("hardtanh"),
    "hardtanh_low": activations.hardtanh(-2.0, 0.5),
    "hardsigmoid": activations.get("hardsigmoid"),
    "hardswish": activations.get("hardswish"),
    "hardshrink": activations.get("hardshrink"),
    "softshrink": activations.get("softshrink"),
    "threshold": activations.threshold(0.5, -0.25),
}
EXPONENTIAL = {
    "elu": activations.get("elu"),
    "elu_quarter": activations.elu(0.25),
    "celu_half": activations.celu(0.5),
    "selu": activations.get("selu"),
}
WAVES = {name: activations.get(name) for name in ("sin", "cos", "abs")}
QUADRATURE = {
    "tanh": activations.get("tanh"),
    "sigmoid": activations.get("sigmoid"),
    "silu": activations.get("silu"),
    "softplus": activations.get("softplus"),
    "softplus_sharp": activations.softplus(2.0, 30.0),
    "mish": activations.get("mish"),
    "logsigmoid": activations.get("logsigmoid"),
    "gelu_tanh": activations.get("gelu_tanh"),
    "tanhshrink": activations.get("tanhshrink"),
    "softsign": activations.get("softsign"),
}
# Of any input, and growing no faster than linearly.
ACTIVATIONS = CLOSED_FORM | PIECEWISE | EXPONENTIAL | WAVES | QUADRATURE
GROWING = {
    "exp": activations.get("exp"),
    "expm1": activations.get("expm1"),
    "square": activations.get("square"),
    "cube": activations.power(3),
}
POSITIVE = {
    "sqrt": activations.get("sqrt"),
    "log": activations.get("log"),
    "log1p": activations.get("log1p"),
    "reciprocal": activations.get("reciprocal"),
    "rsqrt": activations.get("rsqrt"),
    "power_1.5": activations.power(1.5),
}
# Those whose moments are smooth in (mu, var) to the last digit, as no rule with fixed nodes is.
SMOOTHED = {
    name: found
    for name, found in (CLOSED_FORM | PIECEWISE | EXPONENTIAL | WAVES | GROWING).items()
    if name != "identity"
}
