"""Activation layers by name, as ``torch.nn`` has them."""

from __future__ import annotations

from covary import activations
from covary.nn.layers import Activation


def Heaviside() -> Activation:
    """The Heaviside step: 1 for x >= 0, else 0."""
    return Activation("heaviside")


def ReLU() -> Activation:
    """The rectified linear unit."""
    return Activation("relu")


def LeakyReLU(negative_slope: float = 0.01) -> Activation:
    """The leaky rectified linear unit."""
    return Activation(activations.leaky_relu(negative_slope))


def GELU() -> Activation:
    """x Phi(x), exactly (not its tanh approximation)."""
    return Activation("gelu")


def Probit() -> Activation:
    """Phi(x), the standard normal distribution function."""
    return Activation("probit")


def Tanh() -> Activation:
    """tanh(x), by quadrature."""
    return Activation("tanh")


def Sigmoid() -> Activation:
    """The logistic function, by quadrature."""
    return Activation("sigmoid")


def SiLU() -> Activation:
    """x sigmoid(x), by quadrature."""
    return Activation("silu")


def Softplus() -> Activation:
    """log(1 + exp(x)), by quadrature."""
    return Activation("softplus")
