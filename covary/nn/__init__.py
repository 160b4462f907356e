"""Layers that take Moments and give Moments, to be chained in ``torch.nn.Sequential``.

One value goes in and one comes out of every layer, so ordinary modules may stand in front of
``Lift`` (a mixed network) and anything that takes a tensor may follow ``out.mean``. ``MomentLayer``
says which two methods a layer of your own needs to be simulated and compared.
"""

from covary.nn.layers import (
    GELU,
    Activation,
    BatchNorm1d,
    Dropout,
    Flatten,
    Heaviside,
    LeakyReLU,
    Noise,
    Probit,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
)
from covary.nn.lift import Lift
from covary.nn.linear import Linear
from covary.nn.protocol import Drawn, MomentLayer, Noisy
from covary.nn.scales import Rescale, Standardize

__all__ = [
    "GELU", "Activation", "BatchNorm1d", "Drawn", "Dropout", "Flatten", "Heaviside", "LeakyReLU",
    "Lift", "Linear", "MomentLayer", "Noise", "Noisy", "Probit", "ReLU", "Rescale", "SiLU",
    "Sigmoid", "Softplus", "Standardize", "Tanh",
]  # fmt: skip
