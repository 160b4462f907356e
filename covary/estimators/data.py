"""Which rows to train on and which to hold out, and data on the scale of a network."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from torch import Tensor

from covary.nn import Rescale, Standardize

Rows = NDArray[np.int64]


class Fold(NamedTuple):
    """Rows that networks are trained on, and held-out rows."""

    training: Rows
    held_out: Rows


def one_part(n: int, size: int, seed: int, strata: NDArray[Any] | None) -> Fold:
    """So many of n rows held out; of each class the same share, where there are enough."""
    if strata is not None:
        members = np.bincount(strata)
        if members.min() < 2 or min(size, n - size) < len(members):
            strata = None
    return Fold(*train_test_split(np.arange(n), test_size=size, random_state=seed, stratify=strata))


def cross_validation(n: int, folds: int, seed: int, strata: NDArray[Any] | None) -> list[Fold]:
    """Every row held out once; of each class the same share, or as nearly as can be.

    Networks that train together take the same number of rows each. Where n is not a multiple of
    the folds, some parts therefore leave one row unused.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(n)
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]
    # Dealt like cards, so that rows of a class go to all folds.
    dealt = [order[fold::folds] for fold in range(folds)]
    rows = n - len(dealt[0])
    parts = []
    for held_out in dealt:
        training = random.permutation(np.setdiff1d(np.arange(n), held_out))[:rows]
        parts.append(Fold(np.sort(training), np.sort(held_out)))
    return parts


class Standardized:
    """Raw data (n, d) and targets (n, t), or labels (n,), on the scale of a network.

    Attributes:
        x, y: the data on this scale, float32 (labels stay as they are).
        standardize: the layer that leads there.
        back: the layers that lead back, one for targets and none for labels.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.standardize = Standardize.of(x)
        self.back = [Rescale.of(y)] if y.is_floating_point() else []
        self.x, self.y = self.standardize(x), self.targets(y)

    def targets(self, y: Tensor) -> Tensor:
        """Targets on the scale of the network; labels as they are."""
        for rescale in self.back:
            y = ((y - rescale.shift) / rescale.scale).float()
        return y
