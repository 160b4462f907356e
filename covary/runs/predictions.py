"""What a network says to each input of a part, and how sure it is: ``predictions.npz``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary.covariance import Diagonal
from covary.files import FileError, read_arrays, write_arrays
from covary.models import noise_of, with_noise
from covary.moments import Moments, mean_of
from covary.nn import Activation, Linear
from covary.progress import Steps
from covary.recording import record
from covary.runs.results import HeldOut
from covary.uncertainty import metrics, scores
from covary.uncertainty.fitted import moment_features

Array = np.ndarray
_BATCH = 128
# The entropy of a wide hidden layer takes its eigenvalues: for so many samples, not for all.
LAYER_SAMPLES = 500
# Inputs that the report shows, of each of four kinds.
_GALLERY = 12
# What is kept of a part, with its shape: n samples, k outputs, any number of others (*).
_KEPT = {
    "mean": "nk",
    "variance": "nk",
    "entropy": "n",
    "layer_entropy": "n*",
    "label": "n",
    "target": "nk",
    "input": "",
    "input_index": "*",
    "calibrated_probabilities": "nk",
    "calibrated_mean": "nk",
    "calibrated_variance": "nk",
    "calibrated_level": "nk",
    "calibrated_low": "nk",
    "calibrated_high": "nk",
}
_SCORE = "score_"  # before the name of a score, which is an array (n,) of the file


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """Predictions for one part: the test set, or an out-of-distribution one, without truth.

    Covariances are large: they are there after a measurement, and are not kept.
    """

    name: str  # of the part
    mean: Array  # (n, k) logits, or predictions on the original scale
    variance: Array  # (n, k)
    entropy: Array  # (n,) of the output covariance
    layer_entropy: Array  # (n, L), NaN for samples whose layers were not looked at
    label: Array | None = None  # (n,) classes
    target: Array | None = None  # (n, k) true values of a regression
    input: Array  # (g, *shape) raw inputs of the gallery
    input_index: Array  # (g,) which samples those are
    covariance: Array | None = None  # (n, k, k), of a regression
    calibrated_probabilities: Array | None = None  # (n, k), of a classification
    # Of a regression, (n, k): what is predicted as a distribution.
    calibrated_mean: Array | None = None
    calibrated_variance: Array | None = None
    calibrated_level: Array | None = None  # probability of at most the true value
    calibrated_low: Array | None = None  # ends of the 90% interval
    calibrated_high: Array | None = None
    # The last three where they are of what this predicts; of a Gaussian, if not.
    level: Array | None = None
    low: Array | None = None
    high: Array | None = None
    scores: Mapping[str, Array] = field(default_factory=dict)  # name -> (n,)

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def calibrated(self) -> Predictions:
        """The same as it is calibrated: means and (co)variances, or logits of probabilities."""
        if self.calibrated_probabilities is not None:
            with np.errstate(divide="ignore"):
                return replace(self, mean=np.log(self.calibrated_probabilities), scores={})
        if self.calibrated_mean is None or self.calibrated_variance is None:
            return self
        return replace(
            self,
            mean=self.calibrated_mean,
            variance=self.calibrated_variance,
            level=self.calibrated_level,
            low=self.calibrated_low,
            high=self.calibrated_high,
        )

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
    def scaled(self) -> Array:
        """(n, k) true values as a standard Gaussian has them, if the prediction is right.

        Their distance from the mean in standard deviations, or normal scores of their level.
        """
        if self.level is not None:
            return np.asarray(torch.special.ndtri(torch.as_tensor(self.level).double()))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(-self.error / self.stddev)

    def holds(self, level: float) -> Array:
        """(n, k) whether the true value is in the central interval of this level."""
        if self.level is not None:
            return np.asarray(np.abs(self.level - 0.5) <= level / 2)
        return np.asarray(np.abs(self.error) <= metrics.normal_quantile(level) * self.stddev)

    @cached_property
    def interval(self) -> tuple[Array, Array]:
        """(n, k) each, ends of the 90% intervals."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        half = metrics.normal_quantile(0.9) * self.stddev
        return self.mean - half, self.mean + half

    @cached_property
    def error(self) -> Array:
        """(n, k) prediction minus truth, of a regression."""
        if self.target is None:
            raise ValueError("What has no targets has no errors either.")
        return np.asarray(self.mean.astype(float) - self.target)


def write(path: Path, parts: Mapping[str, Predictions]) -> None:
    """Write the parts to one file."""
    arrays: dict[str, Array] = {}
    for name, part in parts.items():
        kept = {key: getattr(part, key) for key in _KEPT if getattr(part, key) is not None}
        kept |= {f"{_SCORE}{score}": values for score, values in part.scores.items()}
        arrays |= {f"{name}/{key}": array for key, array in kept.items()}
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
    own = {key.rpartition("/")[2]: arrays[key] for key in arrays if key.rpartition("/")[0] == name}
    found: dict[str, Any] = {key: own[key] for key in _KEPT if key in own}
    for needed in ("mean", "variance", "entropy"):
        if needed not in found:
            raise ValueError(f"has no {name}/{needed}")
    sizes = dict(zip("nk", found["mean"].shape, strict=False))
    for key, array in found.items():
        _check_array(f"{name}/{key}", array, [sizes.get(letter) for letter in _KEPT[key]])
    n, k = found["mean"].shape
    found["entropy"] = found["entropy"].astype(float)
    found.setdefault("layer_entropy", np.empty((n, 0)))
    if not {"input", "input_index"} <= found.keys():
        found |= {"input": np.empty(0), "input_index": np.empty(0, dtype=int)}
    index, label = found["input_index"], found.get("label")
    if len(found["input"]) != len(index) or not ((index >= 0) & (index < n)).all():
        raise ValueError(f"has {name}/input_index that does not fit {name}/input")
    if label is not None and not (label.dtype.kind in "iu" and (label < k).all()):
        raise ValueError(f"has {name}/label that is not of whole numbers below {k}")
    kept = {key.removeprefix(_SCORE): own[key] for key in own if key.startswith(_SCORE)}
    for score, array in kept.items():
        _check_array(f"{name}/{_SCORE}{score}", array, [n])
    return Predictions(name=name, **found, scores=kept)


def _check_array(name: str, array: Array, shape: Sequence[int | None]) -> None:
    """Refuse what is not of numbers, or not of this shape: None for any length; empty for any."""
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind not in "biuf" or (shape and not fits):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"has {name} of {array.dtype} {array.shape}, and numbers ({wanted}) are expected"
        )


def layer_names(net: nn.Module) -> list[str]:
    """The layers that entropies are taken of: every activation, and the output."""
    activations = [name for name, layer in net.named_modules() if isinstance(layer, Activation)]
    linears = [name for name, layer in net.named_modules() if isinstance(layer, Linear)]
    return [*activations, linears[-1]]


def numbered(progress: Steps | None, i: int, count: int) -> Steps | None:
    """The same for one of several inputs or parts, whose names say which."""
    if progress is None:
        return None
    return lambda items, name: progress(items, f"{i + 1}/{count}, {name}")


@torch.no_grad()
def measure(
    net: nn.Module,
    x: Tensor | Moments,
    y: Tensor | None,
    name: str,
    *,
    held_out: HeldOut,
    classify: bool,
    seed: int,
    progress: Steps | None,
) -> Predictions:
    """Moments, scores and calibrated probabilities of every sample, layers' entropies of some."""
    device = next(net.parameters()).device
    batches = torch.split(torch.arange(len(x)), _BATCH)
    measured = [
        _measured(net, x[rows].to(device), held_out, classify=classify)
        for rows in (progress(batches, name) if progress else batches)
    ]
    arrays, found = (joined(each) for each in zip(*measured, strict=True))
    truth = {} if y is None else {"label" if classify else "target": y.numpy()}
    wrong = np.zeros(len(x), bool)
    if "label" in truth:
        wrong = arrays["mean"].argmax(1) != truth["label"]
    rows = some_of_each(wrong, LAYER_SAMPLES, seed)
    layer_entropy = np.full((len(x), len(layer_names(net))), np.nan, dtype=np.float32)
    chunks = np.array_split(rows, max(1, len(rows) // _BATCH))
    for some in progress(chunks, f"{name}, by layer") if progress else chunks:
        with record(net) as layers:
            net(x[some].to(device))
        chosen = {layer: layers[layer] for layer in layer_names(net)}
        entropies = scores.layer_entropies(chosen).values()
        layer_entropy[some] = np.stack([each.cpu().numpy() for each in entropies], 1)
    gallery = _gallery(arrays["entropy"], wrong)
    return Predictions(
        **arrays,
        **truth,
        name=name,
        layer_entropy=layer_entropy,
        input=mean_of(x)[gallery].numpy(),
        input_index=gallery,
        scores=found,
    )


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Array]:
    """Tensors of one batch after the other, as arrays."""
    return {key: torch.cat([batch[key].cpu() for batch in batches]).numpy() for key in batches[0]}


def _measured(
    net: nn.Module, x: Tensor | Moments, held_out: HeldOut, *, classify: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fields of ``Predictions``, and scores, of one batch."""
    features, out = moment_features(net, x)
    fields = {"mean": out.mean, "variance": out.variance, "entropy": out.entropy()}
    if not classify:
        fields["covariance"] = out.covariance_matrix
    found = scores.of_moments(out, classify=classify)
    for name, fitted in held_out.scores.items():
        moments = fitted.features == "moments"
        own = fitted.of(features.cpu(), out.mean.cpu()) if moments else fitted(net, mean_of(x))
        found[name] = own
    if held_out.calibration is None or not classify:
        return fields, found
    quiet = held_out.noise
    if quiet is not None and list(quiet) != noise_of(net):
        out = with_noise(net, quiet)(x)
    calibrated = held_out.calibration.to(out.mean.device)(out)
    fields["calibrated_probabilities"] = scores.expected_softmax(calibrated).float()
    return fields, found


def some_of_each(wrong: Array, count: int, seed: int) -> Array:
    """(k,) rows to look at closely: half of them wrong predictions if there are so many."""
    order = np.random.default_rng(seed).permutation(len(wrong))
    few = order[wrong[order]][: count // 2]
    rest = order[~wrong[order]][: count - len(few)]
    return np.sort(np.concatenate([few, rest]))


def _gallery(entropy: Array, wrong: Array) -> Array:
    """Rows of the least and most certain samples, of the surest wrong and least sure right ones."""
    order = np.argsort(entropy, kind="stable")
    wrongs, rights = order[wrong[order]], order[~wrong[order]]
    chosen = [order[:_GALLERY], order[-_GALLERY:], wrongs[:_GALLERY], rights[-_GALLERY:]]
    return np.unique(np.concatenate(chosen))
