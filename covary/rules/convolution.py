"""Convolutions: exact, and, with what they cost, most of what a sweep costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.rules.helpers import estimated, fixed, for_each, kept, mapped
from covary.rules.registry import rule
from covary.varying import Varying

Size = int | Sequence[int]
# Strided convolutions of larger images than this go back faster phase by phase.
_LARGE = 100


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

        def scaled_by(scale: Tensor) -> Callable[[Tensor], Tensor]:
            # Of a transposed convolution, results are the second dimension of the weight.
            by = filters * scale.reshape(1, -1, *[1] * dims).transpose(0, int(not is_transposed))
            return lambda rows: _back(rows, by, shape)

        value = mapped(x, mean, lambda rows: _back(rows, filters, shape))
        estimated(
            value,
            [x],
            lambda v: forth(v, _arranged(filters.square()), None, stride, padding, **options),
        )
        if not is_transposed or shape.groups == 1:
            # As it is now: a function that writes in place may change x itself.
            value.before_scaling = Varying(x.numbers, run, x.node, x.samples), scaled_by
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
    if len(kernel) != 2 or shape.groups != 1 or max(shape.dilation) > 1:
        return False
    if shape.stride[0] != shape.stride[1] or shape.stride[0] == 1:
        return False
    return max(kernel) == 1 or shape.before[1] * shape.before[2] >= _LARGE


def _back_by_phases(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """Rows (N, *after) -> (N, *before) of a strided convolution, as one ordinary convolution.

    An element at place i of the input meets weight k at place o of the output if i + padding =
    stride o + k. With i + padding = stride q + a and k = stride t + a it is o = q - t: for each of
    the stride^2 phases a, a convolution of the rows with every stride-th weight.
    """
    step, (channels, height, width) = shape.stride[0], shape.before
    kernel = [-(-size // step) for size in weight.shape[2:]]
    padded = weight.new_zeros(*weight.shape[:2], *[size * step for size in kernel])
    padded[:, :, : weight.shape[2], : weight.shape[3]] = weight
    apart = padded.reshape(len(weight), channels, kernel[0], step, kernel[1], step)
    by_phase = apart.permute(3, 5, 1, 0, 2, 4).reshape(-1, len(weight), *kernel).flip(2, 3)
    found = F.conv2d(rows, _arranged(by_phase), padding=[size - 1 for size in kernel])
    # (N, q, q', a, a', channels) in memory, to be (N, q, a, q', a', channels).
    high, wide = found.shape[2:]
    found = found.permute(0, 2, 3, 1).reshape(len(rows), high, wide, step, step, channels)
    found = found.transpose(2, 3).reshape(len(rows), high * step, wide * step, channels)
    top, left = shape.padding
    found = found[:, top : top + height, left : left + width].permute(0, 3, 1, 2)
    missing = height - found.shape[2], width - found.shape[3]
    return F.pad(found, (0, missing[1], 0, missing[0])) if any(missing) else found


def _back_by_places(rows: Tensor, weight: Tensor, shape: Geometry) -> Tensor:
    """The same for images of one channel: one product, then a sum for each place in the kernel."""
    (high, wide), (top, left) = shape.after[1:], shape.padding
    step, (_, height, width) = shape.stride[0], shape.before
    kernel = weight.shape[2:]
    flat = rows.permute(0, 2, 3, 1).reshape(-1, len(weight))
    parts = weight.permute(2, 3, 1, 0).reshape(-1, len(weight)) @ flat.mT
    parts = parts.view(*kernel, len(rows), high, wide)
    found = rows.new_zeros(
        len(rows),
        max(height + 2 * top, (high - 1) * step + kernel[0]),
        max(width + 2 * left, (wide - 1) * step + kernel[1]),
    )
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            ends = i + (high - 1) * step + 1, j + (wide - 1) * step + 1
            found[:, i : ends[0] : step, j : ends[1] : step] += parts[i, j]
    return found[:, None, top : top + height, left : left + width]


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
