"""Sets of images: readers of the files that they come in, and their entries.

Readers take paths and give numpy arrays. The SHA-256 of a file is checked before it is read, so
they know what is in it. To add a set, add an ``Entry`` to ``ENTRIES``: its files with their SHA-256
and size, and a reader.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.data.dataset import needed
from covary.data.download import File
from covary.data.entry import Array, Arrays, Entry, Form


class Part(NamedTuple):
    """Images ``(n, C, H, W)`` uint8 and labels ``(n,)``."""

    images: Array
    labels: Array


def _arrays(*parts: Part) -> Arrays:
    """A training and a test part; or the latter alone, the training part having length 0 then."""
    *train, test = (Part(part.images, part.labels.astype(np.int64)) for part in parts)
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
    return _arrays(*(Part(images[:, None], labels) for images, labels in pairs))


def read_cifar_set(
    paths: Sequence[Path], *, train: Sequence[str], test: Sequence[str], label_bytes: int
) -> Arrays:
    """CIFAR straight from its archive, of which some members are the training and the test part.

    They hold records of one or two label bytes, of which the last counts, and a 3 x 32 x 32 image.
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
        parts.append(Part(images, records[:, label_bytes - 1]))
    return _arrays(*parts)


def read_strips(path: Path) -> Part:
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
    return Part(np.concatenate(strips).transpose(0, 3, 1, 2), labels)


def read_svhn(path: Path) -> Part:
    """Digits ``(n, 3, 32, 32)`` from a ``*_32x32.mat`` file, where the label 10 means digit 0."""
    with needed("scipy", f"reading {path.name}", "data"):
        from scipy.io import loadmat

    arrays = loadmat(path, variable_names=("X", "y"))
    return Part(arrays["X"].transpose(3, 2, 0, 1), arrays["y"].ravel() % 10)


def read_parts(paths: Sequence[Path], *, read: Callable[[Path], Part]) -> Arrays:
    """From a training and a test file, or from a test file alone."""
    return _arrays(*map(read, paths))


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


def _cifar_form(
    classes: int, sha256: str, size: int, train: Sequence[str], test: Sequence[str]
) -> Form:
    """The archive of CIFAR-10 or CIFAR-100; the latter has a coarse label before the fine one."""
    archive = f"cifar-{classes}-binary.tar.gz"
    url = f"https://www.cs.toronto.edu/~kriz/{archive}"
    label_bytes = 1 if classes == 10 else 2
    read = partial(read_cifar_set, train=train, test=test, label_bytes=label_bytes)
    return Form((File(f"cifar{classes}/{archive}", sha256, (url,), size),), read)


def _strips_form(*files: tuple[str, str], notes: tuple[str, ...] = ()) -> Form:
    """Files that are nowhere to be fetched from: path and SHA-256 of each."""
    return Form(
        tuple(File(path, sha256) for path, sha256 in files),
        partial(read_parts, read=read_strips),
        notes,
    )


def _entry(
    name: str,
    title: str,
    size: str,
    licence: str,
    source: str,
    classes: tuple[str, ...],
    *forms: Form,
) -> Entry:
    return Entry(name, title, "classification", size, licence, source, classes, forms=forms)


_GREY = "60000 + 10000 grey images, 28 x 28"
_COLOUR = "50000 + 10000 colour images, 32 x 32"
_CIFAR_LICENCE = "none stated by the authors"
_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_SVHN = "https://ufldl.stanford.edu/housenumbers/"

ENTRIES = (
    _entry(
        "mnist",
        "MNIST handwritten digits",
        _GREY,
        "CC BY-SA 3.0 (as commonly stated)",
        "http://yann.lecun.com/exdb/mnist/",
        DIGITS,
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
    _entry(
        "fashion-mnist",
        "Fashion-MNIST articles of clothing",
        _GREY,
        "MIT",
        "https://github.com/zalandoresearch/fashion-mnist",
        FASHION,
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
    _entry(
        "notmnist",
        "notMNIST letters A to J in many typefaces",
        "0 + 10000 grey images, 28 x 28 (the test part alone)",
        "MIT (the repository); the data with the permission of their author, Y. Bulatov",
        "https://github.com/davidflanagan/notMNIST-to-MNIST",
        tuple("ABCDEFGHIJ"),
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
    _entry(
        "cifar10",
        "CIFAR-10 tiny photographs",
        _COLOUR,
        _CIFAR_LICENCE,
        _CIFAR_PAGE,
        CIFAR10,
        _cifar_form(
            10,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170052171,
            train=[f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)],
            test=["cifar-10-batches-bin/test_batch.bin"],
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
    _entry(
        "cifar100",
        "CIFAR-100 tiny photographs, fine labels",
        _COLOUR,
        _CIFAR_LICENCE,
        _CIFAR_PAGE,
        CIFAR100,
        _cifar_form(
            100,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            168513733,
            train=["cifar-100-binary/train.bin"],
            test=["cifar-100-binary/test.bin"],
        ),
    ),
    _entry(
        "svhn",
        "Street View House Numbers, cropped digits",
        "73257 + 26032 colour images, 32 x 32",
        "non-commercial use only",
        "http://ufldl.stanford.edu/housenumbers/",
        DIGITS,
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
            partial(read_parts, read=read_svhn),
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
)
