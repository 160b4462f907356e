"""The attacks: FGSM and PGD follow the gradient of the loss; Square searches at random."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.attacks.common import Bounds, Box, Network, box, by_batches, check, check_whole, logits
from covary.progress import Steps

# Squares shrink as the search goes on: at each of these parts of all queries, to half their area.
_SHRINK_AT = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


def input_gradient(
    net: Network, x: Tensor, y: Tensor, *, batch_size: int = 128, progress: Steps | None = None
) -> Tensor:
    """Gradient of each input's cross-entropy of the mean, of the shape of x.

    In a moment network it flows through the means alone (SMUC, as in training); within ``with
    covary.supervise_covariance():`` through the variances too. The network's parameters get no
    gradients. Where all is zero there is nothing to follow, which does not mean that there is
    nothing to find: try ``square``, or an attack on another network.

    Args:
        net: (B, *shape) -> ``Moments`` or logits (B, classes); a module, which is asked in
            evaluation mode, or any function.
        x: (B, *shape) inputs, floating point, as the network takes them.
        y: (B,) their labels.
        batch_size: inputs that are computed together.
        progress: wraps the batches, given a name, to show how far it is.
    """
    check(x, y, 0.0, None)

    def attack(some: Tensor, labels: Tensor) -> Tensor:
        return _gradient(net, some, labels)

    return by_batches(attack, net, x, y, batch_size=batch_size, progress=progress, name="gradient")


def signed_step(
    x: Tensor, gradient: Tensor, epsilon: float | Tensor, *, bounds: Bounds | None = None
) -> Tensor:
    """``x + epsilon * sign(gradient)``, clipped to the bounds."""
    return box(x, epsilon, bounds).clip(x + epsilon * gradient.sign())


def fgsm(
    net: Network,
    x: Tensor,
    y: Tensor,
    epsilon: float | Tensor,
    *,
    bounds: Bounds | None = None,
    batch_size: int = 128,
    progress: Steps | None = None,
) -> Tensor:
    """Fast gradient sign method: one step of the largest size, ``x + epsilon sign(gradient)``.

    See ``input_gradient`` for the other arguments.

    Args:
        epsilon: how far a feature may move, on the scale of x; one number, or one for each feature.
        bounds: (low, high) that no feature may leave; x has to be within. None: no bounds.
    """
    check(x, y, epsilon, bounds)
    gradient = input_gradient(net, x, y, batch_size=batch_size, progress=progress)
    return signed_step(x.detach(), gradient, _like(epsilon, x), bounds=bounds)


def pgd(
    net: Network,
    x: Tensor,
    y: Tensor,
    epsilon: float | Tensor,
    *,
    steps: int = 20,
    step_size: float | Tensor | None = None,
    bounds: Bounds | None = None,
    random_start: bool = True,
    generator: torch.Generator | None = None,
    batch_size: int = 128,
    progress: Steps | None = None,
) -> Tensor:
    """Projected gradient descent: steps by the gradient's sign, never further than ``epsilon``.

    The last point is taken, not the best. See ``fgsm`` and ``input_gradient`` for the other
    arguments.

    Args:
        steps: how many gradients are followed.
        step_size: how far a step goes; by default ``2.5 * epsilon / steps``, enough to cross the
            ball and turn.
        random_start: begin anywhere in the ball, not at x.
        generator: of the CPU, for the random start; the global one by default.
    """
    check(x, y, epsilon, bounds)
    check_whole(steps, "steps", 1)
    size = 2.5 * epsilon / steps if step_size is None else step_size
    sizes = torch.as_tensor(size)
    if not bool((torch.isfinite(sizes) & (sizes >= 0)).all()):
        raise ValueError(f"step_size is finite and >= 0, got {size}.")

    def attack(some: Tensor, labels: Tensor) -> Tensor:
        far, step = _like(epsilon, some), _like(size, some)
        room = box(some, far, bounds)
        now = some
        if random_start:
            # Drawn on the CPU, so that every device begins at the same place.
            drawn = torch.rand(some.shape, generator=generator, dtype=some.dtype).to(some)
            now = room.clip(some + far * (2 * drawn - 1))
        for _ in range(steps):
            now = room.clip(now + step * _gradient(net, now, labels).sign())
        return now

    return by_batches(attack, net, x, y, batch_size=batch_size, progress=progress, name="pgd")


def _gradient(net: Network, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        found = logits(net, x, y)
        if not found.requires_grad:
            raise ValueError(
                "No gradient reaches the input: the network computes within no_grad, or leaves "
                "torch. Let it keep gradients, or use covary.attacks.square, which needs none."
            )
        # A sum, not an average: how small gradients are should not depend on the batch.
        loss = F.cross_entropy(found, y.long(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x)
    return gradient


def _like(value: float | Tensor, x: Tensor) -> float | Tensor:
    return value.to(x) if isinstance(value, Tensor) else value


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
    progress: Steps | None = None,
) -> Tensor:
    """Square attack: random squares of ``+-epsilon``, kept where they lower the margin.

    After Andriushchenko, Croce, Flammarion and Hein (2020), untargeted and in the maximum norm. The
    margin is the true class's logit minus the largest other one: below 0 the input is
    misclassified. The search begins with vertical stripes; then each query paints one square, at a
    random place and in one random sign for each channel, and squares become smaller. It needs the
    network's outputs alone, so a network without gradients is no safer from it.

    Inputs that are not images (B, channels, height, width) have no neighbouring features: instead
    of a square, a query then changes as many features, chosen at random, each in a sign of its own.
    See ``fgsm`` and ``input_gradient`` for the other arguments.

    Args:
        queries: how often the network is asked about each input, the start included.
        share: the part of an input that the first squares cover.
        confidence: an input is left alone once its margin is below minus this. 0: once it is
            misclassified; more for what is to deceive other networks too; inf: never.
        generator: of the CPU; the global one by default.
    """
    check(x, y, epsilon, bounds)
    check_whole(queries, "queries", 1)
    if not 0 < share <= 1:
        raise ValueError(f"share is in (0, 1], got {share}.")
    if not confidence >= 0:  # NaN is not
        raise ValueError(f"confidence is a difference of logits >= 0, got {confidence}.")

    def attack(some: Tensor, labels: Tensor) -> Tensor:
        room = box(some, _like(epsilon, some), bounds)
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
            area = share * 0.5 ** sum(query / queries > at for at in _SHRINK_AT)
            # Drawn for all inputs, so that what one is given does not depend on the others' luck.
            where, sign = _patch(some.shape, area, generator)
            tried = torch.where(
                where.to(some.device)[open_],
                _corner(Box(room.low[open_], room.high[open_]), sign.to(some)[open_]),
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
    found, true = logits(net, x, y), y[:, None].long()
    others = found.scatter(1, true, -math.inf)
    return found.gather(1, true).squeeze(1) - others.max(1).values


def _corner(room: Box, sign: Tensor) -> Tensor:
    """The highest value where the sign is positive, the lowest where it is not."""
    return torch.where(sign > 0, room.high, room.low)


def _signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(2, shape, generator=generator) * 2.0 - 1


def _stripes(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Signs to begin with: of each column of pixels, or of each feature."""
    if len(shape) != 4:
        return _signs(shape, generator)
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
        return where.view(shape), _signs(shape, generator)
    channels, height, width = shape[1:]
    side = min(max(1, round(math.sqrt(area * height * width))), height, width)
    rows = _stretch(height, side, batch, generator)[:, None, :, None]
    columns = _stretch(width, side, batch, generator)[:, None, None, :]
    signs = _signs((batch, channels, 1, 1), generator)
    return (rows & columns).expand(shape), signs.expand(shape)


def _stretch(length: int, side: int, batch: int, generator: torch.Generator | None) -> Tensor:
    """(B, length) True for ``side`` neighbours, at a random place."""
    start = torch.randint(length - side + 1, (batch, 1), generator=generator)
    place = torch.arange(length)
    return (place >= start) & (place < start + side)


def _wide(chosen: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...), to choose whole inputs by."""
    return chosen.view(-1, *[1] * (like.dim() - 1))
