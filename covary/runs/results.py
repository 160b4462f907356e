"""Types of what is measured of a run, each a file of JSON in its folder; arrays lie beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from covary.budget import KINDS, kind_of
from covary.covariance import exact_units
from covary.files import FileError, read_arrays, read_bytes, write_arrays
from covary.nn.fidelity import FidelityRow
from covary.runs.records import Numbers, Record, Stored, to_json
from covary.uncertainty.calibration import LogitCalibration, VarianceCalibration
from covary.uncertainty.fitted import FittedScore

Arrays = Mapping[str, np.ndarray]
Calibration = LogitCalibration | VarianceCalibration
Task = Literal["classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """A measurement of a trained network; its arrays, which figures show, are not in the JSON."""

    dataset: str  # what the network was trained on
    task: Task
    weights: str  # digest of the network
    notes: tuple[str, ...] = ()  # what to know of it, in sentences
    arrays_sha256: str = ""  # of the file of arrays that belongs to it; empty if none does
    arrays: Arrays = field(default_factory=dict, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """As the file has it, without the arrays."""
        content = to_json(replace(self, arrays={}))
        del content["arrays"]
        return content

    def write(self, path: Path) -> Self:
        """Write JSON, and arrays to a file beside it; give what whoever reads them will get."""
        digest, beside = "", path.with_suffix(".npz")
        if self.arrays:
            write_arrays(beside, self.arrays)
            digest = sha256(beside)
        written = super(Result, replace(self, arrays_sha256=digest)).write(path)
        return replace(written, arrays=self.arrays)

    @classmethod
    def read(cls, path: Path, remedy: str = "") -> Self:
        """Read what ``write`` wrote; an error names the file, the key and what was expected."""
        found, beside = super().read(path, remedy), path.with_suffix(".npz")
        if found.arrays_sha256:
            check_belongs(beside, found.arrays_sha256, path, remedy)
        found = replace(found, arrays=read_arrays(beside)) if beside.exists() else found
        try:
            found.check_arrays()
        except ValueError as error:
            raise FileError(f"{beside} {error}. {remedy}".rstrip()) from error
        return found

    def check_arrays(self) -> None:
        """Raise a ``ValueError`` if arrays are not as they are shown; there may be none at all."""


def sha256(path: Path) -> str:
    """Digest of a file."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def check_belongs(path: Path, digest: str, other: Path, remedy: str) -> None:
    """Refuse a file that is not the one that another was written with."""
    if sha256(path) != digest:
        raise FileError(f"{path} is not the file that belongs to {other.name}. {remedy}".rstrip())


@dataclass(frozen=True)
class PartAgreement:
    """``Agreement`` with exact moments over samples of one part of the data."""

    samples: int
    mean: float | None
    variance: float | None
    covariance: float | None
    rank: float | None  # rank correlation of entropies
    argmax: float | None  # part of the samples whose predicted class is another


@dataclass(frozen=True)
class TrackedFidelity:
    """How well tracked covariances agree with exact ones, on training inputs."""

    covariance: str  # "tracked:N"
    rank: float | None  # rank correlation of entropies
    error: float | None  # of the covariance, relative to the exact one

    def row(self) -> FidelityRow:
        """The row to judge it by: NaN and infinity stand for what is undefined."""
        rank = math.nan if self.rank is None else self.rank
        error = math.inf if self.error is None else self.error
        return FidelityRow(exact_units(self.covariance) or 0, rank, error)


@dataclass(frozen=True, kw_only=True)
class CalibrationNumbers:
    """What was fitted to held-out data, and the noise of the layers, if it was chosen anew.

    Mean / temperature and covariance * scale of logits; or covariance * scale + offset.
    ``thresholds`` are scores that most held-out inputs do not exceed: where one may stop answering.
    """

    kind: Literal["logits", "variance"]
    scale: float
    temperature: float | None = None
    offset: tuple[float, ...] | None = None
    noise: tuple[float, ...] | None
    thresholds: Numbers = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KeptCalibration(CalibrationNumbers, Stored):
    """``calibration.json``: numbers of the calibration, and of which network it is."""

    samples: int
    notes: tuple[str, ...]
    weights: str  # digest of the network
    covariance: str  # how it was stored
    scores: tuple[str, ...]  # fitted beside it

    def __post_init__(self) -> None:
        numbers = (self.scale, self.temperature, *(self.offset or ()), *(self.noise or ()))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError("numbers of a calibration are finite")
        self.layer()

    def layer(self) -> Calibration:
        """The calibration as a layer."""
        if self.kind == "logits" and self.temperature is not None:
            return LogitCalibration(self.temperature, self.scale)
        if self.kind == "variance" and self.offset is not None:
            return VarianceCalibration(self.scale, self.offset)
        needed = "temperature" if self.kind == "logits" else "offset"
        raise ValueError(f"a calibration of kind {self.kind!r} needs {needed!r}")


class HeldOut(NamedTuple):
    """What was found on held-out data; empty if there were none."""

    calibration: Calibration | None
    scores: dict[str, FittedScore]
    samples: int
    notes: list[str]
    noise: tuple[float, ...] | None = None  # of the layers, if it was chosen anew
    thresholds: Numbers = MappingProxyType({})  # by score, as in CalibrationNumbers

    def numbers(self) -> CalibrationNumbers:
        """As a file has them."""
        fitted = self.calibration
        assert fitted is not None
        numbers = partial(
            CalibrationNumbers,
            scale=fitted.scale.item(),
            noise=self.noise,
            thresholds=dict(self.thresholds),
        )
        if isinstance(fitted, LogitCalibration):
            return numbers(kind="logits", temperature=fitted.temperature.item())
        return numbers(kind="variance", offset=tuple(fitted.offset.tolist()))


@dataclass(frozen=True, kw_only=True)
class CalibrationResult(CalibrationNumbers):
    """A calibration of classes, and the test set's metrics with it."""

    kind: Literal["logits"]
    held_out_samples: int
    test: Numbers


@dataclass(frozen=True)
class SliceCoverage:
    """How many intervals hold their target, of test rows that are alike in one column."""

    column: str
    label: str  # what they have in common
    samples: int
    inside: int  # rows whose interval holds the target
    low: float  # ends of the 95% interval of the coverage, by so many rows
    high: float
    chance: float  # of so unusual a coverage, if nothing were wrong
    is_beyond: bool  # whether it is too unusual to be the least likely of all slices

    @property
    def share(self) -> float:
        """The coverage."""
        return self.inside / self.samples

    def is_outside(self, usual: float) -> bool:
        """Whether the coverage that it should have is outside of its interval."""
        return not self.low <= usual <= self.high


@dataclass(frozen=True)
class ColumnEffect:
    """Standard deviations as one column moves over some values and the others stay as they are."""

    column: str
    is_ordered: bool  # whether values are numbers or dates
    labels: tuple[str, ...]  # of the values
    std: tuple[float | None, ...]  # on average over rows, by value
    lower: tuple[float | None, ...]  # quartiles over rows
    upper: tuple[float | None, ...]

    @property
    def change(self) -> float:
        """The largest of them over the smallest, less 1."""
        known = [value for value in self.std if value is not None]
        return max(known) / min(known) - 1 if known and min(known) > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class TargetDistribution:
    """What is predicted of one target, and what the test rows say of it."""

    name: str
    family: str  # normal, student or mixture
    shares: Numbers  # of the parts of its variance
    gains: Numbers  # nats by which each part makes a held-out row likelier
    test: Numbers  # metrics
    slices: tuple[SliceCoverage, ...] = ()  # of the test rows, the worst first
    usual: float | None = None  # coverage that slices are compared with: the level, or all rows'
    unusual_by_chance: float = 0.0  # slices whose interval would miss that by chance alone
    effects: tuple[ColumnEffect, ...] = ()  # of the columns, the largest first


@dataclass(frozen=True, kw_only=True)
class DistributionResult:
    """The distributions that ``covary predict`` gives, and the test set's metrics with them."""

    kind: Literal["distribution"] = "distribution"
    held_out_samples: int  # that they were fitted to
    thresholds: Numbers  # as in CalibrationNumbers
    test: Numbers
    level: float  # of the intervals of slices
    effect_rows: int  # in which columns were moved
    targets: tuple[TargetDistribution, ...]


@dataclass(frozen=True)
class BudgetOfInput:
    """What the variance of the output is made of for one test input, on average over outputs."""

    index: int
    sources: Numbers  # share of each source


@dataclass(frozen=True)
class ErrorBars:
    """Standard deviations of each output with the errors of the inputs, and as if they had none.

    On average over the test set, and of inputs of the gallery by their number (with, without). As
    the network gives them, before calibration; of logits, on average over classes.
    """

    stddev: tuple[float | None, ...]
    exact: tuple[float | None, ...]  # with inputs that are exact
    gallery: Mapping[str, tuple[tuple[float | None, ...], tuple[float | None, ...]]]


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    """What the variance of the output is made of: shares, on average over inputs and outputs."""

    samples: int  # test inputs that it was measured on
    sources: Numbers  # by source, the largest first
    kinds: Numbers  # by kind: input, noise, dropout, weights
    removable: float  # the share that more training data could remove: that of the weights
    columns: Numbers = field(default_factory=dict)  # of errors of the inputs, by column
    ratio: float | None = None  # variances of draws over computed ones
    gallery: tuple[BudgetOfInput, ...] = ()
    errors: ErrorBars | None = None  # of tables that have columns of errors

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.sources, *self.kinds) if kind_of(name) not in KINDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no source; they begin with {', '.join(KINDS)}")
        if not self.sources:
            raise ValueError("'sources' is empty")
        if self.errors is not None:
            outputs = {len(each) for each in (self.errors.stddev, self.errors.exact)}
            outputs |= {len(each) for pair in self.errors.gallery.values() for each in pair}
            without = [
                one.index for one in self.gallery if str(one.index) not in self.errors.gallery
            ]
            if len(outputs) > 1 or without:
                raise ValueError("'errors' are not of the same outputs and inputs as 'gallery'")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Result):
    """What ``covary evaluate`` measures (``evaluation.json``).

    Parts are ``test``, and out-of-distribution sets by name.
    """

    layers: tuple[str, ...]  # that entropies were taken of
    classes: tuple[str, ...]
    features: tuple[str, ...]
    targets: tuple[str, ...]
    image_shape: tuple[int, ...] | None
    covariance: str  # how it was stored
    fidelity: TrackedFidelity | None = None  # of tracked covariances
    parts: Mapping[str, Numbers]  # part -> metrics
    scores: Mapping[str, Mapping[str, Numbers]] = field(default_factory=dict)  # by part and name
    # Probabilities that are calibrated, or distributions; None if there were too few held-out data.
    calibration: CalibrationResult | DistributionResult | None = None
    by_target: Mapping[str, Numbers] = field(default_factory=dict)  # of each of several targets
    separability: Mapping[str, tuple[float | None, ...]]  # part -> of entropies, layer by layer
    budget: BudgetResult | None = None  # None of networks that cannot be converted
    predictions_sha256: str = ""

    @property
    def told(self) -> Mapping[str, Numbers]:
        """Metrics of the parts; of the test set of a regression, those of its distributions."""
        if isinstance(self.calibration, DistributionResult):
            return {**self.parts, "test": self.calibration.test}
        return self.parts

    def __post_init__(self) -> None:
        if "test" not in self.parts:
            raise ValueError("'parts' has no 'test'")
        for part, values in self.separability.items():
            if len(values) != len(self.layers):
                raise ValueError(
                    f"'separability.{part}' has {len(values)} numbers for {len(self.layers)} layers"
                )


@dataclass(frozen=True)
class Quartiles:
    """Average and quartiles of numbers over samples."""

    mean: float | None
    median: float | None
    lower_quartile: float | None
    upper_quartile: float | None


@dataclass(frozen=True)
class AttackedNetwork:
    """A network that was attacked: its noise, and its accuracy on clean inputs."""

    name: str
    noise: tuple[float, ...]
    accuracy: float
    with_gradient: float | None  # part of the inputs whose gradient is not zero; None: not asked


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """One attack of one strength on one network."""

    attack: str
    network: str
    epsilon: float
    samples: int
    accuracy: float
    entropy: Quartiles
    max_softmax: Quartiles
    auroc: Numbers  # score -> of attacked against clean inputs

    @property
    def key(self) -> str:
        """What its entropies are called among the arrays."""
        return f"{self.attack}/{self.network}/{self.epsilon:g}"


@dataclass(frozen=True, kw_only=True)
class Attack(Result):
    """What ``covary attack`` measures (``attack.json``, entropies of inputs in ``attack.npz``)."""

    activation: str
    covariance: str
    search_covariance: str
    samples: int
    epsilons: tuple[float, ...]
    epsilon_scale: str
    clip: bool
    gradient: str
    pgd: Mapping[str, float | bool]  # its settings; the size of a step is in parts of epsilon
    square: Mapping[str, int]
    networks: tuple[AttackedNetwork, ...]
    rows: tuple[AttackRow, ...]
    verdict: tuple[str, ...] = ()

    def network(self, name: str) -> AttackedNetwork:
        """One of the networks."""
        return next(one for one in self.networks if one.name == name)

    def names(self, network: str) -> list[str]:
        """The attacks on a network."""
        return list(dict.fromkeys(row.attack for row in self.rows if row.network == network))

    def of(self, attack: str, network: str) -> list[AttackRow]:
        """Rows of an attack on a network, by epsilon."""
        found = [row for row in self.rows if (row.attack, row.network) == (attack, network)]
        return sorted(found, key=lambda row: row.epsilon)


@dataclass(frozen=True)
class Representation:
    """One way of storing the covariance: what it costs, and how close to the exact it comes."""

    name: str  # of the covariance: "full", "tracked:N", "shared" or "diagonal"
    time_over_plain: float | None  # of a batch, in times of the plain network's
    peak_memory_mb: float | None
    parts: Mapping[str, PartAgreement]

    def of(self, part: str, measure: str) -> float | None:
        """One number of a part, None where it is undefined or was not measured."""
        found = self.parts.get(part)
        number: float | None = None if found is None else getattr(found, measure)
        return number


@dataclass(frozen=True, kw_only=True)
class FidelityResult(Result):
    """What ``covary fidelity`` measures (``fidelity.json``, entropies in ``fidelity.npz``)."""

    batch: int  # inputs at a time, where time was taken
    parts: tuple[str, ...]
    representations: tuple[Representation, ...]
    chosen: str  # what "tracked" uses by itself

    def check_arrays(self) -> None:
        """Entropies of one part are of the same inputs, or cannot be compared."""
        for part in self.parts:
            keys = [f"{part}/{one.name}" for one in self.representations]
            lengths = {self.arrays[key].shape for key in keys if key in self.arrays}
            if len(lengths) > 1:
                found = " and ".join(str(shape[0]) for shape in sorted(lengths))
                raise ValueError(
                    f"has entropies of {found} inputs for {part}; all must be of the same"
                )


@dataclass(frozen=True)
class MeasuredNumber:
    """A number and its Monte-Carlo standard error.

    ``floor`` is the relative error that even exact moments would show, by noise of the draws.
    """

    value: float | None
    bar: float | None
    floor: float | None = None

    def may_reach(self, limit: float) -> bool:
        """Whether it may exceed a limit, given its error bar."""
        if self.value is None or self.bar is None:
            return True
        return not self.value + 2 * self.bar < limit


@dataclass(frozen=True)
class SimulatedLayer:
    """One layer in one simulation, on average over inputs."""

    mean: MeasuredNumber
    variance: MeasuredNumber
    covariance: MeasuredNumber
    off_diagonal: MeasuredNumber
    entropy: MeasuredNumber  # of the simulation less that of the moments, in nats
    entropy_dimensions: tuple[int, int]  # least and most in which entropies were compared
    effective_samples: float | None
    variance_share: MeasuredNumber  # variance, of that of the steady state


@dataclass(frozen=True, kw_only=True)
class ComparedLayer:
    """What both kinds of verification say of a layer."""

    name: str
    units: int
    poor: tuple[str, ...]  # what is off, beyond doubt
    pairs: tuple[tuple[int, int, float], ...]  # of units, with the correlation of their inputs


@dataclass(frozen=True, kw_only=True)
class VerifiedLayer(ComparedLayer):
    """One layer against its simulations."""

    activation: str
    simulations: Mapping[str, SimulatedLayer]
    by_input: tuple[Numbers, ...]
    reasons: Mapping[str, float]  # why covariances are off: ``covary.stochastic`` Reasons

    @property
    def steady(self) -> SimulatedLayer:
        """The steady state."""
        return self.simulations["steady"]


@dataclass(frozen=True)
class InTime:
    """How the network was simulated in time."""

    ratio: float
    method: str
    copies: int
    time_constants: tuple[float, ...]
    dt: float
    burn_in: float


@dataclass(frozen=True, kw_only=True)
class Simulated(Result):
    """What both kinds of verification have."""

    activation: str
    noise: tuple[float, ...]
    inputs: tuple[int, ...]  # which of the test set
    copies: int
    duration: float
    limit: float  # above which an error is poor


@dataclass(frozen=True, kw_only=True)
class SteadyVerification(Simulated):
    """What ``covary verify`` measures (``verification.json``, ``verification.npz``)."""

    kind: Literal["steady"] = "steady"
    simulations: tuple[str, ...]
    ou: Mapping[str, InTime]
    layers: tuple[VerifiedLayer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("'layers' is empty")
        for layer in self.layers:
            lacking = sorted({"steady", "ou-0", "ou-1"} - set(layer.simulations))
            if lacking:
                raise ValueError(f"layer {layer.name!r} has no simulation {lacking[0]!r}")

    @property
    def output(self) -> VerifiedLayer:
        """The last layer."""
        return self.layers[-1]


@dataclass(frozen=True, kw_only=True)
class VerifiedSpikingLayer(ComparedLayer):
    """One layer of neurons, on average over inputs."""

    neuron: Numbers
    jump: float | None  # mV that a spike of the layer before moves the membrane by, rms
    mean_rate: float  # spikes per ms
    mean_fano: float | None
    silent: float
    saturated: float
    errors: Mapping[str, MeasuredNumber]


@dataclass(frozen=True)
class SpikingEntropy:
    """Entropy of the output as time goes on, in ms, and where the moments say that it ends."""

    times: tuple[float, ...]
    simulated: tuple[float | None, ...]
    bar: tuple[float | None, ...]
    moments: float | None


@dataclass(frozen=True)
class Decisions:
    """How often a spiking network is right as time goes on, and how often its moments are."""

    inputs: int
    networks: int
    dt: float
    times: tuple[float, ...]
    accuracy: tuple[float, ...]
    bar: tuple[float | None, ...]
    agreement: tuple[float, ...]
    moments: float


_OF_NEURONS = ("rate", "fano", "sampled_rate", "rate_error", "sampled_fano", "fano_error", "pairs")


@dataclass(frozen=True, kw_only=True)
class SpikingVerification(Simulated):
    """What ``covary verify`` measures of spiking networks (``spikes.json``, ``spikes.npz``)."""

    kind: Literal["spiking"] = "spiking"
    burn_in: float
    window: float
    dt: float
    layers: tuple[VerifiedSpikingLayer, ...]
    entropy: SpikingEntropy
    decisions: Decisions | None

    def check_arrays(self) -> None:
        """Raise an error if arrays of a layer are missing."""
        for layer in self.layers:
            for name in _OF_NEURONS:
                if f"{layer.name}/{name}" not in self.arrays:
                    raise ValueError(f"has no {layer.name}/{name}")


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """How a run was trained (``environment.json``)."""

    data: str = ""
    notes: tuple[str, ...] = ()
    training_samples: int | None = None
    validation_samples: int | None = None
    test_samples: int | None = None
    processes: int | None = None
    device: str = ""
