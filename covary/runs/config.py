"""The configuration of a run: what is written to ``config.toml`` and read back from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary import activations, models
from covary.covariance import check_kind, class_name
from covary.covariance import names as covariances
from covary.files import FileError, read_text
from covary.nn import Flatten, Rescale, Standardize
from covary.runs.records import decoded, to_json
from covary.training import TrainingConfig
from covary.training.config import option
from covary.training.objectives import LOSSES

_TEXTS = (".csv", ".tsv", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (*_TEXTS, *(f"{suffix}.gz" for suffix in _TEXTS), ".parquet")
TRUNKS = {"lenet": models.lenet, "lenet5": models.lenet5, "vgg13": models.vgg13}
# Not "shared": samples would depend on their neighbours.
PER_SAMPLE = ("full", "tracked", "diagonal")
PER_SAMPLE_HELP = (
    "full, tracked, diagonal, or tracked:N, with exact variances in layers of up to N units"
)
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")


def _field(panel: str, default: Any, help_text: str, **more: Any) -> Any:
    """A field that is an option of the command line, too, which explains it."""
    return field(default=default, metadata=option(help_text, panel, **more))


_training, _table = partial(_field, "Training"), partial(_field, "Tables")
_network, _devices = partial(_field, "Network"), partial(_field, "Devices")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, and which part of them."""

    name: str  # that ``covary.data`` knows, or the path of a table
    split: int = _training(0, "Which of the published splits (UCI sets).")
    validation: float = _training(
        0.1,
        "Fraction of the training data to hold out: to watch training with, and to calibrate on.",
    )
    augment: bool = _training(False, "Random crop and horizontal flip of images.")
    limit: int = _training(0, "Use so many samples at most, of each part; 0: all.", min=0)
    target: tuple[str, ...] = _table((), "Column to predict; repeat for several.")
    task: str = _table("auto", "auto, classification or regression.")
    test_fraction: float = _table(0.2, "Fraction of the rows to test on.")
    missing: str = _table(
        "error", "Missing values: error, mean (fill in and mark) or drop (the row)."
    )
    categories: tuple[str, ...] = _table(
        (), "Column of numbers that are names; repeat for several.", flag="--category"
    )
    drop: tuple[str, ...] = _table((), "Column to leave out; repeat for several.")
    errors: tuple[str, ...] = _table(
        (),
        "NAME=COLUMN: errors of an input column, and the column that has their standard deviations "
        "row by row; repeat for several.",
        flag="--error",
    )
    encoding: str = _table("utf-8", "How text is encoded.")
    delimiter: str = _table("", "What separates columns; found out if not given.")
    sha256: str = ""  # of the table's file: rows of another one would be divided in another way

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"The validation part is a fraction in [0, 1) of the data, got {self.validation}."
            )
        if not 0 < self.test_fraction < 1:
            raise ValueError(
                f"The test part is a fraction in (0, 1) of the rows, got {self.test_fraction}."
            )
        if self.limit < 0:
            raise ValueError(f"A limit is a number of samples, or 0 for all, got {self.limit}.")
        _ = self.error_columns
        _check_choice("task", self.task, ("auto", "classification", "regression"))
        _check_choice("missing", self.missing, ("error", "mean", "drop"))
        for_the_other = ("split", "augment") if self.is_table else FOR_TABLES
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        strange = [name for name in changed if name in for_the_other]
        if strange:
            kind = "known sets" if self.is_table else "tables"
            raise ValueError(
                f"{self.name} does not take {', '.join(strange)}, which is for {kind}. (A table is "
                f"a file whose name ends in {', '.join(TABLE_SUFFIXES)}.)"
            )

    @property
    def error_columns(self) -> dict[str, str]:
        """By the name of an input column, the column that has the errors of it."""
        found: dict[str, str] = {}
        for said in self.errors:
            name, _, column = said.partition("=")
            if not (name and column):
                raise ValueError(
                    f"--error takes NAME=COLUMN, such as temperature=temperature_std, got {said!r}."
                )
            if name in found:
                raise ValueError(
                    f"--error names {name!r} twice; a column has one column of errors."
                )
            found[name] = column
        return found

    @property
    def is_table(self) -> bool:
        """Whether this names a file and not a known set."""
        return self.name.lower().endswith(TABLE_SUFFIXES)


# Options of ``covary.data.read_table``.
FOR_TABLES = [each.name for each in fields(DataConfig) if each.metadata.get("panel") == "Tables"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, from raw inputs to raw outputs: fully connected, behind a trunk if it has one.

    Evaluation always has a covariance per sample, however it is stored in training.
    """

    hidden: tuple[int, ...] = _network(MISSING, "Units of the hidden layers, such as 128,64,32.")
    trunk: str = _network(
        "", f"Ordinary layers before the first moments, for images: {', '.join(TRUNKS)}."
    )
    trunk_from: str = _network(
        "", "Take the trained trunk of the run in this folder, and train only what is behind it."
    )
    activation: str = _network("relu", f"One of {', '.join(activations.names())}.")
    noise: tuple[float, ...] = _network(
        (0.2,), "Sigma on the scaled input and on each hidden layer: one for all, or a list."
    )
    covariance: str = _network(
        "shared",
        f"How it is stored in training: {', '.join(covariances())}. tracked:N has exact variances "
        "in layers of up to N units, in evaluation; tracked takes the least N that is good enough.",
    )
    batch_norm: bool = _network(
        False,
        "Normalise before each activation. Not given: for spiking neurons (lif) only.",
        flag="--batch-norm/--no-batch-norm",
    )
    poisson: bool = _network(False, "Pixels are rates of spikes, whose variance is their mean.")
    dropout: float = _network(0.0, "Probability of dropping a hidden unit.")
    task: str = "classification"  # or "regression"
    input_shape: tuple[int, ...] = ()  # of one sample, as it is in the data
    outputs: int = 0  # classes or targets

    def __post_init__(self) -> None:
        if self.trunk:
            _check_choice("trunk", self.trunk, tuple(TRUNKS))
        if self.trunk_from and not self.trunk:
            raise ValueError(f"Which trunk is taken from {self.trunk_from}? None is named.")
        if self.poisson and (self.trunk or not self.is_image):
            raise ValueError(
                "poisson takes pixels as rates, so it is for images without a trunk: standardised "
                "columns and what a trunk gives can be negative."
            )

    @property
    def is_image(self) -> bool:
        """Whether inputs are images (channels, height, width) of bytes."""
        return len(self.input_shape) == 3

    @property
    def tracked(self) -> str:
        """Tracked covariances as they were asked for in training, else as ``track`` finds best."""
        return self.covariance if class_name(self.covariance) == "tracked" else "tracked"

    @property
    def widths(self) -> list[int]:
        """Units of every layer that has moments, from the first inputs to the outputs."""
        inputs = torch.Size(self.input_shape)
        if self.trunk:
            with torch.device("meta"):  # shapes alone
                inputs = TRUNKS[self.trunk](inputs)(torch.empty(1, *inputs)).shape
        return [inputs.numel(), *self.hidden, self.outputs]

    def build(self) -> nn.Sequential:
        """The network, newly initialised: what it subtracts and divides by is still 0 and 1.

        Bytes of images go to [-1, 1], as in the paper; as rates they go to [0, 1].
        """
        noise = self.noise * (len(self.widths) - 1) if len(self.noise) == 1 else self.noise
        alike = ("activation", "covariance", "batch_norm", "poisson", "dropout")
        settings: dict[str, Any] = {name: getattr(self, name) for name in alike}
        net = models.mlp(self.widths, noise=list(noise), **settings)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.is_image:
            shift, scale = (0.0, 255.0) if self.poisson else (127.5, 127.5)
            layers["standardize"] = Standardize(torch.tensor(shift), torch.tensor(scale))
        else:
            layers["standardize"] = Standardize(*_nothing_and_one(self.widths[0]))
        if self.trunk:
            trunk = TRUNKS[self.trunk](self.input_shape)
            layers["trunk"] = models.Frozen(*trunk) if self.trunk_from else trunk
        elif self.is_image:
            layers["flatten"] = Flatten()
        layers.update(net.named_children())
        if self.task == "regression":
            layers["rescale"] = Rescale(*_nothing_and_one(self.outputs))
        return nn.Sequential(layers)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides what a run computes."""

    data: DataConfig
    model: ModelConfig
    training: TrainingConfig
    loss: str = _training(
        "mean",
        "mean: squared error, or cross-entropy, of the mean alone. likelihood: the Gaussian one of "
        "the targets, which trains the covariance too.",
        show_default="mean",
    )
    precision: str = _devices(
        "32-true", f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}; moments keep 32 bits."
    )

    def __post_init__(self) -> None:
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("loss", self.loss, LOSSES)
        if self.loss == "likelihood":
            if self.model.task == "classification":
                raise ValueError(
                    "The loss 'likelihood' is that of targets of a regression, and this is a "
                    "classification: leave it out, or choose 'mean'."
                )
            if self.model.covariance == "shared":
                raise ValueError(
                    "The loss 'likelihood' needs a covariance for each sample, and 'shared' is one "
                    "for each mini-batch: choose the covariance full, tracked or diagonal."
                )
            if not any(self.model.noise) and not self.data.errors:
                raise ValueError(
                    "The loss 'likelihood' needs noise in the network, of which variances are "
                    f"made; got {', '.join(map(str, self.model.noise))}: choose another noise."
                )

    def to_toml(self) -> str:
        """The configuration as text, readable by ``from_toml``."""
        import tomlkit

        content = to_json(self)
        sections = {
            # TOML has no word for None
            name: {key: value for key, value in content.pop(name).items() if value is not None}
            for name in ("data", "model", "training")
        }
        return tomlkit.dumps(content | sections)

    @classmethod
    def from_toml(cls, path: Path) -> RunConfig:
        """Read ``config.toml``; what it cannot be is said with the file's name."""
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        said = f"{path} is not the configuration of a run"
        try:
            found = tomlkit.parse(read_text(path)).unwrap()
        except (TOMLKitError, RecursionError) as error:
            raise FileError(f"{said}: {error}.") from error
        config = decoded(cls, found, said)
        unknown = sorted(_flat(found).keys() - _flat(asdict(config)).keys())
        if unknown:
            raise FileError(f"{said}: unknown entries {', '.join(unknown)}.")
        return config

    def differences(self, other: RunConfig) -> list[str]:
        """What is not the same, as ``training.lr: 0.1, not 0.2``."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        return [
            f"{key}: {value}, not {theirs[key]}"
            for key, value in mine.items()
            if value != theirs[key]
        ]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Settings of a network and its training, as in the configurations; None: not chosen."""

    hidden: tuple[int, ...] | None = None
    trunk: str | None = None
    trunk_from: str | None = None
    activation: str | None = None
    noise: tuple[float, ...] | None = None
    covariance: str | None = None
    batch_norm: bool | None = None
    poisson: bool | None = None
    dropout: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    schedule: str | None = None
    clip: float | None = None
    compile: bool | None = None
    seed: int | None = None
    loss: str | None = None
    precision: str | None = None

    def given(self) -> dict[str, Any]:
        """Those that were chosen, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __or__(self, other: Choices) -> Choices:
        """The other's choices, and these where it has none."""
        return replace(self, **other.given())


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where a run is trained and what it keeps; what it computes does not depend on that."""

    accelerator: str = _devices("auto", "auto (cuda, else cpu), or one of Lightning Fabric's.")
    devices: int = _devices(1, "How many; each gets its part of every batch.", min=1)
    strategy: str = _devices("auto", "How devices work together, such as ddp.")
    checkpoint_minutes: float = _devices(5.0, "Save this often within long epochs.")
    keep: tuple[int, ...] = _devices(
        (), "Keep the weights after these epochs too, such as 1,2,5,10."
    )


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"Unknown {name} {value!r}; known are {', '.join(known)}.")


def _nothing_and_one(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    """Entries of sections as ``section.entry``, others as they are."""
    flat: dict[str, Any] = {}
    for key, value in sections.items():
        if isinstance(value, dict) and value:
            flat |= {f"{key}.{name}": entry for name, entry in value.items()}
        else:
            flat[key] = value
    return flat


def check_covariance(covariance: str) -> None:
    """Raise an error unless a measurement can store covariances so: one for each sample."""
    if class_name(covariance) not in PER_SAMPLE:
        raise ValueError(
            f"Measurements give each sample a covariance of its own: {PER_SAMPLE_HELP}. Got "
            f"{covariance!r}."
        )
    check_kind(covariance)
