"""What is known of a named set: its entry in the catalogue, and what readers of its files give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from covary.data.download import File

Array = npt.NDArray[Any]


class Arrays(NamedTuple):
    """Training inputs and targets, then the same for testing."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True)
class Form:
    """One way in which a set lies on disk: all of ``files``, and what reads them in that order."""

    files: tuple[File, ...]
    read: Callable[..., Arrays]
    notes: tuple[str, ...] = ()

    @property
    def downloadable(self) -> bool:
        """Whether every file has an address to fetch it from."""
        return all(file.urls or file.made_from for file in self.files)


@dataclass(frozen=True)
class Entry:
    """What is known of a named set without having it.

    ``forms`` are tried in turn, and are empty for the sets that ``make`` gives without any file.
    ``splits`` counts the published splits to choose from, 0 where there is a single one.
    """

    name: str
    title: str
    task: str
    size: str
    licence: str = "generated"
    source: str = "generated from the seed"
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    splits: int = 0
    forms: tuple[Form, ...] = ()
    make: Callable[[int], Arrays] | None = None
