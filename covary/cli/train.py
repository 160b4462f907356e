"""``covary train``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from covary import activations, covariance
from covary.cli import common, options
from covary.cli.common import DataDir, Debug, Json, Seed, reported, say
from covary.cli.options import NETWORK, TRAINING, option
from covary.data import describe
from covary.runs import DataConfig, Run, RunConfig
from covary.runs.samples import load_data, validation_rows
from covary.runs.tracking import summary
from covary.runs.training import resolve
from covary.runs.training import train as train_run
from covary.training import Silent, terminal_or_lines

_TABLE, _ENGINE = "Tables", "Devices"


@reported
def train(
    data: options.Data,
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
    hidden: options.Hidden = None,
    trunk: options.Trunk = None,
    trunk_from: Annotated[
        str | None,
        option(
            NETWORK,
            "--trunk-from",
            "Take the trained trunk of the run in this folder, and train only what is behind it.",
        ),
    ] = None,
    activation: Annotated[
        str | None, option(NETWORK, "--activation", f"One of {', '.join(activations.names())}.")
    ] = None,
    noise: options.Noise = None,
    held_covariance: Annotated[
        str | None,
        option(
            NETWORK,
            "--covariance",
            f"How it is held in training: {', '.join(covariance.names())}.",
        ),
    ] = None,
    exact_width: Annotated[
        int | None,
        option(
            NETWORK,
            "--exact-width",
            "With tracked covariances, in evaluation: layers of up to so many units have exact "
            "variances. Not given: the least that is good enough.",
            min=0,
        ),
    ] = None,
    batch_norm: Annotated[
        bool | None,
        option(
            NETWORK,
            "--batch-norm/--no-batch-norm",
            "Normalise before each activation. Not given: for spiking neurons (lif) only.",
        ),
    ] = None,
    poisson: Annotated[
        bool,
        option(NETWORK, "--poisson", "Pixels are rates of spikes, whose variance is their mean."),
    ] = False,
    dropout: Annotated[
        float | None, option(NETWORK, "--dropout", "Probability of dropping a hidden unit.")
    ] = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    optimizer: Annotated[str | None, option(TRAINING, "--optimizer", "adam or adamw.")] = None,
    schedule: options.Schedule = None,
    clip: Annotated[
        float | None, option(TRAINING, "--clip", "Largest norm of the gradient; 0 for any.")
    ] = None,
    validation: options.Validation = 0.1,
    augment: Annotated[
        bool, option(TRAINING, "--augment", "Random crop and horizontal flip of images.")
    ] = False,
    limit: Annotated[
        int,
        option(TRAINING, "--limit", "Use so many samples at most, of each part; 0: all.", min=0),
    ] = 0,
    split: options.Split = 0,
    seed: Seed = 0,
    target: Annotated[
        list[str] | None, option(_TABLE, "--target", "Column to predict; repeat for several.")
    ] = None,
    task: Annotated[str, option(_TABLE, "--task", "auto, classification or regression.")] = "auto",
    test_fraction: Annotated[
        float, option(_TABLE, "--test-fraction", "Fraction of the rows to test on.")
    ] = 0.2,
    missing: Annotated[
        str,
        option(
            _TABLE, "--missing", "Missing values: error, mean (fill in and mark) or drop (the row)."
        ),
    ] = "error",
    category: Annotated[
        list[str] | None,
        option(_TABLE, "--category", "Column of numbers that are names; repeat for several."),
    ] = None,
    drop: Annotated[
        list[str] | None, option(_TABLE, "--drop", "Column to leave out; repeat for several.")
    ] = None,
    encoding: Annotated[str, option(_TABLE, "--encoding", "How text is encoded.")] = "utf-8",
    delimiter: Annotated[
        str, option(_TABLE, "--delimiter", "What separates columns; found out if not given.")
    ] = "",
    accelerator: Annotated[
        str,
        option(
            _ENGINE,
            "--accelerator",
            "auto (cuda, else cpu), or one of Lightning Fabric's.",
        ),
    ] = "auto",
    devices: Annotated[
        int, option(_ENGINE, "--devices", "How many; each gets its part of every batch.", min=1)
    ] = 1,
    strategy: Annotated[
        str, option(_ENGINE, "--strategy", "How devices work together, such as ddp.")
    ] = "auto",
    precision: Annotated[
        str | None,
        option(
            _ENGINE,
            "--precision",
            "32-true, 64-true, 16-mixed or bf16-mixed; moments keep 32 bits.",
        ),
    ] = None,
    checkpoint_minutes: Annotated[
        float, option(_ENGINE, "--checkpoint-minutes", "Save this often within long epochs.")
    ] = 5.0,
    keep: Annotated[
        str | None,
        option(_ENGINE, "--keep", "Keep the weights after these epochs too, such as 1,2,5,10."),
    ] = None,
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
    - `covary train fashion-mnist --trunk-from runs/fashion --activation heaviside --epochs 5`
    - `covary train mnist --activation lif`
    - `covary train cifar10 --augment --devices 2 --strategy ddp`
    """
    chosen = {
        "hidden": common.numbers(hidden, int, "--hidden"),
        "trunk": trunk,
        "trunk_from": None if trunk_from is None else str(Path(trunk_from).resolve()),
        "activation": activation,
        "noise": common.numbers(noise, float, "--noise"),
        "covariance": held_covariance,
        "exact_width": exact_width,
        "batch_norm": batch_norm,
        "poisson": poisson,
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
    if trunk_from is not None and trunk is None:
        chosen["trunk"] = Run(trunk_from).config.model.trunk or None
    with common.wrong_use():
        kept = common.numbers(keep, int, "--keep") or ()
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
            limit=limit,
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
        late = [epoch for epoch in kept if not 1 <= epoch <= config.training.epochs]
        if late:
            raise ValueError(f"--keep {late[0]}: there are epochs 1 to {config.training.epochs}.")
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
        existing="resume" if resume else "overwrite" if overwrite else "refuse",
        checkpoint_minutes=checkpoint_minutes,
        keep=kept,
        display=Silent() if as_json else terminal_or_lines(common.voice),
    )
    measured = run.tracking if config.model.covariance == "tracked" else None
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
