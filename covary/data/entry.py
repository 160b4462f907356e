"""What is known of a named set: its entry in the catalogue, and what readers of its files give."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError, regular_file
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


@contextmanager
def open_npz(path: Path, keys: Sequence[str]) -> Iterator[Mapping[str, Array]]:
    """The arrays of an npz file, which must have these keys; nothing is unpickled."""
    try:
        with np.load(regular_file(path), allow_pickle=False) as arrays:
            if absent := [key for key in keys if key not in arrays]:
                raise DataError(f"{path}: has no array {', '.join(absent)}.")
            yield arrays
    except DataError:
        raise
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable npz file ({error}).") from error
