"""The result of a comparison and what it is made of, as files hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from covary.files import read_json, write_json
from covary.runs.config import RunConfig
from covary.runs.records import Numbers, decoded, to_json
from covary.runs.results import TrackedFidelity

_AGAIN = "Run covary compare again, with --resume: only what is missing is measured."


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What a comparison fixes for the methods beside the moment neural network.

    Attributes:
        members: networks of a deep ensemble.
        dropout: probability of Monte Carlo dropout, in training and in use.
        samples: dropout masks per prediction.
        epsilon: how far an attack moves a pixel, as a fraction of its range.
        attacked: test images that are attacked, the first so many.
    """

    members: int = 5
    dropout: float = 0.1
    samples: int = 30
    epsilon: float = 0.1
    attacked: int = 1000

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
class MethodScores:
    """A method's numbers for a seed.

    Attributes:
        name: of the method.
        description: what it does, in a sentence.
        scores: by score, the value of each metric.
    """

    name: str
    description: str
    scores: Mapping[str, Numbers]


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """The numbers of the methods that share networks, for a seed: ``seed-S/GROUP.json``.

    Attributes:
        ood: out-of-distribution data that they were measured on.
        methods: and their numbers.
        notes: what whoever reports the numbers should know.
        covariance: how the moment network held its covariance; None for other groups.
        fidelity: of tracked covariances.
    """

    ood: tuple[str, ...]
    methods: tuple[MethodScores, ...]
    notes: tuple[str, ...] = ()
    covariance: str | None = None
    fidelity: TrackedFidelity | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times over those of the plain network: ``costs.json``.

    Attributes:
        batch: samples of a pass.
        threads: that torch used.
        training: of each group.
        inference: of each method.
        covariance: how the moment network held its covariance.
    """

    batch: int
    threads: int
    training: Mapping[str, float]
    inference: Mapping[str, float]
    covariance: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A metric over seeds; seeds for which it is undefined are left out.

    Attributes:
        mean: None where it is undefined for all.
        stddev: that of a sample (n - 1); None for a single seed.
        seeds: how many it is defined for.
    """

    mean: float | None
    stddev: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Summary:
        """Of the metric's value for each seed."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        return cls(
            mean=float(np.mean(finite)) if finite else None,
            stddev=float(np.std(finite, ddof=1)) if len(finite) > 1 else None,
            seeds=len(finite),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method and one of its scores.

    Attributes:
        group: methods of a group share their networks.
        method: its name.
        score: by which samples are ranked.
        description: what the method does.
        training_cost: in trainings of the plain network.
        inference_cost: in passes of the plain network; None where it was not measured.
        summary: of each metric, over seeds.
        by_seed: each metric for each seed.
    """

    group: str
    method: str
    score: str
    description: str
    training_cost: float
    inference_cost: float | None
    summary: Mapping[str, Summary]
    by_seed: Mapping[str, Numbers]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A moment neural network beside other methods: ``compare.json``.

    Attributes:
        task: what all are trained for.
        dataset: on which data.
        image_shape: (channels, height, width), or None where inputs are no images.
        ood: out-of-distribution data.
        seeds: each trained all networks anew.
        config: of the moment neural network, for the first seed.
        settings: of the methods beside it.
        rows: a row for each method and score.
        notes: what whoever reads the numbers should know.
        covariance: how the moment network held its covariance; None in files that do not say.
        fidelity: of tracked covariances, by seed.
        command, versions, git_commit, platform, started, seconds: how it came about.
    """

    task: Literal["classification", "regression"]
    dataset: str
    image_shape: tuple[int, ...] | None
    ood: tuple[str, ...]
    seeds: tuple[int, ...]
    config: RunConfig
    settings: CompareConfig
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    covariance: str | None = None
    fidelity: Mapping[str, TrackedFidelity] = field(default_factory=dict)
    command: str
    versions: Mapping[str, str]
    git_commit: str | None
    platform: str
    started: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As a file has it."""
        return to_json(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str = "JSON") -> Comparison:
        """The inverse of ``to_json``; an error names the source, the key and what was expected."""
        return decoded(cls, content, source, _AGAIN)

    def write(self, path: Path) -> Comparison:
        """Write it as JSON, and give what whoever reads the file will get."""
        content = self.to_json()
        write_json(path, content)
        return Comparison.from_json(content, str(path))

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Read what ``write`` wrote."""
        return cls.from_json(read_json(path), str(path))
