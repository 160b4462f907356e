"""Functions that are linear in what varies: exact for mean and covariance."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import differentiated, estimated, fixed, kept, mapped, merged, summed_to
from covary.rules.registry import BATCH, EXACT, rule
from covary.varying import Varying, plain


@rule("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Varying:
    """x W^T + b; rows go back by rows W."""
    if not isinstance(x, Varying) or isinstance(weight, Varying) or isinstance(bias, Varying):
        product: Any = torch.matmul(x, weight.mT)
        return product if bias is None else product + bias  # type: ignore[no-any-return]
    fixed(x, [-1])
    by = kept(x.run, weight)
    value = mapped(x, F.linear(x.numbers, weight, bias), lambda rows: rows @ by)
    return estimated(value, [x], lambda v: F.linear(v, by.square()))


@rule(F.batch_norm)  # torch.batch_norm has another order of arguments
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
    of_batch = training or running_var is None
    if of_batch and not x.run.is_training:
        raise x.run.refusal(
            "It normalises by the statistics of the batch in evaluation, so samples mix.",
            "Give it running statistics: nn.BatchNorm2d(..., track_running_stats=True).",
        )
    kind = BATCH if of_batch else EXACT
    mean = F.batch_norm(x.numbers, running_mean, running_var, weight, bias, training, momentum, eps)
    if running_var is None or training:
        others = [dim for dim in range(x.numbers.dim()) if dim != 1]
        var = x.numbers.detach().var(others, correction=0)
    else:
        fixed(x, [1])
        var = running_var.clone()  # torch counts no change of running statistics
    weight = None if weight is None else kept(x.run, weight)
    ones = [1] * (x.numbers.dim() - 2)

    def scale() -> Tensor:  # computed by whoever needs it
        found = torch.rsqrt(var + eps)
        return found if weight is None else found * weight

    if x.before_scaling is not None:
        before, node, numbers, back = x.before_scaling
        if before.node != node:
            before = Varying(numbers, x.run, node, x.samples)
        value = mapped(before, mean, lambda rows: back(rows, scale()), samples=x.samples, kind=kind)
    else:
        value = mapped(x, mean, lambda rows: rows * scale().view(-1, *ones), kind=kind)
    return estimated(value, [x], lambda v: v * scale().square().view(-1, *ones))


@rule("add", Tensor.__radd__)
def add(x: Any, y: Any, *, alpha: float = 1) -> Varying:
    """x + alpha y: what comes back goes to both."""
    return _sum(x, y, 1.0, alpha)


@rule("sub", "subtract", Tensor.__sub__)
def sub(x: Any, y: Any, *, alpha: float = 1) -> Varying:
    """x - alpha y."""
    return _sum(x, y, 1.0, -alpha)


@rule("rsub", Tensor.__rsub__)
def rsub(x: Any, y: Any, *, alpha: float = 1) -> Varying:
    """``other - alpha * x``."""
    return _sum(x, y, -alpha, 1.0)


def _sum(x: Any, y: Any, a: float, b: float) -> Varying:
    values = [value for value in (x, y) if isinstance(value, Varying)]
    factors = [factor for value, factor in ((x, a), (y, b)) if isinstance(value, Varying)]
    shapes = [value.numbers.shape for value in values]
    left, right = plain(x), plain(y)
    mean = (left if a == 1 else a * left) + (right if b == 1 else b * right)

    def pull(rows: Tensor) -> list[Tensor]:
        return [
            summed_to(rows if factor == 1 else factor * rows, shape)
            for factor, shape in zip(factors, shapes, strict=True)
        ]

    samples = merged(values).of_dim(mean.dim())
    written: Varying = values[0].run.write(EXACT, mean, values, pull, samples)

    def spread(*parts: Tensor) -> Tensor:
        first, *others = [
            part if abs(f) == 1 else part * f**2 for part, f in zip(parts, factors, strict=True)
        ]
        return first + others[0] if others else first

    return estimated(written, values, spread)


def scaled(x: Varying, factor: Any) -> Varying:
    """Multiply x by a factor that does not vary, a number or a tensor that may broadcast it."""
    mean = x.numbers * factor
    shape, samples, by = x.numbers.shape, x.samples.of_dim(mean.dim()), kept(x.run, factor)
    value = mapped(x, mean, lambda rows: summed_to(rows * by, shape), samples=samples)
    return estimated(value, [x], lambda v: v * by**2)


@rule("neg", "negative")
def neg(x: Varying) -> Varying:
    """-x."""
    return scaled(x, -1.0)


@rule("positive", "requires_grad_")
def identity(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value in the same memory."""
    return _same(x, x.numbers, view=True)


@rule("contiguous")
def contiguous(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value, in memory of its own if it was in another order there.

    What a convolution gives is in another order here than in the model, where it is contiguous.
    """
    lies = x.numbers.is_contiguous() or (
        x.dim() == 4 and x.numbers.is_contiguous(memory_format=torch.channels_last)
    )
    return _same(x, x.numbers, view=True) if lies else _same(x, x.numbers.contiguous())


def _same(x: Varying, mean: Tensor, *, view: bool = False) -> Varying:
    value = mapped(x, mean, lambda rows: rows, view=view)
    value.spread = x.spread
    return value


@rule("clone", Tensor.__deepcopy__)
def clone(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value in memory of its own."""
    return _same(x, x.numbers.clone())


@rule("detach", "data")
def detach(x: Varying) -> Varying:
    """The same value without gradient; it varies as before."""
    return _same(x, x.numbers.detach(), view=True)


@rule("to", "float", "double", "type_as", "cpu", "cuda", "type", "half", "bfloat16")
def to(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value in another type; only float32 and float64 have the digits for variances."""
    mean = x.run.on_means(x, *args, **kwargs)
    if mean.dtype not in (torch.float32, torch.float64):
        raise x.run.refusal(
            f"It makes {mean.dtype} of a value that varies.",
            "Convert the model in float32: covary.convert(model.float()).",
        )
    if mean is x.numbers:  # as torch gives the very same tensor, if nothing is asked of its memory
        return _same(x, mean, view=True) if "memory_format" in kwargs else x
    dtype, device = x.dtype, x.device
    return mapped(x, mean, lambda rows: rows.to(device, dtype))


@rule("dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """Nothing in evaluation. In training, the mask counts as constant."""
    mask = x.run.on_means(torch.ones_like(x.numbers), *args, **kwargs)
    if bool((mask == 1).all()):
        return x
    if not x.run.is_training:
        raise x.run.refusal(
            "It drops elements at random in evaluation.",
            "Give it training=self.training, or drop nothing (p=0).",
        )
    dropped = scaled(x, mask)
    return x.become(dropped) if kwargs.get("inplace", args[2:3] == (True,)) else dropped


@rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(
    x: Varying, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Varying:
    """Nothing in evaluation."""
    if training and p > 0:
        raise x.run.refusal("It drops elements at random.", "Fine-tune with p=0.")
    return x


@rule("masked_fill")
def masked_fill(x: Varying, mask: Tensor, value: float) -> Varying:
    """A constant in some places: nothing comes back from there."""
    if isinstance(x, Varying) and not isinstance(mask, Varying):
        mean = x.numbers.masked_fill(mask, value)
        shape, samples, where = x.numbers.shape, x.samples.of_dim(mean.dim()), kept(x.run, mask)
        return mapped(
            x, mean, lambda rows: summed_to(rows.masked_fill(where, 0.0), shape), samples=samples
        )
    raise x.run.refusal("Its mask varies.")


@rule("where")
def where(condition: Any, input: Any, other: Any) -> Varying:
    """Either of two values, by a condition that does not vary."""
    values = [value for value in (input, other) if isinstance(value, Varying)]

    return differentiated(torch.where, [condition, input, other], merged(values), EXACT)


@rule(Tensor.where)
def where_method(input: Any, condition: Any, other: Any) -> Varying:
    """The same as a method of the first value."""
    return where(condition, input, other)  # type: ignore[no-any-return]
