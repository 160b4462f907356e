"""Weights that vary: a Gaussian around the weights of a linear or convolutional layer.

For a layer that gives W a at each position, rows g of its output meet the weights as the gradient
G = sum over positions of g a^T (docs/theory.md, eq. 43). With weights of covariance
``left diag(variance) right`` in the bases of two orthogonal matrices, the variance that they add is
the sum of (left^T G right)^2 variance.
"""

from __future__ import annotations

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
        if turned.shape[2] == 1:
            flat = turned[:, :, 0].transpose(0, 1)  # (B, r, m)
            return (flat * self._variances()) @ flat.mT
        total = torch.cat([g @ g.mT for g in self._gradients(turned)])
        flat = (turned * self.more.sqrt()).transpose(0, 1).flatten(2)
        return total.baddbmm_(flat, flat.mT)

    def variances(self, rows: Tensor) -> Tensor:
        turned = self._turned(rows)
        if turned.shape[2] == 1:
            return (turned[:, :, 0].square() * self._variances()[:, 0]).sum(-1).mT
        total = torch.cat([g.square().sum(-1) for g in self._gradients(turned)])
        return total + (turned.square() * self.more).sum((-2, -1)).mT

    def _turned(self, rows: Tensor) -> Tensor:
        """(r, B, T, m) rows in the basis of ``left``."""
        arranged = self.arrange(rows)
        return arranged if self.weights.left is None else arranged @ self.weights.left

    def _variances(self) -> Tensor:
        """(B, 1, m) of layers with one position."""
        return self.weights.spread(self.inputs().square()) + self.more

    def _gradients(self, turned: Tensor) -> Iterator[Tensor]:
        """(b, r, m n) gradients times the deviations of the weights, of some samples at a time."""
        root = self.weights.variance.sqrt()
        step = max(1, _NUMBERS_IN_CACHE // (len(turned) * root.numel()))
        pairs = zip(torch.split(turned, step, 1), torch.split(self.inputs(), step), strict=True)
        return (_gradient(rows, inputs, root) for rows, inputs in pairs)


def _gradient(rows: Tensor, inputs: Tensor, root: Tensor) -> Tensor:
    """(b, r, m n) of rows (r, b, T, m), inputs (b, T, n): one product for all rows of a sample."""
    r, b, _, m = rows.shape
    found = rows.permute(1, 0, 3, 2).reshape(b, r * m, -1) @ inputs
    return found.view(b, r, *root.shape).mul_(root).flatten(2)


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

    def patches(self, images: Tensor) -> Tensor:
        """(N, channels, *places) -> (N, places, n) what the kernel takes at each place."""
        images = images[:, :, None] if images.dim() == 3 else images
        padded = F.pad(images, self.padding) if any(self.padding) else images
        return F.unfold(padded, self.size, self.dilation, 0, self.stride).mT


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
        lead = shape[:1] if kernel is not None else shape[:-1]
        index = samples.index.reshape(samples.index.shape[: len(lead)]).expand(lead).reshape(-1)
        if samples.is_one_axis and samples.axes in ([], [0]):
            return cls(None, samples.batch, kernel)
        if len(set(index.bincount(minlength=samples.batch).tolist())) > 1:
            return None
        return cls(torch.argsort(index, stable=True), samples.batch, kernel)

    def patches(self, value: Tensor) -> Tensor:
        """(B, T, n) what each position takes of a value that goes into the layer."""
        if self.kernel is None:
            found = value.reshape(-1, 1, value.shape[-1])
        else:
            found = self.kernel.patches(value)
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
