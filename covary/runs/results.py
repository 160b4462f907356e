"""Types of what is measured of a run: written by ``runs``, read by report and command line.

Each is a file of JSON in the folder of the run; what figures show of it lies beside, as arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from covary.files import FileError, read_arrays, read_bytes, read_json, write_arrays, write_json
from covary.runs.records import Numbers, Record, decoded, to_json

Arrays = Mapping[str, np.ndarray]
Task = Literal["classification", "regression"]
Found = TypeVar("Found", bound="Result")


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """A measurement of a trained network.

    Attributes:
        dataset: what the network was trained on.
        weights: digest of the network.
        notes: what to know of it, in sentences.
        arrays_sha256: of the file of arrays that belongs to it; empty if none does.
        arrays: what figures show, by name. They are not in the JSON.
    """

    dataset: str
    weights: str
    notes: tuple[str, ...] = ()
    arrays_sha256: str = ""
    arrays: Arrays = field(default_factory=dict, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """As the file has it, without the arrays."""
        content = to_json(replace(self, arrays={}))
        del content["arrays"]
        return content

    def write(self: Found, path: Path) -> Found:
        """Write JSON, and arrays to a file beside it; give what whoever reads them will get."""
        digest, beside = "", path.with_suffix(".npz")
        if self.arrays:
            write_arrays(beside, self.arrays)
            digest = sha256(beside)
        content = replace(self, arrays_sha256=digest).to_json()
        write_json(path, content)
        return replace(decoded(type(self), content, str(path)), arrays=self.arrays)

    @classmethod
    def read(cls: type[Found], path: Path, remedy: str = "") -> Found:
        """Read what ``write`` wrote; an error names the file, the key and what was expected."""
        found = decoded(cls, read_json(path, remedy), str(path), remedy)
        beside = path.with_suffix(".npz")
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
class Agreement:
    """How far approximate moments are from exact ones, over some samples; errors are relative."""

    samples: int
    mean: float | None
    variance: float | None
    covariance: float | None
    rank: float | None  # rank correlation of entropies
    argmax: float | None  # part of the samples whose predicted class is another


@dataclass(frozen=True)
class TrackedFidelity:
    """How well tracked covariances agree with exact ones, on training inputs."""

    exact_width: int
    rank: float | None  # rank correlation of entropies
    error: float | None  # of the covariance, relative to the exact one


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """What was fitted to held-out data, and the test set's metrics with it.

    Mean / temperature and covariance * scale of logits; or covariance * scale + offset.
    """

    kind: Literal["logits", "variance"]
    scale: float
    temperature: float | None = None
    offset: tuple[float, ...] | None = None
    noise: tuple[float, ...] | None = None  # of the layers, if it was chosen anew
    held_out_samples: int
    test: Numbers


@dataclass(frozen=True, kw_only=True)
class Evaluation(Result):
    """What ``covary evaluate`` measures (``evaluation.json``).

    Attributes:
        covariance: how it was held.
        exact_width: of tracked covariances.
        fidelity: of tracked covariances.
        parts: metrics of each part: ``test``, and out-of-distribution sets by name.
        scores: metrics of each score, by part and name.
        calibration: None if there were too few held-out data.
        by_target: metrics of each of several targets.
        separability: part -> of entropies, layer by layer.
        predictions_sha256: of ``predictions.npz``.
    """

    task: Task
    layers: tuple[str, ...]
    classes: tuple[str, ...]
    features: tuple[str, ...]
    targets: tuple[str, ...]
    image_shape: tuple[int, ...] | None
    covariance: str
    exact_width: int | None = None
    fidelity: TrackedFidelity | None = None
    parts: Mapping[str, Numbers]
    scores: Mapping[str, Mapping[str, Numbers]] = field(default_factory=dict)
    calibration: CalibrationResult | None = None
    by_target: Mapping[str, Numbers] = field(default_factory=dict)
    separability: Mapping[str, tuple[float | None, ...]]
    predictions_sha256: str = ""

    def __post_init__(self) -> None:
        if "test" not in self.parts:
            raise ValueError("'parts' has no 'test'")
        for part, values in self.separability.items():
            if len(values) != len(self.layers):
                raise ValueError(
                    f"'separability.{part}' has {len(values)} numbers for {len(self.layers)} layers"
                )

    @property
    def held(self) -> str:
        """How covariances were held, in words."""
        return self.covariance + (f", exact_width={self.exact_width}" if self.exact_width else "")


@dataclass(frozen=True)
class Spread:
    """Of numbers over samples."""

    mean: float | None
    median: float | None
    lower_quartile: float | None
    upper_quartile: float | None


@dataclass(frozen=True)
class AttackedNetwork:
    """A network that was attacked, before it was."""

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
    entropy: Spread
    max_softmax: Spread
    auroc: Numbers  # score -> of attacked against clean inputs

    @property
    def key(self) -> str:
        """What its entropies are called among the arrays."""
        return f"{self.attack}/{self.network}/{self.epsilon:g}"


@dataclass(frozen=True)
class PgdSettings:
    """Of projected gradient descent; a step's size is in parts of epsilon."""

    steps: int
    step_size: float
    random_start: bool


@dataclass(frozen=True)
class SquareSettings:
    """Of the attack that asks for outputs alone."""

    queries: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Attack(Result):
    """What ``covary attack`` measures (``attack.json``, entropies of inputs in ``attack.npz``)."""

    activation: str
    covariance: str
    exact_width: int | None
    search_covariance: str
    samples: int
    epsilons: tuple[float, ...]
    epsilon_unit: str
    clip: bool
    gradient: str
    pgd: PgdSettings
    square: SquareSettings
    networks: tuple[AttackedNetwork, ...]
    rows: tuple[AttackRow, ...]
    verdict: tuple[str, ...] = ()

    def names(self, network: str) -> list[str]:
        """The attacks on a network."""
        return list(dict.fromkeys(row.attack for row in self.rows if row.network == network))

    def of(self, attack: str, network: str) -> list[AttackRow]:
        """By epsilon."""
        found = [row for row in self.rows if (row.attack, row.network) == (attack, network)]
        return sorted(found, key=lambda row: row.epsilon)

    def entropy(self, row: AttackRow) -> np.ndarray | None:
        """(n,) entropies of the row's inputs, None if they were not stored."""
        return self.arrays.get(row.key)


@dataclass(frozen=True)
class Representation:
    """One way of holding the covariance: what it costs, and how close to the exact it comes."""

    name: str
    covariance: str  # "full", "tracked", "shared" or "diagonal"
    exact_width: int | None
    time_over_plain: float | None  # of a batch, in times of the plain network's
    peak_memory_mb: float | None
    parts: Mapping[str, Agreement]

    def of(self, part: str, measure: str) -> float | None:
        """One number of a part, None where it is undefined or was not measured."""
        found = self.parts.get(part)
        number: float | None = None if found is None else getattr(found, measure)
        return number


@dataclass(frozen=True, kw_only=True)
class Fidelity(Result):
    """What ``covary fidelity`` measures (``fidelity.json``, entropies in ``fidelity.npz``)."""

    task: Task
    batch: int  # inputs at a time, where time was taken
    parts: tuple[str, ...]
    representations: tuple[Representation, ...]
    chosen: str  # what "tracked" uses by itself

    def entropy(self, part: str, representation: Representation) -> np.ndarray | None:
        """(n,) entropies of a part's inputs, None if they were not stored."""
        return self.arrays.get(f"{part}/{representation.name}")

    def check_arrays(self) -> None:
        """Entropies of one part are of the same inputs, or cannot be compared."""
        for part in self.parts:
            stored = [self.entropy(part, one) for one in self.representations]
            lengths = {values.shape for values in stored if values is not None}
            if len(lengths) > 1:
                found = " and ".join(str(shape[0]) for shape in sorted(lengths))
                raise ValueError(
                    f"has entropies of {found} inputs for {part}; all must be of the same"
                )

    @property
    def exact(self) -> Representation | None:
        """What the others are held against."""
        return next((one for one in self.representations if one.covariance == "full"), None)


@dataclass(frozen=True)
class WithBar:
    """A number and its Monte-Carlo standard error."""

    value: float | None
    bar: float | None


@dataclass(frozen=True)
class RelativeError:
    """An error, its standard error, and what exact moments would seem to have."""

    value: float | None
    bar: float | None
    floor: float | None

    def may_reach(self, limit: float) -> bool:
        """Whether it is not known to be below a limit."""
        if self.value is None or self.bar is None:
            return True
        return not self.value + 2 * self.bar < limit


@dataclass(frozen=True)
class EntropyGap:
    """Of the simulation less that of the moments, in nats."""

    value: float | None
    bar: float | None
    dimensions: tuple[int, int]  # least and most in which inputs' entropies were compared


@dataclass(frozen=True)
class SimulatedLayer:
    """One layer in one simulation, on average over inputs."""

    mean: RelativeError
    variance: RelativeError
    covariance: RelativeError
    off_diagonal: RelativeError
    entropy: EntropyGap
    effective_samples: float | None
    variance_share: WithBar  # variance, of that of the steady state


@dataclass(frozen=True)
class PoorReasons:
    """Why covariances of a layer are off."""

    pairs: tuple[tuple[int, int, float], ...]  # of units, with the correlation of their inputs
    strong_pairs: float
    error_at_strong_pairs: float
    saturated: float
    error_at_saturated: float
    own: float  # the error that the layer itself adds


@dataclass(frozen=True)
class VerifiedLayer:
    """One layer against its simulations."""

    name: str
    units: int
    activation: str
    poor: tuple[str, ...]  # what is off, beyond doubt
    simulations: Mapping[str, SimulatedLayer]
    by_input: tuple[Numbers, ...]
    reasons: PoorReasons

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

    task: Task
    activation: str
    noise: tuple[float, ...]
    inputs: tuple[int, ...]  # which of the test set
    copies: int
    duration: float
    limit: float  # above which an error is poor


@dataclass(frozen=True, kw_only=True)
class Verification(Simulated):
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

    def of(self, layer: VerifiedLayer, name: str) -> np.ndarray | None:
        """An array of a layer, None if it was not stored."""
        return self.arrays.get(f"{layer.name}/{name}")

    @property
    def output(self) -> VerifiedLayer:
        """The last layer."""
        return self.layers[-1]


@dataclass(frozen=True)
class SpikingLayer:
    """One layer of neurons, on average over inputs."""

    name: str
    units: int
    neuron: Numbers
    poor: tuple[str, ...]  # what is off, beyond doubt
    pairs: tuple[tuple[float, float, float], ...]  # of units, with the correlation of their inputs
    jump: float | None  # mV that a spike of the layer before moves the membrane by, rms
    mean_rate: float  # spikes per ms
    mean_fano: float | None
    silent: float
    saturated: float
    errors: Mapping[str, RelativeError]


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


_SPIKING_ARRAYS = (
    "rate",
    "fano",
    "sampled_rate",
    "rate_error",
    "sampled_fano",
    "fano_error",
    "pairs",
)


@dataclass(frozen=True, kw_only=True)
class SpikingVerification(Simulated):
    """What ``covary verify`` measures of spiking networks (``spikes.json``, ``spikes.npz``)."""

    kind: Literal["spiking"] = "spiking"
    burn_in: float
    window: float
    dt: float
    layers: tuple[SpikingLayer, ...]
    entropy: SpikingEntropy
    decisions: Decisions | None

    def check_arrays(self) -> None:
        """Of each layer all is there."""
        for layer in self.layers:
            for name in _SPIKING_ARRAYS:
                if f"{layer.name}/{name}" not in self.arrays:
                    raise ValueError(f"has no {layer.name}/{name}")

    def of(self, layer: SpikingLayer, name: str) -> np.ndarray:
        """An array of a layer."""
        return self.arrays[f"{layer.name}/{name}"]


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
