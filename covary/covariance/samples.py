"""Which sample of the batch each element of a value belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from covary.tracing import is_traced


@dataclass(frozen=True, eq=False)
class Samples:
    """The sample of each element, for a value of any layout.

    Samples of a batch do not mix, but models are free to move the batch to another dimension, or to
    merge it with one ((B, T, n) to (B T, n)). This remembers where it went.

    Attributes:
        index: int64, of as many dimensions as the value, of size 1 along all those on which the
            sample does not depend: (B, 1, 1, 1) for images, numbered from 0.
        batch: the number B of samples.
    """

    index: Tensor
    batch: int

    @classmethod
    def along(cls, value: Tensor, axis: int = 0) -> Samples:
        """The samples of a value whose dimension ``axis`` is the batch."""
        shape = [1] * value.dim()
        shape[axis] = value.shape[axis]
        index = torch.arange(value.shape[axis], device=value.device)
        return cls(index.view(shape), value.shape[axis])

    @cached_property
    def axes(self) -> list[int]:
        """The dimensions along which the sample changes."""
        return [axis for axis, size in enumerate(self.index.shape) if size > 1]

    @cached_property
    def is_one_axis(self) -> bool:
        """Whether one dimension is the batch: no sample's elements are in two places of it."""
        count = self.index.numel()
        if len(self.axes) > 1 or count != self.batch:
            return False
        if is_traced():  # no values to look at: ``covary.export`` did before
            return True
        order = torch.arange(count, device=self.index.device)
        return torch.equal(self.index.reshape(-1), order)

    def of_dim(self, dim: int) -> Samples:
        """Samples of the value with dimensions of size 1 in front, as broadcasting adds them."""
        missing = dim - self.index.dim()
        return self if missing <= 0 else Samples(self.index[(None,) * missing], self.batch)

    def without(self, dims: Sequence[int]) -> Samples:
        """The samples of the value without these dimensions, none of which is the batch."""
        gone = {dim % self.index.dim() for dim in dims}
        keep = [size for dim, size in enumerate(self.index.shape) if dim not in gone]
        return Samples(self.index.reshape(keep), self.batch)

    def moved(self, function: Callable[[Tensor], Any], shape: Sequence[int]) -> Any:
        """Samples of what a function makes that moves elements; a tuple if it gives several."""
        found = function(self.index.expand(*shape))
        if isinstance(found, Tensor):
            return Samples(_without_repetition(found), self.batch)
        return tuple(Samples(_without_repetition(each), self.batch) for each in found)

    def agrees(self, other: Samples) -> bool:
        """Whether elements that broadcasting brings together are of one sample."""
        if self.index is other.index:
            return True
        dim = max(self.index.dim(), other.index.dim())
        mine, others = self.of_dim(dim).index, other.of_dim(dim).index
        fits = all(a == b or 1 in (a, b) for a, b in zip(mine.shape, others.shape, strict=True))
        return fits and (is_traced() or bool((mine == others).all()))

    def flattened(self, rows: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (M, r, n) and variances (1 | M, n), the batch in front and the rest flat.

        M is B if ``is_one_axis``; or else element m of M belongs to sample ``index.flatten()[m]``.

        Args:
            rows: (r, *shape) of a value.
            var: (1 | B, ...) to be broadcast to the value's shape.
        """
        shape, axes = rows.shape[1:], self.axes
        if var.dim() < len(shape):
            var = var[(None,) * (len(shape) - var.dim())]
        # The same for all samples: expanded along the other dimensions alone.
        common = all(var.shape[axis] == 1 for axis in axes)
        if var.shape[1:] != shape[1:] or axes != [0]:
            var = var.expand([1 if common and i in axes else size for i, size in enumerate(shape)])
        # In the order in which numbers lie in memory, so that nothing is copied.
        rest = _in_memory(rows.stride()[1:], tuple(axes))
        flat = rows.permute(*[axis + 1 for axis in axes], 0, *[i + 1 for i in rest])
        count = self.index.numel()
        units = torch.Size(shape[i] for i in rest).numel()
        return (
            flat.reshape(count, len(rows), units),
            var.permute(*axes, *rest).reshape(1 if common else count, units),
        )

    def add_up(self, parts: Tensor) -> Tensor:
        """(B, ...) sums over the elements of each sample, of parts (M, ...)."""
        if self.is_one_axis:
            return parts
        total = parts.new_zeros(self.batch, *parts.shape[1:])
        return total.index_add(0, self.index.reshape(-1), parts)


def _without_repetition(index: Tensor) -> Tensor:
    """The same with size 1 along the dimensions on which it does not depend."""
    for axis, (size, stride) in enumerate(zip(index.shape, index.stride(), strict=True)):
        if size > 1:
            first = index.narrow(axis, 0, 1)
            # What was expanded has stride 0; what was copied has to be looked at. In a graph for
            # any number of samples a size is a number where it does not depend on theirs.
            if is_traced():
                is_same = not isinstance(size, torch.SymInt)
            else:
                is_same = stride == 0 or bool((index == first).all())
            if is_same:
                index = first
    return index


@lru_cache(maxsize=1024)
def _in_memory(stride: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    """The dimensions of these strides but for some, the one that varies slowest first."""
    return sorted((i for i in range(len(stride)) if i not in axes), key=lambda i: -stride[i])
