"""Sets of images: readers of the files that they come in, and their entries.

Readers take paths and give numpy arrays. Each checks what it reads and raises a ``DataError`` that
names the file and what is wrong with it; none of them unpickles anything. To add a set, add an
``Entry`` to ``ENTRIES``: its files with their SHA-256 and size, and a reader.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.data.dataset import DataError, needed, regular_file
from covary.data.download import File
from covary.data.entry import Array, Arrays, Entry, Form, open_npz

Members = Mapping[str, int]  # files of an archive, and how many images each holds


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
    data = regular_file(path).read_bytes()
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
    train: Members,
    test: Members,
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
        with tarfile.open(regular_file(path), "r:*") as archive:
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


# colour images in npz files


def read_strips(path: Path, *, classes: int) -> Part:
    """Colour images packed as lossless WebP strips, each of 32 x 32 images below each other.

    Keys: ``webp``, the files one after the other; ``offsets``, where each begins, and the end;
    ``labels``.
    """
    with needed("Pillow", f"reading {path.name}", "data"):
        from PIL import Image, UnidentifiedImageError
    with open_npz(path, ("webp", "offsets", "labels")) as arrays:
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
        arrays = loadmat(regular_file(path), variable_names=("X", "y"))
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


# the sets


def _names(text: str, separator: str | None = ", ") -> tuple[str, ...]:
    """The names in a text, which reads better than a list with a quoted string for each."""
    return tuple(text.strip().split(separator))


DIGITS = tuple("0123456789")
FASHION = _names(
    "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
)
CIFAR10 = _names("airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck")
CIFAR100 = _names(
    """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
""",
    None,
)

RAW_GITHUB = "https://raw.githubusercontent.com/"
IDX_FILES = tuple(
    f"{stem}-ubyte.gz"
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)


def _idx_form(name: str, addresses: Sequence[str], *files: tuple[int, str]) -> Form:
    """MNIST's four files, or the last two of them, each below all of the addresses."""
    return Form(
        tuple(
            File(f"{name}/{file}", sha256, tuple(f"{address}{file}" for address in addresses), size)
            for file, (size, sha256) in zip(IDX_FILES[-len(files) :], files, strict=True)
        ),
        read_idx_set,
    )


def _cifar_form(classes: int, sha256: str, size: int, train: Members, test: Members) -> Form:
    """The archive of CIFAR-10 or CIFAR-100; the latter has a coarse label before the fine one."""
    archive = f"cifar-{classes}-binary.tar.gz"
    url = f"https://www.cs.toronto.edu/~kriz/{archive}"
    bytes_of_labels = 1 if classes == 10 else 2
    read = partial(
        read_cifar_set, train=train, test=test, label_bytes=bytes_of_labels, classes=classes
    )
    return Form((File(f"cifar{classes}/{archive}", sha256, (url,), size),), read)


def _strips_form(*files: tuple[str, str], notes: tuple[str, ...] = ()) -> Form:
    """Files that are nowhere to be fetched from: path and SHA-256 of each."""
    return Form(tuple(File(path, sha256) for path, sha256 in files), read_strips_set, notes)


_GREY = "60000 + 10000 grey images, 28 x 28"
_COLOUR = "50000 + 10000 colour images, 32 x 32"
_CIFAR_LICENCE = "none stated by the authors"
_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SVHN = "https://ufldl.stanford.edu/housenumbers/"

ENTRIES = (
    Entry(
        "mnist",
        "MNIST handwritten digits",
        "classification",
        _GREY,
        licence="CC BY-SA 3.0 (as commonly stated)",
        source="http://yann.lecun.com/exdb/mnist/",
        classes=DIGITS,
        forms=(
            _idx_form(
                "mnist",
                (
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    "https://storage.googleapis.com/cvdf-datasets/mnist/",
                ),
                (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ),
        ),
    ),
    Entry(
        "fashion-mnist",
        "Fashion-MNIST articles of clothing",
        "classification",
        _GREY,
        licence="MIT",
        source="https://github.com/zalandoresearch/fashion-mnist",
        classes=FASHION,
        forms=(
            _idx_form(
                "fashion-mnist",
                (
                    f"{RAW_GITHUB}zalandoresearch/fashion-mnist/"
                    "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion/",
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                ),
                (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ),
        ),
    ),
    Entry(
        "notmnist",
        "notMNIST letters A to J in many typefaces",
        "classification",
        "0 + 10000 grey images, 28 x 28 (the test part alone)",
        licence="MIT (the repository); the data with the permission of their author, Y. Bulatov",
        source="https://github.com/davidflanagan/notMNIST-to-MNIST",
        classes=tuple("ABCDEFGHIJ"),
        forms=(
            _idx_form(
                "notmnist",
                (
                    f"{RAW_GITHUB}davidflanagan/notMNIST-to-MNIST/"
                    "17823f4d4a3acd8317c07866702d2eb2ac79c7a0/",
                ),
                (3172375, "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7"),
                (5118, "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b"),
            ),
        ),
    ),
    Entry(
        "cifar10",
        "CIFAR-10 tiny photographs",
        "classification",
        _COLOUR,
        licence=_CIFAR_LICENCE,
        source=_CIFAR_PAGE,
        classes=CIFAR10,
        forms=(
            _cifar_form(
                10,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170052171,
                train={f"cifar-10-batches-bin/data_batch_{i}.bin": 10_000 for i in range(1, 6)},
                test={"cifar-10-batches-bin/test_batch.bin": 10_000},
            ),
            _strips_form(
                (
                    "cifar10/cifar10_train.npz",
                    "267cf6de2a9ee636548caeffbfcade50e6885cfdcbf0612109656b216aa85013",
                ),
                (
                    "cifar10/cifar10_test.npz",
                    "ea02b00e865662947da62315858a3cb417876aa7e63741d96ea4c33cf7d70480",
                ),
            ),
        ),
    ),
    Entry(
        "cifar100",
        "CIFAR-100 tiny photographs, fine labels",
        "classification",
        _COLOUR,
        licence=_CIFAR_LICENCE,
        source=_CIFAR_PAGE,
        classes=CIFAR100,
        forms=(
            _cifar_form(
                100,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                168513733,
                train={"cifar-100-binary/train.bin": 50_000},
                test={"cifar-100-binary/test.bin": 10_000},
            ),
        ),
    ),
    Entry(
        "svhn",
        "Street View House Numbers, cropped digits",
        "classification",
        "73257 + 26032 colour images, 32 x 32",
        licence="non-commercial use only",
        source="http://ufldl.stanford.edu/housenumbers/",
        classes=DIGITS,
        forms=(
            Form(
                tuple(
                    File(f"svhn/{name}", sha256, (f"{_SVHN}{name}",), size)
                    for name, size, sha256 in (
                        (
                            "train_32x32.mat",
                            182040794,
                            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                        ),
                        (
                            "test_32x32.mat",
                            64275384,
                            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                        ),
                    )
                ),
                read_svhn_set,
            ),
            _strips_form(
                (
                    "svhn/svhn_test_recropped.npz",
                    "4a2d3e4b298c44afc59d92d25633e01afe4046f71834a9e60d876cab8550ff7f",
                ),
                notes=(
                    "the 26032 test digits alone, cut anew from the full-number images: not the "
                    "official crops, so fit as an out-of-distribution set but not for SVHN "
                    "accuracies",
                ),
            ),
        ),
    ),
)
