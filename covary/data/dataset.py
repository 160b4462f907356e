"""The data set as a value, the error of this room, and what to say when a library is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from covary.moments import Moments

Array = npt.NDArray[Any]


class DataError(ValueError):
    """A problem with data or with their files; the message names the remedy."""


@contextmanager
def needed(library: str, purpose: str, extra: str) -> Iterator[None]:
    """Around an import: say what the library is needed for and how to install it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose} needs {library}: pip install 'covary[{extra}]'") from error


class Arrays(NamedTuple):
    """Training inputs and targets, then the same for testing."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


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
        x_std: standard deviations ``(n, d)`` of the errors of ``x``, where they are known.
        x_test_std: the same ``(m, d)`` of ``x_test``.
        reasons: of new rows of a table, by the number of a test row, what it has that training did
            not have.
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
    x_std: Tensor | None = None
    x_test_std: Tensor | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, task: str, arrays: Sequence[Array], *more: Any) -> Dataset:
        """From arrays ``x, y, x_test, y_test``, and the remaining attributes in their order."""
        # what was read may be a view of read-only bytes, and a tensor may be written to
        writable = (np.require(array, requirements=["C", "W"]) for array in arrays)
        x, y, x_test, y_test = map(torch.as_tensor, writable)
        return cls(name, task, x, y, x_test, y_test, *more)

    @cached_property
    def inputs(self) -> Tensor | Moments:
        """Training inputs as a network takes them: with their errors, where they are known."""
        return self.x if self.x_std is None else Moments.of(self.x, std=self.x_std)

    @cached_property
    def test_inputs(self) -> Tensor | Moments:
        """The same for testing."""
        return (
            self.x_test if self.x_test_std is None else Moments.of(self.x_test, std=self.x_test_std)
        )

    @property
    def is_image(self) -> bool:
        """Whether inputs are images ``(n, C, H, W)`` rather than rows ``(n, d)``."""
        return self.x_test.ndim == 4

    def __repr__(self) -> str:
        parts = f"x={tuple(self.x.shape)}, x_test={tuple(self.x_test.shape)}"
        return f"Dataset({self.name!r}, {self.task}, {parts}, source={self.source!r})"
