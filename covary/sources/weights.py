"""Weights that vary: a Gaussian around the weights of a linear or convolutional layer.

For a layer that gives W a at each position, rows g of its output meet the weights as the gradient
G = sum over positions of g a^T (docs/theory.md, eq. 43). With weights of covariance
``left diag(variance) right`` in the bases of two orthogonal matrices, the variance that they add is
the sum of (left^T G right)^2 variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.covariance.samples import Samples
from covary.covariance.terms import WEIGHTS, Term

# Numbers of the largest tensor while weights are drawn: 64 MB in single precision.
_NUMBERS_AT_A_TIME = 2**24
# The same while rows meet weights: 2 MB, which stay in the cache until they are used.
_NUMBERS_IN_CACHE = 2**19


@dataclass(frozen=True, eq=False)
class UncertainWeights:
    """A Gaussian around a weight (m, n) and its bias: left (Z sqrt(variance)) right^T is added.

    Attributes:
        variance: (m, n), or (m, n + 1) where the bias, as one more column, varies too; n is what
            one position of a layer takes: channels times the size of the kernel.
        left: (m, m) orthogonal, or None for the identity.
        right: (n, n) or (n + 1, n + 1) orthogonal, or None for the identity.
    """

    variance: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def inputs(self, patches: Tensor) -> Tensor:
        """(..., n) what positions take -> (..., n or n + 1) in the basis of ``right``."""
        if self.variance.shape[1] > patches.shape[-1]:
            patches = F.pad(patches, (0, 1), value=1.0)
        return patches if self.right is None else patches @ self.right

    def spread(self, squares: Tensor) -> Tensor:
        """(..., n) averages of squared ``inputs`` -> (..., m) variances, in the basis of left."""
        return squares @ self.variance.mT

    def outputs(self, values: Tensor) -> Tensor:
        """(..., m) from the basis of ``left`` to that of the layer's output."""
        return values if self.left is None else values @ self.left.mT

    def draw(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, T, m) what one draw of the weights for each sample adds, for ``inputs`` (B, T, n)."""
        if inputs.shape[1] == 1:  # of one position, elements in the basis of left are independent
            scale = self.spread(inputs.square()).sqrt()
            return self.outputs(scale * torch.empty_like(scale).normal_(generator=generator))
        step = max(1, _NUMBERS_AT_A_TIME // self.variance.numel())
        root = self.variance.sqrt()
        parts = []
        for some in torch.split(inputs, step):
            drawn = root.new_empty(len(some), *root.shape).normal_(generator=generator)
            parts.append(some @ (drawn * root).mT)
        return self.outputs(torch.cat(parts))


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightTerm(Term):
    """What weights that vary add to the output of a layer.

    Attributes:
        weights: how they vary.
        inputs: (B, T, n) what each position of each sample takes, in the basis of ``right``.
        more: (1 | B, 1 | T, m) variance that inputs' own variance adds, in the basis of ``left``.
        arrange: rows (r, *shape) of the output -> (r, B, T, m).
    """

    kind: str = WEIGHTS
    weights: UncertainWeights
    inputs: Tensor
    more: Tensor
    arrange: Callable[[Tensor], Tensor]

    def products(self, rows: Tensor) -> Tensor:
        turned = self._turned(rows)
        if self.inputs.shape[1] == 1:
            flat = turned[:, :, 0].transpose(0, 1)  # (B, r, m)
            return (flat * self._variances()) @ flat.mT
        total = torch.cat([g @ g.mT for g in self._gradients(turned)])
        flat = (turned * self.more.sqrt()).transpose(0, 1).flatten(2)
        return total.baddbmm_(flat, flat.mT)

    def variances(self, rows: Tensor) -> Tensor:
        turned = self._turned(rows)
        if self.inputs.shape[1] == 1:
            return (turned[:, :, 0].square() * self._variances()[:, 0]).sum(-1).mT
        total = torch.cat([g.square().sum(-1) for g in self._gradients(turned)])
        return total + (turned.square() * self.more).sum((-2, -1)).mT

    def _turned(self, rows: Tensor) -> Tensor:
        """(r, B, T, m) rows in the basis of ``left``."""
        arranged = self.arrange(rows)
        return arranged if self.weights.left is None else arranged @ self.weights.left

    def _variances(self) -> Tensor:
        """(B, 1, m) of layers with one position."""
        return self.weights.spread(self.inputs.square()) + self.more

    def _gradients(self, turned: Tensor) -> Iterator[Tensor]:
        """(b, r, m n) gradients times the deviations of the weights, of some samples at a time."""
        root = self.weights.variance.sqrt()
        step = max(1, _NUMBERS_IN_CACHE // (len(turned) * root.numel()))
        pairs = zip(torch.split(turned, step, 1), torch.split(self.inputs, step), strict=True)
        return (_gradient(rows, inputs, root) for rows, inputs in pairs)


def _gradient(rows: Tensor, inputs: Tensor, root: Tensor) -> Tensor:
    """(b, r, m n) of rows (r, b, T, m), inputs (b, T, n): one product for all rows of a sample."""
    r, b, _, m = rows.shape
    found = rows.permute(1, 0, 3, 2).reshape(b, r * m, -1) @ inputs
    return found.view(b, r, *root.shape).mul_(root).flatten(2)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where a layer applies its weights: at each row of features, or at each place of a kernel.

    Attributes:
        order: (B T,) positions of the value sorted by sample, or None where they are already.
        batch: the number B of samples.
        kernel: of a convolution: size, stride, padding and dilation; None for a linear layer.
    """

    order: Tensor | None
    batch: int
    kernel: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of_linear(cls, samples: Samples, shape: Sequence[int]) -> Positions:
        """Of values (..., n): one position for each row of features."""
        lead = shape[:-1]
        index = samples.index[..., 0].expand(lead).reshape(-1)
        is_sorted = samples.is_one_axis and samples.axes in ([], [0])
        return cls(None if is_sorted else torch.argsort(index, stable=True), samples.batch)

    def patches(self, value: Tensor) -> Tensor:
        """(B, T, n) what each position takes of a value that goes into the layer."""
        if self.kernel is None:
            flat = value.reshape(-1, value.shape[-1])
            flat = flat if self.order is None else flat[self.order]
            return flat.reshape(self.batch, -1, value.shape[-1])
        size, stride, padding, dilation = self.kernel
        if value.dim() == 3:  # a sequence is an image of one row
            value = value[:, :, None]
        found = F.unfold(value, size, dilation, padding, stride)
        return found.mT

    def arrange(self, rows: Tensor) -> Tensor:
        """(r, *shape) rows of what the layer gives -> (r, B, T, m)."""
        if self.kernel is not None:
            return rows.flatten(3).mT
        flat = rows.reshape(len(rows), -1, rows.shape[-1])
        flat = flat if self.order is None else flat[:, self.order]
        return flat.reshape(len(rows), self.batch, -1, rows.shape[-1])

    def restore(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """(B, T, m) of positions -> the shape of what the layer gives."""
        if self.kernel is not None:
            return values.mT.reshape(shape)
        flat = values.reshape(-1, values.shape[-1])
        if self.order is not None:
            flat = torch.empty_like(flat).index_copy_(0, self.order, flat)
        return flat.reshape(shape)


def kernel_of(weight: Tensor, options: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Size, stride, padding and dilation of a convolution of one or two dimensions."""
    dims = weight.dim() - 2
    found = []
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = options.get(name, default)
        sizes = (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))
        found.append((default, *sizes) if dims == 1 else sizes)
    size = tuple(weight.shape[2:])
    return ((1, *size) if dims == 1 else size, *found)
