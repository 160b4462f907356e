"""Weights that vary: a Gaussian around the weights of a linear or convolutional layer.

For a layer that gives W a at each position, rows g of its output meet the weights as the gradient
G = sum over positions of g a^T (docs/theory.md, eq. 43). With weights of covariance
``left diag(variance) right`` in the bases of two orthogonal matrices, the variance that they add is
the sum of (left^T G right)^2 variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.covariance.samples import Samples
from covary.covariance.terms import DROPOUT, WEIGHTS, Term
from covary.settings import covariance_is_supervised

# Numbers of the largest tensor while weights are drawn: 64 MB in single precision.
_NUMBERS_AT_A_TIME = 2**24
# The same while rows meet weights: 2 MB, which stay in the cache until they are used.
_NUMBERS_IN_CACHE = 2**19
# Torch takes longer for products whose results have fewer columns than this.
_FEW_COLUMNS = 16


@dataclass(frozen=True, eq=False)
class UncertainWeights:
    """A Gaussian around a weight (m, n) and its bias: left (Z sqrt(variance)) right^T is added.

    Attributes:
        variance: (m, n), or (m, n + 1) where the bias, as one more column, varies too; n is what
            one position of a layer takes: channels times the size of the kernel.
        left: (m, m) orthogonal, or None for the identity.
        right: (n, n) or (n + 1, n + 1) orthogonal, or None for the identity.
        kind: what it is in a budget.
        linearised: whether outputs are taken as linear in how they vary: means, and the gains of
            what follows, are then those of the weights themselves.
    """

    variance: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    kind: str = WEIGHTS
    linearised: bool = False

    def inputs(self, patches: Tensor) -> Tensor:
        """(..., n) what positions take -> (..., n or n + 1) in the basis of ``right``."""
        if self.right is not None:
            return F.linear(patches, *self.turning(patches.shape[-1]))
        has_bias = self.variance.shape[1] > patches.shape[-1]
        return F.pad(patches, (0, 1), value=1.0) if has_bias else patches

    def turning(self, n: int) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of a layer that turns n inputs to the basis of ``right``."""
        assert self.right is not None
        return self.right[:n].mT, self.right[n] if len(self.right) > n else None

    def spread(self, squares: Tensor) -> Tensor:
        """(..., n) averages of squared ``inputs`` -> (..., m) variances, in the basis of left."""
        return squares @ self.variance.mT

    def spread_out(self, squares: Tensor) -> Tensor:
        """The same of each element of the layer's output, in its own basis."""
        if self.left is None:
            return self.spread(squares)
        return squares @ (self.left.square() @ self.variance).mT

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


@dataclass(frozen=True)
class DropConnect:
    """Weights of a layer dropped with probability p, and the others divided by 1 - p.

    They vary around the weight W as a Gaussian of variance p / (1 - p) W^2; biases are kept.
    """

    p: float

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p < 1:
            raise ValueError(f"DropConnect needs a probability in [0, 1), got {self.p!r}.")

    def weights(self, weight: Tensor) -> UncertainWeights:
        """How this weight varies."""
        weight = weight if covariance_is_supervised() else weight.detach()
        variance = weight.flatten(1).square() * (self.p / (1 - self.p))
        return UncertainWeights(variance, kind=DROPOUT)


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightTerm(Term):
    """What weights that vary add to the output of a layer.

    The layer's inputs vary too. Their variance, times that of the weights, is added as if it were
    independent at different positions.

    Attributes:
        weights: how they vary.
        inputs: gives (B, T, n) what each position of each sample takes, in the basis of ``right``.
        more: (1 | B, 1, m) variance that inputs' own variance adds, in the basis of ``left``.
        arrange: rows (r, *shape) of the output -> (r, B, T, m).
    """

    weights: UncertainWeights
    inputs: Callable[[], Tensor]
    more: Tensor
    arrange: Callable[[Tensor], Tensor]

    @property
    def is_linearised(self) -> bool:
        return self.weights.linearised

    def products(self, rows: Tensor) -> Tensor:
        turned = self._turned(rows)
        flat = turned.transpose(0, 1).flatten(2)  # (B, r, T m)
        if turned.shape[2] == 1:
            return (flat * self._variances()) @ flat.mT
        places = turned.permute(1, 2, 0, 3).contiguous()  # (B, T, r, m)
        by, pairs = self.weights.variance, self._gradients(places)
        if by.shape[1] < turned.shape[2]:  # gradients are smaller than rows
            found = torch.cat([(g * by).flatten(2) @ g.flatten(2).mT for g, _ in pairs])
            return found.baddbmm_((turned * self.more).transpose(0, 1).flatten(2), flat.mT)
        met = torch.cat([inputs @ g.mul_(by).flatten(1, 2).mT for g, inputs in pairs])
        met = met.view(places.shape).addcmul_(places, self.more[:, :, None])
        return met.transpose(1, 2).flatten(2) @ flat.mT

    def variances(self, rows: Tensor) -> Tensor:
        turned = self._turned(rows)
        if turned.shape[2] == 1:
            return (turned[:, :, 0].square() * self._variances()[:, 0]).sum(-1).mT
        by, pairs = self.weights.variance.flatten(), self._gradients(turned.permute(1, 2, 0, 3))
        total = torch.cat([g.square().flatten(2) @ by for g, _ in pairs])
        return total + (turned.square() * self.more).sum((-2, -1)).mT

    def _turned(self, rows: Tensor) -> Tensor:
        """(r, B, T, m) rows in the basis of ``left``."""
        arranged, left = self.arrange(rows), self.weights.left
        if left is None:
            return arranged
        if arranged.shape[2] == 1 or len(left) >= _FEW_COLUMNS:
            return arranged @ left
        # As images of T pixels, which a convolution turns sooner.
        images = arranged.flatten(0, 1)[:, None].permute(0, 3, 1, 2)
        turned = F.conv2d(images, left.mT[..., None, None])
        return turned.permute(0, 2, 3, 1).reshape(arranged.shape)

    def _variances(self) -> Tensor:
        """(B, 1, m) of layers with one position."""
        return self.weights.spread(self.inputs().square()) + self.more

    def _gradients(self, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of rows (B, T, r, m), gradients (b, r, m, n) and inputs (b, T, n) of some samples."""
        r = places.shape[2]
        step = max(1, _NUMBERS_IN_CACHE // (r * self.weights.variance.numel()))
        every = torch.split(places.flatten(2), step), torch.split(self.inputs(), step)
        for rows, inputs in zip(*every, strict=True):
            is_narrow = inputs.shape[2] < _FEW_COLUMNS
            found = (inputs.mT @ rows).mT if is_narrow else rows.mT @ inputs
            yield found.reshape(len(found), r, -1, inputs.shape[2]), inputs


@dataclass(frozen=True, eq=False)
class Kernel:
    """The geometry of a convolution; a sequence is an image of one row.

    Attributes:
        size: (2,) of the kernel.
        stride: (2,) of its places.
        padding: (4,) zeros around the image, in the order of ``F.pad``.
        dilation: (2,) steps within the kernel.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, options: Mapping[str, Any]) -> Kernel:
        """Of the weight (m, channels, *size) of a convolution and the options of its call."""
        dims = weight.dim() - 2
        size = tuple(weight.shape[2:])
        given = [options.get("stride", 1), options.get("dilation", 1)]
        stride, dilation = (
            (each,) * dims if isinstance(each, int) else tuple(each) * (dims // len(each))
            for each in given
        )
        padding = options.get("padding", 0)
        if isinstance(padding, str):  # an even kernel has one more behind than before
            total = [d * (k - 1) * (padding == "same") for d, k in zip(dilation, size, strict=True)]
            around = [(each // 2, each - each // 2) for each in total]
        else:
            sides = (padding,) * dims if isinstance(padding, int) else tuple(padding)
            around = [(each, each) for each in sides * (dims // len(sides))]
        if dims == 1:
            size, stride, dilation, around = (
                (1, *size),
                (1, *stride),
                (1, *dilation),
                [(0, 0), *around],
            )
        last_first = tuple(zeros for pair in reversed(around) for zeros in pair)
        return cls(size, stride, last_first, dilation)

    def inputs(self, images: Tensor, weights: UncertainWeights) -> Tensor:
        """(N, channels, *places) -> (N, places, n) what the kernel takes, in the weights' basis."""
        images = images[:, :, None] if images.dim() == 3 else images
        sides = self.padding[::-2]
        if sides != self.padding[-2::-2]:  # an uneven number of zeros
            images, sides = F.pad(images, self.padding), (0, 0)
        if weights.right is None:
            patches = F.unfold(images, self.size, self.dilation, sides, self.stride).mT
            return weights.inputs(patches)
        # To turn patches is a convolution too, which need not write them down.
        shape = images.shape[1], *self.size
        turn, bias = weights.turning(math.prod(shape))
        last = torch.channels_last
        filters = turn.reshape(-1, *shape).contiguous(memory_format=last)
        images = images.contiguous(memory_format=last)
        found = F.conv2d(images, filters, bias, self.stride, sides, self.dilation)
        return found.flatten(2).mT


@dataclass(frozen=True, eq=False)
class Positions:
    """Where a layer applies its weights: at each row of features, or at each place of a kernel.

    Attributes:
        order: (N,) rows of features, or images, sorted by sample; None where they are already.
        batch: the number B of samples, each of which has N / B of them.
        kernel: of a convolution; None for a linear layer.
    """

    order: Tensor | None
    batch: int
    kernel: Kernel | None = None

    @classmethod
    def of(cls, samples: Samples, shape: Sequence[int], kernel: Kernel | None) -> Positions | None:
        """Of a value of this shape that goes into the layer; None if samples have unequal parts."""
        if samples.is_one_axis and samples.axes in ([], [0]):
            return cls(None, samples.batch, kernel)
        lead = shape[:1] if kernel is not None else shape[:-1]
        index = samples.index.reshape(samples.index.shape[: len(lead)]).expand(lead).reshape(-1)
        if len(set(index.bincount(minlength=samples.batch).tolist())) > 1:
            return None
        return cls(torch.argsort(index, stable=True), samples.batch, kernel)

    def inputs(self, value: Tensor, weights: UncertainWeights) -> Tensor:
        """(B, T, n) what each position takes of a value that goes into the layer.

        In the basis of the weights.
        """
        if self.kernel is None:
            found = weights.inputs(value.reshape(-1, 1, value.shape[-1]))
        else:
            found = self.kernel.inputs(value, weights)
        return self._by_sample(found[None])[0]

    def level(self, value: Tensor) -> Tensor:
        """(B, 1, 1) the average of each sample's elements of a value that goes into the layer."""
        front = value.flatten(1) if self.kernel is not None else value.reshape(-1, value.shape[-1])
        averages = front.mean(1)
        averages = averages if self.order is None else averages[self.order]
        return averages.reshape(self.batch, -1).mean(1)[:, None, None]

    def arrange(self, rows: Tensor) -> Tensor:
        """(r, *shape) rows of what the layer gives -> (r, B, T, m)."""
        if self.kernel is None:
            return self._by_sample(rows.reshape(len(rows), -1, 1, rows.shape[-1]))
        return self._by_sample(rows.flatten(3).mT)

    def restore(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """(B, T, m) of positions -> the shape of what the layer gives."""
        count = shape[0] if self.kernel is not None else torch.Size(shape[:-1]).numel()
        flat = values.reshape(count, -1, values.shape[-1])
        if self.order is not None:
            flat = torch.empty_like(flat).index_copy_(0, self.order, flat)
        return (flat if self.kernel is None else flat.mT).reshape(shape)

    def _by_sample(self, values: Tensor) -> Tensor:
        """(r, N, places, n) -> (r, B, T, n)."""
        values = values if self.order is None else values[:, self.order]
        return values.reshape(len(values), self.batch, -1, values.shape[-1])
