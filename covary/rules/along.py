"""Functions along some dimensions, none of which may be the batch.

Sums, averages and windows are exact; normalisation, softmax and norms are linearised at the mean;
what sorting gives is chosen by the means, and the choice counts as constant.
"""

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
    counted,
    estimated,
    fixed,
    for_each,
    kept,
    mapped,
    of_first,
)
from covary.rules.registry import CHOICE, EXACT, LINEARISED, rule
from covary.varying import Varying

# Value and arguments of a call -> the dimensions along which the function goes.
Where = Callable[..., int | Sequence[int] | None]


def _applied(where: Where, kind: str, x: Varying, *args: Any, **kwargs: Any) -> Any:
    """The result of the called function, or the first of several, linearised at the mean."""
    dims = counted(x, where(x, *args, **kwargs))
    fixed(x, dims)
    called = of_first(x, args, kwargs)

    def on(value: Tensor) -> Tensor:
        found = called(value)
        return found if isinstance(found, Tensor) else found[0]

    found = x.run.function(x.numbers, *args, **kwargs)
    mean = found if isinstance(found, Tensor) else found[0]
    samples = x.samples
    if mean.dim() < x.dim():
        samples = samples.without(dims[: x.dim() - mean.dim()])
    elif mean.dim() > x.dim():
        samples = samples.moved(lambda index: index[..., None], x.shape)
    value = x.run.write(kind, mean, [x], by_derivative(on, [x]), samples)
    if kind == EXACT:
        estimated(value, [x], on)
    return value if mean is found else type(found)((value, *found[1:]))


def _along(where: Where, kind: str, *names: str | Callable[..., Any]) -> None:
    rule(*names)(partial(_applied, where, kind))


def _argument(place: int, default: int | None = None) -> Where:
    """The argument ``dim``, which stands at this place behind the first if it has no name."""

    def where(x: Varying, *args: Any, **kwargs: Any) -> int | Sequence[int] | None:
        given: Any = kwargs.get("dim", args[place] if len(args) > place else default)
        return default if isinstance(given, bool) else given

    return where


def _last(count: int) -> Where:
    return lambda x, *args, **kwargs: range(-count, 0)


def _from(first: int) -> Where:
    return lambda x, *args, **kwargs: range(first, x.dim())


_along(_argument(0), EXACT, "cumsum")
_along(_from(2), EXACT, "interpolate", "upsample")
_along(_last(2), EXACT, "tril", "triu")
_along(_from(1), EXACT, F.unfold, F.fold)
_along(_argument(1, 1), LINEARISED, "normalize")
_along(_from(1), LINEARISED, "group_norm", "local_response_norm", F.instance_norm)
_along(_argument(0), LINEARISED, "var", "std", "logsumexp")
_along(_argument(1), LINEARISED, "norm", "vector_norm")
_along(_argument(0, -1), CHOICE, "sort")
_along(_argument(0), CHOICE, "median")
_along(_argument(1, -1), CHOICE, "topk", "kthvalue")


@rule("softmax", "log_softmax", "softmin")
def softmax(x: Varying, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Along one dimension, by default the one that torch chooses."""
    dim = dim if dim is not None else 0 if x.dim() in (0, 1, 3) else 1
    return _applied(_argument(0), LINEARISED, x, dim, *args, **kwargs)


@rule("mean", "sum")
def total(
    x: Varying,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Varying:
    """Sum or average."""
    dims = list(range(x.numbers.dim())) if dim is None else counted(x, dim)
    function, is_mean = x.run.function, x.run.function.__name__ == "mean"
    mean = function(x.numbers, dims, keepdim, dtype=dtype)
    value = _added_up(x, mean, dims, is_mean=is_mean)
    return estimated(value, [x], lambda v: function(v, dims, keepdim))


def _added_up(x: Varying, mean: Tensor, dims: Sequence[int], *, is_mean: bool) -> Varying:
    """Rows go back to all elements that were added up, or averaged."""
    fixed(x, dims)
    shape = x.numbers.shape
    share = 1 / math.prod(shape[each] for each in dims) if is_mean else 1.0
    one = [1 if i in dims else size for i, size in enumerate(shape)]

    def pull(rows: Tensor) -> Tensor:
        return (rows * share).reshape(len(rows), *one).expand(len(rows), *shape)

    samples = x.samples if mean.dim() == len(shape) else x.samples.without(dims)
    return mapped(x, mean, pull, samples=samples)


def _adaptive(count: int) -> None:
    """Averages of windows; of one window for all positions, rows go back faster than by torch."""

    def apply(x: Varying, output_size: int | Sequence[int]) -> Any:
        if any(size != 1 for size in for_each(output_size, count)):
            return _applied(_last(count), EXACT, x, output_size)
        function, dims = x.run.function, counted(x, range(-count, 0))
        value = _added_up(x, function(x.numbers, output_size), dims, is_mean=True)
        return estimated(value, [x], lambda v: function(v, output_size))

    rule(f"adaptive_avg_pool{count}d")(apply)


for _count in (1, 2, 3):
    _along(_last(_count), EXACT, f"avg_pool{_count}d")
    _adaptive(_count)


@rule("layer_norm", "rms_norm", is_observed=True)
def layer_norm(x: Varying, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Varying:
    """Over the last dimensions; linearised, where the average square is that of a varying value.

    (x - average) / sqrt(average square + average variance + eps) * weight + bias.
    """
    run, dims = x.run, counted(x, range(-len(normalized_shape), 0))
    fixed(x, dims)
    is_centred = run.function.__name__ == "layer_norm"
    names = ("weight", "bias", "eps") if is_centred else ("weight", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    var = run.observed(x).expand(x.numbers.shape).mean(dims, keepdim=True)
    eps = given.get("eps", 1e-5 if is_centred else None)
    var = var + (torch.finfo(var.dtype).eps if eps is None else eps)
    apart = x.numbers - x.numbers.mean(dims, keepdim=True) if is_centred else x.numbers
    scale = torch.rsqrt(apart.square().mean(dims, keepdim=True) + var)
    unit, weight = apart * scale, given.get("weight")
    mean = unit if weight is None else unit * weight
    mean = mean if given.get("bias") is None else mean + given["bias"]
    mean = run.function(x.numbers, normalized_shape, *args, **kwargs) if run.is_still else mean
    weight = kept(run, weight)
    if not run.tape.is_supervised:
        unit, scale = unit.detach(), scale.detach()

    def pull(rows: Tensor) -> Tensor:
        rows = rows if weight is None else rows * weight
        behind = [dim + 1 for dim in dims]
        along = unit * (rows * unit).mean(behind, keepdim=True)
        along = along + rows.mean(behind, keepdim=True) if is_centred else along
        return (rows - along) * scale

    def spread(v: Tensor) -> Tensor:
        # Of each element by itself: divided by the deviation of all, times the scale.
        return v * scale.square() if weight is None else v * (scale * weight).square()

    return estimated(mapped(x, mean, pull, kind=LINEARISED), [x], spread)
