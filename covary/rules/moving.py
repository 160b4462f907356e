"""Functions that move, join or split elements: exact for mean and covariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.covariance.samples import Samples
from covary.rules.helpers import (
    by_derivative,
    differentiated,
    estimated,
    fixed,
    kept,
    mapped,
    merged,
    run_of,
)
from covary.rules.registry import EXACT, composed, rule, spellings
from covary.tracing import is_traced
from covary.varying import Varying, plain

# Views in most models, though not of what lies in memory here as it does not in the model.
_VIEWS = {
    spelling
    for name in ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel")
    for spelling in spellings(name)
}
_IN_ANY_MEMORY = {Tensor.view: Tensor.reshape, Tensor.view_as: Tensor.reshape_as}


@rule(
    *("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "permute"),
    *("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "expand"),
    *("expand_as", "view_as", "reshape_as", "broadcast_to", "narrow", "select", "diagonal"),
    *("index_select", "T", "mT", "flip", "roll", "repeat", "repeat_interleave", "tile"),
    *("rot90", "gather", "take_along_dim", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("unbind", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit"),
    *("atleast_1d", "atleast_2d", "atleast_3d"),
    *(Tensor.__getitem__, Tensor.__iter__, Tensor.unfold),
    is_moving=True,
)
def moved(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Elements put elsewhere; the batch is found again by moving the samples' numbers alike."""
    if not isinstance(x, Varying):
        raise run_of(args).refusal("Its indices vary.")
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


def _part(on: Callable[[Tensor], Any], i: int, value: Tensor) -> Any:
    return on(value)[i]


def _moved(x: Varying, mean: Tensor, samples: Any, on: Callable[[Tensor], Tensor]) -> Varying:
    if x.node < 0:
        return Varying(mean, x.run, x.node, samples)
    before, spread = x.numbers, x.spread
    shape = before.shape
    view = keeps_order = x.run.function in _VIEWS
    if not is_traced():  # there is memory to look at
        view |= mean.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        same_start = mean.numel() == before.numel() and mean.data_ptr() == before.data_ptr()
        keeps_order = same_start and mean.is_contiguous() and before.is_contiguous()
    if keeps_order:

        def pull(rows: Tensor) -> Tensor:
            return rows.reshape(len(rows), *shape)
    else:
        back = by_derivative(on, [x])

        def pull(rows: Tensor) -> Tensor:
            return back(rows)[0]

    value = mapped(x, mean, pull, samples=samples, view=view)
    return value if spread is None else value.estimate(lambda: on(spread.value.expand(shape)))


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Any], dim: int = 0) -> Varying:
    """Values side by side; each gets its part of the rows back."""
    tensors = list(tensors)  # models go on with their own list
    values = [value for value in tensors if isinstance(value, Varying)]
    run = values[0].run
    means, is_varying = plain(tensors), [isinstance(value, Varying) for value in tensors]
    mean = torch.cat(means, dim)
    dim = dim % mean.dim()
    sizes = [each.shape[dim] if each.dim() == mean.dim() else 0 for each in means]
    if all(value.samples.index.shape[dim] == 1 for value in values):
        samples = merged(values)
    elif len(values) == len(tensors):
        parts = [value.samples.index for value in values]
        shape = [max(sizes) for sizes in zip(*[part.shape for part in parts], strict=True)]
        whole = [
            part.expand(*shape[:dim], size, *shape[dim + 1 :])
            for part, size in zip(parts, sizes, strict=True)
        ]
        samples = Samples(torch.cat(whole, dim), values[0].samples.batch)
    else:
        raise run.refusal("It puts values that do not vary beside samples of the batch.")

    def pull(rows: Tensor) -> list[Tensor]:
        parts = torch.split(rows, sizes, dim + 1)
        return [part for part, varies in zip(parts, is_varying, strict=True) if varies]

    def spread(*parts: Tensor) -> Tensor:
        pairs = zip(parts, means, strict=True)
        return torch.cat([part.expand(mean.shape) for part, mean in pairs], dim)

    return estimated(run.write(EXACT, mean, values, pull, samples), tensors, spread)


@composed("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Values side by side along a new dimension."""
    dim = dim % (tensors[0].dim() + 1)
    return torch.cat([value.unsqueeze(dim) for value in tensors], dim)


@composed("hstack", "column_stack")
def hstack(tensors: Sequence[Any]) -> Any:
    """Values side by side along the second dimension."""
    return torch.cat(list(tensors), 1 if tensors[0].dim() > 1 else 0)


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
