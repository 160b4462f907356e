"""Layers between the scale of data and that of a network: Standardize before, Rescale behind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covary.moments import Moments, mean_of
from covary.nn.checks import check_moments
from covary.nn.protocol import Drawn, chain_of, each_row
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

    @each_row
    def forward(self, moments: Moments) -> Moments:
        check_moments(moments, self)
        mean = moments.mean * self.scale + self.shift
        with covariance_grad():
            return Moments(mean, moments.cov.scale(self.scale.expand(1, mean.shape[-1])))

    def undone(self, out: Moments | Tensor) -> Moments | Tensor:
        """What came in, Moments or a tensor (B, t), from what came out."""
        mean = (mean_of(out) - self.shift) / self.scale
        if isinstance(out, Tensor):
            return mean
        with covariance_grad():
            return Moments(mean, out.cov.scale((1 / self.scale).expand(1, mean.shape[-1])))

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
    one that is the last of another. Any other module, a compiled one too, counts as one layer,
    without units.
    """
    layers = chain_of(net)
    if layers and net._compiled_call_impl is None:
        before, units = before_units(layers.pop())
        return [*layers, *before], units
    last = net.layer if isinstance(net, Rescaled) else net
    return ([], last) if isinstance(last, Rescale) else ([net], None)


def units_of(net: nn.Module) -> Rescale | None:
    """The layer that gives a network's outputs their units, also where the network is compiled."""
    last = _last_layer(net)
    last = last.layer if isinstance(last, Rescaled) else last
    return last if isinstance(last, Rescale) else None


def check_units(net: nn.Module, loss: str) -> None:
    """Refuse a network that hides a ``Rescale`` where nobody can see if it is the last layer."""
    last = _last_layer(net)
    if units_of(last) is None and any(isinstance(layer, Rescale) for layer in last.modules()):
        raise ValueError(
            f"{loss} takes errors in the units before a network's last Rescale, and cannot see "
            f"whether the one within {type(last).__name__} is the last layer. Give it an "
            "nn.Sequential that ends with the Rescale, or a network without one and standardised "
            "targets."
        )


def _last_layer(net: nn.Module) -> nn.Module:
    """The last layer that can be seen: within ``nn.Sequential``s and what torch.compile wraps."""
    if hasattr(net, "_orig_mod"):
        return _last_layer(net._orig_mod)  # type: ignore[arg-type]
    layers = chain_of(net)
    return _last_layer(layers[-1]) if layers else net


def _usable(scale: Tensor, layer: str) -> Tensor:
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ValueError(f"{layer} needs finite scales >= 0, got {scale}.")
    return torch.where(scale == 0, 1.0, scale).to(scale.dtype)
