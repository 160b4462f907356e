"""The files of a run directory as one value, checked once so that nothing after it needs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from covary.covariance import Diagonal
from covary.moments import Moments
from covary.report.attack import Attacks, read_attacks
from covary.report.fidelity import Fidelity, read_fidelity
from covary.report.files import Array, ReportError, read_arrays, read_json, without_nan
from covary.report.spikes import Spikes, read_spikes
from covary.report.verification import Verification, read_verification
from covary.uncertainty import scores


@dataclass(frozen=True, eq=False)
class Part:
    """What the network said to one set of inputs: the test set, or a foreign one without labels."""

    name: str
    mean: Array  # (n, k) logits, or predictions in original units
    variance: Array  # (n, k)
    entropy: Array  # (n,) of the output covariance
    layer_entropy: Array  # (n, L)
    label: Array | None  # (n,) classes
    target: Array | None  # (n, k) true values of a regression
    input: Array  # (g, *shape) raw inputs of the gallery
    input_index: Array  # (g,) which samples those are
    fitted: Array | None = None  # (n,) the score that was fitted to held-out data

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def probability(self) -> Array:
        """(n, k) softmax of the mean, in float64."""
        shifted = np.exp(self.mean.astype(float) - self.mean.max(axis=1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))

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
            raise ReportError(f"{self.name} has no targets, so no errors either.")
        return np.asarray(self.mean.astype(float) - self.target)


@dataclass(frozen=True, eq=False)
class Results:
    """All that a page shows, as read from one run directory."""

    directory: Path
    task: str  # "classification" | "regression"
    dataset: str
    layers: tuple[str, ...]
    classes: tuple[str, ...]
    features: tuple[str, ...]
    targets: tuple[str, ...]
    image_shape: tuple[int, ...] | None
    covariance: str
    metrics: Mapping[str, Mapping[str, Any]]  # part -> metric -> value or None
    separability: Mapping[str, tuple[float | None, ...]]  # part -> one for each layer
    parts: Mapping[str, Part]
    history: tuple[Mapping[str, Any], ...]  # one row for each epoch, in order
    config: Mapping[str, Any]
    config_text: str
    environment: Mapping[str, Any]
    evaluation: Mapping[str, Any]  # what else evaluation.json says: command, versions, seed
    fidelity: Fidelity | None  # None if it was not measured
    attacks: Attacks | None  # None if it was not attacked
    verification: Verification | None  # None if it was not simulated
    spikes: Spikes | None  # None if it has none, or they were not simulated

    @property
    def test(self) -> Part:
        """The test set."""
        return self.parts["test"]

    @property
    def foreign(self) -> tuple[Part, ...]:
        """The out-of-distribution sets."""
        return tuple(part for name, part in self.parts.items() if name != "test")

    @property
    def is_classification(self) -> bool:
        """Whether labels are predicted, not numbers."""
        return self.task == "classification"

    @property
    def fidelity_is_current(self) -> bool:
        """Whether fidelity was measured, and of the network that the rest of the page is about."""
        weights = self.evaluation.get("weights")
        return self.fidelity is not None and self.fidelity.weights == weights

    @property
    def attacks_are_current(self) -> bool:
        """Whether there were attacks, and on the network that the rest of the page is about."""
        weights = self.evaluation.get("weights")
        return self.attacks is not None and self.attacks.weights == weights

    @property
    def simulated(self) -> Verification | Spikes | None:
        """What ``covary verify`` found; a network has spikes or not."""
        return self.verification or self.spikes

    @property
    def simulation_is_current(self) -> bool:
        """Whether there was a simulation, and of the network that the rest of the page is about."""
        weights = self.evaluation.get("weights")
        return self.simulated is not None and self.simulated.weights == weights

    @property
    def title(self) -> str:
        """The dataset, without the folders of a file."""
        return self.dataset.replace("\\", "/").rpartition("/")[2] or self.dataset

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where classes have no names."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def target_name(self, column: int) -> str:
        """The name of a target of a regression."""
        if column < len(self.targets):
            return self.targets[column]
        return "target" if self.test.mean.shape[1] == 1 else f"target {column + 1}"


def read(run_dir: Path) -> Results:
    """Read ``config.toml``, ``environment.json``, ``metrics.jsonl`` and what was measured since."""
    evaluation_file = run_dir / "evaluation.json"
    predictions_file = run_dir / "predictions.npz"
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory. Name one that `covary train` wrote.")
    if not (evaluation_file.is_file() and predictions_file.is_file()):
        raise ReportError(
            f"{run_dir} has no evaluation yet: run `covary evaluate {run_dir}` first."
        )
    evaluation = read_json(evaluation_file)
    task = evaluation.get("task")
    if task not in ("classification", "regression"):
        raise ReportError(
            f"{evaluation_file} has task {task!r}; a page can be made of 'classification' and "
            f"'regression'. Run `covary evaluate {run_dir}` again."
        )
    config_text, config = _read_config(run_dir / "config.toml")
    environment_file = run_dir / "environment.json"
    shape = evaluation.get("image_shape")
    layers = tuple(evaluation.get("layers") or ())
    return Results(
        directory=run_dir,
        task=task,
        dataset=str(evaluation.get("dataset", "unnamed dataset")),
        layers=layers,
        classes=tuple(map(str, evaluation.get("classes") or ())),
        features=tuple(map(str, evaluation.get("features") or ())),
        targets=tuple(map(str, evaluation.get("targets") or ())),
        image_shape=None if shape is None else tuple(shape),
        covariance=str(evaluation.get("covariance", "")),
        metrics=evaluation.get("parts") or {},
        separability={
            name: tuple(values)
            for name, values in (evaluation.get("separability") or {}).items()
            if len(values) == len(layers)
        },
        parts=_read_predictions(predictions_file, task),
        history=_read_history(run_dir / "metrics.jsonl"),
        config=config,
        config_text=config_text,
        environment=read_json(environment_file) if environment_file.is_file() else {},
        evaluation=evaluation,
        fidelity=read_fidelity(run_dir),
        attacks=read_attacks(run_dir),
        verification=read_verification(run_dir),
        spikes=read_spikes(run_dir),
    )


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8")
    try:
        return text, tomlkit.parse(text).unwrap()
    except TOMLKitError as error:
        raise ReportError(f"{path} is not TOML: {error}.") from error


def _read_history(path: Path) -> tuple[dict[str, Any], ...]:
    """The epoch rows; where a run was resumed and repeated an epoch, the later row."""
    if not path.is_file():
        return ()
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    epochs: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # a run that was stopped while it wrote
            raise ReportError(f"{path}, line {number}, is not JSON: {error}.") from error
        if row.get("kind") == "epoch":
            epochs[int(row["epoch"])] = without_nan(row)
    return tuple(epochs[epoch] for epoch in sorted(epochs))


def _read_predictions(path: Path, task: str) -> dict[str, Part]:
    arrays = read_arrays(path)
    names = list(dict.fromkeys(key.rpartition("/")[0] for key in arrays))
    truth = "label" if task == "classification" else "target"
    needed = [f"{name}/{array}" for name in names for array in ("mean", "variance", "entropy")]
    missing = [
        key for key in [*needed, "test/mean", f"test/{truth}"] if not arrays.get(key, _NONE).size
    ]
    if missing:
        raise ReportError(f"{path} has no {missing[0]}. Run `covary evaluate {path.parent}` again.")
    return {name: _part(name, arrays) for name in sorted(names, key=lambda name: name != "test")}


_NONE: Array = np.empty(0)


def _part(name: str, arrays: Mapping[str, Array]) -> Part:
    def get(array: str) -> Array | None:
        return arrays.get(f"{name}/{array}")

    mean = arrays[f"{name}/mean"]
    layer_entropy, shown, index = get("layer_entropy"), get("input"), get("input_index")
    target = get("target")
    return Part(
        name=name,
        mean=mean,
        variance=arrays[f"{name}/variance"],
        entropy=arrays[f"{name}/entropy"].astype(float),
        layer_entropy=np.empty((len(mean), 0)) if layer_entropy is None else layer_entropy,
        label=get("label"),
        target=None if target is None else target.reshape(len(mean), -1),
        input=_NONE if shown is None or index is None else shown,
        input_index=np.empty(0, dtype=int) if shown is None or index is None else index,
        fitted=get("fitted"),
    )
