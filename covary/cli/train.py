"""``covary train``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from covary import activations, covariance
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, Seed, reported, say
from covary.data import describe
from covary.runs import DataConfig, Run, RunConfig
from covary.runs.config import TRUNKS
from covary.runs.samples import load_data, validation_rows
from covary.runs.tracking import fidelity_of, summary
from covary.runs.training import resolve
from covary.runs.training import train as train_run
from covary.training import Silent, terminal_or_lines

_NETWORK, _TRAINING, _TABLE, _ENGINE = "Network", "Training", "Tables", "Devices"


def _option(panel: str, name: str, help_text: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel=panel, help=help_text, **more)


@reported
def train(
    data: Annotated[
        str, typer.Argument(help="A known set (covary data list), or a .csv, .tsv, .parquet file.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the run.", show_default="runs/DATA"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, if there is one.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration and stop.")
    ] = False,
    hidden: Annotated[
        str | None, _option(_NETWORK, "--hidden", "Units of the hidden layers, such as 128,64,32.")
    ] = None,
    trunk: Annotated[
        str | None,
        _option(
            _NETWORK,
            "--trunk",
            f"Ordinary layers before the first moments, for images: {', '.join(TRUNKS)}.",
        ),
    ] = None,
    activation: Annotated[
        str | None, _option(_NETWORK, "--activation", f"One of {', '.join(activations.names())}.")
    ] = None,
    noise: Annotated[
        str | None,
        _option(
            _NETWORK,
            "--noise",
            "Sigma on the scaled input and on each hidden layer: one for all, or a list.",
        ),
    ] = None,
    held_covariance: Annotated[
        str | None,
        _option(
            _NETWORK,
            "--covariance",
            f"How it is held in training: {', '.join(covariance.names())}.",
        ),
    ] = None,
    exact_width: Annotated[
        int | None,
        _option(
            _NETWORK,
            "--exact-width",
            "With tracked covariances, in evaluation: layers of up to so many units have exact "
            "variances. Not given: the least that is good enough.",
            min=0,
        ),
    ] = None,
    batch_norm: Annotated[
        bool, _option(_NETWORK, "--batch-norm", "Normalise before each activation.")
    ] = False,
    dropout: Annotated[
        float | None, _option(_NETWORK, "--dropout", "Probability of dropping a hidden unit.")
    ] = None,
    epochs: Annotated[
        int | None, _option(_TRAINING, "--epochs", "Passes over the training data.")
    ] = None,
    batch_size: Annotated[
        int | None, _option(_TRAINING, "--batch-size", "Samples in a step, over all devices.")
    ] = None,
    lr: Annotated[
        float | None, _option(_TRAINING, "--lr", "Learning rate, at its highest.")
    ] = None,
    weight_decay: Annotated[
        float | None, _option(_TRAINING, "--weight-decay", "Weight decay.")
    ] = None,
    optimizer: Annotated[str | None, _option(_TRAINING, "--optimizer", "adam or adamw.")] = None,
    schedule: Annotated[
        str | None, _option(_TRAINING, "--schedule", "constant, cooldown, cosine or one-cycle.")
    ] = None,
    clip: Annotated[
        float | None, _option(_TRAINING, "--clip", "Largest norm of the gradient; 0 for any.")
    ] = None,
    validation: Annotated[
        float,
        _option(_TRAINING, "--validation", "Fraction of the training data to watch training with."),
    ] = 0.1,
    augment: Annotated[
        bool, _option(_TRAINING, "--augment", "Random crop and horizontal flip of images.")
    ] = False,
    split: Annotated[
        int, _option(_TRAINING, "--split", "Which of the published splits (UCI sets).")
    ] = 0,
    seed: Seed = 0,
    target: Annotated[
        list[str] | None, _option(_TABLE, "--target", "Column to predict; repeat for several.")
    ] = None,
    task: Annotated[str, _option(_TABLE, "--task", "auto, classification or regression.")] = "auto",
    test_fraction: Annotated[
        float, _option(_TABLE, "--test-fraction", "Fraction of the rows to test on.")
    ] = 0.2,
    missing: Annotated[
        str,
        _option(
            _TABLE, "--missing", "Missing values: error, mean (fill in and mark) or drop (the row)."
        ),
    ] = "error",
    category: Annotated[
        list[str] | None,
        _option(_TABLE, "--category", "Column of numbers that are names; repeat for several."),
    ] = None,
    drop: Annotated[
        list[str] | None, _option(_TABLE, "--drop", "Column to leave out; repeat for several.")
    ] = None,
    encoding: Annotated[str, _option(_TABLE, "--encoding", "How text is encoded.")] = "utf-8",
    delimiter: Annotated[
        str, _option(_TABLE, "--delimiter", "What separates columns; found out if not given.")
    ] = "",
    accelerator: Annotated[
        str,
        _option(
            _ENGINE,
            "--accelerator",
            "auto (cuda, else cpu), or one of Lightning Fabric's.",
        ),
    ] = "auto",
    devices: Annotated[
        int, _option(_ENGINE, "--devices", "How many; each gets its part of every batch.", min=1)
    ] = 1,
    strategy: Annotated[
        str, _option(_ENGINE, "--strategy", "How devices work together, such as ddp.")
    ] = "auto",
    precision: Annotated[
        str | None,
        _option(
            _ENGINE,
            "--precision",
            "32-true, 64-true, 16-mixed or bf16-mixed; moments keep 32 bits.",
        ),
    ] = None,
    checkpoint_minutes: Annotated[
        float, _option(_ENGINE, "--checkpoint-minutes", "Save this often within long epochs.")
    ] = 5.0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a network and keep all that made it in a folder.

    What is not said is taken from the paper where it used the same data. Progress goes to standard
    error, with a checkpoint after each epoch: a run that was stopped or killed goes on with the
    same command and --resume, to the same weights.

    Examples:

    - `covary train mnist --activation relu --epochs 5 --out runs/mnist`
    - `covary train houses.csv --target price`
    - `covary train yacht --split 3 --noise 0.3,0 --epochs 200`
    - `covary train fashion-mnist --trunk lenet --epochs 20`
    - `covary train cifar10 --augment --devices 2 --strategy ddp`
    """
    chosen = {
        "hidden": common.numbers(hidden, int, "--hidden"),
        "trunk": trunk,
        "activation": activation,
        "noise": common.numbers(noise, float, "--noise"),
        "covariance": held_covariance,
        "exact_width": exact_width,
        "batch_norm": batch_norm,
        "dropout": dropout,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "weight_decay": weight_decay,
        "optimizer": optimizer,
        "schedule": schedule,
        "clip": clip,
        "seed": seed,
        "precision": precision,
    }
    with common.wrong_use():
        if resume and overwrite:
            raise ValueError("--resume goes on with a run, --overwrite replaces it: choose one.")
        is_table = DataConfig(name=data).is_table
        if is_table and not target:
            raise ValueError(f"Which column of {data} is to be predicted? Say --target NAME.")
        if not is_table and not 0 <= split < max(1, describe(data).splits):
            raise ValueError(f"{data} has splits 0 to {max(1, describe(data).splits) - 1}.")
        data_config = DataConfig(
            # Wherever the run is looked at from, this is the file that it means.
            name=str(Path(data).resolve()) if is_table else data,
            split=split,
            validation=validation,
            augment=augment,
            target=tuple(target or ()),
            task=task,
            test_fraction=test_fraction,
            missing=missing,
            categories=tuple(category or ()),
            drop=tuple(drop or ()),
            encoding=encoding,
            delimiter=delimiter,
        )
    dataset, schema = load_data(data_config, data_dir=data_dir, seed=seed)
    with common.wrong_use():
        config = resolve(data_config, dataset, chosen)
        config.model.build()
    for note in dataset.notes:
        say(f"Note: {note}")
    if dry_run:
        _show(config, as_json=as_json)
        return
    run = Run(out or Path("runs") / Path(data).name.split(".")[0])
    widths = "-".join(map(str, config.model.widths))
    watched = len(validation_rows(len(dataset.x), config)[0])
    say(
        f"{dataset.name} ({dataset.source}): {len(dataset.x) - watched:,} samples to train on, "
        f"{watched:,} to watch training with, {len(dataset.x_test):,} to test on. "
        f"{config.model.task.capitalize()} by a {config.model.activation} network {widths}"
        f"{f' behind a {config.model.trunk} trunk' if config.model.trunk else ''}, into {run.path}."
    )
    if resume and run.checkpoint_path.exists():
        say("Going on from its last checkpoint.")
    history = train_run(
        config,
        dataset,
        run,
        schema=schema,
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        resume=resume,
        overwrite=overwrite,
        checkpoint_minutes=checkpoint_minutes,
        display=Silent() if as_json else terminal_or_lines(common.voice),
    )
    measured = fidelity_of(run.network()) if config.model.covariance == "tracked" else None
    if as_json:
        rows = None if measured is None else [row._asdict() for row in measured.rows]
        result = {"run": str(run.path), "config": asdict(config), "epochs": history}
        common.show_json(result | {"fidelity": rows})
        return
    if not history:
        say("There was nothing left to train.")
    if measured is not None:
        say(summary(measured, config.model.exact_width))
    path = common.quoted(run.path)
    say(f"Done. Measure it: covary evaluate {path}. Look at it: covary report {path}.")


def _show(config: RunConfig, *, as_json: bool) -> None:
    if as_json:
        common.show_json(asdict(config))
    else:
        typer.echo(config.to_toml(), nl=False)
