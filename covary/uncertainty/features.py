"""Features of a sample for the fitted score: a few numbers from each layer of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from covary.models import noise_of, with_covariance, with_noise
from covary.moments import Moments, mean_of
from covary.nn import Lift
from covary.nn.protocol import activation_of, plain_of

Value = TypeVar("Value")

# Nothing may be infinitely far from what is usual: logarithms of 0 stop here.
_TINY = 1e-30
_LEAST_ENTROPY = -1e4


@dataclass
class Watched(Generic[Value]):
    """What went into and came out of every hidden activation, in order, in the last pass.

    ``entrance`` is what came before: what convolutions gave, and what the first layer took that has
    moments (or is fully connected); of a network without a trunk, the input.
    """

    before: list[Value] = field(default_factory=list)
    after: list[Value] = field(default_factory=list)
    entrance: list[Tensor] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all, for the next pass."""
        for seen in (self.before, self.after, self.entrance):
            seen.clear()


@contextmanager
def watch_moments(net: nn.Module) -> Iterator[Watched[Moments]]:
    """Within this block, the moments that pass through the network's activations are kept."""
    seen: Watched[Moments] = Watched()

    def keep(_: nn.Module, inputs: tuple[Moments, ...], output: Moments) -> None:
        seen.before.append(inputs[0])
        seen.after.append(output)

    def enter(_: nn.Module, inputs: tuple[Tensor, ...], __: Moments) -> None:
        seen.entrance.append(inputs[0])

    hooks: dict[nn.Module, Callable[[Any, Any, Any], None]] = {
        layer: enter if isinstance(layer, Lift) else keep
        for layer in net.modules()
        if isinstance(layer, Lift) or activation_of(layer) is not None
    }
    with _hooked(net, seen, hooks):
        yield seen


@contextmanager
def watch_means(net: nn.Module) -> Iterator[Watched[Tensor]]:
    """Like ``watch_moments``, for any torch network: what lies between its linear layers.

    What one of them gives goes into an activation, what the next one takes came out of it.
    """
    seen: Watched[Tensor] = Watched()
    layers = [layer for layer in net.modules() if isinstance(plain_of(layer), nn.Linear)]

    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        (seen.entrance if layer is layers[0] else seen.after).append(mean_of(inputs[0]))
        if layer is not layers[-1]:
            seen.before.append(mean_of(output))

    hooks: dict[nn.Module, Callable[[Any, Any, Any], None]] = dict.fromkeys(layers, keep)
    with _hooked(net, seen, hooks):
        yield seen


@contextmanager
def _hooked(
    net: nn.Module, seen: Watched[Any], keep: Mapping[nn.Module, Callable[[Any, Any, Any], None]]
) -> Iterator[None]:
    def convolved(_: nn.Module, __: Any, output: Tensor) -> None:
        seen.entrance.append(output)

    hooks = [layer.register_forward_hook(hook) for layer, hook in keep.items()]
    for layer in net.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            hooks.append(layer.register_forward_hook(convolved))
    hooks.append(net.register_forward_pre_hook(lambda *_: seen.clear()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def of_moments(seen: Watched[Moments], out: Moments) -> Tensor:
    """(B, 3 E + 3 L + 3 or 4) float64, of E tensors at the entrance, L activations, the output.

    At the entrance (the input, or what a trunk makes of it): log-norm, the fraction of numbers
    above 0, log of their average size. Of each activation: log-trace of what comes out, log-norm of
    its mean, and the log of ``mean_i |mu_i| / s_i`` of what goes in: how far units are from their
    threshold, in standard deviations of their own. Of the output: log-trace and entropy, log-norm
    of the mean, and, of two outputs or more, the log-margin.
    """
    columns = _of_entrance(seen.entrance)
    for before, after in zip(seen.before, seen.after, strict=True):
        # What activations take: of tracked covariances, variances that need no sweep.
        deviation = before.cov.unit_variance.double().clamp(min=_TINY).sqrt()
        columns += [
            _log(after.cov.unit_variance.double().sum(-1).expand(len(out.mean))),
            _log(after.mean.double().norm(dim=-1)),
            _log((before.mean.double().abs() / deviation).mean(-1)),
        ]
    columns += [
        _log(out.variance.double().sum(-1)),
        out.entropy().double().clamp(min=_LEAST_ENTROPY),
    ]
    return torch.stack([*columns, *_of_mean(out.mean)], -1)


def of_means(seen: Watched[Tensor], out: Moments | Tensor) -> Tensor:
    """(B, 3 E + 4 L + 1 or 2) float64: what a plain network has.

    The same at the entrance. Of each activation: log-norm of what comes out, the fraction of units
    above their threshold, and log-norm and log of the average size of what goes in. Of the output:
    log-norm and, of two outputs or more, the log-margin. No covariance is looked at.
    """
    columns = _of_entrance(seen.entrance)
    for before, after in zip(seen.before, seen.after, strict=True):
        size = before.double()
        columns += [
            _log(after.double().norm(dim=-1)),
            (size > 0).double().mean(-1),
            _log(size.norm(dim=-1)),
            _log(size.abs().mean(-1)),
        ]
    return torch.stack([*columns, *_of_mean(mean_of(out))], -1)


def without_noise(net: nn.Module) -> nn.Module:
    """The same weights as a plain network: no noise, so no covariance; a twin of ``net``.

    A network that has no moments is plain already.
    """
    if not noise_of(net):
        return net
    return with_covariance(with_noise(net, 0.0), "diagonal").eval()


@dataclass(frozen=True)
class Features:
    """Which network is looked at, where, and what is taken from there."""

    network: Callable[[nn.Module], nn.Module]
    watch: Callable[[nn.Module], AbstractContextManager[Watched[Any]]]
    of: Callable[[Watched[Any], Any], Tensor]


FEATURES = {
    "moments": Features(lambda net: net, watch_moments, of_moments),
    "plain": Features(without_noise, watch_means, of_means),
}


def check_features(name: str | None, net: nn.Module) -> str:
    """Which features to take of this network; by default all that it has."""
    if name is None:
        return "moments" if noise_of(net) else "plain"
    if name not in FEATURES:
        raise ValueError(f"Unknown features {name!r}; known are {', '.join(FEATURES)}.")
    if name == "moments" and not noise_of(net):
        raise ValueError(
            "A network without covary.nn.Lift has no moments to look at: features='plain'."
        )
    return name


def log_margin(mean: Tensor) -> Tensor:
    """(B,) log of the distance between the two largest outputs (B, n)."""
    largest = mean.double().topk(2, dim=-1).values
    return _log(largest[..., 0] - largest[..., 1])


def _of_entrance(entrance: Sequence[Tensor]) -> list[Tensor]:
    columns = []
    for values in (each.double().flatten(1) for each in entrance):
        columns += [
            _log(values.norm(dim=-1)),
            (values > 0).double().mean(-1),
            _log(values.abs().mean(-1)),
        ]
    return columns


def _of_mean(mean: Tensor) -> list[Tensor]:
    norm = _log(mean.double().norm(dim=-1))
    return [norm] if mean.shape[-1] < 2 else [norm, log_margin(mean)]


def _log(value: Tensor) -> Tensor:
    return value.clamp(min=_TINY).log()
