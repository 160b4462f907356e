"""Layers between the scale of data and that of a network: Standardize before, Rescale behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covary.moments import Moments
from covary.nn.checks import check_moments
from covary.nn.protocol import Drawn
from covary.settings import covariance_grad


class Standardize(nn.Module):
    """Plain tensor (B, *shape) of any type -> ``(x - shift) / scale`` as floating point numbers.

    Put in front of ``Lift``, it lets a network take data as they come. It computes in the type of
    its buffers (float64 keeps small differences in a column of values around 1e9) and gives the
    type of the network (float32, or what ``net.double()`` makes it). A scale of 0, as a constant
    column has, counts as 1.
    """

    shift: Tensor
    scale: Tensor
    like: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", _usable(scale, "Standardize"))
        # No value at all, but of the type that its network is converted to.
        self.register_buffer("like", torch.empty(0), persistent=False)

    @classmethod
    def of(cls, x: Tensor) -> Standardize:
        """What brings these data (n, *shape) to average 0 and standard deviation 1."""
        return cls(x.mean(0), x.std(0, correction=0))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.shift) / self.scale).to(self.like.dtype)


class Rescale(nn.Module):
    """mean -> mean * scale + shift, C -> scale_i scale_j C_ij: outputs on their original scale.

    What comes out is of the type of the buffers if that is the wider one: float64 keeps small
    differences between values around 1e9.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", _usable(scale, "Rescale"))

    @classmethod
    def of(cls, y: Tensor) -> Rescale:
        """What brings numbers of average 0 and deviation 1 to the scale of these targets (n, t)."""
        return cls(y.mean(0), y.std(0, correction=0))

    def forward(self, moments: Moments) -> Moments:
        check_moments(moments, self)
        mean = moments.mean * self.scale + self.shift
        with covariance_grad():
            return Moments(mean, moments.cov.scale(self.scale.expand(1, mean.shape[-1])))

    def plain(self) -> Rescaled:
        """The same for tensors."""
        return Rescaled(self)

    def drawn(self) -> Drawn:
        """v scale + shift."""
        return Drawn(scale=self.scale, shift=self.shift)


class Rescaled(nn.Module):
    """The conventional layer of a ``Rescale``: tensors (B, t) -> x * scale + shift."""

    def __init__(self, layer: Rescale) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layer.scale + self.layer.shift


def before_units(net: nn.Module) -> tuple[list[nn.Module], Rescale | None]:
    """The layers of a network without the one that gives outputs their scale, and that one.

    It is the last layer, ``Rescale`` or its conventional version, of an ``nn.Sequential``, or of
    one that is the last of another. Of other modules nobody knows which of their layers is the
    last; they count as one layer, without units.
    """
    if isinstance(net, nn.Sequential) and len(net):
        *layers, last = net
        before, units = before_units(last)
        return [*layers, *before], units
    last = net.layer if isinstance(net, Rescaled) else net
    return ([], last) if isinstance(last, Rescale) else ([net], None)


def _usable(scale: Tensor, layer: str) -> Tensor:
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ValueError(f"{layer} needs finite scales >= 0, got {scale}.")
    return torch.where(scale == 0, 1.0, scale).to(scale.dtype)
