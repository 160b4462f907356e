"""Options that several commands have, so that they are called and explained alike."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from covary.runs.config import PER_SAMPLE, TRUNKS
from covary.training.config import SCHEDULES

NETWORK, TRAINING = "Network", "Training"


def option(panel: str, name: str, help_text: str, **more: Any) -> Any:
    """An option under a heading of its own in ``--help``."""
    return typer.Option(name, rich_help_panel=panel, help=help_text, **more)


Data = Annotated[
    str, typer.Argument(help="A known set (covary data list), or a .csv, .tsv, .parquet file.")
]
PerSampleCovariance = Annotated[
    str | None,
    typer.Option(
        "--covariance",
        help=f"How it is held: {', '.join(PER_SAMPLE)}.",
        show_default="tracked, or full where tracked ones are poor",
    ),
]
AttackedCovariance = Annotated[
    str | None,
    typer.Option(
        "--covariance",
        help=f"How it is held: {', '.join(PER_SAMPLE)}.",
        show_default="tracked if it was so in training, else full",
    ),
]
Hidden = Annotated[
    str | None, option(NETWORK, "--hidden", "Units of the hidden layers, such as 128,64,32.")
]
Trunk = Annotated[
    str | None,
    option(
        NETWORK,
        "--trunk",
        f"Ordinary layers before the first moments, for images: {', '.join(TRUNKS)}.",
    ),
]
Noise = Annotated[
    str | None,
    option(
        NETWORK,
        "--noise",
        "Sigma on the scaled input and on each hidden layer: one for all, or a list.",
    ),
]
Epochs = Annotated[int | None, option(TRAINING, "--epochs", "Passes over the training data.")]
BatchSize = Annotated[
    int | None, option(TRAINING, "--batch-size", "Samples in a step, over all devices.")
]
LearningRate = Annotated[float | None, option(TRAINING, "--lr", "Learning rate, at its highest.")]
WeightDecay = Annotated[float | None, option(TRAINING, "--weight-decay", "Weight decay.")]
Schedule = Annotated[
    str | None,
    option(TRAINING, "--schedule", f"{', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}."),
]
Validation = Annotated[
    float,
    option(
        TRAINING,
        "--validation",
        "Fraction of the training data to hold out: to watch training with, and to calibrate on.",
    ),
]
Split = Annotated[int, option(TRAINING, "--split", "Which of the published splits (UCI sets).")]
