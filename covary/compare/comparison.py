"""The settings and the result of a comparison, and what it is made of, as files have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from covary.runs.config import Choices, DataConfig, RunConfig
from covary.runs.records import Numbers, Record, Stored
from covary.runs.results import TrackedFidelity
from covary.training.config import option

_OTHERS = "Methods compared with"
_AGAIN = "Run covary compare again, with --resume: only what is missing is measured."


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Settings of the methods that a moment neural network is compared with."""

    members: int = field(default=5, metadata=option("Networks of a deep ensemble.", _OTHERS, min=1))
    dropout: float = field(
        default=0.1,
        metadata=option("Probability of Monte Carlo dropout.", _OTHERS, flag="--mc-dropout"),
    )
    samples: int = field(
        default=30, metadata=option("Dropout masks per prediction.", _OTHERS, min=1)
    )
    epsilon: float = field(
        default=0.1, metadata=option("Size of the attack, in ranges of a pixel.", _OTHERS)
    )
    attacked: int = 1000  # test images that are attacked, the first so many

    def __post_init__(self) -> None:
        for name in ("members", "samples", "attacked"):
            if getattr(self, name) < 1:
                raise ValueError(f"A comparison needs {name} >= 1, got {getattr(self, name)}.")
        if not 0 < self.dropout < 1:
            raise ValueError(
                f"Monte Carlo dropout needs a probability between 0 and 1, got {self.dropout}."
            )
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon is a fraction in (0, 1] of a range, got {self.epsilon}.")


@dataclass(frozen=True, kw_only=True)
class Begun(CompareConfig, Stored):
    """What a comparison was begun with, and is gone on with: ``settings.json``."""

    data: DataConfig
    chosen: Choices

    def differences(self, other: Begun) -> list[str]:
        """What is not the same, as ``epochs: 11, not 10``."""
        ours, theirs = (vars(one) | vars(one.data) | vars(one.chosen) for one in (self, other))
        return [
            f"{key}: {value}, not {theirs[key]}"
            for key, value in sorted(ours.items())
            if key not in ("data", "chosen") and value != theirs[key]
        ]


@dataclass(frozen=True, kw_only=True)
class MethodScores:
    """A method's numbers for a seed."""

    name: str
    description: str  # what it does, in a sentence
    scores: Mapping[str, Numbers]  # by score, the value of each metric


@dataclass(frozen=True, kw_only=True)
class GroupScores(Stored):
    """The numbers of the methods that share networks, for a seed: ``seed-S/GROUP.json``."""

    ood: tuple[str, ...]  # out-of-distribution data that they were measured on
    methods: tuple[MethodScores, ...]
    notes: tuple[str, ...] = ()  # what whoever reports the numbers should know
    covariance: str | None = None  # how the moment network stored it; None for other groups
    fidelity: TrackedFidelity | None = None  # of tracked covariances


@dataclass(frozen=True, kw_only=True)
class Costs(Stored):
    """Times over those of the plain network: ``costs.json``."""

    batch: int  # samples of a pass
    threads: int  # that torch used
    training: Mapping[str, float]  # of each group
    inference: Mapping[str, float]  # of each method
    covariance: str | None = None  # how the moment network stored it


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A metric over seeds; seeds for which it is undefined are left out."""

    mean: float | None  # None where it is undefined for all
    stddev: float | None  # that of a sample (n - 1); None for a single seed
    seeds: int  # how many it is defined for

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Summary:
        """Mean and spread of a metric, from its value for each seed."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        return cls(
            mean=float(np.mean(finite)) if finite else None,
            stddev=float(np.std(finite, ddof=1)) if len(finite) > 1 else None,
            seeds=len(finite),
        )


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A method and one of its scores."""

    group: str  # methods of a group share their networks
    method: str
    score: str  # by which samples are ranked
    description: str  # what the method does
    training_cost: float  # in trainings of the plain network
    inference_cost: float | None  # in passes of the plain network; None where it was not measured
    summary: Mapping[str, Summary]  # of each metric, over seeds
    by_seed: Mapping[str, Numbers]  # each metric for each seed


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """A moment neural network beside other methods: ``compare.json``."""

    task: Literal["classification", "regression"]
    dataset: str
    image_shape: tuple[int, ...] | None  # (channels, height, width); None if inputs are no images
    ood: tuple[str, ...]  # out-of-distribution data
    seeds: tuple[int, ...]  # each trained all networks anew
    config: RunConfig  # of the moment neural network, for the first seed
    settings: CompareConfig
    rows: tuple[MethodRow, ...]
    notes: tuple[str, ...]  # what whoever reads the numbers should know
    covariance: str | None = None  # how the moment network stored it; None in files that do not say
    fidelity: Mapping[str, TrackedFidelity] = field(default_factory=dict)  # if tracked, by seed

    @classmethod
    def from_json(cls, content: Any, source: str = "JSON", remedy: str = "") -> Self:
        """The inverse of ``to_json``; an error says how to measure again."""
        return super().from_json(content, source, remedy or _AGAIN)
