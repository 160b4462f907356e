"""Elementwise nonlinearities and the largest of several elements: both moment matched.

A torch function has the moment activation of its name. The larger of two values is
``b + relu(a - b)``; maxima of windows and of dimensions are made of such pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.nn.layers import applied
from covary.rules.helpers import counted, fixed, for_each, mapped, merged
from covary.rules.registry import CHOICE, composed, elementwise, rule, spellings
from covary.varying import ConversionError, Varying, plain

# Functions of one argument that never fall.
_INCREASING = {
    *("relu", "relu6", "tanh", "sigmoid", "selu", "hardsigmoid", "logsigmoid", "softsign"),
    *("tanhshrink", "erf", "exp", "expm1"),
}
# Noise before them would leave the numbers that they take: norms are made of them.
_OF_SOME_NUMBERS = {"sqrt", "rsqrt", "log", "log1p", "reciprocal"}


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
        )(partial(activations.get, _name))
elementwise("absolute")(partial(activations.get, "abs"))
elementwise("expit", increasing=_always)(partial(activations.get, "sigmoid"))

# Their arguments have torch's names.
elementwise("elu", increasing=_unless_negative)(activations.elu)
elementwise("celu", increasing=_unless_negative)(activations.celu)
elementwise("softplus", increasing=_unless_negative)(activations.softplus)
elementwise("hardtanh", increasing=_always)(activations.hardtanh)
elementwise("threshold")(activations.threshold)
elementwise("hardshrink")(activations.hardshrink)
elementwise("softshrink")(activations.softshrink)


@elementwise("leaky_relu", increasing=_unless_negative)
def leaky_relu(negative_slope: float = 0.01) -> MomentActivation:
    """x for x >= 0, else ``negative_slope`` x."""
    return activations.leaky_relu(negative_slope)


@elementwise("gelu")
def gelu(approximate: str = "none") -> MomentActivation:
    """x Phi(x), or its approximation by tanh."""
    return activations.get("gelu_tanh" if approximate == "tanh" else "gelu")


@elementwise("pow", Tensor.__pow__, has_noise=False)
def power(exponent: float) -> MomentActivation:
    """x to a constant power."""
    if isinstance(exponent, Tensor) and exponent.numel() > 1:
        raise ConversionError(
            f"covary cannot convert pow: its exponents are a tensor of shape "
            f"{tuple(exponent.shape)}. Give one number, or write it as exp(exponents * log(x))."
        )
    return activations.power(float(exponent))


@composed("clamp", "clip")
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """x within one bound or two: a ReLU, or a hardtanh; without noise if bounds are tensors."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        above = x if min is None else torch.maximum(x, torch.as_tensor(min, device=x.device))
        return above if max is None else torch.minimum(above, torch.as_tensor(max, device=x.device))
    if min is not None and max is not None:
        return F.hardtanh(x, float(min), float(max))
    return F.relu(x - min) + min if max is None else max - F.relu(max - x)


composed("clamp_min")(lambda x, min: clamp(x, min=min))
composed("clamp_max")(lambda x, max: clamp(x, max=max))


@composed("prelu")
def prelu(x: Any, weight: Any) -> Any:
    """w x + (1 - w) relu(x) of x with its noise, so that slopes w (C,) get their gradient."""
    noisy = x.run.noisy(x)
    slope = weight.view(-1, *[1] * (x.dim() - 2)) if weight.numel() > 1 else weight
    return slope * noisy + (1 - slope) * activated(noisy, activations.get("relu"))


@composed("glu")
def glu(input: Any, dim: int = -1) -> Any:
    """Half of the elements times the sigmoid of the other half."""
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def activated(x: Any, activation: MomentActivation) -> Any:
    """h(x) where no noise enters: part of another function, not a nonlinearity of its own."""
    if isinstance(x, Varying):
        return x.run.call(activated, (x, activation), {})
    return activation.function(x)


elementwise(activated, has_noise=False)(lambda activation: activation)
elementwise(applied)(lambda activation: activation)  # of the conventional layers of covary.nn


def larger(x: Any, y: Any) -> Any:
    """max(x, y) of two values that vary, moment matched."""
    if isinstance(x, Varying):
        return x.run.call(larger, (x, y), {})
    return torch.maximum(x, y)


rule(larger, is_pair=True)(lambda x, y: x.run.larger(x, y, merged([x, y])))


@composed("maximum", "fmax")
def maximum(x: Any, y: Any) -> Any:
    """The larger of two values, or of a value and a bound."""
    if isinstance(x, Varying) and isinstance(y, Varying):
        return larger(x, y)
    value, bound = (x, y) if isinstance(x, Varying) else (y, x)
    return bound + activated(value - bound, activations.get("relu"))


composed("minimum", "fmin")(lambda x, y: -torch.maximum(-x, -y))


def _before_activation(x: Any, pool: Callable[[Any], Any]) -> Any:
    """The largest of some elements: of what went into an increasing activation, if x came from one.

    Rectified values are far from Gaussian, and so is the difference of two; what goes into an
    activation is closer, and the largest result is the result of the largest.
    """
    if x.into_activation is None:
        return pool(x)
    noisy, activation = x.into_activation()
    return activated(pool(noisy), activation)


def _largest(x: Any, dim: int) -> Any:
    """The largest along a dimension, which stays with size 1: pairs, pairs of pairs and so on."""
    while (count := x.shape[dim]) > 1:
        half = count // 2
        pairs = torch.maximum(x.narrow(dim, 0, half), x.narrow(dim, half, half))
        x = pairs if count == 2 * half else torch.cat([pairs, x.narrow(dim, count - 1, 1)], dim)
    return x


@composed("amax")
def amax(x: Any, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
    """The largest along some dimensions, none of which is the batch."""
    dims = counted(x, dim)
    fixed(x, dims)

    def pool(x: Any) -> Any:
        for each in dims:
            x = _largest(x, each)
        return x

    found = _before_activation(x, pool)
    for each in () if keepdim else sorted(dims, reverse=True):
        found = found.squeeze(each)
    return found


@composed("amin")
def amin(x: Any, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
    """The smallest along some dimensions."""
    return -amax(-x, dim, keepdim)


def _extreme(name: str, along: Callable[..., Any], pair: Callable[..., Any]) -> None:
    """Register the extreme of two values, or along a dimension, with its place at the mean."""
    function = getattr(torch, name)

    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            return pair(x, other)
        dim = kwargs.get("dim", other)
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
        values = along(x, () if dim is None else dim, keepdim)
        found = function(plain(x), dim, keepdim)
        return type(found)((values, found[1]))

    composed(name)(apply)


_extreme("max", amax, torch.maximum)
_extreme("min", amin, torch.minimum)


def _pooling(dims: int) -> None:
    """The largest in each window, one dimension after the other."""
    name, adaptive = f"max_pool{dims}d", f"adaptive_max_pool{dims}d"

    def apply(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        kernels, pads = for_each(kernel_size, dims), for_each(padding, dims)
        steps = kernels if stride is None else for_each(stride, dims)
        if return_indices or ceil_mode or max(for_each(dilation, dims)) > 1:
            options = (kernel_size, stride, padding, dilation, ceil_mode)
            return _chosen(x, dims, name, options, return_indices)

        def pool(x: Any) -> Any:
            for axis in range(dims):
                x = _largest_in_windows(x, axis - dims, kernels[axis], steps[axis], pads[axis])
            return x

        return _before_activation(x, pool)

    def apply_adaptive(x: Any, output_size: Any, return_indices: bool = False) -> Any:
        if return_indices or any(size != 1 for size in for_each(output_size, dims)):
            return _chosen(x, dims, adaptive, (output_size,), return_indices)
        return amax(x, range(-dims, 0), keepdim=True)

    composed(name, f"{name}_with_indices")(apply)
    composed(adaptive, f"{adaptive}_with_indices")(apply_adaptive)


def _largest_in_windows(x: Any, axis: int, kernel: int, step: int, pad: int) -> Any:
    """The largest in each window along a dimension; windows at the ends have fewer elements."""
    size = x.shape[axis]
    # Outputs whose windows have the same places inside are made together.
    groups: dict[tuple[int, int], list[int]] = {}
    for out in range((size + 2 * pad - kernel) // step + 1):
        inside = max(0, pad - out * step), min(kernel, size + pad - out * step)
        groups.setdefault(inside, []).append(out * step - pad)
    behind = (slice(None),) * (-1 - axis)
    parts = []
    for (low, high), starts in groups.items():
        ends = [slice(starts[0] + i, starts[-1] + i + 1, step) for i in range(low, high)]
        shifted = [x[(..., end, *behind)] for end in ends]
        while len(shifted) > 1:
            pairs = zip(shifted[::2], shifted[1::2], strict=False)
            rest = shifted[len(shifted) - len(shifted) % 2 :]
            shifted = [*(torch.maximum(a, b) for a, b in pairs), *rest]
        parts += shifted
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _chosen(x: Any, dims: int, name: str, options: Sequence[Any], return_indices: bool) -> Any:
    """The largest in each window by the means, for windows that are not made of pairs here."""
    fixed(x, range(-dims, 0))
    mean, indices = getattr(F, f"{name}_with_indices")(x.numbers, *options)
    shape = x.shape

    def pull(rows: Tensor) -> Tensor:
        flat = rows.flatten(-dims)
        where = indices.flatten(-dims).expand(flat.shape)
        back = flat.new_zeros(*flat.shape[:-1], shape[-dims:].numel())
        return back.scatter_add(-1, where, flat).reshape(len(rows), *shape)

    pooled = x.run.wrapped(mean) if x.run.is_drawing else mapped(x, mean, pull, kind=CHOICE)
    return (pooled, indices) if return_indices else pooled


for _dims in (1, 2, 3):
    _pooling(_dims)
