"""Convolutions: exact. They cost most of a sweep, so rows go back by the fastest way known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import estimated, fixed, for_each, kept, mapped
from covary.rules.registry import rule
from covary.tracing import is_traced
from covary.varying import Varying

# Strided convolutions of images of fewer channels go back faster phase by phase.
_FEW_CHANNELS = 16
# Those of one channel, so many images at a time: what is between two steps stays in the cache.
_AT_ONCE = 128


class Geometry(NamedTuple):
    """Shapes and steps of a convolution from (B, *before) to (B, *after)."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    is_transposed: bool


def _convolution(dims: int, *, is_transposed: bool) -> Callable[..., Varying]:
    forth = getattr(F, f"conv{'_transpose' if is_transposed else ''}{dims}d")
    # What follows bias, stride and padding, in torch's order.
    names = ("output_padding", "groups", "dilation") if is_transposed else ("dilation", "groups")

    def apply(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        *rest: Any,
        **options: Any,
    ) -> Varying:
        """A convolution; rows go back by the transposed one, folded into the batch."""
        options |= dict(zip(names, rest, strict=False))
        if not isinstance(x, Varying) or isinstance(weight, Varying) or isinstance(bias, Varying):
            value = x if isinstance(x, Varying) else weight
            raise value.run.refusal("Weights of a convolution vary.")
        run = x.run
        if x.numbers.dim() != dims + 2:
            raise run.refusal("Its input has no batch dimension.", "Give it one: x[None].")
        fixed(x, range(1, dims + 2))
        dilation = for_each(options.get("dilation", 1), dims)
        if isinstance(padding, str):
            x, padding = _padded(x, padding, weight, dilation), 0
        if run.is_still:  # to the last digit what the model itself gives
            mean = forth(x.numbers, weight, bias, stride, padding, **options)
        else:
            mean = _arranged(forth(x.numbers, _arranged(weight), bias, stride, padding, **options))
        shape = Geometry(
            x.numbers.shape[1:], mean.shape[1:], for_each(stride, dims), for_each(padding, dims),
            dilation, options.get("groups", 1), is_transposed,
        )  # fmt: skip
        filters = kept(run, weight)

        def scaled_back(rows: Tensor, scale: Tensor) -> Tensor:
            # Of a transposed convolution, results are the second dimension of the weight.
            by = filters * scale.reshape(1, -1, *[1] * dims).transpose(0, int(not is_transposed))
            return back(rows, by, shape)

        def spread(v: Tensor) -> Tensor:
            found: Tensor = forth(v, _arranged(filters.square()), None, stride, padding, **options)
            return found

        value = estimated(mapped(x, mean, lambda rows: back(rows, filters, shape)), [x], spread)
        if not is_transposed or shape.groups == 1:
            # As it is now: a function that writes in place may change x itself.
            value.before_scaling = x, x.node, x.numbers, scaled_back
        return value

    return apply


for _dims in (1, 2, 3):
    rule(f"conv{_dims}d", has_weights=True)(_convolution(_dims, is_transposed=False))
    rule(f"conv_transpose{_dims}d")(_convolution(_dims, is_transposed=True))


def back(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """Rows (r, B, *after) -> (r, B, *before): the transpose of the convolution."""
    flat = _arranged(rows.reshape(-1, *shape.after))
    dims, kernel = weight.dim() - 2, weight.shape[2:]
    options: dict[str, Any] = {"dilation": shape.dilation, "groups": shape.groups}
    if shape.is_transposed:
        function = getattr(F, f"conv{dims}d")
    elif _has_phases(shape, kernel):
        by_parts = _back_by_places if shape.before[0] == 1 else _back_by_phases
        return by_parts(flat, weight, shape).view(*rows.shape[:2], *shape.before)
    else:
        function = getattr(F, f"conv_transpose{dims}d")
        # So that sizes come out as they were: strides leave some of the last elements out.
        options["output_padding"] = [
            b - ((a - 1) * s - 2 * p + d * (k - 1) + 1)
            for b, a, s, p, d, k in zip(
                shape.before[1:], shape.after[1:], *shape[2:5], kernel, strict=True
            )
        ]
    found: Tensor = function(flat, _arranged(weight), None, shape.stride, shape.padding, **options)
    return found.view(*rows.shape[:2], *shape.before)


def _has_phases(shape: Geometry, kernel: Sequence[int]) -> bool:
    """Whether a strided convolution goes back faster by parts than by torch's own function.

    So it does for few channels, of which torch computes sixteen at a time, and where no two places
    of the kernel meet.
    """
    if is_traced() or len(kernel) != 2:
        return False
    if shape.groups != 1 or max(shape.dilation) > 1:
        return False
    if shape.stride[0] != shape.stride[1] or shape.stride[0] == 1:
        return False
    is_apart = max(kernel) <= shape.stride[0] and not any(shape.padding)
    return is_apart or shape.before[0] < _FEW_CHANNELS


def _back_by_phases(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """Rows (N, *after) -> (N, *before) of a strided convolution, as one ordinary convolution.

    Element i of the input meets weight k at element o of the result if i + padding = stride o + k.
    Elements i = stride q + a are phase a, and k = stride t + (a + padding) % stride: for each of
    the stride^2 phases, a convolution of the rows with every stride-th weight. Nothing comes back
    to the phases that a small kernel does not reach.
    """
    step, (channels, height, width) = shape.stride[0], shape.before
    # Zeros around the weight and around rows, the last dimension first; phases that are reached.
    zeros: list[int] = []
    margins: list[int] = []
    reach: list[int] = []
    for kernel, padding, before, after in zip(
        weight.shape[2:], shape.padding, shape.before[1:], shape.after[1:], strict=True
    ):
        last = -(-padding // step)  # how far behind q the last o is that it meets
        front = last * step - padding
        taps = -(-(kernel + front) // step)
        zeros = [front, taps * step - kernel - front, *zeros]
        margins = [taps - 1 - last, -(-before // step) + last - after, *margins]
        reach.append(step if front else min(kernel, step))
    padded = F.pad(weight, zeros) if any(zeros) else weight
    rows = _arranged(F.pad(rows, margins)) if any(margins) else rows
    apart = padded.reshape(len(weight), channels, -1, step, padded.shape[3] // step, step)
    # (O, C, taps, a, taps', a') -> (a a' C, O, taps, taps')
    apart = apart[:, :, :, : reach[0], :, : reach[1]].permute(3, 5, 1, 0, 2, 4).flatten(0, 2)
    found = F.conv2d(rows, _arranged(apart.flip(2, 3)))
    high, wide = found.shape[2:]
    # (N, q, q', a, a', C) in memory, to be (N, q, a, q', a', C)
    found = found.permute(0, 2, 3, 1).reshape(len(rows), high, wide, *reach, channels)
    found = found.transpose(2, 3)
    if reach != [step, step]:
        reached = found
        found = found.new_zeros(len(rows), high, step, wide, step, channels)
        found[:, :, : reach[0], :, : reach[1]] = reached
    found = found.reshape(len(rows), high * step, wide * step, channels)
    return found[:, :height, :width].permute(0, 3, 1, 2)


def _back_by_places(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """The same for images of one channel: one product for all places of the kernel, then sums."""
    by, places = weight.flatten(1).mT, rows.permute(0, 2, 3, 1).flatten(1, 2).mT
    chunks = torch.split(places, _AT_ONCE)
    sizes: Any = shape.before[1:], weight.shape[2:]
    options: Any = {"padding": shape.padding, "stride": shape.stride}
    return torch.cat([F.fold(by @ chunk, *sizes, **options) for chunk in chunks])


def _arranged(value: Tensor) -> Tensor:
    """Images with their channels last in memory: convolutions of them take about half the time."""
    if value.dim() != 4 or is_traced():  # a compiler arranges them itself
        return value
    return value.contiguous(memory_format=torch.channels_last)


def _padded(x: Varying, padding: str, weight: Tensor, dilation: Sequence[int]) -> Any:
    """The input with padding of this name; an even kernel has one more behind than before."""
    if padding == "valid":
        return x
    sizes: list[int] = []
    for d, k in zip(reversed(dilation), reversed(weight.shape[2:]), strict=True):
        total = d * (k - 1)
        sizes += [total // 2, total - total // 2]
    return F.pad(x, sizes)
