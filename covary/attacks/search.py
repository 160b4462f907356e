"""An attack that needs no gradient: random search for what makes the network wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covary.attacks.common import (
    Bounds,
    Box,
    Network,
    Progress,
    box,
    by_batches,
    check,
    check_classes,
    check_fraction,
    check_whole,
    logits,
)

# Squares shrink as the search goes on: at each of these parts of all queries, to half their area.
_SHRINK_AT = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


def square(
    net: Network,
    x: Tensor,
    y: Tensor,
    epsilon: float | Tensor,
    *,
    queries: int = 500,
    share: float = 0.8,
    confidence: float = 0.0,
    bounds: Bounds | None = None,
    generator: torch.Generator | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Square attack: random squares of ``+-epsilon``, kept where they lower the margin.

    After Andriushchenko, Croce, Flammarion and Hein (2020), untargeted and in the maximum norm. The
    margin is the true class's logit minus the largest other one: below 0 the input is
    misclassified. The search begins with vertical stripes; then each query paints one square, at a
    random place and in one random sign for each channel, and squares become smaller. Outputs of the
    network are all it takes, so a network without gradients (steps, as of a Heaviside without
    noise) is no safer from it.

    Inputs that are no images (B, channels, height, width) have no neighbouring features: in place
    of a square, a query then changes as many features, chosen at random, each in a sign of its own.

    Args:
        net: (B, *shape) -> ``Moments`` or logits (B, classes); asked in evaluation mode.
        x: (B, *shape) inputs, floating point, as the network takes them.
        y: (B,) their labels.
        epsilon: how far, on the scale of x; one number, or one for each feature.
        queries: how often the network is asked about each input, the start included.
        share: the part of an input that the first squares cover.
        confidence: an input is left alone once its margin is below minus this. 0: once it is
            misclassified; more for what is to deceive other networks too; inf: never.
        bounds: (low, high) that no feature may leave; x has to be within. None: no bounds.
        generator: of the CPU; the global one by default.
        batch_size: inputs that are computed together.
        progress: wraps the batches, given a name, to show how far it is.
    """
    check(x, y, epsilon, bounds)
    check_whole(queries, "queries", 1)
    check_fraction(share, "share")
    if not confidence >= 0:  # NaN is not
        raise ValueError(f"confidence is a difference of logits >= 0, got {confidence}.")

    def attack(some: Tensor, labels: Tensor) -> Tensor:
        far = epsilon.to(some) if isinstance(epsilon, Tensor) else epsilon
        room = box(some, far, bounds)
        best = _corner(room, _stripes(some.shape, generator).to(some))
        margin = _margin(net, best, labels)
        given = _margin(net, some, labels)
        # What is wrong enough already needs no change.
        keep = (given < -confidence) | (given < margin.clamp(max=0))
        best = torch.where(_wide(keep, some), some, best)
        margin = torch.where(keep, given, margin)
        for query in range(1, queries):
            open_ = (margin >= -confidence).nonzero().squeeze(1)
            if not len(open_):
                break
            area = _area(share, query / queries)
            # Drawn for all inputs, so that what one is given does not depend on the others' luck.
            where, sign = _patch(some.shape, area, generator)
            tried = torch.where(
                where.to(some.device)[open_],
                _corner(Box(*(side[open_] for side in room)), sign.to(some)[open_]),
                best[open_],
            )
            found = _margin(net, tried, labels[open_])
            better = found < margin[open_]
            best[open_] = torch.where(_wide(better, tried), tried, best[open_])
            margin[open_] = torch.minimum(found, margin[open_])
        return best

    return by_batches(attack, net, x, y, batch_size=batch_size, progress=progress, name="square")


def _margin(net: Network, x: Tensor, y: Tensor) -> Tensor:
    """(B,) the true class's logit minus the largest other one."""
    found = logits(net, x)
    check_classes(found, y)
    true = found.gather(1, y[:, None].long())
    others = found.scatter(1, y[:, None].long(), -math.inf)
    return true.squeeze(1) - others.max(1).values


def _corner(room: Box, sign: Tensor) -> Tensor:
    """The highest value where the sign is positive, the lowest where it is not."""
    return torch.where(sign > 0, room.high, room.low)


def _area(share: float, done: float) -> float:
    """The part of an input to change when a part of all queries is done."""
    return share * 0.5 ** sum(done > at for at in _SHRINK_AT)


def _signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(2, shape, generator=generator) * 2.0 - 1


def _stripes(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Signs to begin with: of each column of pixels, or of each feature."""
    if len(shape) != 4:
        return _signs(tuple(shape), generator)
    batch, channels, _, width = shape
    return _signs((batch, channels, 1, width), generator).expand(shape)


def _patch(
    shape: torch.Size, area: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Where to change each input, and in which direction; both (B, *shape)."""
    batch = shape[0]
    if len(shape) != 4:
        features = math.prod(shape[1:])
        order = torch.rand(batch, features, generator=generator).argsort(1)
        where = order < max(1, round(area * features))
        return where.view(shape), _signs(tuple(shape), generator)
    channels, height, width = shape[1:]
    side = min(max(1, round(math.sqrt(area * height * width))), height, width)
    top = torch.randint(height - side + 1, (batch, 1), generator=generator)
    left = torch.randint(width - side + 1, (batch, 1), generator=generator)
    rows = _within(torch.arange(height), top, side)[:, None, :, None]
    columns = _within(torch.arange(width), left, side)[:, None, None, :]
    signs = _signs((batch, channels, 1, 1), generator)
    return (rows & columns).expand(shape), signs.expand(shape)


def _within(place: Tensor, start: Tensor, side: int) -> Tensor:
    return (place >= start) & (place < start + side)


def _wide(chosen: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...), to choose whole inputs by."""
    return chosen.view(-1, *[1] * (like.dim() - 1))
