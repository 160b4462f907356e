"""Sums, products, normalisation and copies.

Exact where they are linear in what varies; products of values that vary are matched or linearised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.covariance.samples import Samples
from covary.linalg import summed_to
from covary.rules.helpers import (
    differentiated,
    estimated,
    fixed,
    joined,
    kept,
    mapped,
    merged,
    mixing,
    run_of,
)
from covary.rules.registry import BATCH, EXACT, LINEARISED, composed, rule
from covary.sources.source import DropoutMask
from covary.varying import Varying, name_of, plain, varying_in


@rule("linear", has_weights=True)
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x W^T + b; rows go back by rows W."""
    if not isinstance(x, Varying) or isinstance(weight, Varying) or isinstance(bias, Varying):
        product: Any = torch.matmul(x, weight.mT)
        return product if bias is None else product + bias
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
    mean = F.batch_norm(x.numbers, running_mean, running_var, weight, bias, training, momentum, eps)
    if of_batch:
        others = [dim for dim in range(x.numbers.dim()) if dim != 1]
        var, kind = x.numbers.detach().var(others, correction=0), BATCH
    else:
        assert running_var is not None
        fixed(x, [1])
        var, kind = running_var.clone(), EXACT  # torch counts no change of running statistics
    by = kept(x.run, weight)
    ones = [1] * (x.numbers.dim() - 2)

    def scale() -> Tensor:  # computed by whoever needs it
        found = torch.rsqrt(var + eps)
        return found if by is None else found * by

    if x.before_scaling is not None:
        before, node, numbers, back = x.before_scaling
        if before.node != node:
            before = Varying(numbers, x.run, node, x.samples)
        value = mapped(before, mean, lambda rows: back(rows, scale()), samples=x.samples, kind=kind)
    else:
        value = mapped(x, mean, lambda rows: rows * scale().view(-1, *ones), kind=kind)
    return estimated(value, [x], lambda v: v * scale().square().view(-1, *ones))


def _sum(sign: int, x: Any, y: Any, *, alpha: float = 1) -> Varying:
    """x + sign alpha y: what comes back goes to both."""
    scale = sign * alpha
    pairs = [(value, by) for value, by in ((x, 1), (y, scale)) if isinstance(value, Varying)]
    values, factors = [value for value, _ in pairs], [by for _, by in pairs]
    shapes = [value.numbers.shape for value in values]
    mean = plain(x) + (plain(y) if scale == 1 else scale * plain(y))

    def pull(rows: Tensor) -> list[Tensor]:
        return [
            summed_to(rows if factor == 1 else factor * rows, shape)
            for factor, shape in zip(factors, shapes, strict=True)
        ]

    def spread(*parts: Tensor) -> Tensor:
        first, *others = [
            part if abs(f) == 1 else part * f**2 for part, f in zip(parts, factors, strict=True)
        ]
        return first + others[0] if others else first

    samples = merged(values).of_dim(mean.dim())
    return estimated(values[0].run.write(EXACT, mean, values, pull, samples), values, spread)


rule("add", Tensor.__radd__)(partial(_sum, 1))
rule("sub", "subtract", Tensor.__sub__)(partial(_sum, -1))
rule("rsub", Tensor.__rsub__)(lambda x, y, *, alpha=1: _sum(-1, y, x, alpha=alpha))


def scaled(x: Varying, factor: Any) -> Varying:
    """Multiply x by a factor that does not vary, a number or a tensor that may broadcast it."""
    mean = x.numbers * factor
    shape, samples, by = x.numbers.shape, x.samples.of_dim(mean.dim()), kept(x.run, factor)
    value = mapped(x, mean, lambda rows: summed_to(rows * by, shape), samples=samples)
    return estimated(value, [x], lambda v: v * by**2)


rule("neg", "negative")(lambda x: scaled(x, -1.0))


@rule("mul", "multiply", Tensor.__rmul__, is_pair=True)
def multiply(x: Any, y: Any) -> Varying:
    """x y; exact if one of them is constant.

    Of two that vary, E[x y] = E[x] E[y] + Cov(x, y), and the covariance follows each factor at the
    other's mean; what both do together adds Var x Var y + Cov(x, y)^2 to each element's variance.
    """
    if not isinstance(y, Varying):
        return scaled(x, plain(y))
    if not isinstance(x, Varying):
        return scaled(y, plain(x))
    mx, my = x.numbers, y.numbers
    if not x.run.tape.is_supervised:
        mx, my = mx.detach(), my.detach()

    def pull(rows: Tensor) -> list[Tensor]:
        return [summed_to(rows * b, a.shape) for a, b in ((mx, my), (my, mx))]

    product: Varying = x.run.product(x, y, merged([x, y]), pull)
    return product


@rule("div", "divide", "true_divide")
def divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Varying:
    """x / y; exact if y is constant, linearised at the means if it varies."""
    if rounding_mode is not None:
        raise run_of([x, y]).refusal("It rounds, and what is rounded has no slope.")
    if not isinstance(y, Varying):
        return scaled(x, 1 / plain(y))
    return differentiated(torch.div, [x, y], merged(varying_in([x, y])), LINEARISED)


rule(Tensor.__rdiv__, Tensor.__rtruediv__)(lambda x, y: divide(y, x))


@composed("addcmul")
def addcmul(x: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    """x + value tensor1 tensor2."""
    return x + value * (tensor1 * tensor2)


@rule("matmul", "bmm", "mm", Tensor.__rmatmul__)
def matmul(x: Any, y: Any) -> Any:
    """Matrix product; exact if one factor is constant, linearised at the means if both vary."""
    run = run_of([x, y])
    if run.function is Tensor.__rmatmul__:
        x, y = y, x
    if y.dim() == 1 and not isinstance(y, Varying):
        return torch.matmul(x, y[:, None]).squeeze(-1)
    if x.dim() == 1 and not isinstance(x, Varying):
        return torch.matmul(x[None], y).squeeze(-2)
    if min(x.dim(), y.dim()) < 2:
        raise run.refusal(
            "It takes a vector without batch dimension.", "Give it a dimension: [:, None]."
        )
    # Along the sum the batch would mix; the other dimension of a matrix may be the batch.
    varying = [(each, dim) for each, dim in ((x, -1), (y, -2)) if isinstance(each, Varying)]
    for each, dim in varying:
        fixed(each, [dim])
    samples = merged([each for each, _ in varying]).of_dim(max(x.dim(), y.dim()))
    kind = EXACT if len(varying) == 1 else LINEARISED
    mx, my = plain(x), plain(y)

    def spread(vx: Tensor, vy: Tensor) -> Tensor:
        found: Tensor = vx @ my.square() + mx.square() @ vy
        return found

    return estimated(differentiated(torch.matmul, [x, y], samples, kind), [x, y], spread)


@composed("addmm", "baddbmm")
def addmm(x: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """``beta * x + alpha * (mat1 @ mat2)``."""
    return beta * x + alpha * torch.matmul(mat1, mat2)


@rule("einsum")
def einsum(equation: str, *operands: Any) -> Varying:
    """Sums of products; exact if one operand varies, linearised at the means if more do."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    run = run_of([equation, *operands])
    if not isinstance(equation, str) or "..." in equation:
        raise run.refusal("Its equation has an ellipsis.", "Write out all its indices.")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = "".join(terms)
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    every = []
    for term, operand in zip(terms, operands, strict=True):
        if not isinstance(operand, Varying):
            continue
        index = operand.samples.index
        if any(index.shape[i] > 1 and c not in right for i, c in enumerate(term)):
            raise mixing(run)
        # The sample of each result: dimensions of the batch at their new places.
        common = "".join(c for c in right if c in term)
        moved = torch.einsum(f"{term}->{common}", index)
        sizes = [moved.shape[common.index(c)] if c in common else 1 for c in right]
        every.append(Samples(moved.reshape(sizes), operand.samples.batch))
    kind = EXACT if len(every) == 1 else LINEARISED
    samples = joined(run, every)
    return differentiated(lambda *args: torch.einsum(equation, *args), operands, samples, kind)


@rule("positive", "requires_grad_", "contiguous", "clone", Tensor.__deepcopy__, "detach", "data")
def same(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value, in the same memory or as a copy.

    What a convolution gives has its channels last here, and is contiguous in the model.
    """
    name, numbers = name_of(x.run.function), x.numbers
    mean, is_view = numbers, True
    if name == "contiguous" and not numbers.is_contiguous():
        is_view = x.dim() == 4 and numbers.is_contiguous(memory_format=torch.channels_last)
        mean = numbers if is_view else numbers.contiguous()
    elif name in ("clone", "__deepcopy__"):
        mean, is_view = numbers.clone(), False
    elif name in ("detach", "data"):
        mean = numbers.detach()
    value = mapped(x, mean, lambda rows: rows, view=is_view)
    value.spread = x.spread
    return value


@rule("to", "float", "double", "type_as", "cpu", "cuda", "type", "half", "bfloat16")
def to(x: Varying, *args: Any, **kwargs: Any) -> Varying:
    """The same value in another type; only float32 and float64 have the digits for variances."""
    mean = x.run.function(x.numbers, *plain(args), **plain(kwargs))
    if mean.dtype not in (torch.float32, torch.float64):
        raise x.run.refusal(
            f"It makes {mean.dtype} of a value that varies.",
            "Convert the model in float32: covary.convert(model.float()).",
        )
    if mean is x.numbers:  # as torch gives the very same tensor, if nothing is asked of its memory
        return same(x) if "memory_format" in kwargs else x
    dtype, device = x.dtype, x.device
    return mapped(x, mean, lambda rows: rows.to(device, dtype))


@composed("dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(x: Varying, p: float = 0.5, training: bool = True) -> Varying:
    """A source (``convert(dropout=True)``), in training too. Else a mask in training alone."""
    run = x.run
    if run.drops() and p > 0:
        entered: Varying = run.entered(x, DropoutMask(p, _dropped_together(x)))
        return entered
    if run.is_training:
        return scaled(x, run.function(torch.ones_like(x.numbers), p, training)) if training else x
    if training and p > 0:
        raise run.refusal(
            "It drops elements at random in evaluation.",
            "Make it a source (covary.convert(model, dropout=True)), give it "
            "training=self.training, or drop nothing (p=0).",
        )
    return x


def _dropped_together(x: Varying) -> Sequence[int]:
    """The dimensions along which the dropout that is called drops all elements or none."""
    name = name_of(x.run.function).rstrip("_")
    if name == "dropout":
        return ()
    needed = {"dropout1d": 3, "dropout3d": 5}.get(name, max(3, x.dim()))
    if x.dim() != needed:
        raise x.run.refusal(f"It takes {needed} dimensions with a batch, and got {x.dim()}.")
    together = range(2, x.dim())
    fixed(x, together)
    return together


@rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(x: Varying, p: float = 0.5, training: bool = False) -> Varying:
    """Nothing in evaluation."""
    if p > 0 and (training or x.run.drops()):
        raise x.run.refusal("It drops elements at random.", "Set its p to 0.")
    return x


@rule("masked_fill")
def masked_fill(x: Any, mask: Any, value: float) -> Varying:
    """A constant in some places: nothing comes back from there."""
    if not isinstance(x, Varying) or isinstance(mask, Varying):
        raise run_of([x, mask]).refusal("Its mask varies.")
    mean = x.numbers.masked_fill(mask, value)
    shape, samples, where = x.numbers.shape, x.samples.of_dim(mean.dim()), kept(x.run, mask)
    return mapped(
        x, mean, lambda rows: summed_to(rows.masked_fill(where, 0.0), shape), samples=samples
    )


@rule("where")
def where(condition: Any, input: Any, other: Any) -> Varying:
    """Either of two values, by a condition that does not vary."""
    samples = merged([value for value in (input, other) if isinstance(value, Varying)])
    return differentiated(torch.where, [condition, input, other], samples, EXACT)


# As a method of the first value.
rule(Tensor.where)(lambda input, condition, other: where(condition, input, other))
