"""Building blocks of rules: linear maps of one value, linearisation, checks of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covary.covariance.samples import Samples
from covary.rules.registry import EXACT
from covary.tracing import is_traced
from covary.varying import ConversionError, Varying, plain, varying_in


def mapped(
    x: Varying,
    mean: Tensor,
    pull: Callable[[Tensor], Tensor],
    *,
    samples: Samples | None = None,
    view: bool = False,
    kind: str = EXACT,
) -> Varying:
    """A value that is linear in one other.

    Args:
        x: what it is linear in.
        mean: what the function makes of the mean of x.
        pull: rows (r, *shape) of the result -> rows (r, *shape) of x: the transposed map.
        samples: which sample each element belongs to, if not as in x.
        view: whether the result shares the memory of x.
        kind: how ``print(net)`` describes it.
    """
    samples, view_of = samples or x.samples, x if view else None
    value: Varying = x.run.write(
        kind, mean, [x], lambda rows: (pull(rows),), samples, view_of=view_of
    )
    return value


def kept(run: Any, value: Any) -> Any:
    """An argument that does not vary, as a map keeps it for later: as it is now.

    Parameters are watched (covariances refuse to be looked at once they have changed); all other
    tensors are copied, and so are lists. Without gradient, unless covariances are supervised.
    """
    if isinstance(value, Tensor):
        value = plain(value)
        if value.requires_grad or any(isinstance(v, nn.Parameter) for v in (value, value._base)):
            run.tape.uses(value)
            return value if run.tape.is_supervised else value.detach()
        return value.clone()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(kept(run, each) for each in value)
    if isinstance(value, dict):
        return {name: kept(run, each) for name, each in value.items()}
    return value


def of_first(x: Varying, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The torch function that is called, as a function of its first argument alone."""
    if varying_in([*args, *kwargs.values()]):
        raise x.run.refusal("More than its first argument varies.")
    function, others, options = x.run.function, kept(x.run, args), kept(x.run, kwargs)
    return lambda value: function(value, *others, **options)


def differentiated(
    function: Callable[..., Tensor], args: Sequence[Any], samples: Samples, kind: str
) -> Varying:
    """What any differentiable function makes of values that vary: linearised at their means.

    Exact if the function is linear in all that varies. Rows are pulled back by its derivative.

    Args:
        function: of tensors, ``function(*args)``.
        args: its arguments, of which some are Varying.
        samples: which sample each element of the result belongs to.
        kind: how ``print(net)`` describes it.
    """
    values = varying_in(args)
    run, is_varying = values[0].run, [isinstance(arg, Varying) for arg in args]
    others = [None if isinstance(arg, Varying) else kept(run, arg) for arg in args]

    def of(*numbers: Tensor) -> Tensor:
        left = iter(numbers)
        pairs = zip(is_varying, others, strict=True)
        return function(*[next(left) if varies else other for varies, other in pairs])

    mean = function(*plain(list(args)))
    written: Varying = run.write(kind, mean, values, by_derivative(of, values), samples)
    return written


def by_derivative(
    function: Callable[..., Tensor], values: Sequence[Varying]
) -> Callable[[Tensor], Sequence[Tensor]]:
    """Rows pulled back by the derivative of a function at the means of these values."""
    means = [value.numbers for value in values]
    if not values[0].run.tape.is_supervised:
        means = [mean.detach() for mean in means]

    def pull(rows: Tensor) -> Sequence[Tensor]:
        if is_traced():
            # The other way round: some derivatives fix the size of the batch within vmap.
            copies = [mean.expand(len(rows), *mean.shape) for mean in means]
            together: Sequence[Tensor] = torch.func.vjp(torch.func.vmap(function), *copies)[1](rows)
            return together
        back = torch.func.vjp(function, *means)[1]
        try:
            pulled: Sequence[Tensor] = torch.func.vmap(back)(rows)
        except RuntimeError as error:  # functions that vmap does not know: row by row
            if not any(word in str(error) for word in ("vmap", "batching rule", "NYI")):
                raise
            pulled = [torch.stack(parts) for parts in zip(*map(back, rows), strict=True)]
        return pulled

    return pull


def estimated(value: Varying, parents: Sequence[Any], spread: Callable[..., Tensor]) -> Varying:
    """The same value, whose variances are estimated from those of its parents.

    As if elements were uncorrelated: at the next nonlinearity a measured factor corrects for that.
    Only in passes that estimate variances for each sample (``propagates``).

    Args:
        value: the result of a function.
        parents: its arguments; those that do not vary have no variance.
        spread: variances of the parents -> variances of the value.
    """
    if value.run.propagates and all(p.spread for p in parents if isinstance(p, Varying)):
        # Of the parents as they are now: a function that writes in place may change them. Their
        # shape but for the batch, which has size 1 where all samples are alike.
        known = [
            (p.spread, [-1 if i in p.samples.axes else n for i, n in enumerate(p.numbers.shape)])
            if isinstance(p, Varying)
            else p
            for p in parents
        ]
        value.estimate(lambda: spread(*map(_variances, known)))
    return value


def _variances(known: Any) -> Any:
    if isinstance(known, Tensor):
        return torch.zeros_like(known)
    spread, shape = known
    return spread.value.expand(shape)


def merged(values: Sequence[Varying]) -> Samples:
    """Which sample each element of a broadcast function of these values belongs to.

    Raises:
        ConversionError: if elements of different samples would meet.
    """
    dim = max(value.numbers.dim() for value in values)
    return joined(values[0].run, [value.samples.of_dim(dim) for value in values])


def joined(run: Any, every: Sequence[Samples]) -> Samples:
    """The samples of elements that broadcasting brings together, which have to be the same."""
    samples, *others = every
    for other in others:
        if not samples.agrees(other):
            raise mixing(run)
        if other.index.numel() > samples.index.numel():
            samples = other
    return samples


def fixed(x: Varying, dims: Sequence[int]) -> None:
    """Refuse a function that goes along these dimensions if the batch is one of them."""
    if not x.run.is_drawing and any(x.samples.index.shape[dim] > 1 for dim in dims):
        raise mixing(x.run)


def mixing(run: Any) -> ConversionError:
    """The error of a function that mixes samples."""
    error: ConversionError = run.refusal(
        "It brings different samples of the batch together.",
        "Only models that treat each sample by itself have a covariance for each. If the batch is "
        "not the first dimension of the inputs, say so: covary.convert(model, batch_dim=...).",
    )
    return error


def counted(x: Varying, dim: int | Sequence[int] | None) -> list[int]:
    """Dimensions of a value, counted from the first; an error if none are named."""
    if dim is None or dim == ():
        raise x.run.refusal("It goes over all elements, the batch among them.", "Name its dim=.")
    count = x.numbers.dim()
    return [each % count for each in ([dim] if isinstance(dim, int) else dim)]


def run_of(values: Sequence[Any]) -> Any:
    """The pass that these values belong to, of which some vary."""
    return varying_in(values)[0].run


def for_each(size: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A size, stride or padding for each of so many dimensions."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes
