"""Sums, averages, average pooling and interpolation: exact for mean and covariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from covary.rules.helpers import differentiated, fixed
from covary.rules.registry import EXACT, rule
from covary.varying import Varying


def _along(name: str, where: Callable[..., Sequence[int] | None]) -> None:
    """A linear function along some dimensions, none of which may be the batch."""

    def apply(x: Varying, *args: Any, **kwargs: Any) -> Varying:
        dims = where(x.dim(), *args, **kwargs)
        every = list(range(x.dim())) if dims is None else [dim % x.dim() for dim in dims]
        fixed(x, every)
        function = x.run.function
        mean = function(x.numbers, *args, **kwargs)
        samples = x.samples.without(every) if mean.dim() < x.dim() else x.samples
        return differentiated(lambda v: function(v, *args, **kwargs), [x], samples, EXACT)

    rule(name)(apply)


def _reduced(_: int, *args: Any, **kwargs: Any) -> Sequence[int] | None:
    dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    if dims is None:
        return None
    return [dims] if isinstance(dims, int) else list(dims)


for _name in ("mean", "sum", "cumsum"):
    _along(_name, _reduced)


def _last(count: int) -> Callable[..., Sequence[int]]:
    return lambda _, *args, **kwargs: range(-count, 0)


for _dims in (1, 2, 3):
    for _name in (f"avg_pool{_dims}d", f"adaptive_avg_pool{_dims}d"):
        _along(_name, _last(_dims))
_along("interpolate", lambda ndim, *args, **kwargs: range(2, ndim))
_along("upsample", lambda ndim, *args, **kwargs: range(2, ndim))
