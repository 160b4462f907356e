"""Several networks that answer as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from covary.moments import Moments
from covary.uncertainty.calibration import combined


class Ensemble(nn.Module):
    """The average of what networks predict, with the spread of their means in its covariance.

    Args:
        members: networks of the same inputs and outputs.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Any) -> Moments:
        """``covary.uncertainty.calibration.combined`` of the members' moments."""
        return combined([member(x) for member in self.members])
