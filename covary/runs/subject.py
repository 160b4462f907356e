"""A trained network that is simulated on some test inputs, by draws or spikes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary import moments
from covary.models import with_covariance
from covary.progress import Steps
from covary.recording import record
from covary.runs.directory import Run
from covary.runs.predictions import numbered
from covary.runs.results import MeasuredNumber
from covary.stochastic import Chain, Stage
from covary.stochastic.comparison import Error, correlations, inputs_of, moments_of_inputs

Moments = tuple[Tensor, Tensor]  # mean (n,) and covariance (n, n)
OneInput = tuple[int, Tensor, Steps | None]  # number, value (1, ...), shows how far it is


@dataclass(frozen=True, eq=False)
class Subject:
    """The network of a run, its chain and the stages that are compared; rows of the test set."""

    run: Run
    net: nn.Module
    chain: Chain
    stages: Sequence[Stage]
    rows: np.ndarray
    seed: int
    progress: Steps | None
    started: datetime

    def inputs(self) -> Iterator[OneInput]:
        """The inputs, one after another."""
        for i, x in enumerate(self.run.data.x_test[torch.from_numpy(self.rows)]):
            yield i, x[None], numbered(self.progress, i, len(self.rows))

    def analytic(self, x: Tensor) -> tuple[moments.Moments, list[Moments]]:
        """The output for one input (1, ...); and moments of the first units and of each stage."""
        exact = with_covariance(self.net, "full")
        with record(exact) as found:
            output: moments.Moments = exact(x.to(self.stages[0].weight.device))
        layers = [found[stage.name] for stage in self.stages]
        listed = [(one.mean[0].double(), one.covariance_matrix[0].double()) for one in layers]
        return output, [moments_of_inputs(self.chain, x), *listed]

    def about(self) -> dict[str, Any]:
        """Fields that the results of both kinds have."""
        return {
            "activation": self.run.config.model.activation,
            "noise": (self.chain.noise, *(stage.noise for stage in self.stages)),
            "inputs": tuple(self.rows.tolist()),
            **self.run.about(self.started, self.seed),
        }


def input_correlations(stage: Stage, before: Moments) -> Tensor:
    """(n, n) of what goes into the units of a stage, from the moments of the one before it."""
    return correlations(inputs_of(stage, *before)[1])


def relative(errors: Sequence[Error]) -> MeasuredNumber:
    """An error on average over inputs, as results have it."""
    average = Error.average(errors)
    return MeasuredNumber(average.value, average.bar, average.floor)


def arrays_of(name: str, found: Mapping[str, Sequence[Tensor]]) -> dict[str, np.ndarray]:
    """What figures show of a layer: values of each input, stacked."""
    return {f"{name}/{key}": to_numpy(torch.stack(list(each))) for key, each in found.items()}


def to_numpy(value: Tensor) -> np.ndarray:
    """As figures take it."""
    array: np.ndarray = value.float().cpu().numpy()
    return array


def percent(value: float | None) -> str:
    """A part as people read it.

    Examples:
        >>> percent(0.123), percent(0.0123), percent(0.00001), percent(0.0)
        ('12%', '1.2%', '<0.1%', '0%')
    """
    if value is None:
        return "undefined"
    if 0 < value < 0.001:
        return "<0.1%"
    return f"{100 * value:.{1 if 0 < value < 0.0995 else 0}f}%"
