"""Readers of the files of image sets. Their SHA-256 was checked, so their content is known."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.data.dataset import Array, Arrays, needed


class LabelledImages(NamedTuple):
    """Images ``(n, C, H, W)`` uint8 and labels ``(n,)``."""

    images: Array
    labels: Array


def _arrays(parts: Iterable[LabelledImages]) -> Arrays:
    """A training and a test part; or the latter alone, the training part having length 0 then."""
    *train, test = (LabelledImages(part.images, part.labels.astype(np.int64)) for part in parts)
    return Arrays(*(train[0] if train else (test.images[:0], test.labels[:0])), *test)


def read_idx(path: Path) -> Array:
    """The uint8 array of an idx file (MNIST and its likes), gzipped or not, of whatever shape."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    shape = np.frombuffer(data, ">u4", data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def read_idx_set(paths: Sequence[Path]) -> Arrays:
    """From training images and labels, test images and labels; or from the latter two alone."""
    arrays = [read_idx(path) for path in paths]
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return _arrays(LabelledImages(images[:, None], labels) for images, labels in pairs)


def read_cifar_set(
    paths: Sequence[Path], *, train: Sequence[str], test: Sequence[str], label_bytes: int
) -> Arrays:
    """CIFAR straight from its archive, of which some members are the training and the test part.

    Files are records of one or two label bytes, of which the last counts, and a 3 x 32 x 32 image.
    """
    (path,) = paths
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name in (*train, *test) and (stream := archive.extractfile(member)):
                found[member.name] = stream.read()
    parts = []
    for members in (train, test):
        data = b"".join(found[name] for name in members)
        records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3 * 32 * 32)
        images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
        parts.append(LabelledImages(images, records[:, label_bytes - 1]))
    return _arrays(parts)


def read_strips(path: Path) -> LabelledImages:
    """Colour images packed as lossless WebP strips, each of 32 x 32 images below each other.

    Keys: ``webp``, the files one after the other; ``offsets``, where each begins, and the end;
    ``labels``.
    """
    with needed("Pillow", f"reading {path.name}", "data"):
        from PIL import Image
    with np.load(path, allow_pickle=False) as arrays:
        blob, offsets, labels = arrays["webp"].tobytes(), arrays["offsets"], arrays["labels"]
    strips = []
    for start, end in pairwise(offsets.tolist()):
        with Image.open(io.BytesIO(blob[start:end]), formats=["WEBP"]) as image:
            strips.append(np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3))
    return LabelledImages(np.concatenate(strips).transpose(0, 3, 1, 2), labels)


def read_svhn(path: Path) -> LabelledImages:
    """Digits ``(n, 3, 32, 32)`` from a ``*_32x32.mat`` file, where the label 10 means digit 0."""
    with needed("scipy", f"reading {path.name}", "data"):
        from scipy.io import loadmat

    arrays = loadmat(path, variable_names=("X", "y"))
    return LabelledImages(arrays["X"].transpose(3, 2, 0, 1), arrays["y"].ravel() % 10)


def read_parts(paths: Sequence[Path], *, read: Callable[[Path], LabelledImages]) -> Arrays:
    """From a training and a test file, or from a test file alone."""
    return _arrays(map(read, paths))


READERS: dict[str, Callable[[Sequence[Path]], Arrays]] = {
    "idx": read_idx_set,
    "cifar10": partial(
        read_cifar_set,
        train=[f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)],
        test=["cifar-10-batches-bin/test_batch.bin"],
        label_bytes=1,
    ),
    "cifar100": partial(  # with a coarse label before the fine one
        read_cifar_set,
        train=["cifar-100-binary/train.bin"],
        test=["cifar-100-binary/test.bin"],
        label_bytes=2,
    ),
    "strips": partial(read_parts, read=read_strips),
    "svhn": partial(read_parts, read=read_svhn),
}
