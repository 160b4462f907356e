"""The largest of several elements, and functions that choose among them.

The larger of two values is ``b + relu(a - b)``: a difference, which is exact, and a ReLU, which is
moment matched. Maxima of windows and of dimensions are made of such pairs. What remains (sorting,
comparing) is chosen by the means, and the choice counts as constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.rules.helpers import counted, differentiated, fixed, for_each, mapped, merged, without
from covary.rules.registry import CHOICE, RULES, Rule, composed, register, rule
from covary.varying import Varying, plain


def activated(x: Any, activation: MomentActivation) -> Any:
    """h(x) where no noise enters: part of another function, not a nonlinearity of its own."""
    if isinstance(x, Varying):
        return x.run.call(activated, (x, activation), {})
    return activation.function(x)


RULES[activated] = Rule(activation=lambda activation: activation, has_noise=False)


def larger(x: Any, y: Any) -> Any:
    """max(x, y) of two values that vary, moment matched."""
    if isinstance(x, Varying):
        return x.run.call(larger, (x, y), {})
    return torch.maximum(x, y)


RULES[larger] = Rule(lambda x, y: x.run.larger(x, y, merged([x, y])), is_pair=True)


@composed("maximum", "fmax")
def maximum(x: Any, y: Any) -> Any:
    """The larger of two values, or of a value and a bound."""
    if isinstance(x, Varying) and isinstance(y, Varying):
        return larger(x, y)
    value, bound = (x, y) if isinstance(x, Varying) else (y, x)
    return bound + activated(value - bound, activations.get("relu"))


@composed("minimum", "fmin")
def minimum(x: Any, y: Any) -> Any:
    """The smaller of two values."""
    return -torch.maximum(-x, -y)


def largest(x: Any, dim: int) -> Any:
    """The largest along a dimension, which stays with size 1: pairs, pairs of pairs and so on."""
    while (count := x.shape[dim]) > 1:
        half = count // 2
        pairs = torch.maximum(x.narrow(dim, 0, half), x.narrow(dim, half, half))
        x = pairs if count == 2 * half else torch.cat([pairs, x.narrow(dim, count - 1, 1)], dim)
    return x


def _before_activation(x: Any, pool: Callable[[Any], Any]) -> Any:
    """The largest of some elements: of what went into an increasing activation, if x came from one.

    Rectified values are far from Gaussian, and so is the difference of two; what goes into an
    activation is closer, and the largest result is the result of the largest.
    """
    if x.into_activation is None:
        return pool(x)
    noisy, activation = x.into_activation()
    return activated(pool(noisy), activation)


@composed("amax")
def amax(x: Any, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
    """The largest along some dimensions, none of which is the batch."""
    dims = _dims(x, dim)

    def pool(x: Any) -> Any:
        for each in dims:
            x = largest(x, each)
        return x

    found = _before_activation(x, pool)
    return found if keepdim else without(found, dims)


@composed("amin")
def amin(x: Any, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
    """The smallest along some dimensions."""
    return -amax(-x, dim, keepdim)


def _extreme(
    function: Callable[..., Any], along: Callable[..., Any], pair: Callable[..., Any]
) -> Any:
    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        """Of two values, or along a dimension, with the places where it is at the mean."""
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            return pair(x, other)
        dim = kwargs.get("dim", other)
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
        values = along(x, () if dim is None else dim, keepdim)
        found = function(plain(x), dim, keepdim)
        return type(found)((values, found[1]))

    return apply


composed("max")(_extreme(torch.max, amax, torch.maximum))
composed("min")(_extreme(torch.min, amin, torch.minimum))


def _dims(x: Any, dim: int | Sequence[int]) -> list[int]:
    every = counted(dim, x.dim())
    if not every:
        raise x.run.refusal("It goes over all elements, the batch among them.", "Name its dim=.")
    fixed(x, every)
    return every


def _pooling(dims: int) -> Callable[..., Any]:
    by_means = getattr(F, f"max_pool{dims}d_with_indices")

    def apply(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        """The largest in each window, one dimension after the other."""
        kernels, pads = for_each(kernel_size, dims), for_each(padding, dims)
        steps = kernels if stride is None else for_each(stride, dims)
        if return_indices or ceil_mode or max(for_each(dilation, dims)) > 1:
            return chosen_windows(
                x, dims, by_means, kernel_size, stride, padding, dilation, ceil_mode, return_indices
            )

        def pool(x: Any) -> Any:
            for axis in range(dims):
                x = _largest_in_windows(x, axis - dims, kernels[axis], steps[axis], pads[axis])
            return x

        return _before_activation(x, pool)

    return apply


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
        places: list[Any] = [(..., end, *behind) for end in ends]
        shifted = [x[place] for place in places]
        while len(shifted) > 1:
            pairs = zip(shifted[::2], shifted[1::2], strict=False)
            rest = shifted[len(shifted) - len(shifted) % 2 :]
            shifted = [*(torch.maximum(a, b) for a, b in pairs), *rest]
        parts += shifted
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _adaptive(dims: int) -> Callable[..., Any]:
    by_means = getattr(F, f"adaptive_max_pool{dims}d_with_indices")

    def apply(x: Any, output_size: Any, return_indices: bool = False) -> Any:
        """The largest in each of so many windows."""
        sizes = for_each(output_size, dims)
        if return_indices or any(size != 1 for size in sizes):
            return chosen_windows(x, dims, by_means, output_size, return_indices)
        return amax(x, range(-dims, 0), keepdim=True)

    return apply


def chosen_windows(x: Any, dims: int, by_means: Callable[..., Any], *args: Any) -> Any:
    """The largest in each window by the means, for windows that are not made of pairs here."""
    *options, return_indices = args
    if x.run.is_drawing:
        found = by_means(plain(x), *options)
        pooled = x.run.wrapped(found[0])
        return (pooled, found[1]) if return_indices else pooled
    fixed(x, range(-dims, 0))
    mean, indices = by_means(x.numbers, *options)
    shape = x.shape

    def pull(rows: Tensor) -> Tensor:
        flat = rows.flatten(-dims)
        where = indices.flatten(-dims).expand(flat.shape)
        back = flat.new_zeros(*flat.shape[:-1], shape[-dims:].numel())
        return back.scatter_add(-1, where, flat).reshape(len(rows), *shape)

    pooled = mapped(x, mean, pull, kind=CHOICE)
    return (pooled, indices) if return_indices else pooled


for _dims_ in (1, 2, 3):
    composed(f"max_pool{_dims_}d", f"max_pool{_dims_}d_with_indices")(_pooling(_dims_))
    composed(f"adaptive_max_pool{_dims_}d", f"adaptive_max_pool{_dims_}d_with_indices")(
        _adaptive(_dims_)
    )


@rule("topk", "sort", "median", "kthvalue")
def chosen(x: Varying, *args: Any, **kwargs: Any) -> Any:
    """Some of the elements along a dimension, by the order of the means."""
    function = x.run.function
    if function.__name__ == "median" and not args and "dim" not in kwargs:
        raise x.run.refusal("It goes over all elements, the batch among them.", "Name its dim=.")
    first = 1 if function.__name__ in ("topk", "kthvalue") else 0
    given = args[first] if len(args) > first and not isinstance(args[first], bool) else -1
    dim = kwargs.get("dim", given)
    fixed(x, [dim])
    found = function(x.numbers, *args, **kwargs)
    samples = x.samples.without([dim] if found[0].dim() < x.dim() else [])
    value = differentiated(lambda value: function(value, *args, **kwargs)[0], [x], samples, CHOICE)
    return type(found)((value, *found[1:]))


_COMPARING = (
    *("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"),
    *("not_equal", "isnan", "isinf", "isfinite", "argsort", "sign", "isclose"),
    *("logical_not", "logical_and", "logical_or", "signbit", "bitwise_not"),
    *(Tensor.__eq__, Tensor.__ne__, Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__),
    *(Tensor.__and__, Tensor.__or__, Tensor.__invert__, "argmax", "argmin"),
)


def compared(*args: Any, **kwargs: Any) -> Any:
    """A comparison of the means. Its result does not vary, and no Python ``if`` may read it."""
    values = [value for value in args if isinstance(value, Varying)]
    run = values[0].run
    run.note(CHOICE)
    return run.constant(run.function(*plain(list(args)), **plain(kwargs)), values)


register(_COMPARING, Rule(compared, is_choice=True))
