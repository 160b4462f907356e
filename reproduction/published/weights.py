"""Networks that the paper's authors trained and made public: where they are, checked and read.

They are of https://github.com/AwakerMhy/probabilistic-computing-mnn, commit 0a18d98a3283, folder
``checkpoints``: the tensors as they are, as safetensors instead of pickles. The paper calls that
code available without restrictions, but it has no licence, so nothing of it is in this repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from covary.data import DataError
from covary.data.download import file_sha256
from covary.data.store import folders
from covary.files import read_tensors

# Of a data folder, as other sets have theirs.
FOLDER = "authors"
_SOURCE = "https://github.com/AwakerMhy/probabilistic-computing-mnn"


class Weights(NamedTuple):
    """A file of weights: its SHA-256, and units from the input to the output."""

    sha256: str
    widths: tuple[int, ...]


_SMALL = (784, 196, 48, 10)
_LARGE = (784, 392, 196, 96, 48, 24, 10)
# By file, without its suffix. Pixels are in [-1, 1]; which noise is added is in no file.
NETWORKS = {
    "mnist_relu_mlp": Weights(
        "6debd15b15ed15c750a8f8287f5f4839b65f1c32bc128b706bde2de42e0462ac", _SMALL
    ),
    "mnist_heav_mlp": Weights(
        "323004b173ea232fc782542441cca73453040ce899734416618c919e2d4c89bd", _SMALL
    ),
    "mnist_ood_demo": Weights(
        "428007241eec69f2129600f94e6e1771f09047aece44245d480856b3d95d24f3", _LARGE
    ),
    "mnist_attack_demo": Weights(
        "28038870dc605c4991cc55579c321017102d8c8fd19e93f5aee0ac7185be4b62", _LARGE
    ),
}


def find(name: str, data_dir: str | None = None) -> Path | None:
    """The file of a network in the first data folder that has it."""
    paths = (folder / FOLDER / f"{name}.safetensors" for folder in folders(data_dir))
    return next((path for path in paths if path.exists()), None)


def lacking(name: str, data_dir: str | None = None) -> str:
    """What to do about a file that is nowhere found, as a sentence; empty if it is there."""
    if find(name, data_dir) is not None:
        return ""
    searched = ", ".join(str(folder / FOLDER) for folder in folders(data_dir))
    return (
        f"The weights {name}, which the paper's authors published ({_SOURCE}), are not in "
        f"{searched}. Put {name}.safetensors there, or name the folder above: --data-dir or "
        "$COVARY_DATA."
    )


def read(name: str, data_dir: str | None = None) -> dict[str, Tensor]:
    """Weights and biases by the names that they have in ``covary.mlp``: ``linear1.weight``, ...

    Raises:
        DataError: if the file is nowhere found, or is another one.
    """
    path = find(name, data_dir)
    if path is None:
        raise DataError(lacking(name, data_dir))
    known = NETWORKS[name]
    if (got := file_sha256(path)) != known.sha256:
        raise DataError(
            f"{path} is damaged or another version: its SHA-256 is {got}, expected {known.sha256}. "
            f"The right one holds the tensors of checkpoints/{name}.pt of {_SOURCE}."
        )
    tensors, _ = read_tensors(path)
    hidden = len(known.widths) - 2
    layers = [f"linear_sequence.{i}" for i in range(hidden)] + ["final"]
    return {
        f"linear{i}.{kind}": tensors[f"{layer}.{kind}"]
        for i, layer in enumerate(layers, 1)
        for kind in ("weight", "bias")
    }
