"""The files of a run as one value that a page is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from covary.compare import Comparison
from covary.compare.comparing import RESULT
from covary.runs import Run
from covary.runs.predictions import Predictions as Part
from covary.runs.results import (
    DistributionResult,
    Evaluation,
    Result,
    SpikingVerification,
    SteadyVerification,
)

__all__ = ["Part", "ReportError", "Results", "read"]
_FILES = ("config", "environment", "history", "fidelity", "attack", "verification", "spikes")


class ReportError(ValueError):
    """A run of which no page can be made yet; the message says what to do."""


@dataclass(frozen=True, eq=False)
class Results:
    """All that a page shows, as read from one run."""

    run: Run
    evaluation: Evaluation
    parts: Mapping[str, Part]

    @property
    def test(self) -> Part:
        """The test set."""
        return self.parts["test"]

    @property
    def ood(self) -> tuple[Part, ...]:
        """The out-of-distribution sets."""
        return tuple(part for name, part in self.parts.items() if name != "test")

    @property
    def simulated(self) -> SteadyVerification | SpikingVerification | None:
        """The verification, spiking or not; None if the network was not simulated."""
        return self.run.verification or self.run.spikes

    @property
    def comparison(self) -> Comparison | None:
        """That of the folder which the run is part of, ``seed-S/mnn``, if it is of this run."""
        path, training = self.run.path.absolute().parent.parent / RESULT, self.run.config.training
        if self.run.path.absolute().name != "mnn" or not path.exists():
            return None
        found = self.run.once("comparison", lambda: Comparison.read(path), path)
        own = replace(found.config.training, seed=training.seed)
        same = replace(found.config, training=own) == self.run.config
        return found if same and training.seed in found.seeds else None

    @property
    def is_classification(self) -> bool:
        """Whether labels are predicted, not numbers."""
        return self.evaluation.task == "classification"

    @property
    def is_calibrated(self) -> bool:
        """Whether there are calibrated predictions."""
        return self.test.calibrated is not self.test

    @property
    def distribution(self) -> DistributionResult | None:
        """What a regression predicts as distributions; None if there were too few held-out data."""
        found = self.evaluation.calibration
        return found if isinstance(found, DistributionResult) else None

    @property
    def targets(self) -> int:
        """How many numbers are predicted; 1 of a classification."""
        return 1 if self.is_classification else int(self.test.mean.shape[1])

    def is_current(self, result: Result | None) -> bool:
        """Whether something was measured, and of the network that the page is about."""
        return result is not None and result.weights == self.evaluation.weights

    def with_and_without(self, metric: str) -> tuple[float | None, float | None]:
        """A metric of the test set, calibrated (where it is) and before calibration."""
        calibration, before = self.evaluation.calibration, self.evaluation.parts["test"].get(metric)
        return (before if calibration is None else calibration.test.get(metric)), before

    def rmse(self, column: int) -> float:
        """Root of the mean squared error of one target of a regression."""
        return float(np.sqrt((self.test.error[:, column] ** 2).mean()))

    def threshold(self, score: str, target: int) -> float | None:
        """The score up to which held-out inputs say that one should answer."""
        name = f"stddev_{target + 1}" if score == "stddev" else score
        calibration = self.evaluation.calibration
        return None if calibration is None else calibration.thresholds.get(name)

    @property
    def title(self) -> str:
        """The dataset, without the folders of a file."""
        dataset = self.evaluation.dataset
        return dataset.replace("\\", "/").rpartition("/")[2] or dataset

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where classes have no names."""
        classes = self.evaluation.classes
        return classes[label] if 0 <= label < len(classes) else str(label)

    def target_name(self, column: int) -> str:
        """The name of a target of a regression."""
        if column < len(self.evaluation.targets):
            return self.evaluation.targets[column]
        return "target" if self.targets == 1 else f"target {column + 1}"


def read(run: Run | Path) -> Results:
    """All files of a run that a page shows; what was not measured is None."""
    run = run if isinstance(run, Run) else Run(run)
    if not run.path.is_dir():
        raise ReportError(f"{run.path} is not a directory. Name one that `covary train` wrote.")
    for name in _FILES:
        getattr(run, name)  # a file that is damaged is named before anything is drawn
    evaluation, predictions = run.evaluation, run.predictions
    if evaluation is None or predictions is None:
        raise ReportError(
            f"{run.path} has no evaluation yet: run `covary evaluate {run.path}` first."
        )
    return Results(run, evaluation, predictions)
