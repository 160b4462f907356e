"""Layers between the scale of data and that of a network: Standardize before, Rescale behind."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from covary.moments import Moments, mean_of
from covary.nn.protocol import Drawn, chain_of, each_row
from covary.settings import covariance_grad


class _Scaled(nn.Module):
    """A layer with buffers ``shift`` and ``scale``; a scale of 0, of a constant, counts as 1."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise ValueError(f"{type(self).__name__} needs finite scales >= 0, got {scale}.")
        self.register_buffer("shift", shift)
        self.register_buffer("scale", torch.where(scale == 0, 1.0, scale).to(scale.dtype))

    @classmethod
    def of(cls, data: Tensor) -> Self:
        """The layer between these data (n, *shape) and numbers of average 0 and deviation 1."""
        return cls(data.mean(0), data.std(0, correction=0))


class Standardize(_Scaled):
    """Plain tensor (B, *shape) of any type -> ``(x - shift) / scale`` as floating point numbers.

    Of Moments, inputs with errors of their own, the covariance is divided by the scales, too.

    Put in front of ``Lift``, it lets a network take data as they come. It computes in the type of
    its buffers (float64 keeps small differences in a column of values around 1e9) and gives the
    type of the network (float32, or what ``net.double()`` makes it).
    """

    like: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__(shift, scale)
        # No value at all, but of the type that its network is converted to.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, x: Tensor | Moments) -> Tensor | Moments:
        mean = ((mean_of(x) - self.shift) / self.scale).to(self.like.dtype)
        if isinstance(x, Tensor):
            return mean
        with covariance_grad():
            factor = (1 / self.scale).expand(mean.shape[1:]).reshape(1, -1)
            return Moments(mean, x.cov.scale(factor).each(lambda part: part.to(mean.dtype)))


class Rescale(_Scaled):
    """mean -> mean * scale + shift, C -> scale_i scale_j C_ij: outputs on their original scale.

    The tensors (B, t) of a conventional network become x * scale + shift. What comes out is of the
    type of the buffers if that is the wider one: float64 keeps small differences around 1e9.
    """

    def forward(self, x: Moments | Tensor) -> Moments | Tensor:
        return self._of_tensor(x) if isinstance(x, Tensor) else self._of_moments(x)

    def _of_tensor(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift

    @each_row
    def _of_moments(self, moments: Moments) -> Moments:
        mean = self._of_tensor(moments.mean)
        with covariance_grad():
            return Moments(mean, moments.cov.scale(self.scale.expand(1, mean.shape[-1])))

    def undone(self, out: Moments | Tensor) -> Moments | Tensor:
        """The inverse: inputs, Moments or a tensor (B, t), from what this layer gave."""
        mean = (mean_of(out) - self.shift) / self.scale
        if isinstance(out, Tensor):
            return mean
        with covariance_grad():
            return Moments(mean, out.cov.scale((1 / self.scale).expand(1, mean.shape[-1])))

    def plain(self) -> Rescale:
        return self

    def drawn(self) -> Drawn:
        return Drawn(scale=self.scale, shift=self.shift)


def before_rescale(net: nn.Module) -> tuple[list[nn.Module], Rescale | None]:
    """The layers of a network without the one that gives outputs their scale, and that one.

    It is the last layer of an ``nn.Sequential``, or of one that is the last of another. Any other
    module, a compiled one too, counts as one layer, without a scale.
    """
    layers = chain_of(net)
    if layers and net._compiled_call_impl is None:
        before, rescale = before_rescale(layers.pop())
        return [*layers, *before], rescale
    return ([], net) if isinstance(net, Rescale) else ([net], None)


def rescale_of(net: nn.Module) -> Rescale | None:
    """The layer that gives a network's outputs their scale, also where the network is compiled."""
    last = _last_layer(net)
    return last if isinstance(last, Rescale) else None


def check_rescale(net: nn.Module, loss: str) -> None:
    """Refuse a network that hides a ``Rescale`` where nobody can see if it is the last layer."""
    last = _last_layer(net)
    if rescale_of(last) is None and any(isinstance(layer, Rescale) for layer in last.modules()):
        raise ValueError(
            f"{loss} takes errors on the scale before a network's last Rescale, and cannot see "
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
