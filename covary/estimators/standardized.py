"""Data in the units of a network, and the layers that lead there and back."""

from __future__ import annotations

from torch import Tensor

from covary.nn import Rescale, Standardize


class Standardized:
    """Raw data (n, d) and targets (n, t), or labels (n,), in the units of a network.

    Attributes:
        x, y: the data in these units, float32 (labels stay as they are).
        standardize: the layer that leads there.
        back: the layers that lead back, one for targets and none for labels.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.standardize = Standardize.of(x)
        self.back = [Rescale.of(y)] if y.is_floating_point() else []
        self.x, self.y = self.standardize(x), self.targets(y)

    def targets(self, y: Tensor) -> Tensor:
        """Targets in the units of the network; labels as they are."""
        if not self.back:
            return y
        (rescale,) = self.back
        return ((y - rescale.shift) / rescale.scale).float()
