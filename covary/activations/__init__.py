"""Moment activations: from (mu, var) the mean, variance and gain of h(x), x ~ N(mu, var)."""

from covary.activations.activation import (
    ActivationMoments,
    MomentActivation,
    functions,
    get,
    names,
)
from covary.activations.hermite import quadrature
from covary.activations.neuron import LIF, lif
from covary.activations.normal import leaky_relu
from covary.activations.piecewise import celu, elu, hardshrink, hardtanh, softshrink, threshold
from covary.activations.smooth import power, softplus

__all__ = [
    "LIF", "ActivationMoments", "MomentActivation", "celu", "elu", "functions", "get", "hardshrink",
    "hardtanh", "leaky_relu", "lif", "names", "power", "quadrature", "softplus", "softshrink",
    "threshold",
]  # fmt: skip
