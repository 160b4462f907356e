"""Data on the scale of a network."""

from __future__ import annotations

from torch import Tensor

from covary.nn import Rescale, Standardize


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
