"""What every layer of moments provides, and the checks of its input."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from covary.activations import MomentActivation
from covary.covariance import Rows
from covary.moments import Moments
from covary.nn.fidelity import frames_to_caller

Module = TypeVar("Module", bound=nn.Module)
Value = TypeVar("Value", float, bool, list[float])


def each_row(forward: Callable[[Any, Moments], Moments]) -> Callable[[Any, Moments], Moments]:
    """Let a layer of Moments (B, n) act on each row of (B, T, n), whose rows are not correlated."""

    @wraps(forward)
    def act(layer: Any, moments: Moments) -> Moments:
        check_moments(moments, layer)
        mean, cov = moments.mean, moments.cov
        if not isinstance(cov, Rows):
            return forward(layer, moments)
        try:
            found = forward(layer, Moments(mean.flatten(0, -2), cov.each_row))
        except ValueError as error:
            raise ValueError(
                f"{error} It acts on each row of samples of shape {tuple(mean.shape[1:])}; to make "
                "one row of them, put a covary.nn.Flatten before it."
            ) from error
        return Moments(found.mean.reshape(*mean.shape[:-1], -1), Rows(found.cov, cov.rows))

    return act


def check_moments(moments: Moments, layer: nn.Module) -> None:
    """Raise an error unless these are Moments."""
    if not isinstance(moments, Moments):
        got = type(moments).__name__
        if isinstance(moments, Tensor):
            got = f"a Tensor of shape {tuple(moments.shape)}"
        raise TypeError(
            f"{type(layer).__name__} takes Moments and got {got}. Put a covary.nn.Lift before it."
        )


def check_features(moments: Moments, layer: nn.Module, features: int) -> None:
    """Raise an error unless there are so many features."""
    if moments.mean.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__} expects {features} features, got {moments.mean.shape[-1]}. "
            "Check the width of the layer before it; right after Lift, that of the input, whose "
            "features are last."
        )


def check_noise(noise: float, layer: str) -> float:
    """The noise as a float; an error unless it is a finite number, 0 or more."""
    try:
        # float() reads strings, but "0.2" where a number belongs is a mistake all the same.
        sigma = None if isinstance(noise, str) else float(noise)
    except (TypeError, ValueError):
        sigma = None
    if sigma is None:
        raise TypeError(f"{layer} needs a number as noise, got {noise!r}.")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"{layer} needs a finite noise >= 0 (a standard deviation), got {noise}.")
    return sigma


@dataclass(frozen=True)
class Drawn:
    """What a layer does in evaluation to one drawn value v (n,): h((W v) scale + shift + noise z).

    None stands for what a layer does not do; z is standard normal, independent for each unit.

    Attributes:
        weight: W (m, n).
        scale: (m,), or () for all units.
        shift: (m,), or () for all units.
        noise: a standard deviation.
        activation: h, whose ``function`` is applied.
    """

    weight: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    noise: float | None = None
    activation: MomentActivation | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether the layer leaves v as it is."""
        return all(value is None for value in vars(self).values())


@runtime_checkable
class MomentLayer(Protocol):
    """A layer that takes or gives Moments. Any ``nn.Module`` with these two methods is one.

    ``covary.stochastic`` simulates it, ``covary.models.plain`` has its conventional version, and
    ``covary.uncertainty`` finds weights and activations by them. Modules without these methods
    are conventional layers.
    """

    def plain(self) -> nn.Module | None:
        """The conventional layer, tensors (B, n) -> (B, m), that shares this one's parameters.

        None: there is none, because the layer changes covariances alone.
        """

    def drawn(self) -> Drawn:
        """What the layer does to a drawn value in evaluation, with its present parameters."""


def chain_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a module that applies them one after the other; None for any other module.

    That is an ``nn.Sequential``, unless it has a ``forward`` of its own.
    """
    if type(module).forward is not nn.Sequential.forward:
        return None
    # Not by children(), which leave out a layer that is there twice.
    return [layer for layer in module._modules.values() if layer is not None]


def leaves_of_chain(net: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Paths and layers of nested ``nn.Sequential``s, in the order in which they are called."""
    layers = chain_of(net)
    if layers is None:
        raise ValueError(
            f"The layers of a {type(net).__name__} with moments inside are called in an order that "
            "nobody can see. Put them into an nn.Sequential."
        )
    # Not named_children, which leaves out a module that comes again.
    for name, layer in net._modules.items():
        if layer is None:
            continue
        if chain_of(layer) is not None:
            yield from leaves_of_chain(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def plain_of(layer: nn.Module) -> nn.Module | None:
    """The conventional version of a layer: itself if it is conventional."""
    return layer.plain() if isinstance(layer, MomentLayer) else layer


def activation_of(layer: nn.Module) -> MomentActivation | None:
    """The moment activation that a layer applies, if it applies one."""
    return layer.drawn().activation if isinstance(layer, MomentLayer) else None


def share(layer: nn.Module, plain: Module) -> Module:
    """``plain`` with the parameters and buffers of ``layer`` in place of its own of these names."""
    for name in (*plain._parameters, *plain._buffers):
        setattr(plain, name, getattr(layer, name))
    return plain


class Noisy(nn.Module):
    """A layer that adds noise of standard deviation ``noise``, which is saved with the weights.

    ``state_dict`` has it as a float64 tensor (). It is an attribute and no buffer, so that the
    networks that ``covary.with_noise`` makes share buffers and differ in noise. Loading a file with
    another noise takes that noise, and warns; files without any are loaded as they are.
    """

    noise: float

    def plain(self) -> None:
        """None: noise has no effect on a conventional network."""

    def drawn(self) -> Drawn:
        return Drawn(noise=self.noise)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        noise = torch.as_tensor(self.noise, dtype=torch.float64, device="cpu")
        destination[f"{prefix}noise"] = noise.clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = f"{prefix}noise"
        saved = state_dict.get(key)
        if saved is not None and not saved.is_meta:
            if saved.shape == ():
                self.noise = taken(saved.item(), self.noise, prefix)
            else:
                rest[-1].append(f"{key} is one number, and the file has {tuple(saved.shape)}.")
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(others, prefix, *rest)


def taken(saved: Value, own: Value, layer: str, name: str = "noise") -> Value:
    """The saved noise of a layer, to be used; warns if it is not what the layer had."""
    if saved != own:
        remedy = " covary.with_noise(net, ...) gives other noise with the same weights."
        warnings.warn(
            f"{layer.rstrip('.') or 'This layer'} had {name}={own} and takes {name}={saved}, which "
            f"was saved with the weights.{remedy if name == 'noise' else ''}",
            UserWarning,
            stacklevel=frames_to_caller(),
        )
    return saved
