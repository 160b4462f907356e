"""Activation layers by name, as ``torch.nn`` has them."""

from __future__ import annotations

from typing import ClassVar

from covary import activations
from covary.nn.layers import Activation


class _Named(Activation):
    """An activation without options; ``name`` is its name in ``covary.activations``."""

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(self.name)

    def extra_repr(self) -> str:
        return ""


class Heaviside(_Named):
    """The Heaviside step: 1 for x >= 0, else 0."""

    name = "heaviside"


class ReLU(_Named):
    """The rectified linear unit: max(x, 0)."""

    name = "relu"


class LeakyReLU(Activation):
    """The leaky rectified linear unit: x for x >= 0, else ``negative_slope`` x."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__(activations.leaky_relu(negative_slope))
        self.negative_slope = negative_slope

    def extra_repr(self) -> str:
        return f"negative_slope={self.negative_slope}"


class GELU(_Named):
    """x Phi(x), exactly (not its tanh approximation)."""

    name = "gelu"


class Probit(_Named):
    """Phi(x), the standard normal distribution function."""

    name = "probit"


class Tanh(_Named):
    """tanh(x), by quadrature."""

    name = "tanh"


class Sigmoid(_Named):
    """The logistic function, by quadrature."""

    name = "sigmoid"


class SiLU(_Named):
    """x sigmoid(x), by quadrature."""

    name = "silu"


class Softplus(_Named):
    """log(1 + exp(x)), by quadrature."""

    name = "softplus"
