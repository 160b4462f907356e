"""The value that every source of data gives: a training part and a test part, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class DataError(ValueError):
    """A problem with data or with the files that hold them; the message names the remedy."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets as published, neither scaled nor centred.

    Attributes:
        name: the name it was asked for by.
        task: ``"classification"`` or ``"regression"``.
        x: training inputs, uint8 images ``(n, C, H, W)`` or float64 rows ``(n, d)``.
        y: int64 labels ``(n,)``, or float64 targets ``(n, t)``.
        x_test: test inputs ``(m, ...)``.
        y_test: test labels ``(m,)`` or targets ``(m, t)``.
        classes: the name of each label (classification).
        features: the name of each column of ``x`` (tables).
        targets: the name of each column of ``y`` (regression).
        source: where the data were found.
        notes: what whoever reports numbers on these data should know.
    """

    name: str
    task: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_image(self) -> bool:
        """Whether inputs are images ``(n, C, H, W)`` rather than rows ``(n, d)``."""
        return self.x_test.ndim == 4

    def __repr__(self) -> str:
        parts = f"x={tuple(self.x.shape)}, x_test={tuple(self.x_test.shape)}"
        return f"Dataset({self.name!r}, {self.task}, {parts}, source={self.source!r})"
