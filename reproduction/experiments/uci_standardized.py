"""Data on the scale of a network."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from covary.nn import Rescale, Standardize

Scaled = TypeVar("Scaled", Standardize, Rescale)
# How data are scaled: to average 0 and deviation 1, or to go from 0 to 1.
STANDARDISED, MIN_MAX = "standardised", "min-max"


class Standardized:
    """Raw data (n, d) and targets (n, t), or labels (n,), on the scale of a network.

    Args:
        x, y: the data, of which averages and deviations, or least and largest, are taken.
        scaling: ``"standardised"`` or ``"min-max"``.

    Attributes:
        x, y: the data on this scale, float32 (labels stay as they are).
        standardize: the layer that leads there.
        back: the layers that lead back, one for targets and none for labels.
    """

    def __init__(self, x: Tensor, y: Tensor, scaling: str = STANDARDISED) -> None:
        self.standardize = _layer(Standardize, x, scaling)
        self.back = [_layer(Rescale, y, scaling)] if y.is_floating_point() else []
        self.x, self.y = self.standardize(x), self.targets(y)

    def targets(self, y: Tensor) -> Tensor:
        """Targets on the scale of the network; labels as they are."""
        for rescale in self.back:
            y = ((y - rescale.shift) / rescale.scale).float()
        return y


def _layer(kind: type[Scaled], data: Tensor, scaling: str) -> Scaled:
    """The layer between these data (n, *shape) and their scaled values."""
    if scaling == STANDARDISED:
        return kind.of(data)
    if scaling == MIN_MAX:
        least = data.amin(0)
        return kind(least, data.amax(0) - least)
    raise ValueError(f"Data are {STANDARDISED} or scaled by {MIN_MAX}; got {scaling!r}.")
