"""Attacks that follow the gradient of the loss with respect to the input."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.attacks.common import (
    Bounds,
    Network,
    Progress,
    box,
    by_batches,
    check,
    check_classes,
    check_whole,
    logits,
)


def input_gradient(
    net: Network,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Gradient of each input's cross-entropy of the mean, of the shape of x.

    In a moment network it flows through the means alone (SMUC, as in training); within ``with
    covary.supervise_covariance():`` through the variances too. The network is asked in evaluation
    mode, and its parameters get no gradients. Where all is zero there is nothing to follow, which
    does not mean that there is nothing to find: try ``square``, or an attack on another network.

    Args:
        net: (B, *shape) -> ``Moments`` or logits (B, classes); a module or any function.
        x: (B, *shape) inputs, floating point, as the network takes them.
        y: (B,) their labels.
        batch_size: inputs that are computed together.
        progress: wraps the batches, given a name, to show how far it is.
    """
    check(x, y, 0.0, None)
    return by_batches(
        lambda some, labels: _gradient(net, some, labels),
        net,
        x,
        y,
        batch_size=batch_size,
        progress=progress,
        name="gradient",
    )


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
    progress: Progress | None = None,
) -> Tensor:
    """Fast gradient sign method: one step of the largest size, ``x + epsilon sign(gradient)``.

    Of the same shape as x, and as far as ``epsilon`` from it in each feature where the gradient is
    not zero. See ``input_gradient`` for ``net``, ``x``, ``y`` and the rest.

    Args:
        epsilon: how far, on the scale of x; one number, or one for each feature.
        bounds: (low, high) that no feature may leave; x has to be within. None: no bounds.
    """
    check(x, y, epsilon, bounds)
    gradient = input_gradient(net, x, y, batch_size=batch_size, progress=progress)
    epsilon = epsilon.to(x) if isinstance(epsilon, Tensor) else epsilon
    return signed_step(x.detach(), gradient, epsilon, bounds=bounds)


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
    progress: Progress | None = None,
) -> Tensor:
    """Projected gradient descent: steps by the gradient's sign, never further than ``epsilon``.

    The last point is taken, not the best. See ``input_gradient`` for ``net``, ``x``, ``y`` and the
    rest.

    Args:
        epsilon: how far, on the scale of x; one number, or one for each feature.
        steps: how many gradients are followed.
        step_size: how far a step goes; by default ``2.5 * epsilon / steps``, enough to cross the
            ball and turn.
        bounds: (low, high) that no feature may leave; x has to be within. None: no bounds.
        random_start: begin anywhere in the ball, not at x.
        generator: of the CPU, for the random start; the global one by default.
    """
    check(x, y, epsilon, bounds)
    check_whole(steps, "steps", 1)
    size = 2.5 * epsilon / steps if step_size is None else step_size
    _check_step_size(size)

    def attack(some: Tensor, labels: Tensor) -> Tensor:
        far, step = (v.to(some) if isinstance(v, Tensor) else v for v in (epsilon, size))
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
        found = logits(net, x)
        check_classes(found, y)
        if not found.requires_grad:
            raise ValueError(
                "No gradient reaches the input: the network computes within no_grad, or leaves "
                "torch. Let it keep gradients, or use covary.attacks.square, which needs none."
            )
        # A sum, not an average: how small gradients are should not depend on the batch.
        loss = F.cross_entropy(found, y.long(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x)
    return gradient


def _check_step_size(size: float | Tensor) -> None:
    values = torch.as_tensor(size, dtype=torch.float64)
    if not all(math.isfinite(value) and value >= 0 for value in values.flatten().tolist()):
        raise ValueError(f"step_size is finite and >= 0, got {size}.")
