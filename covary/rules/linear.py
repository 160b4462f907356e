"""Functions that are linear in what varies: exact for mean and covariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import differentiated, fixed, mapped, merged, summed_to
from covary.rules.registry import EXACT, rule
from covary.varying import Varying, plain

Size = int | Sequence[int]


@rule("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Varying:
    """x W^T + b; rows go back by rows W."""
    if not isinstance(x, Varying) or isinstance(weight, Varying) or isinstance(bias, Varying):
        product: Any = torch.matmul(x, weight.mT)
        return product if bias is None else product + bias  # type: ignore[no-any-return]
    fixed(x, [-1])
    x.run.uses(weight)
    return mapped(x, F.linear(x.numbers, weight, bias), lambda rows: rows @ weight.to(rows.dtype))


def _convolution(dims: int, *, transposed: bool) -> Callable[..., Varying]:
    forth = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
    # What follows bias, stride and padding, in torch's order.
    names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")

    def apply(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Size = 1,
        padding: Size | str = 0,
        *rest: Any,
        **options: Any,
    ) -> Varying:
        """A convolution; rows go back by the transposed one, folded into the batch."""
        options |= dict(zip(names, rest, strict=False))
        if not isinstance(x, Varying) or isinstance(weight, Varying) or isinstance(bias, Varying):
            value = x if isinstance(x, Varying) else weight
            raise value.run.refusal("Weights of a convolution vary.")
        if x.dim() != dims + 2:
            raise x.run.refusal("Its input has no batch dimension.", "Give it one: x[None].")
        fixed(x, range(1, dims + 2))
        if isinstance(padding, str):
            x, padding = _padded(x, padding, weight, _tuple(options.get("dilation", 1), dims))
        x.run.uses(weight)
        arranged = weight if x.run.noise.is_none else _arranged(weight)
        mean = forth(x.numbers, arranged, bias, stride, padding, **options)
        back = _transposed(
            dims,
            transposed,
            (x.shape, mean.shape),
            _tuple(stride, dims),
            _tuple(padding, dims),
            _tuple(options.get("dilation", 1), dims),
            options.get("groups", 1),
        )
        kept = weight if x.run.tape.is_supervised else weight.detach()
        channels = 1 if transposed else 0  # the dimension of the weight that results have

        def scaled_by(scale: Tensor | None) -> Callable[[Tensor], Tensor]:
            if scale is None:
                return lambda rows: back(rows, kept)
            shape = [1] * kept.dim()
            shape[channels] = -1
            by = kept * scale.reshape(shape)
            return lambda rows: back(rows, by)

        value = mapped(x, mean, scaled_by(None))
        if options.get("groups", 1) == 1 or not transposed:
            value.before_scaling = x, scaled_by
        return value

    return apply


def _transposed(
    dims: int,
    transposed: bool,
    shapes: tuple[torch.Size, torch.Size],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows (r, B, *after) and a weight -> rows (r, B, *before), for (before, after) shapes."""
    before, after = shapes
    function = getattr(F, f"conv{dims}d" if transposed else f"conv_transpose{dims}d")
    folds = dims == 2 and groups == 1 and before[1] <= _FEW_CHANNELS and max(stride) > 1

    def back(rows: Tensor, weight: Tensor) -> Tensor:
        flat = _arranged(rows.reshape(-1, *after[1:]))
        kernel = weight.shape[2:]
        options: dict[str, Any] = {"dilation": dilation, "groups": groups}
        if not transposed and folds:
            columns = weight.flatten(1).mT @ flat.flatten(2)
            found = F.fold(columns, before[2:], kernel, dilation, padding, stride)
        else:
            if not transposed:  # so that sizes come out as they were: strides leave some out
                sizes = zip(before[2:], after[2:], stride, padding, dilation, kernel, strict=True)
                options["output_padding"] = [
                    b - ((a - 1) * s - 2 * p + d * (k - 1) + 1) for b, a, s, p, d, k in sizes
                ]
            found = function(flat, _arranged(weight), None, stride, padding, **options)
        return found.view(*rows.shape[:2], *before[1:])

    return back


# Of inputs with so few channels, strided convolutions go back faster as one product.
_FEW_CHANNELS = 4


def _arranged(value: Tensor) -> Tensor:
    """Images with their channels last in memory: convolutions of them take about half the time."""
    if value.dim() != 4:
        return value
    return value.contiguous(memory_format=torch.channels_last)


def _padded(
    x: Varying, padding: str, weight: Tensor, dilation: Sequence[int]
) -> tuple[Varying, int]:
    """Padding by name, as numbers; an even kernel has one more behind than before."""
    if padding == "valid":
        return x, 0
    sizes: list[int] = []
    for d, k in reversed(list(zip(dilation, weight.shape[2:], strict=True))):
        total = d * (k - 1)
        sizes += [total // 2, total - total // 2]
    return F.pad(x, sizes), 0  # type: ignore[return-value]


def _tuple(size: Size, dims: int) -> tuple[int, ...]:
    sizes = (size,) * dims if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes


for _dims in (1, 2, 3):
    rule(f"conv{_dims}d")(_convolution(_dims, transposed=False))
    rule(f"conv_transpose{_dims}d")(_convolution(_dims, transposed=True))


@rule("batch_norm")
def batch_norm(
    x: Varying,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Varying:
    """Exact in evaluation. In training, the statistics are the means', and count as constant."""
    mean = F.batch_norm(x.numbers, running_mean, running_var, weight, bias, training, momentum, eps)
    if training or running_var is None:
        others = [dim for dim in range(x.dim()) if dim != 1]
        var = x.numbers.detach().var(others, correction=0)
    else:
        fixed(x, [1])
        var = running_var.clone()
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        x.run.uses(weight)
        scale = scale * (weight if x.run.tape.is_supervised else weight.detach())
    if x.before_scaling is not None:
        before, scaled_by = x.before_scaling
        return mapped(before, mean, scaled_by(scale), samples=x.samples)
    scale = scale.view(-1, *[1] * (x.dim() - 2))
    return mapped(x, mean, lambda rows: rows * scale)


@rule("add", Tensor.__radd__)
def add(x: Any, y: Any, *, alpha: float = 1, out: None = None) -> Varying:
    """x + alpha y: what comes back goes to both."""
    return _sum(x, y, 1.0, alpha)


@rule("sub", "subtract", Tensor.__sub__)
def sub(x: Any, y: Any, *, alpha: float = 1, out: None = None) -> Varying:
    """x - alpha y."""
    return _sum(x, y, 1.0, -alpha)


@rule("rsub", Tensor.__rsub__)
def rsub(x: Any, y: Any, *, alpha: float = 1) -> Varying:
    """Y - alpha x."""
    return _sum(x, y, -alpha, 1.0)


def _sum(x: Any, y: Any, a: float, b: float) -> Varying:
    values = [(value, factor) for value, factor in ((x, a), (y, b)) if isinstance(value, Varying)]
    run = values[0][0].run
    left, right = plain(x), plain(y)
    mean = (left if a == 1 else a * left) + (right if b == 1 else b * right)
    shapes = [value.shape for value, _ in values]

    def pull(rows: Tensor) -> list[Tensor]:
        return [
            summed_to(rows if factor == 1 else factor * rows, shape)
            for (_, factor), shape in zip(values, shapes, strict=True)
        ]

    varying = [value for value, _ in values]
    samples = merged(varying).of_dim(mean.dim())
    written: Varying = run.write(EXACT, mean, varying, pull, samples)
    return written


def scaled(x: Varying, factor: Any) -> Varying:
    """X times a factor that does not vary, a number or a tensor that may broadcast it."""
    mean = x.numbers * factor
    shape, samples = x.shape, x.samples.of_dim(mean.dim())
    kept = (
        factor.detach() if isinstance(factor, Tensor) and not x.run.tape.is_supervised else factor
    )
    if isinstance(factor, Tensor):
        x.run.uses(factor)
    return mapped(x, mean, lambda rows: summed_to(rows * kept, shape), samples=samples)


@rule("neg", "negative")
def neg(x: Varying) -> Varying:
    """-x."""
    return scaled(x, -1.0)


def _identity(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    return mapped(x, x.numbers, lambda rows: rows, view=True)


rule("contiguous", "positive", "requires_grad_")(_identity)


@rule("clone", Tensor.__deepcopy__)
def clone(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value in memory of its own."""
    return mapped(x, x.numbers.clone(), lambda rows: rows)


@rule("detach", "data")
def detach(x: Varying) -> Varying:
    """The same value without gradient; it varies as before."""
    return mapped(x, x.numbers.detach(), lambda rows: rows, view=True)


@rule("to", "float", "double", "type_as", "cpu", "cuda", "type", "half", "bfloat16")
def to(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value in another type; only float32 and float64 have the digits for variances."""
    mean = x.run.on_means(x, *args, **kwargs)
    if mean.dtype not in (torch.float32, torch.float64):
        raise x.run.refusal(
            f"It makes {mean.dtype} of a value that varies.",
            "Convert the model in float32: covary.convert(model.float()).",
        )
    dtype, device = x.dtype, x.device
    return mapped(x, mean, lambda rows: rows.to(device, dtype))


@rule("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """Nothing in evaluation. In training, the mask counts as constant."""
    ones = torch.ones_like(x.numbers)
    mask = x.run.on_means(ones, *args, **kwargs)
    return x if bool((mask == 1).all()) else scaled(x, mask)


@rule("masked_fill")
def masked_fill(x: Varying, mask: Tensor, value: float) -> Varying:
    """A constant in some places: nothing comes back from there."""
    if isinstance(x, Varying) and not isinstance(mask, Varying):
        mean = x.numbers.masked_fill(mask, value)
        shape, samples = x.shape, x.samples.of_dim(mean.dim())
        return mapped(
            x, mean, lambda rows: summed_to(rows.masked_fill(mask, 0.0), shape), samples=samples
        )
    raise x.run.refusal("Its mask varies.")


@rule("where")
def where(condition: Tensor, x: Any, y: Any) -> Varying:
    """Either of two values, by a condition that does not vary."""
    values = [value for value in (x, y) if isinstance(value, Varying)]

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    return differentiated(chosen, [x, y], merged(values), EXACT)
