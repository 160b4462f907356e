"""Residuals of nearby training rows: what networks have not learnt of a place."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

Floats = NDArray[np.float64]

# Rows that are kept to be neighbours: more cost more and are hardly nearer.
MOST_REFERENCES = 50_000
_POWER = 3  # weights fall with this power of the distance
# Distances and squared residuals below this part of the usual ones count as that.
_LEAST_DISTANCE, _LEAST_SQUARE = 0.03, 1e-3
# Residuals of rows that a network has seen are less than those of others, so more than all of a
# correction may be right; but not much more.
_MOST_SHARE = 2.0
_QUERIES_AT_A_TIME, _ROWS_OF_THE_UNIT = 2**14, 1000
_SAME = 1e-12  # squared distances below are round-off


class Local(NamedTuple):
    """What neighbours say of n rows and t targets, in standard deviations of the targets.

    Attributes:
        residual: (n, t) weighted averages of the neighbours' residuals.
        log_square: (n, t) logarithms of weighted averages of their squares.
        log_distance: (n,) the logarithm of how far neighbours are.
    """

    residual: Floats
    log_square: Floats
    log_distance: Floats

    def features(self, target: int) -> Floats:
        """(n, 3) of one target, as columns."""
        each = (self.residual[:, target], self.log_square[:, target], self.log_distance)
        return np.stack(each, 1)


class Neighbours:
    """Standardised inputs -> what the training residuals of nearby rows say.

    Networks of fold f are trained on all rows but those of the fold. At an input x the residuals
    r_j of the k nearest rows j, at distances d_j, average to

        sum_j w_j r_j / sum_j w_j  with  w_j = (d_j^2 + e^2)^(-3/2),

    where e is a small part of the usual distance. A held-out row is told of rows of other folds
    alone, and of their residuals by the networks that have not seen it. A new row is predicted by
    the networks of all folds, and told of all rows and of their residuals by all these networks;
    squares are of those that were trained on a row (docs/theory.md, eq. 51).

    Args:
        inputs: (n, d) standardised, of training rows.
        residuals: (folds, n, t) targets less the means of each fold's networks.
        fold: (n,) by whose networks a row is held out.
        k: neighbours that are looked at.
    """

    def __init__(self, inputs: Floats, residuals: Floats, fold: NDArray[np.int64], k: int) -> None:
        self._residuals, self._fold = residuals, fold
        has_seen = (np.arange(len(residuals))[:, None] != fold)[..., None] / (len(residuals) - 1)
        # Exactly what the average of all networks is off by, at a row that comes again.
        self._average = residuals.mean(0)
        self._average_square = (has_seen * residuals**2).sum(0)
        # A row is its own nearest one, and says nothing of itself.
        self._count = min(k + 1, len(inputs))
        self._search = NearestNeighbors(n_neighbors=self._count).fit(inputs)
        some = inputs[:: max(1, len(inputs) // _ROWS_OF_THE_UNIT)]
        distances, _ = self._search.kneighbors(some)
        self._unit = float(np.square(distances[:, 1:]).mean()) if self._count > 1 else 0.0
        if self._unit < _SAME:
            self._unit = 1.0  # all rows are copies of a few
        self._level = np.maximum(np.square(residuals).mean((0, 1)), np.finfo(np.float64).tiny)

    def __call__(self, inputs: Floats, fold: NDArray[np.int64] | None = None) -> Local:
        """Of n rows (n, d): new ones, or such that the networks of ``fold`` (n,) have not seen."""
        parts = []
        for start in range(0, max(1, len(inputs)), _QUERIES_AT_A_TIME):
            some = slice(start, start + _QUERIES_AT_A_TIME)
            parts.append(self._of_some(inputs[some], None if fold is None else fold[some, None]))
        return Local(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _of_some(self, inputs: Floats, fold: NDArray[np.int64] | None) -> Local:
        """The same of as many rows as fit into memory; ``fold`` (n, 1)."""
        if len(inputs) == 0:
            t = self._residuals.shape[2]
            return Local(np.zeros((0, t)), np.zeros((0, t)), np.zeros(0))
        distances, rows = self._search.kneighbors(inputs)
        if fold is None:  # as many as a held-out row has but for itself
            most = max(1, self._count - 1)
            distances, rows = distances[:, :most], rows[:, :most]
        squares = np.square(distances) + _LEAST_DISTANCE**2 * self._unit
        weights = squares ** (-_POWER / 2)
        if fold is None:
            near, near_square = self._average[rows], self._average_square[rows]
        else:
            weights = np.where(self._fold[rows] != fold, weights, 0.0)
            near = self._residuals[fold, rows]
            near_square = near**2
        total = weights.sum(1, keepdims=True)
        # Where all neighbours are held out together, nobody says anything: the residual is 0.
        weights = weights / np.where(total > 0, total, 1.0)
        residual = np.einsum("nk,nkt->nt", weights, near)
        square = np.einsum("nk,nkt->nt", weights, near_square)
        silent = total[:, 0] == 0
        square[silent] = self._level
        distance = np.where(silent, squares.max(1), (weights * squares).sum(1))
        log_square = np.log(square + _LEAST_SQUARE * self._level)
        return Local(residual, log_square, 0.5 * np.log(distance / self._unit))


def shares(local: Floats, residual: Floats) -> Floats:
    """(t,) by how much of ``local`` (n, t) the squares of residuals (n, t) become least."""
    norm = np.square(local).sum(0)
    found = (local * residual).sum(0) / np.where(norm > 0, norm, 1.0)
    return cast(Floats, np.clip(found, 0.0, _MOST_SHARE))
