"""What a network says to each input of a part: arrays that are kept in ``predictions.npz``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from covary.covariance import Diagonal
from covary.files import FileError, read_arrays, write_arrays
from covary.moments import Moments
from covary.uncertainty import scores

Array = np.ndarray
_NEEDED = ("mean", "variance", "entropy")
_MORE = (
    "layer_entropy",
    "label",
    "target",
    "input",
    "input_index",
    "calibrated_probabilities",
    "calibrated_mean",
    "calibrated_variance",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """Of one part: the test set, or an out-of-distribution one, which has no truth.

    Scores other than ``fitted``, and covariances, are large or follow from the rest: they are there
    after a measurement, and are not kept.
    """

    name: str  # of the part
    mean: Array  # (n, k) logits, or predictions in original units
    variance: Array  # (n, k)
    entropy: Array  # (n,) of the output covariance
    layer_entropy: Array  # (n, L), NaN for samples whose layers were not looked at
    label: Array | None = None  # (n,) classes
    target: Array | None = None  # (n, k) true values of a regression
    input: Array  # (g, *shape) raw inputs of the gallery
    input_index: Array  # (g,) which samples those are
    covariance: Array | None = None  # (n, k, k), of a regression
    calibrated_probabilities: Array | None = None  # (n, k), of a classification
    calibrated_mean: Array | None = None  # (n, k), of a regression, as the next two
    calibrated_variance: Array | None = None
    calibrated_covariance: Array | None = None  # (n, k, k)
    scores: Mapping[str, Array] = field(default_factory=dict)  # name -> (n,)

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def calibrated(self) -> Predictions:
        """The same with calibrated means and variances, of a regression that has them."""
        if self.calibrated_mean is None or self.calibrated_variance is None:
            return self
        return replace(self, mean=self.calibrated_mean, variance=self.calibrated_variance)

    @property
    def fitted(self) -> Array | None:
        """(n,) the score that was fitted to held-out data."""
        return self.scores.get("fitted")

    @cached_property
    def probability(self) -> Array:
        """(n, k) softmax of the mean, in float64."""
        return np.asarray(torch.softmax(torch.as_tensor(self.mean).double(), -1))

    @cached_property
    def prediction(self) -> Array:
        """(n,) the class of the largest logit."""
        return np.asarray(self.mean.argmax(axis=1))

    @cached_property
    def confidence(self) -> Array:
        """(n,) max-softmax: the probability of the predicted class."""
        return np.asarray(self.probability.max(axis=1))

    @cached_property
    def doubt(self) -> Array:
        """(n,) one minus max-softmax, which does not tie inputs that are nearly certain."""
        if "max_softmax" in self.scores:
            return self.scores["max_softmax"]
        mean = torch.as_tensor(self.mean)
        return np.asarray(scores.max_softmax(Moments(mean, Diagonal(torch.zeros_like(mean)))))

    @cached_property
    def right(self) -> Array:
        """(n,) whether the predicted class is the true one; all False without labels."""
        if self.label is None:
            return np.zeros(len(self), dtype=bool)
        return np.asarray(self.prediction == self.label)

    @cached_property
    def stddev(self) -> Array:
        """(n, k) predicted standard deviations."""
        return np.asarray(np.sqrt(np.maximum(self.variance.astype(float), 0.0)))

    @cached_property
    def error(self) -> Array:
        """(n, k) prediction minus truth, of a regression."""
        if self.target is None:
            raise ValueError("What has no targets has no errors either.")
        return np.asarray(self.mean.astype(float) - self.target)


def write(path: Path, parts: Mapping[str, Predictions]) -> None:
    """Write the parts to one file."""
    arrays: dict[str, Array] = {}
    for part, found in parts.items():
        kept = {name: getattr(found, name) for name in (*_NEEDED, *_MORE)} | {
            "fitted": found.fitted
        }
        arrays |= {f"{part}/{name}": value for name, value in kept.items() if value is not None}
    write_arrays(path, arrays)


def read(path: Path, *, task: str, remedy: str = "") -> dict[str, Predictions]:
    """Read what ``write`` wrote, the test set first; an error names the file and the array."""
    arrays = read_arrays(path)
    names = list(dict.fromkeys(key.rpartition("/")[0] for key in arrays))
    try:
        parts = {name: _part(name, arrays) for name in sorted(names, key=lambda n: n != "test")}
        truth = "label" if task == "classification" else "target"
        if "test" not in parts or getattr(parts["test"], truth) is None or not len(parts["test"]):
            raise ValueError(f"has no test/{truth}")
        widths = {part.mean.shape[1] for part in parts.values()}
        if len(widths) > 1:
            raise ValueError(f"has means of {' and '.join(map(str, sorted(widths)))} outputs")
    except ValueError as error:
        raise FileError(f"{path} {error}. {remedy}".rstrip()) from error
    return parts


def _part(name: str, arrays: Mapping[str, Array]) -> Predictions:
    def get(array: str, *shape: int | None) -> Array | None:
        """An array of numbers of this shape, None for any length."""
        found = arrays.get(f"{name}/{array}")
        if found is None:
            return None
        fits = found.ndim == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, found.shape, strict=True)
        )
        if found.dtype.kind not in "biuf" or (shape and not fits):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"has {name}/{array} of {found.dtype} {found.shape}, and numbers ({wanted}) are "
                "expected"
            )
        return found

    mean = get("mean", None, None)
    if mean is None:
        raise ValueError(f"has no {name}/mean")
    n, k = mean.shape
    variance, entropy = get("variance", n, k), get("entropy", n)
    for needed, value in (("variance", variance), ("entropy", entropy)):
        if value is None:
            raise ValueError(f"has no {name}/{needed}")
    assert variance is not None
    assert entropy is not None
    layers, label, index = get("layer_entropy", n, None), get("label", n), get("input_index", None)
    shown, fitted = get("input"), get("fitted", n)
    if shown is None or index is None:
        shown, index = np.empty(0), np.empty(0, dtype=int)
    if len(shown) != len(index) or (len(index) and not (index.min() >= 0 and index.max() < n)):
        raise ValueError(f"has {name}/input_index that does not fit {name}/input")
    if label is not None and not (label.dtype.kind in "iu" and (label < k).all()):
        raise ValueError(f"has {name}/label that is not of whole numbers below {k}")
    return Predictions(
        name=name,
        mean=mean,
        variance=variance,
        entropy=entropy.astype(float),
        layer_entropy=np.empty((n, 0)) if layers is None else layers,
        label=label,
        target=get("target", n, k),
        input=shown,
        input_index=index,
        calibrated_probabilities=get("calibrated_probabilities", n, k),
        calibrated_mean=get("calibrated_mean", n, k),
        calibrated_variance=get("calibrated_variance", n, k),
        scores={} if fitted is None else {"fitted": fitted},
    )
