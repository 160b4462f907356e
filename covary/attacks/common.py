"""What attacks share: checks of their arguments, and asking a network for outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from covary.moments import Moments

# A network, or any function: (B, *shape) -> Moments or logits (B, classes).
Network: TypeAlias = Callable[[Tensor], Moments | Tensor]
# The least and the largest value that an input may have, for all features or for each.
Bounds: TypeAlias = tuple[float | Tensor, float | Tensor]
Progress: TypeAlias = Callable[[Sequence[Any], str], Iterable[Any]]


class Box(NamedTuple):
    """Where an attack may go: between ``low`` and ``high``, each (B, *shape)."""

    low: Tensor
    high: Tensor

    def clip(self, x: Tensor) -> Tensor:
        """The nearest point within."""
        return torch.minimum(torch.maximum(x, self.low), self.high)


def logits(net: Network, x: Tensor) -> Tensor:
    """(B, classes) what the network makes of inputs: the mean, if these are Moments."""
    out = net(x)
    found = out.mean if isinstance(out, Moments) else out
    if not isinstance(found, Tensor):
        raise TypeError(
            f"An attack needs a network that gives Moments or a Tensor, this gives "
            f"{type(found).__name__}. Wrap it: lambda x: net(x).logits, or what it is called."
        )
    if found.dim() != 2 or len(found) != len(x):
        raise ValueError(
            f"An attack needs logits of shape (batch, classes), got {tuple(found.shape)} for "
            f"{len(x)} inputs. Is this a classifier?"
        )
    return found


def box(x: Tensor, epsilon: float | Tensor, bounds: Bounds | None) -> Box:
    """All inputs within ``epsilon`` of x in the maximum norm, and within the bounds."""
    low, high = x - epsilon, x + epsilon
    if bounds is None:
        return Box(low, high)
    least, most = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    return Box(torch.maximum(low, least), torch.minimum(high, most))


def check(x: Tensor, y: Tensor, epsilon: float | Tensor, bounds: Bounds | None) -> None:
    """An error, if the arguments of an attack do not fit."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"An attack moves inputs by fractions, and needs a floating point Tensor; got {kind}. "
            "Convert first: x.float(), with epsilon and bounds in the units of x (bytes of images: "
            "epsilon=0.1 * 255, bounds=(0, 255))."
        )
    if x.dim() < 2:
        raise ValueError(f"An attack needs a batch of inputs (B, ...), got {tuple(x.shape)}.")
    if not bool(torch.isfinite(x).all()):
        count = int((~torch.isfinite(x)).sum())
        raise ValueError(f"An attack needs finite inputs; {count} values are NaN or infinite.")
    _check_labels(x, y)
    _check_epsilon(x, epsilon)
    if bounds is not None:
        _check_bounds(x, bounds)


def _check_labels(x: Tensor, y: Tensor) -> None:
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool:
        kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(f"An attack needs labels as a Tensor of integers, got {kind}.")
    if y.shape != x.shape[:1]:
        hint = " One-hot labels become numbers by y.argmax(1)." if y.dim() == 2 else ""
        raise ValueError(
            f"An attack needs a label for each input, of shape ({len(x)},); got "
            f"{tuple(y.shape)}.{hint}"
        )
    if len(y) and int(y.min()) < 0:
        raise ValueError(f"Labels count from 0, got {int(y.min())}.")


def _check_epsilon(x: Tensor, epsilon: float | Tensor) -> None:
    values = torch.as_tensor(epsilon, dtype=torch.float64)
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        shown = values.item() if values.dim() == 0 else "some that are not"
        raise ValueError(
            f"epsilon is how far an input may be moved: finite and >= 0, got {shown}. (The "
            "direction is the attack's to find.)"
        )
    try:
        torch.broadcast_to(values, x.shape[1:])
    except RuntimeError:
        raise ValueError(
            f"epsilon is one number, or fits an input of shape {tuple(x.shape[1:])}; got "
            f"{tuple(values.shape)}."
        ) from None


def _check_bounds(x: Tensor, bounds: Bounds) -> None:
    if len(bounds) != 2:
        raise ValueError(f"bounds are (low, high), got {len(bounds)} of them.")
    low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    if not bool((low <= high).all()):  # and never true of NaN
        raise ValueError(f"bounds are (low, high) with low <= high, got {bounds}.")
    outside = int(((x < low) | (x > high)).sum())
    if outside:
        raise ValueError(
            f"{outside} values of the inputs lie outside of the bounds {bounds}: inputs go from "
            f"{x.min().item():g} to {x.max().item():g}. Give bounds in the units of the inputs, "
            "such as (0, 255) for bytes."
        )


def check_whole(value: int, name: str, least: int) -> None:
    """An error unless the number is whole and large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number >= {least}, got {value}.")


def check_fraction(value: float, name: str) -> None:
    """An error unless the number is in (0, 1]."""
    if not (math.isfinite(value) and 0 < value <= 1):
        raise ValueError(f"{name} is in (0, 1], got {value}.")


def check_classes(found: Tensor, y: Tensor) -> None:
    """Labels must be those of the logits (B, classes)."""
    if len(y) and int(y.max()) >= found.shape[1]:
        raise ValueError(
            f"Labels go up to {int(y.max())}, but the network has {found.shape[1]} classes."
        )


@contextmanager
def evaluating(net: Network) -> Iterator[None]:
    """Within this block a network is in evaluation mode; each layer's own mode comes back."""
    layers = list(net.modules()) if isinstance(net, nn.Module) else []
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def by_batches(
    attack: Callable[[Tensor, Tensor], Tensor],
    net: Network,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int,
    progress: Progress | None,
    name: str,
) -> Tensor:
    """What an attack makes of each batch, moved to where the network is, and back."""
    check_whole(batch_size, "batch_size", 1)
    parameter = next(iter(net.parameters()), None) if isinstance(net, nn.Module) else None
    device = x.device if parameter is None else parameter.device
    # Also where the caller has switched gradients off, or is in inference mode.
    with torch.inference_mode(False), torch.no_grad(), evaluating(net):
        made = torch.empty_like(x, requires_grad=False)
        batches = torch.split(torch.arange(len(x)), batch_size) if len(x) else ()
        for rows in progress(batches, name) if progress else batches:
            some = x[rows].detach().clone().to(device)
            made[rows] = attack(some, y[rows].clone().to(device)).to(made)
    return made
