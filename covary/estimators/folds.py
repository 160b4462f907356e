"""Which rows to train on and which to hold out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

Rows = NDArray[np.int64]


class Part(NamedTuple):
    """Rows that networks are trained on, and rows that they have not seen."""

    training: Rows
    held_out: Rows


def one_part(n: int, size: int, seed: int, strata: NDArray[Any] | None) -> Part:
    """So many of n rows held out; of each class the same share, where there are enough."""
    if strata is not None:
        members = np.bincount(strata)
        if members.min() < 2 or min(size, n - size) < len(members):
            strata = None
    return Part(*train_test_split(np.arange(n), test_size=size, random_state=seed, stratify=strata))


def cross_validation(n: int, folds: int, seed: int, strata: NDArray[Any] | None) -> list[Part]:
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
        parts.append(Part(np.sort(training), np.sort(held_out)))
    return parts
