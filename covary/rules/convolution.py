"""Convolutions: exact. They cost most of a sweep, so rows go back by the fastest way known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import estimated, fixed, for_each, kept, mapped
from covary.rules.registry import rule
from covary.varying import Varying

Size = int | Sequence[int]
# Strided convolutions of images of fewer channels go back faster phase by phase.
_FEW_CHANNELS = 16


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
        run = x.run
        if x.numbers.dim() != dims + 2:
            raise run.refusal("Its input has no batch dimension.", "Give it one: x[None].")
        fixed(x, range(1, dims + 2))
        dilation = for_each(options.get("dilation", 1), dims)
        if isinstance(padding, str):
            x, padding = _padded(x, padding, weight, dilation)
        if run.noise.is_none:  # to the last digit what the model itself gives
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
            return _back(rows, by, shape)

        value = mapped(x, mean, lambda rows: _back(rows, filters, shape))
        estimated(
            value,
            [x],
            lambda v: forth(v, _arranged(filters.square()), None, stride, padding, **options),
        )
        if not is_transposed or shape.groups == 1:
            # As it is now: a function that writes in place may change x itself.
            value.before_scaling = x, x.node, x.numbers, scaled_back
        return value

    return apply


for _dims in (1, 2, 3):
    rule(f"conv{_dims}d")(_convolution(_dims, is_transposed=False))
    rule(f"conv_transpose{_dims}d")(_convolution(_dims, is_transposed=True))


def _back(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """Rows (r, B, *after) -> (r, B, *before): the transpose of the convolution."""
    flat = _arranged(rows.reshape(-1, *shape.after))
    dims, kernel = weight.dim() - 2, weight.shape[2:]
    options: dict[str, Any] = {"dilation": shape.dilation, "groups": shape.groups}
    if shape.is_transposed:
        function = getattr(F, f"conv{dims}d")
    elif _has_phases(shape, kernel):
        back = _back_by_places if shape.before[0] == 1 else _back_by_phases
        return back(flat, weight, shape).view(*rows.shape[:2], *shape.before)
    else:
        function = getattr(F, f"conv_transpose{dims}d")
        # So that sizes come out as they were: strides leave some of the last elements out.
        options["output_padding"] = [
            b - ((a - 1) * s - 2 * p + d * (k - 1) + 1)
            for b, a, s, p, d, k in zip(
                shape.before[1:], shape.after[1:], shape.stride, shape.padding, shape.dilation,
                kernel, strict=True,
            )
        ]  # fmt: skip
    found: Tensor = function(flat, _arranged(weight), None, shape.stride, shape.padding, **options)
    return found.view(*rows.shape[:2], *shape.before)


def _has_phases(shape: Geometry, kernel: Sequence[int]) -> bool:
    """Whether a strided convolution goes back faster phase by phase than by torch's own function.

    So it does for few channels, of which torch computes sixteen at a time, and where no two places
    of the kernel meet.
    """
    if len(kernel) != 2 or shape.groups != 1 or max(shape.dilation) > 1:
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
    zeros, margins, reach = _phases(shape, *weight.shape[2:])
    padded = F.pad(weight, zeros) if any(zeros) else weight
    rows = _arranged(F.pad(rows, margins)) if any(margins) else rows
    apart = padded.reshape(len(weight), channels, -1, step, padded.shape[3] // step, step)
    # (O, C, taps, a, taps', a') -> (a a' C, O, taps, taps')
    apart = apart[:, :, :, : reach[0], :, : reach[1]].permute(3, 5, 1, 0, 2, 4).flatten(0, 2)
    found = F.conv2d(rows, _arranged(apart.flip(2, 3)))
    high, wide = found.shape[2:]
    # (N, q, q', a, a', C) in memory, to be (N, q, a, q', a', C)
    found = found.permute(0, 2, 3, 1).reshape(len(rows), high, wide, *reach, channels)
    if reach == (step, step):
        whole = found.transpose(2, 3).reshape(len(rows), high * step, wide * step, channels)
        return whole[:, :height, :width].permute(0, 3, 1, 2)
    whole = found.new_zeros(len(rows), height, width, channels)
    for a, b in itertools.product(*map(range, reach)):
        here = whole[:, a::step, b::step]
        here.copy_(found[:, : here.shape[1], : here.shape[2], a, b])
    return whole.permute(0, 3, 1, 2)


@lru_cache(maxsize=1024)
def _phases(
    shape: Geometry, *kernels: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """How a strided convolution comes apart into phases.

    Returns:
        Zeros to be put around the weight and around rows, the last dimension first, as torch wants
        them; and how many phases the kernel reaches along each dimension.
    """
    step = shape.stride[0]
    zeros: list[int] = []
    margins: list[int] = []
    reach: list[int] = []
    for dim, kernel in enumerate(kernels):
        last = -(-shape.padding[dim] // step)  # how far behind q the last o is that it meets
        front = last * step - shape.padding[dim]
        taps = -(-(kernel + front) // step)
        zeros = [front, taps * step - kernel - front, *zeros]
        counts = -(-shape.before[1 + dim] // step), shape.after[1 + dim]
        margins = [taps - 1 - last, counts[0] + last - counts[1], *margins]
        # With zeros in front, all phases are taken for reached.
        reach.append(step if front else min(kernel, step))
    return tuple(zeros), tuple(margins), (reach[0], reach[1])


def _back_by_places(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """The same for images of one channel: one product for all places of the kernel, then sums."""
    step, (_, height, width) = shape.stride[0], shape.before
    flat = rows.permute(0, 2, 3, 1).reshape(-1, len(weight))
    parts = weight.permute(2, 3, 1, 0).reshape(-1, len(weight)) @ flat.mT
    parts = parts.view(*weight.shape[2:], len(rows), *shape.after[1:])
    found = rows.new_zeros(len(rows), height, width)
    for a, b in itertools.product(range(min(step, height)), range(min(step, width))):
        here = found[:, a::step, b::step]
        downward = _meeting(
            a + shape.padding[0], weight.shape[2], step, here.shape[1], shape.after[1]
        )
        across = _meeting(
            b + shape.padding[1], weight.shape[3], step, here.shape[2], shape.after[2]
        )
        total = None
        for (i, above, below), (j, left, right) in itertools.product(downward, across):
            part = parts[i, j, :, above, left]
            if total is None:  # the first has most elements; nobody else needs it
                total = part if part.shape == here.shape else torch.zeros_like(here)
            if total is not part:
                total[:, below, right] += part
        if total is not None:
            here.copy_(total)
    return found[:, None]


@lru_cache(maxsize=1024)
def _meeting(
    first: int, kernel: int, step: int, count: int, size: int
) -> tuple[tuple[int, slice, slice], ...]:
    """Which places of the kernel reach a phase of the input along one dimension, and where.

    Element q of the phase is at place step q + first of the padded input, and meets place k of the
    kernel at element q + shift of the result, where shift = (first - k) / step.

    Args:
        first: the place of the phase's first element in the padded input.
        kernel: the size of the kernel.
        step: the stride.
        count: the number of elements of the phase.
        size: the number of elements of the result.

    Returns:
        Places k, with the elements of the result and those of the phase that meet; most first.
    """
    found = []
    for k in range(first % step, kernel, step):
        shift = (first - k) // step
        low, high = max(0, -shift), min(count, size - shift)
        if low < high:
            found.append((k, slice(low + shift, high + shift), slice(low, high)))
    return tuple(sorted(found, key=lambda each: each[2].start - each[2].stop))


def _arranged(value: Tensor) -> Tensor:
    """Images with their channels last in memory: convolutions of them take about half the time."""
    if value.dim() != 4:
        return value
    return value.contiguous(memory_format=torch.channels_last)


def _padded(x: Varying, padding: str, weight: Tensor, dilation: Sequence[int]) -> tuple[Any, int]:
    """Padding by name, as numbers; an even kernel has one more behind than before."""
    if padding == "valid":
        return x, 0
    sizes: list[int] = []
    for d, k in reversed(list(zip(dilation, weight.shape[2:], strict=True))):
        total = d * (k - 1)
        sizes += [total // 2, total - total // 2]
    return F.pad(x, sizes), 0
