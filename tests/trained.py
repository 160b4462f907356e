"""Plain torch networks trained on scikit-learn's bundled digits: a residual one, a CNN, a ViT.

Each is trained once per process, in seconds, and is the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.residual_cnn import ResidualCNN
from tests import digits
from tests.architectures_images import MaxPoolCNN, VisionTransformer

# What makes the network, the side of its images, the number of epochs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "residual_cnn": (ResidualCNN, 28, 8),
    "max_pool": (MaxPoolCNN, 12, 20),
    "vit": (lambda: VisionTransformer(dim=24, classes=10), 12, 30),
}
BATCH = 64


@cache
def data(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (1347, 1, side, side) and labels, then the same for testing (450).

    The images of 8x8 pixels are enlarged to the network's side; pixels average 0, with standard
    deviation 1.
    """
    _, side, _ = NETWORKS[name]
    x, y, x_test, y_test = digits.data()

    def images(rows: Tensor) -> Tensor:
        rows = (rows - x.mean()) / x.std()
        return F.interpolate(rows.view(-1, 1, 8, 8), size=(side, side), mode="bilinear")

    return images(x), y, images(x_test), y_test


def trained(name: str, seed: int = 0) -> nn.Module:
    """One of ``NETWORKS``, trained, in evaluation mode. Do not change it: others get the same."""
    return _trained(name, seed)


@cache
def _trained(name: str, seed: int) -> nn.Module:
    make, _, epochs = NETWORKS[name]
    x, y, _, _ = data(name)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        net = make()
        optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=1e-2)
        steps = epochs * (len(x) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
        for _ in range(epochs):
            order = torch.randperm(len(x))
            for batch in order[: len(x) // BATCH * BATCH].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
                schedule.step()
    return net.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(name: str, seed: int = 0) -> float:
    """The fraction of test digits whose largest output is their label's."""
    _, _, x_test, y_test = data(name)
    return (trained(name, seed)(x_test).argmax(1) == y_test).float().mean().item()
