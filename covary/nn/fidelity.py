"""What is known of how well tracked covariances agree with exact ones."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from covary.covariance import exact_units

# Good enough to be chosen: rank correlation of entropies, relative error of the covariance.
_GOOD_RANK, _GOOD_ERROR = 0.99, 0.1
# Poor enough to be warned of.
_POOR_RANK, _POOR_ERROR = 0.95, 0.25


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


class FidelityRow(NamedTuple):
    """What was measured with ``"tracked:N"``."""

    units: int  # N: the most units of a layer whose variances are exact
    rank: float  # Spearman's correlation of entropies with exact ones
    error: float  # of the covariance, relative to the exact one, on average

    @property
    def covariance(self) -> str:
        """The name of the covariance that this was measured of."""
        return f"tracked:{self.units}"

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
        error = "less than 1%" if self.error < 0.01 else f"{self.error:.0%}"
        return f"rank correlation of entropies {rank}, covariance off by {error}"


class Fidelity(NamedTuple):
    """What ``covary.track`` measured of ``"tracked:N"``, by rising N; no rows: nothing.

    Methods take the covariance that was asked for: ``"tracked"`` leaves N to what was measured.
    """

    rows: tuple[FidelityRow, ...]

    @classmethod
    def of(cls, table: Tensor) -> Fidelity:
        """From (k, 3) numbers, as they are saved with a network."""
        return cls(tuple(FidelityRow(int(units), *rest) for units, *rest in table.tolist()))

    def named(self, covariance: str) -> str:
        """The covariance to use: as asked for, or with the least N that is good, or the best."""
        if exact_units(covariance) is not None or not self.rows:
            return covariance
        return self._chosen().covariance

    def used(self, covariance: str) -> FidelityRow:
        """What was measured of the covariance to use."""
        units = exact_units(self.named(covariance))
        # Between two N that were tried, the same layers are exact as with the lower one.
        return [row for row in self.rows if row.units <= (units or 0)][-1]

    def problem(self, covariance: str) -> str | None:
        """Why not to rely on tracked covariances as they are used, and what is better."""
        if not self.rows:
            return (
                "This network tracks its covariance, but how well was never measured since it was "
                "last trained: its entropies may be far from exact ones. Measure it, on some "
                "training inputs: covary.track(net, loader)."
            )
        named, used = self.named(covariance), self.used(covariance)
        if (exact_units(named) or 0) > self.rows[-1].units or not used.is_poor:
            return None  # (more may be exact than was ever tried)
        chosen = self._chosen()
        better = "full" if chosen.is_poor else chosen.covariance
        gain = "exact" if chosen.is_poor else str(chosen)
        return (
            f"Covariances of this network are poor when stored as {named} ({used}). "
            f"Better: covary.with_covariance(net, {better!r}) ({gain})."
        )

    def _chosen(self) -> FidelityRow:
        good = [row for row in self.rows if row.is_good]
        return good[0] if good else min(self.rows, key=lambda row: row.error)


UNKNOWN = Fidelity(())
