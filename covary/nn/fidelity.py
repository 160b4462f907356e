"""What is known of how well tracked covariances agree with exact ones."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Good enough to be chosen: rank correlation of entropies, relative error of the covariance.
_GOOD_RANK, _GOOD_ERROR = 0.99, 0.1
# Poor enough to be warned of.
_POOR_RANK, _POOR_ERROR = 0.95, 0.25
_REMEDY = "covary.with_covariance(net, {})"


class TrackingWarning(UserWarning):
    """Tracked covariances are used that are poor, or were never compared with exact ones."""


def frames_to_caller() -> int:
    """The ``stacklevel`` at which a warning names the line that used the network.

    Python shows a warning once for each line: not the one line in here for all networks.
    """
    rooms = (Path(__file__).parents[1], Path(torch.__file__).parent)
    inside = tuple(f"{room}{os.sep}" for room in rooms)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


class Row(NamedTuple):
    """What was measured with one ``exact_width``."""

    exact_width: int
    rank: float  # Spearman's correlation of entropies with exact ones
    error: float  # of the covariance, relative to the exact one, on average

    @property
    def is_good(self) -> bool:
        """Whether it is close enough to exact covariances; equal entropies have no rank (NaN)."""
        return not (self.rank < _GOOD_RANK) and self.error <= _GOOD_ERROR

    @property
    def is_poor(self) -> bool:
        """Whether a warning is due: rank correlation or error is out of bounds."""
        return self.rank < _POOR_RANK or not (self.error <= _POOR_ERROR)

    def __str__(self) -> str:
        rank = "undefined" if math.isnan(self.rank) else f"{self.rank:.3f}"
        return f"rank correlation of entropies {rank}, covariance off by {self.error:.0%}"


class Fidelity(NamedTuple):
    """What ``covary.track`` measured, by ``exact_width`` in rising order; no rows: nothing."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, table: Tensor) -> Fidelity:
        """From (k, 3) numbers, as they are saved with a network."""
        return cls(tuple(Row(int(width), rank, error) for width, rank, error in table.tolist()))

    def width(self, asked: int | None) -> int:
        """The width to use: what was asked for, or the least that is good, or else the best."""
        return asked if asked is not None else self._chosen().exact_width

    def used(self, asked: int | None) -> Row:
        """What was measured with the width to use."""
        width = self.width(asked)
        # Between two widths that were tried, the same layers are exact as with the lower one.
        return [row for row in self.rows if row.exact_width <= width][-1]

    def problem(self, asked: int | None) -> str | None:
        """Why not to rely on tracked covariances as they are used, and what is better."""
        if not self.rows:
            return (
                "This network tracks its covariance, but how well was never measured since it was "
                "last trained: its entropies may be far from exact ones. Measure it, on some "
                "training inputs: covary.track(net, loader)."
            )
        width, used = self.width(asked), self.used(asked)
        if width > self.rows[-1].exact_width or not used.is_poor:
            return None  # (more may be exact than was ever tried)
        chosen = self._chosen()
        better = "'full'" if chosen.is_poor else f"'tracked', exact_width={chosen.exact_width}"
        gain = "exact" if chosen.is_poor else str(chosen)
        return (
            f"Tracked covariances of this network are poor with exact_width={width} ({used}). "
            f"Better: {_REMEDY.format(better)} ({gain})."
        )

    def _chosen(self) -> Row:
        if not self.rows:
            return Row(0, math.nan, math.nan)
        good = [row for row in self.rows if row.is_good]
        return good[0] if good else min(self.rows, key=lambda row: row.error)


UNKNOWN = Fidelity(())
