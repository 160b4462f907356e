"""Where a prediction's uncertainty is right and where not, and which columns it comes from.

Pure functions of numpy arrays: shares of hits in slices of rows, the size of errors by the size of
error bars, and what a function of rows becomes as one column moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Bools = NDArray[np.bool_]


def quantile_slices(values: ArrayLike, most: int, least: int = 1) -> list[Rows]:
    """Rows of like values (n,), the lowest first: slices of about equal size.

    Equal values are never parted. Up to ``most`` different values are a slice each, if every slice
    has ``least`` rows.

    Args:
        values: (n,) without NaN.
        most: slices.
        least: rows of a slice. There is one slice if there are too few rows for more.
    """
    numbers = np.asarray(values, dtype=np.float64)
    order = np.argsort(numbers, kind="stable")
    different, count = np.unique(numbers, return_counts=True)
    ends = np.cumsum(count)
    if len(different) > most or count.min(initial=least) < least:
        slices = max(1, min(most, len(numbers) // max(1, least)))
        wanted = np.arange(1, slices) * len(numbers) / slices
        # Each cut goes to the nearest place where the value changes.
        inner = ends[:-1]
        near = [inner[np.abs(inner - cut).argmin()] for cut in wanted] if len(inner) else []
        ends = np.unique([*near, len(numbers)]).astype(np.int64)
    found = [part for part in np.split(order, ends[:-1]) if len(part)]
    kept: list[Rows] = []
    for part in found:  # what is too small goes to the slice before it
        if kept and min(len(part), len(kept[-1])) < least:
            kept[-1] = np.concatenate([kept[-1], part])
        else:
            kept.append(part)
    return kept


def share_interval(
    hits: ArrayLike, count: ArrayLike, confidence: float = 0.95
) -> tuple[Floats, Floats]:
    """Ends (m,) of the exact interval (Clopper and Pearson) of a share, of hits among count (m,).

    A share is outside exactly where ``chance_of_hits`` is below ``1 - confidence``.
    """
    from scipy.special import betaincinv

    k, n = np.asarray(hits, dtype=np.float64), np.asarray(count, dtype=np.float64)
    tail = (1 - confidence) / 2
    low = np.where(k > 0, betaincinv(np.maximum(k, 1), n - k + 1, tail), 0.0)
    high = np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1), 1 - tail), 1.0)
    return low, high


def chance_of_hits(hits: ArrayLike, count: ArrayLike, share: float) -> Floats:
    """(m,) how likely so unusual numbers of hits among count (m,) are if each hits by this share.

    Twice the probability of the tail (binomial), at most 1.
    """
    from scipy.special import bdtr

    k, n = np.asarray(hits, dtype=np.int64), np.asarray(count, dtype=np.int64)
    below = bdtr(k, n, share)  # of at most k
    above = np.where(k > 0, 1 - bdtr(np.maximum(k - 1, 0), n, share), 1.0)  # of at least k
    found: Floats = np.minimum(1.0, 2 * np.minimum(below, above))
    return found


def expected_unusual(count: ArrayLike, share: float, level: float = 0.05) -> float:
    """How many slices of count (m,) rows have a ``chance_of_hits`` below the level by chance alone.

    Fewer than ``level`` times their number, as hits are whole numbers.
    """
    from scipy.special import bdtr

    total = 0.0
    for n in np.asarray(count, dtype=np.int64).tolist():
        hits = np.arange(n + 1)
        probability = np.diff(bdtr(hits, np.full(n + 1, n), share), prepend=0.0)
        total += float(probability[chance_of_hits(hits, np.full(n + 1, n), share) < level].sum())
    return total


def beyond_chance(chance: ArrayLike, level: float = 0.05) -> Bools:
    """(m,) which of m chances are too small to be the least of so many (Holm's procedure).

    If nothing is wrong anywhere, there is one among them with a probability of at most ``level``,
    however they depend on each other.
    """
    values = np.asarray(chance, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    left = np.arange(len(values), 0, -1)
    passed = np.logical_and.accumulate(values[order] * left <= level)
    found = np.zeros(len(values), dtype=bool)
    found[order] = passed
    return found


class ErrorsByStd(NamedTuple):
    """Errors of m groups of rows, from the smallest to the largest predicted standard deviation."""

    std: Floats  # (m,) root of the mean predicted variance
    rmse: Floats  # (m,) root of the mean squared error
    low: Floats  # (m,) ends of the interval in which that root lies, by drawing rows again
    high: Floats
    samples: Rows  # (m,)


def errors_by_std(
    std: ArrayLike,
    error: ArrayLike,
    groups: int = 10,
    *,
    confidence: float = 0.9,
    draws: int = 1000,
    seed: int = 0,
) -> ErrorsByStd:
    """The size of errors (n,) in groups of equal size by predicted standard deviation (n,).

    The interval is that of the bootstrap: rows of the group are drawn again, with replacement.
    """
    stds, errors = np.asarray(std, dtype=np.float64), np.asarray(error, dtype=np.float64)
    random, tail = np.random.default_rng(seed), (1 - confidence) / 2
    parts = np.array_split(np.argsort(stds, kind="stable"), max(1, min(groups, len(stds))))
    rows = []
    for part in parts:
        square = errors[part] ** 2
        some = max(100, min(draws, 10**7 // len(part)))  # as many as fit in memory
        weights = random.multinomial(len(part), np.full(len(part), 1 / len(part)), some)
        low, high = np.sqrt(np.quantile(weights @ square / len(part), [tail, 1 - tail]))
        rows.append((np.sqrt((stds[part] ** 2).mean()), np.sqrt(square.mean()), low, high))
    means, roots, lows, highs = np.array(rows).T
    return ErrorsByStd(means, roots, lows, highs, np.array([len(part) for part in parts]))


def partial_dependence(
    function: Callable[[Floats], Floats], x: Floats, places: Sequence[int], donors: Floats
) -> Floats:
    """(g, n, ...) what a function of rows becomes as some of their columns move together.

    Args:
        function: rows (n, d) -> (n, ...).
        x: (n, d) the rows; all other columns stay as they are in them.
        places: of the columns that move.
        donors: (g, d) rows from which the columns are taken, one after the other.
    """
    found = []
    for donor in donors:
        moved = np.array(x)
        moved[:, places] = donor[places]
        found.append(function(moved))
    return np.stack(found)
