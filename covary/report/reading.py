"""The files of a run as one value that a page is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from covary.runs import Run
from covary.runs.config import RunConfig
from covary.runs.predictions import Predictions as Part
from covary.runs.records import Numbers
from covary.runs.results import (
    Attack,
    Environment,
    Evaluation,
    Fidelity,
    Result,
    SpikingVerification,
    Verification,
)

__all__ = ["Part", "ReportError", "Results", "read"]


class ReportError(ValueError):
    """A run of which no page can be made yet; the message says what to do."""


@dataclass(frozen=True, eq=False)
class Results:
    """All that a page shows, as read from one run."""

    directory: Path
    evaluation: Evaluation
    parts: Mapping[str, Part]
    history: tuple[Numbers, ...]  # one row for each epoch, in order
    config: RunConfig
    config_text: str
    environment: Environment | None
    fidelity: Fidelity | None  # None if it was not measured
    attacks: Attack | None  # None if it was not attacked
    simulated: Verification | SpikingVerification | None  # None if it was not simulated

    @property
    def task(self) -> str:
        """``"classification"`` or ``"regression"``."""
        return self.evaluation.task

    @property
    def dataset(self) -> str:
        """What the network was trained on."""
        return self.evaluation.dataset

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers that entropies were taken of."""
        return self.evaluation.layers

    @property
    def features(self) -> tuple[str, ...]:
        """Columns of a table."""
        return self.evaluation.features

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """(channels, height, width) of images."""
        return self.evaluation.image_shape

    @property
    def metrics(self) -> Mapping[str, Numbers]:
        """Part -> metric -> value."""
        return self.evaluation.parts

    @property
    def separability(self) -> Mapping[str, tuple[float | None, ...]]:
        """Part -> one for each layer."""
        return self.evaluation.separability

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

    def is_current(self, result: Result | None) -> bool:
        """Whether something was measured, and of the network that the page is about."""
        return result is not None and result.weights == self.evaluation.weights

    @property
    def title(self) -> str:
        """The dataset, without the folders of a file."""
        return self.dataset.replace("\\", "/").rpartition("/")[2] or self.dataset

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where classes have no names."""
        classes = self.evaluation.classes
        return classes[label] if 0 <= label < len(classes) else str(label)

    def target_name(self, column: int) -> str:
        """The name of a target of a regression."""
        if column < len(self.evaluation.targets):
            return self.evaluation.targets[column]
        return "target" if self.test.mean.shape[1] == 1 else f"target {column + 1}"


def read(run: Run | Path) -> Results:
    """All files of a run that a page shows; what was not measured is None."""
    run = run if isinstance(run, Run) else Run(run)
    if not run.path.is_dir():
        raise ReportError(f"{run.path} is not a directory. Name one that `covary train` wrote.")
    config, evaluation, predictions = run.config, run.evaluation, run.predictions
    if evaluation is None or predictions is None:
        raise ReportError(
            f"{run.path} has no evaluation yet: run `covary evaluate {run.path}` first."
        )
    return Results(
        directory=run.path,
        evaluation=evaluation,
        parts=predictions,
        history=run.history,
        config=config,
        config_text=run.config_text,
        environment=run.environment,
        fidelity=run.fidelity,
        attacks=run.attack,
        simulated=run.verification or run.spikes,
    )
