"""Which rows to train on and which to hold out; errors of inputs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Rows = NDArray[np.int64]


class Fold(NamedTuple):
    """Rows that networks are trained on, and held-out rows."""

    training: Rows
    held_out: Rows


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


def checked_errors(
    X_std: ArrayLike | None, x: Tensor, spread: Tensor, names: Sequence[str] | None
) -> Tensor | None:
    """Errors of inputs (n, d) as standard deviations of that shape; None if there are none.

    Args:
        X_std: one for each feature, (d,), or for each value, (n, d); on the scale of the features.
        x: the inputs.
        spread: (d,) standard deviations of the features in training.
        names: of the features, if they have any.
    """
    if X_std is None:
        return None
    named = getattr(X_std, "columns", None)
    if named is not None and names is not None and list(named) != list(names):
        raise ValueError(
            f"X_std has the columns {list(named)}, and X was fitted with {list(names)}: errors "
            "need the same columns in the same order; 0 is an exact value."
        )
    try:
        std = torch.tensor(np.asarray(X_std, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(f"X_std are standard deviations, numbers: {error}.") from error
    if std.shape not in (x.shape, x.shape[1:]):
        n, d = x.shape
        raise ValueError(
            f"X_std has the shape {tuple(std.shape)}; of inputs ({n}, {d}) it is ({d},), one for "
            f"each feature, or ({n}, {d})."
        )
    wrong = std[~(torch.isfinite(std) & (std >= 0))]
    if len(wrong):
        raise ValueError(
            f"X_std are standard deviations, finite and 0 or more; {len(wrong)} are not, the first "
            f"is {wrong[0].item():g}. Put 0 for an exact value."
        )
    std = std.expand(x.shape)
    large = ((std > spread) & (spread > 0)).double().mean(0) > 0.5
    if large.any():
        listed = [names[i] if names is not None else i for i in large.nonzero().flatten().tolist()]
        warnings.warn(
            f"Errors X_std of the features {listed} are larger than their spread in most rows, so "
            "these say little. Are the errors standard deviations on the scale of the features?",
            UserWarning,
            stacklevel=level_of_user(),
        )
    return std


def level_of_user() -> int:
    """The ``stacklevel`` by which a warning of whoever calls this points to the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("covary."):
        frame, level = frame.f_back, level + 1
    return level
