"""Sums, averages, average pooling and interpolation: exact for mean and covariance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from covary.rules.helpers import counted, differentiated, estimated, fixed, mapped
from covary.rules.registry import EXACT, rule
from covary.varying import Varying


def _along(name: str, where: Callable[..., Sequence[int] | None]) -> None:
    """A linear function along some dimensions, none of which may be the batch."""

    def apply(x: Varying, *args: Any, **kwargs: Any) -> Varying:
        dims = where(x.dim(), *args, **kwargs)
        every = list(range(x.dim())) if dims is None else counted(dims, x.dim())
        fixed(x, every)
        function = x.run.function
        mean = function(x.numbers, *args, **kwargs)
        samples = x.samples.without(every) if mean.dim() < x.dim() else x.samples

        def on(value: Tensor) -> Tensor:
            found: Tensor = function(value, *args, **kwargs)
            return found

        return estimated(differentiated(on, [x], samples, EXACT), [x], on)

    rule(name)(apply)


def _reduced(_: int, *args: Any, **kwargs: Any) -> Sequence[int] | None:
    dims = kwargs.get("dim", args[0] if args else None)
    if dims is None:
        return None
    return [dims] if isinstance(dims, int) else list(dims)


def _total(is_mean: bool) -> Callable[..., Varying]:
    def apply(
        x: Varying,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Varying:
        """Sum or average: rows go back to all elements that were added up."""
        shape, function = x.numbers.shape, x.run.function
        dims = list(range(len(shape))) if dim is None else counted(dim, len(shape))
        fixed(x, dims)
        mean = function(x.numbers, dims, keepdim, dtype=dtype)
        share = 1 / math.prod(shape[each] for each in dims) if is_mean else 1.0
        one = [1 if i in dims else size for i, size in enumerate(shape)]

        def pull(rows: Tensor) -> Tensor:
            return (rows * share).reshape(len(rows), *one).expand(len(rows), *shape)

        samples = x.samples if keepdim else x.samples.without(dims)
        value = mapped(x, mean, pull, samples=samples)
        return estimated(value, [x], lambda v: function(v, dims, keepdim))

    return apply


rule("mean")(_total(is_mean=True))
rule("sum")(_total(is_mean=False))
_along("cumsum", _reduced)


def _last(count: int) -> Callable[..., Sequence[int]]:
    return lambda _, *args, **kwargs: range(-count, 0)


for _dims in (1, 2, 3):
    for _name in (f"avg_pool{_dims}d", f"adaptive_avg_pool{_dims}d"):
        _along(_name, _last(_dims))
_along("interpolate", lambda ndim, *args, **kwargs: range(2, ndim))
_along("upsample", lambda ndim, *args, **kwargs: range(2, ndim))
