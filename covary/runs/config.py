"""The configuration of a run: what is written to ``config.toml`` and read back from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary import activations, models
from covary.covariance import names as covariances
from covary.files import FileError, read_text
from covary.nn import Flatten, Rescale, Standardize
from covary.runs.records import decoded
from covary.training import TrainingConfig
from covary.training.config import option

# What a table's columns are called and how they are coded is decided once, in training.
TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")


_FOR_TABLES = (
    "target",
    "task",
    "test_fraction",
    "missing",
    "categories",
    "drop",
    "encoding",
    "delimiter",
)
TRUNKS = {"lenet": models.lenet, "lenet5": models.lenet5, "vgg13": models.vgg13}
# Not "shared": samples would depend on their neighbours.
PER_SAMPLE = ("full", "tracked", "diagonal")
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, and which part of them.

    Attributes:
        name: a name that ``covary.data`` knows, or the path of a table.
        split: which of the published splits, where there are several.
        validation: fraction of the training data held out to watch training with.
        augment: random crop and horizontal flip, for images.
        limit: take so many samples at most to train on, and so many to test on; 0 for all.
        target: columns to predict (tables; the following are for tables too).
        task: ``"auto"``, ``"classification"`` or ``"regression"``.
        test_fraction: fraction of the rows to test on.
        missing: ``"error"``, ``"mean"`` or ``"drop"``.
        categories: columns to take as categories though they look like numbers.
        drop: columns to leave out.
        encoding: how text is encoded.
        delimiter: what separates columns; found out where empty.
        sha256: of the table's file, so that nobody takes another one for it: rows of another file
            would be divided into training and test rows in another way.
    """

    name: str
    split: int = field(default=0, metadata=option("Which of the published splits (UCI sets)."))
    validation: float = field(
        default=0.1,
        metadata=option(
            "Fraction of the training data to hold out: to watch training with, and to calibrate "
            "on."
        ),
    )
    augment: bool = field(
        default=False, metadata=option("Random crop and horizontal flip of images.")
    )
    limit: int = field(
        default=0, metadata=option("Use so many samples at most, of each part; 0: all.", min=0)
    )
    target: tuple[str, ...] = field(
        default=(), metadata=option("Column to predict; repeat for several.", "Tables")
    )
    task: str = field(
        default="auto", metadata=option("auto, classification or regression.", "Tables")
    )
    test_fraction: float = field(
        default=0.2, metadata=option("Fraction of the rows to test on.", "Tables")
    )
    missing: str = field(
        default="error",
        metadata=option(
            "Missing values: error, mean (fill in and mark) or drop (the row).", "Tables"
        ),
    )
    categories: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Column of numbers that are names; repeat for several.", "Tables", flag="--category"
        ),
    )
    drop: tuple[str, ...] = field(
        default=(), metadata=option("Column to leave out; repeat for several.", "Tables")
    )
    encoding: str = field(default="utf-8", metadata=option("How text is encoded.", "Tables"))
    delimiter: str = field(
        default="", metadata=option("What separates columns; found out if not given.", "Tables")
    )
    sha256: str = ""

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
        _check_choice("task", self.task, ("auto", "classification", "regression"))
        _check_choice("missing", self.missing, ("error", "mean", "drop"))
        usual = {field.name: field.default for field in fields(self)}
        for_the_other = ("split", "augment") if self.is_table else _FOR_TABLES
        strange = [name for name in for_the_other if getattr(self, name) != usual[name]]
        if strange:
            kind = "known sets" if self.is_table else "tables"
            raise ValueError(
                f"{self.name} does not take {', '.join(strange)}, which is for {kind}. (A table is "
                f"a file whose name ends in {', '.join(TABLE_SUFFIXES)}.)"
            )

    @property
    def is_table(self) -> bool:
        """Whether this names a file and not a known set."""
        return self.name.lower().endswith(TABLE_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, from raw inputs to raw outputs: fully connected, behind a trunk if it has one.

    Attributes:
        hidden: units of the hidden layers.
        trunk: ``"lenet"``, ``"lenet5"`` or ``"vgg13"`` for a convolutional trunk of ordinary layers
            before the first moments (a mixed network), or none.
        trunk_from: folder of a run whose trained trunk is taken, and not trained further; empty for
            a trunk that is trained with the rest.
        activation: a name of ``covary.activations``.
        noise: sigma of the input and of each hidden layer, or one for all.
        covariance: how it is held in training; evaluation always has one per sample.
        exact_width: of ``covary.nn.Lift``, for evaluation with tracked covariances; None is the
            least that was good enough, and is left out of ``config.toml``.
        batch_norm: normalise before each activation.
        poisson: images are rates in [0, 1] spikes per ms, with the variance of Poisson processes,
            instead of going to [-1, 1] with constant noise alone.
        dropout: probability of dropping a hidden unit in training.
        task: ``"classification"`` or ``"regression"``.
        input_shape: of one sample, as it is in the data.
        outputs: how many classes or targets.
    """

    hidden: tuple[int, ...] = field(
        metadata=option("Units of the hidden layers, such as 128,64,32.", "Network")
    )
    trunk: str = field(
        default="",
        metadata=option(
            f"Ordinary layers before the first moments, for images: {', '.join(TRUNKS)}.",
            "Network",
        ),
    )
    trunk_from: str = field(
        default="",
        metadata=option(
            "Take the trained trunk of the run in this folder, and train only what is behind it.",
            "Network",
        ),
    )
    activation: str = field(
        default="relu", metadata=option(f"One of {', '.join(activations.names())}.", "Network")
    )
    noise: tuple[float, ...] = field(
        default=(0.2,),
        metadata=option(
            "Sigma on the scaled input and on each hidden layer: one for all, or a list.",
            "Network",
        ),
    )
    covariance: str = field(
        default="shared",
        metadata=option(f"How it is held in training: {', '.join(covariances())}.", "Network"),
    )
    exact_width: int | None = field(
        default=None,
        metadata=option(
            "With tracked covariances, in evaluation: layers of up to so many units have exact "
            "variances. Not given: the least that is good enough.",
            "Network",
            min=0,
        ),
    )
    batch_norm: bool = field(
        default=False,
        metadata=option(
            "Normalise before each activation. Not given: for spiking neurons (lif) only.",
            "Network",
            flag="--batch-norm/--no-batch-norm",
        ),
    )
    poisson: bool = field(
        default=False,
        metadata=option("Pixels are rates of spikes, whose variance is their mean.", "Network"),
    )
    dropout: float = field(
        default=0.0, metadata=option("Probability of dropping a hidden unit.", "Network")
    )
    task: str = "classification"
    input_shape: tuple[int, ...] = ()
    outputs: int = 0

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
        net = models.mlp(
            self.widths,
            activation=self.activation,
            noise=list(noise),
            covariance=self.covariance,
            exact_width=self.exact_width,
            batch_norm=self.batch_norm,
            poisson=self.poisson,
            dropout=self.dropout,
        )
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.is_image:
            shift, scale = (0.0, 255.0) if self.poisson else (127.5, 127.5)
            layers["standardize"] = Standardize(torch.tensor(shift), torch.tensor(scale))
            if self.trunk:
                trunk = TRUNKS[self.trunk](self.input_shape)
                layers["trunk"] = models.Frozen(*trunk) if self.trunk_from else trunk
            else:
                layers["flatten"] = Flatten()
        else:
            layers["standardize"] = Standardize(*_nothing_and_one(self.widths[0]))
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
    precision: str = field(
        default="32-true",
        metadata=option(
            f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}; moments keep 32 bits.", "Devices"
        ),
    )

    def __post_init__(self) -> None:
        _check_choice("precision", self.precision, PRECISIONS)

    def to_toml(self) -> str:
        """The configuration as text, readable by ``from_toml``."""
        import tomlkit

        document = tomlkit.document()
        document["precision"] = self.precision
        for section in ("data", "model", "training"):
            values = asdict(getattr(self, section))
            document[section] = {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None  # for which TOML has no word
            }
        return tomlkit.dumps(document)

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
        for name, section in (("", cls), *_SECTIONS.items()):
            known = {field.name for field in fields(section)}
            unknown = sorted(set(found[name] if name else found) - known)
            if unknown:
                where = f"section {name!r} has " if name else ""
                raise FileError(f"{said}: {where}unknown entries {', '.join(unknown)}.")
        return config

    def differences(self, other: RunConfig) -> list[str]:
        """What is not the same, as ``training.lr: 0.1, not 0.2``."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        return [
            f"{key}: {value}, not {theirs[key]}"
            for key, value in mine.items()
            if value != theirs[key]
        ]


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"Unknown {name} {value!r}; known are {', '.join(known)}.")


def _nothing_and_one(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)


_SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
}


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
        )
    return flat


def check_covariance(covariance: str | None, exact_width: int | None, model: ModelConfig) -> str:
    """How to hold the covariance in evaluation, if it can be held so."""
    if covariance is None:
        covariance = "tracked" if model.covariance == "tracked" else "full"
    if covariance not in PER_SAMPLE:
        raise ValueError(
            f"Evaluation gives each sample a covariance of its own: {', '.join(PER_SAMPLE)}; got "
            f"{covariance!r}."
        )
    if exact_width is not None and covariance != "tracked":
        raise ValueError(f"exact_width is for tracked covariances, not for {covariance} ones.")
    return covariance
