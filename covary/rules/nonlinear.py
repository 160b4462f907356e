"""Elementwise nonlinearities: which moment activation each torch function has.

Each function here takes the arguments behind the first, by torch's names for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.rules.choices import activated
from covary.rules.registry import composed, elementwise, spellings
from covary.varying import ConversionError

# Functions of one argument that never fall.
_INCREASING = {
    *("relu", "relu6", "tanh", "sigmoid", "selu", "hardsigmoid", "logsigmoid", "softsign"),
    *("tanhshrink", "erf", "exp", "expm1"),
}
# Noise before them would leave the numbers that they take: norms are made of them.
_OF_SOME_NUMBERS = {"sqrt", "rsqrt", "log", "log1p", "reciprocal"}


def _named(name: str) -> Callable[..., MomentActivation]:
    def activation(inplace: bool = False) -> MomentActivation:
        return activations.get(name)

    return activation


def _always(*_: Any, **__: Any) -> bool:
    return True


def _unless_negative(slope: float = 1.0, *_: Any, **options: Any) -> bool:
    """Whether the first of the arguments behind x, whatever its name, is 0 or more."""
    return all(value >= 0 for value in (slope, *options.values()))


# A torch function has the moment activation of its own name. Those with more arguments follow
# below, but for the step: torch.heaviside takes a value at 0 for each element.
for _name in (*activations.names(), *activations.functions()):
    if _name != "heaviside" and spellings(_name):
        elementwise(
            _name,
            has_noise=_name not in _OF_SOME_NUMBERS,
            increasing=_always if _name in _INCREASING else None,
        )(_named(_name))
elementwise("absolute")(_named("abs"))
elementwise("expit", increasing=_always)(_named("sigmoid"))


@elementwise("leaky_relu", increasing=_unless_negative)
def leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> MomentActivation:
    """A slope below 0."""
    return activations.leaky_relu(negative_slope)


@elementwise("elu", increasing=_unless_negative)
def elu(alpha: float = 1.0, inplace: bool = False) -> MomentActivation:
    """alpha (e^x - 1) below 0."""
    return activations.elu(alpha)


@elementwise("celu", increasing=_unless_negative)
def celu(alpha: float = 1.0, inplace: bool = False) -> MomentActivation:
    """alpha (e^(x / alpha) - 1) below 0."""
    return activations.celu(alpha)


@elementwise("gelu")
def gelu(approximate: str = "none") -> MomentActivation:
    """x Phi(x), or its approximation by tanh."""
    return activations.get("gelu_tanh" if approximate == "tanh" else "gelu")


@elementwise("softplus", increasing=_unless_negative)
def softplus(beta: float = 1.0, threshold: float = 20.0) -> MomentActivation:
    """log(1 + e^(beta x)) / beta."""
    return activations.softplus(beta, threshold)


@elementwise("hardtanh", increasing=_always)
def hardtanh(
    min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> MomentActivation:
    """x within two bounds."""
    return activations.hardtanh(min_val, max_val)


@composed("clamp", "clip")
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """x within one bound or two: a ReLU, or a hardtanh; without noise if bounds are tensors."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        above = x if min is None else torch.maximum(x, torch.as_tensor(min, device=x.device))
        return above if max is None else torch.minimum(above, torch.as_tensor(max, device=x.device))
    if min is not None and max is not None:
        return F.hardtanh(x, float(min), float(max))
    if min is not None:
        return F.relu(x - min) + min
    assert max is not None
    return max - F.relu(max - x)


@composed("clamp_min")
def clamp_min(x: Any, min: float) -> Any:
    """x above a bound."""
    return clamp(x, min=min)


@composed("clamp_max")
def clamp_max(x: Any, max: float) -> Any:
    """x below a bound."""
    return clamp(x, max=max)


@composed("prelu")
def prelu(x: Any, weight: Any) -> Any:
    """w x + (1 - w) relu(x) of x with its noise, so that slopes w (C,) get their gradient."""
    noisy = x.run.noisy(x)
    slope = weight.view(-1, *[1] * (x.dim() - 2)) if weight.numel() > 1 else weight
    return slope * noisy + (1 - slope) * activated(noisy, activations.get("relu"))


@elementwise("threshold")
def threshold(threshold: float, value: float, inplace: bool = False) -> MomentActivation:
    """x above the threshold, a constant below."""
    return activations.threshold(threshold, value)


@elementwise("hardshrink")
def hardshrink(lambd: float = 0.5) -> MomentActivation:
    """0 in the middle."""
    return activations.hardshrink(lambd)


@elementwise("softshrink")
def softshrink(lambd: float = 0.5) -> MomentActivation:
    """0 in the middle, and no jump at its ends."""
    return activations.softshrink(lambd)


@elementwise("pow", Tensor.__pow__, has_noise=False)
def power(exponent: float) -> MomentActivation:
    """x to a constant power."""
    if isinstance(exponent, Tensor) and exponent.numel() > 1:
        raise ConversionError(
            f"covary cannot convert pow: its exponents are a tensor of shape "
            f"{tuple(exponent.shape)}. Give one number, or write it as exp(exponents * log(x))."
        )
    return activations.power(float(exponent))


@composed("glu")
def glu(input: Any, dim: int = -1) -> Any:
    """Half of the elements times the sigmoid of the other half."""
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()
