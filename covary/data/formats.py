"""Readers of the file formats that the named sets come in: paths in, numpy arrays out.

Each checks what it reads and raises a ``DataError`` that names the file and what is wrong with it.
None of them unpickles anything.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError, needed

Array = npt.NDArray[Any]


class Arrays(NamedTuple):
    """Training inputs and targets, then the same for testing."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


class Part(NamedTuple):
    """Images ``(n, C, H, W)`` uint8 and labels ``(n,)`` int64."""

    images: Array
    labels: Array


def _part(images: Array, labels: Array, classes: int, path: Path) -> Part:
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(labels)} labels for {len(images)} images.")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"{path}: labels from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}."
        )
    return Part(images, labels.astype(np.int64))


def without_training(test: Part) -> Arrays:
    """A set of which only the test part exists: its training part has length 0."""
    return Arrays(test.images[:0], test.labels[:0], test.images, test.labels)


# idx: the format of MNIST and its likes


def read_idx(path: Path) -> Array:
    """The uint8 array of an idx file, plain or gzipped, of whatever shape it says."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error}).") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(
            f"{path}: not an idx file of bytes (it begins with {data[:4].hex() or 'nothing'}, "
            "expected 000008 and the number of dimensions)."
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise DataError(f"{path}: ends inside the header, after {len(data)} bytes.")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", data[3], offset=4))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise DataError(f"{path}: {len(data)} bytes, expected {expected} for shape {shape}.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_idx_part(images_path: Path, labels_path: Path, *, classes: int) -> Part:
    """Grey images ``(n, 1, H, W)`` and their labels from a pair of idx files."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    for path, array, dimensions in ((images_path, images, 3), (labels_path, labels, 1)):
        if array.ndim != dimensions:
            raise DataError(f"{path}: {array.ndim} dimensions, expected {dimensions}.")
    return _part(images[:, None], labels, classes, labels_path)


def read_idx_set(paths: Sequence[Path], *, classes: int = 10) -> Arrays:
    """From training images and labels, test images and labels; or from the latter two alone."""
    *train, images, labels = paths
    test = read_idx_part(images, labels, classes=classes)
    if not train:
        return without_training(test)
    return Arrays(*read_idx_part(*train, classes=classes), *test)


# the binary version of CIFAR


def parse_cifar(data: bytes, *, label_bytes: int, classes: int, path: Path) -> Part:
    """Records of one or two label bytes (the last counts) and a 3 x 32 x 32 image."""
    size = label_bytes + 3 * 32 * 32
    if not data or len(data) % size:
        raise DataError(f"{path}: {len(data)} bytes, expected a multiple of {size}.")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return _part(images, records[:, label_bytes - 1], classes, path)


def read_cifar_set(
    paths: Sequence[Path],
    *,
    train: Mapping[str, int],
    test: Mapping[str, int],
    label_bytes: int,
    classes: int,
) -> Arrays:
    """CIFAR straight from its archive; nothing is unpacked to disk.

    ``train`` and ``test`` say how many images each member holds; the parts follow their order.
    """
    (path,) = paths
    wanted = {**train, **test}
    found: dict[str, Part] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if member.name not in wanted or not member.isfile():
                    continue
                expected = wanted[member.name] * (label_bytes + 3 * 32 * 32)
                if member.size != expected:
                    raise DataError(
                        f"{path}: {member.name} has {member.size} bytes, expected {expected}."
                    )
                stream = archive.extractfile(member)
                data = stream.read() if stream else b""
                found[member.name] = parse_cifar(
                    data, label_bytes=label_bytes, classes=classes, path=path / member.name
                )
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error}).") from error
    if absent := [name for name in wanted if name not in found]:
        raise DataError(f"{path}: the archive has no {', '.join(absent)}.")
    parts = [
        np.concatenate([found[name][i] for name in members])
        for members in (train, test)
        for i in (0, 1)
    ]
    return Arrays(*parts)


# npz files


@contextmanager
def _open_npz(path: Path, keys: Sequence[str]) -> Iterator[Mapping[str, Array]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if absent := [key for key in keys if key not in arrays]:
                raise DataError(f"{path}: has no array {', '.join(absent)}.")
            yield arrays
    except DataError:
        raise
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable npz file ({error}).") from error


def read_strips(path: Path, *, classes: int) -> Part:
    """Colour images packed as lossless WebP strips, each of 32 x 32 images below each other.

    Keys: ``webp``, the files one after the other; ``offsets``, where each begins, and the end;
    ``labels``.
    """
    with needed("Pillow", f"reading {path.name}", "data"):
        from PIL import Image, UnidentifiedImageError
    with _open_npz(path, ("webp", "offsets", "labels")) as arrays:
        blob, labels = arrays["webp"].tobytes(), arrays["labels"]
        offsets = [int(offset) for offset in arrays["offsets"]]
    if len(offsets) < 2 or sorted(offsets) != offsets or offsets[-1] != len(blob):
        raise DataError(f"{path}: offsets do not divide the {len(blob)} bytes of images.")
    strips = []
    for i, (start, end) in enumerate(pairwise(offsets)):
        try:
            with Image.open(io.BytesIO(blob[start:end]), formats=["WEBP"]) as image:
                strip = np.asarray(image.convert("RGB"))
        except (UnidentifiedImageError, OSError, ValueError) as error:
            raise DataError(f"{path}: image strip {i} is damaged.") from error
        if strip.shape[0] % 32 or strip.shape[1] != 32:
            raise DataError(f"{path}: image strip {i} is of shape {strip.shape}, not (32 k, 32).")
        strips.append(strip.reshape(-1, 32, 32, 3))
    images = np.ascontiguousarray(np.concatenate(strips).transpose(0, 3, 1, 2))
    return _part(images, labels, classes, path)


def read_strips_set(paths: Sequence[Path], *, classes: int = 10) -> Arrays:
    """From a training and a test file, or from a test file alone."""
    *train, test = (read_strips(path, classes=classes) for path in paths)
    return Arrays(*train[0], *test) if train else without_training(test)


# SVHN's Matlab files


def read_svhn(path: Path) -> Part:
    """Digits ``(n, 3, 32, 32)`` from a ``*_32x32.mat`` file, where the label 10 means digit 0."""
    with needed("scipy", f"reading {path.name}", "data"):
        from scipy.io import loadmat
        from scipy.io.matlab import MatReadError

    try:
        arrays = loadmat(path, variable_names=("X", "y"))
        images, labels = arrays["X"], arrays["y"].ravel().astype(np.int64)
    except (MatReadError, ValueError, TypeError, KeyError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a readable SVHN file ({error}).") from error
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise DataError(
            f"{path}: images {images.dtype} {images.shape}, expected uint8 (32, 32, 3, n)."
        )
    labels[labels == 10] = 0
    return _part(np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels, 10, path)


def read_svhn_set(paths: Sequence[Path]) -> Arrays:
    """From the training and the test file."""
    train, test = paths
    return Arrays(*read_svhn(train), *read_svhn(test))


# the UCI regression benchmark


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
    with _open_npz(path, ("X", "y", "train_idx", "test_idx")) as arrays:
        x, y, train, test = (arrays[key] for key in ("X", "y", "train_idx", "test_idx"))
    if x.ndim != 2 or y.shape != x.shape[:1] or x.dtype != np.float64 or y.dtype != np.float64:
        raise DataError(
            f"{path}: X {x.dtype} {x.shape} and y {y.dtype} {y.shape}, "
            "expected float64 (n, d) and (n,)."
        )
    rows = np.arange(len(x))
    for order in np.concatenate([train, test], axis=1):
        if not np.array_equal(np.sort(order), rows):
            raise DataError(f"{path}: a split does not hold each of the {len(x)} rows once.")
    return Regression(x, y, train.astype(np.int64), test.astype(np.int64))


def read_uci_set(paths: Sequence[Path], split: int) -> Arrays:
    """One split of a set; targets are ``(n, 1)``."""
    (path,) = paths
    x, y, train, test = read_uci(path)
    train, test = train[split], test[split]
    return Arrays(x[train], y[train, None], x[test], y[test, None])


def uci_digest(path: Path) -> str:
    """SHA-256 of the values and splits that a file holds, however it was compressed."""
    digest = hashlib.sha256()
    x, y, train, test = read_uci(path)
    for array, kind in ((x, "<f8"), (y, "<f8"), (train, "<i8"), (test, "<i8")):
        digest.update(np.ascontiguousarray(array, kind).tobytes())
    return digest.hexdigest()


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
