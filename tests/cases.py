"""Inputs that tests share, as data."""

from __future__ import annotations

import torch
from torch import Tensor

from covary import activations

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

_MEANS = [0, 1e-4, 0.03, 0.3, 0.77, 1, 1.5, 2.2, 3, 4, 5, 6.3, 8, 10, 12, 20, 35, 50]
_SIGMAS = [1e-6, 1e-4, 5e-4, 1e-2, 0.1, 0.2, 0.5, 1, 2, 3.3, 5, 8, 10, 30, 100, 1e3]


def wide_grid(every: int = 1) -> tuple[Tensor, Tensor]:
    """mu in [-50, 50] and sigma in [1e-6, 1e3], with 0: float64 tensors of float32 numbers, (N,).

    All pairs, or every so many of them (a step that does not divide the rows).
    """
    means = torch.tensor(sorted({sign * mean for mean in _MEANS for sign in (-1, 1)}))
    variances = torch.tensor([0.0, *(sigma**2 for sigma in _SIGMAS)])
    # mu / sigma = 1e5, where E[x^2] - E[x]^2 is nothing but rounding error in float32
    pairs = torch.cat([torch.cartesian_prod(means, variances), torch.tensor([[50.0, 2.5e-7]])])
    mu, var = pairs[::every].double().unbind(1)
    return mu, var


def grid(*, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Moderate mu and var > 0, float64, (1, N) each."""
    mu, var = torch.cartesian_prod(
        torch.tensor([-3.0, -1.1, -0.2, 0.3, 0.9, 2.5], dtype=torch.float64),
        torch.tensor([0.01, 0.3, 1.0, 4.0], dtype=torch.float64),
    ).unbind(1)
    return (
        mu[None].clone().requires_grad_(requires_grad),
        var[None].clone().requires_grad_(requires_grad),
    )
