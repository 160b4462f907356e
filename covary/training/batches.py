"""Mini-batches in a random order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Batches(Protocol):
    """What a training loop asks for: an epoch is the same whenever it is asked for, to resume."""

    def __len__(self) -> int:
        """How many batches an epoch has."""

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The batches of this epoch but for the first ``skip``: what the objective takes, (x, y).

        Where inputs have errors, (x, y, std).
        """


def shuffled(n: int, *key: int) -> Tensor:
    """(n,) a permutation that depends on the key alone: a seed, an epoch."""
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.randperm(n, generator=torch.Generator().manual_seed(int(seed) >> 1))


def filling(samples: int, batch_size: int) -> int:
    """As many samples as fill whole batches, if from ten batches on few are left out so; else all.

    Networks that train together record a step for each size of a batch.
    """
    return samples - samples % batch_size if samples >= 10 * batch_size else samples


def divided(order: Tensor, batch_size: int, *, dim: int = 0) -> tuple[Tensor, ...]:
    """An order of samples in batches; a single sample left over joins the batch before it.

    A batch of one has no variance, and batch norm no use for it.
    """
    batches = torch.split(order, batch_size, dim=dim)
    if len(batches) > 1 and batch_size > 1 and batches[-1].shape[dim] == 1:
        *whole, last, single = batches
        return (*whole, torch.cat([last, single], dim=dim))
    return batches


def count(samples: int, batch_size: int) -> int:
    """How many batches ``divided`` makes of so many samples."""
    batches, rest = divmod(samples, batch_size)
    alone = rest == 1 and batches > 0 and batch_size > 1
    return batches + (rest > 0 and not alone)


@dataclass(eq=False)
class TensorBatches:
    """Batches of tensors that are in memory, (n, *shape) and (n, ...).

    Args:
        x: inputs, of any type (images may stay bytes; the network converts a batch at a time).
        y: labels or targets.
        batch_size: samples in a batch; the last of an epoch may have fewer, or one more.
        seed: decides the order.
        transform: applied to the inputs of each batch, such as a random crop.
        std: standard deviations of the inputs' errors, of their shape, where they are known.
    """

    x: Tensor
    y: Tensor
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    transform: Callable[[Tensor], Tensor] | None = None
    std: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            sizes = f"{len(self.x)} and {len(self.y)}"
            raise ValueError(f"Batches need as many targets as inputs, got {sizes}.")
        if len(self.x) == 0:
            raise ValueError("There is nothing to train on: 0 samples.")

    def __len__(self) -> int:
        return count(len(self.x), self.batch_size)

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The batches of this epoch but for the first ``skip``."""
        order = shuffled(len(self.x), self.seed, epoch)
        for rows in divided(order, self.batch_size)[skip:]:
            x = self.x[rows]
            x = x if self.transform is None else self.transform(x)
            yield (x, self.y[rows]) if self.std is None else (x, self.y[rows], self.std[rows])
