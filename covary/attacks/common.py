"""What attacks share: checks of their arguments, where they may go, and asking a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from covary.models import evaluating
from covary.moments import Moments
from covary.progress import Steps

# A network, or any function: (B, *shape) -> Moments or logits (B, classes).
Network: TypeAlias = Callable[[Tensor], Moments | Tensor]
# The least and the largest value that an input may have, for all features or for each.
Bounds: TypeAlias = tuple[float | Tensor, float | Tensor]


class Box(NamedTuple):
    """Where an attack may go: between ``low`` and ``high``, each (B, *shape)."""

    low: Tensor
    high: Tensor

    def clip(self, x: Tensor) -> Tensor:
        """The nearest point within."""
        return torch.minimum(torch.maximum(x, self.low), self.high)


def box(x: Tensor, epsilon: float | Tensor, bounds: Bounds | None) -> Box:
    """All inputs within ``epsilon`` of x in the maximum norm, and within the bounds."""
    low, high = x - epsilon, x + epsilon
    if bounds is None:
        return Box(low, high)
    least, most = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    return Box(torch.maximum(low, least), torch.minimum(high, most))


def logits(net: Network, x: Tensor, y: Tensor) -> Tensor:
    """(B, classes) the network's output for inputs with labels y: the mean, if it is Moments."""
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
    if len(y) and int(y.max()) >= found.shape[1]:
        raise ValueError(
            f"Labels go up to {int(y.max())}, but the network has {found.shape[1]} classes."
        )
    return found


def by_batches(
    attack: Callable[[Tensor, Tensor], Tensor],
    net: Network,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int,
    progress: Steps | None,
    name: str,
) -> Tensor:
    """Apply an attack to each batch, on the network's device and in evaluation mode."""
    check_whole(batch_size, "batch_size", 1)
    module = net if isinstance(net, nn.Module) else nn.Module()  # of other functions none is known
    device = next((parameter.device for parameter in module.parameters()), x.device)
    # Also where the caller has switched gradients off, or is in inference mode.
    with torch.inference_mode(False), torch.no_grad(), evaluating(module):
        made = torch.empty_like(x, requires_grad=False)
        batches = torch.split(torch.arange(len(x)), batch_size) if len(x) else ()
        for rows in progress(batches, name) if progress else batches:
            some = x[rows].detach().clone().to(device)
            made[rows] = attack(some, y[rows].clone().to(device)).to(made)
    return made


def check(x: Tensor, y: Tensor, epsilon: float | Tensor, bounds: Bounds | None) -> None:
    """Raise an error if the arguments of an attack do not fit."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"An attack moves inputs by fractions, and needs a floating point Tensor; got {kind}. "
            "Convert first: x.float(), with epsilon and bounds on the scale of x (bytes of images: "
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
    values = torch.as_tensor(epsilon)
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        shown = epsilon if values.dim() == 0 else "some that are not"
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
            f"{x.min().item():g} to {x.max().item():g}. Give bounds on the scale of the inputs, "
            "such as (0, 255) for bytes."
        )


def check_whole(value: int, name: str, least: int) -> None:
    """Raise an error unless the number is whole and large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number >= {least}, got {value}.")
