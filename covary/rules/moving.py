"""Functions that move, join or split elements: exact for mean and covariance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import (
    by_derivative,
    differentiated,
    estimated,
    fixed,
    kept,
    mapped,
    merged,
)
from covary.rules.registry import EXACT, Rule, composed, register, rule, spellings
from covary.varying import Varying, plain

# Functions that put elements elsewhere: a view, or a copy of some of them.
_MOVING = (
    *("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "permute"),
    *("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "expand"),
    *("expand_as", "view_as", "reshape_as", "broadcast_to", "narrow", "select", "diagonal"),
    *("index_select", "unfold", "T", "mT", "flip", "roll", "repeat", "repeat_interleave", "tile"),
    *("rot90", "gather", "take_along_dim", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("unbind", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit"),
    *("atleast_1d", "atleast_2d", "atleast_3d"),
    *(Tensor.__getitem__, Tensor.__iter__),
)


# Views in most models, though not of what lies in memory here as it does not in the model.
_VIEWS = {
    spelling
    for name in ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel")
    for spelling in spellings(name)
}
_IN_ANY_MEMORY = {Tensor.view: Tensor.reshape, Tensor.view_as: Tensor.reshape_as}


def moved(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Elements put elsewhere; the batch is found again by moving the samples' numbers alike."""
    if not isinstance(x, Varying):
        raise _first(args).run.refusal("Its indices vary.")
    function = x.run.function
    if function is Tensor.__iter__:
        return iter(x.unbind(0))
    # Means need not lie in memory as the model's own values do.
    function = _IN_ANY_MEMORY.get(function, function)

    others, options = kept(x.run, args), kept(x.run, kwargs)

    def on(value: Tensor) -> Any:
        return function(value, *others, **options)

    mean, samples = on(x.numbers), x.samples.moved(on, x.shape)
    if isinstance(mean, Tensor):
        return _moved(x, mean, samples, on)
    parts = [
        _moved(x, part, owner, partial(_part, on, i))
        for i, (part, owner) in enumerate(zip(mean, samples, strict=True))
    ]
    return type(mean)(parts) if isinstance(mean, list) else tuple(parts)


def _part(on: Callable[[Tensor], Any], i: int, value: Tensor) -> Tensor:
    part: Tensor = on(value)[i]
    return part


def _moved(x: Varying, mean: Tensor, samples: Any, on: Callable[[Tensor], Tensor]) -> Varying:
    shape = x.numbers.shape
    same_order = mean.numel() == math.prod(shape) and mean.data_ptr() == x.numbers.data_ptr()
    view = (
        x.run.function in _VIEWS
        or mean.untyped_storage().data_ptr() == x.numbers.untyped_storage().data_ptr()
    )
    if same_order and mean.is_contiguous() and x.numbers.is_contiguous():

        def pull(rows: Tensor) -> Tensor:
            return rows.reshape(len(rows), *shape)
    else:
        back = by_derivative(on, [x])

        def pull(rows: Tensor) -> Tensor:
            return back(rows)[0]

    value = mapped(x, mean, pull, samples=samples, view=view)
    spread = x.spread
    return value if spread is None else value.estimate(lambda: on(spread.value.expand(shape)))


def _first(values: Sequence[Any]) -> Varying:
    return next(value for value in values if isinstance(value, Varying))


register(_MOVING, Rule(moved, is_moving=True))


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Any], dim: int = 0) -> Varying:
    """Values side by side; each gets its part of the rows back."""
    tensors = list(tensors)  # models go on with their own list
    values = [value for value in tensors if isinstance(value, Varying)]
    run, first = values[0].run, values[0]
    means, is_varying = plain(tensors), [isinstance(value, Varying) for value in tensors]
    mean = torch.cat(means, dim)
    dim = dim % mean.dim()
    sizes = [each.shape[dim] if each.dim() == mean.dim() else 0 for each in means]
    if all(value.samples.index.shape[dim] == 1 for value in values):
        samples = merged(values)
    elif len(values) == len(tensors):
        parts = [value.samples.index for value in values]
        sizes_of = [max(part.shape[i] for part in parts) for i in range(mean.dim())]
        index = torch.cat(
            [
                part.expand([n if i == dim else size for i, size in enumerate(sizes_of)])
                for part, n in zip(parts, sizes, strict=True)
            ],
            dim,
        )
        samples = type(first.samples)(index, first.samples.batch)
    else:
        raise run.refusal("It puts values that do not vary beside samples of the batch.")

    def pull(rows: Tensor) -> list[Tensor]:
        parts = torch.split(rows, sizes, dim + 1)
        return [part for part, varies in zip(parts, is_varying, strict=True) if varies]

    written: Varying = run.write(EXACT, mean, values, pull, samples)

    def spread(*parts: Tensor) -> Tensor:
        pairs = zip(parts, means, strict=True)
        return torch.cat([part.expand(mean.shape) for part, mean in pairs], dim)

    return estimated(written, tensors, spread)


@composed("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Values side by side along a new dimension."""
    some = next(value for value in tensors if isinstance(value, Varying))
    dim = dim % (some.dim() + 1)
    return torch.cat([value.unsqueeze(dim) for value in tensors], dim)


@composed("hstack", "column_stack")
def hstack(tensors: Sequence[Any]) -> Any:
    """Values side by side along the second dimension."""
    return torch.cat(list(tensors), 1 if tensors[0].dim() > 1 else 0)


@rule(F.unfold)
def windows(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """Windows of images (B, C, H, W) as columns (B, C k k', L)."""
    fixed(x, range(1, x.dim()))

    def on(value: Tensor) -> Tensor:
        return F.unfold(value, *args, **kwargs)

    return estimated(differentiated(on, [x], x.samples.without([-1]), EXACT), [x], on)


@rule(F.fold)
def folded(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """Columns (B, C k k', L) added up to images (B, C, H, W)."""
    fixed(x, range(1, x.dim()))

    def on(value: Tensor) -> Tensor:
        return F.fold(value, *args, **kwargs)

    samples = x.samples.moved(lambda index: index[..., None], x.shape)
    return estimated(differentiated(on, [x], samples, EXACT), [x], on)


@rule("tril", "triu")
def triangle(x: Varying, diagonal: int = 0) -> Varying:
    """Zeros on one side of the diagonal of the last two dimensions."""
    fixed(x, [-2, -1])
    function = x.run.function
    return differentiated(lambda value: function(value, diagonal), [x], x.samples, EXACT)


@rule("pad")
def pad(
    x: Varying, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Varying:
    """Padding by constants, or by elements of the value itself."""
    fixed(x, range(-(len(pad) // 2), 0))
    sizes = [int(each) for each in pad]
    padded = differentiated(lambda v: F.pad(v, sizes, mode, value), [x], x.samples, EXACT)
    spread, shape = x.spread, x.numbers.shape
    if spread is None:
        return padded
    return padded.estimate(lambda: F.pad(spread.value.expand(shape), sizes, mode))
