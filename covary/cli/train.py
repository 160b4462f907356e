"""``covary train``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from covary.cli import common, options
from covary.cli.common import DataDir, Debug, Json, Seed, reported, say
from covary.cli.options import Chosen, configured, taken
from covary.covariance import class_name
from covary.data import Dataset
from covary.runs import Choices, DataConfig, DeviceConfig, ModelConfig, Run, RunConfig
from covary.runs.samples import load_data, validation_rows
from covary.runs.tracking import summary
from covary.runs.training import resolve
from covary.runs.training import train as train_run
from covary.training import Epoch, Silent, TrainingConfig, terminal_or_lines

_NOT_COMPILED = (
    "full covariances train slower compiled (--compile) than not; tracked, diagonal and shared "
    "ones faster, where training takes longer than compiling, about a minute."
)
_SECTIONS = (ModelConfig, TrainingConfig, DataConfig, RunConfig, DeviceConfig)


@reported
@configured(*_SECTIONS, defaults=[DataConfig, DeviceConfig])
def train(
    data: options.Data,
    chosen: Chosen,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the run.", show_default="runs/DATA"),
    ] = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration and stop.")
    ] = False,
    seed: Seed = 0,
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
    - `covary train houses.csv --target price --loss likelihood`
    - `covary train yacht --split 3 --noise 0.3,0 --epochs 200`
    - `covary train fashion-mnist --trunk lenet --epochs 20`
    - `covary train fashion-mnist --trunk-from runs/fashion --activation heaviside --epochs 5`
    - `covary train mnist --activation lif`
    - `covary train cifar10 --augment --devices 2 --strategy ddp`
    """
    with common.wrong_use():
        devices = DeviceConfig(**taken(DeviceConfig, chosen))
        existing = options.existing_of(resume=resume, overwrite=overwrite)
        of_data = options.data_config(data, chosen)
    if chosen["trunk_from"] is not None:
        chosen["trunk"] = chosen["trunk"] or Run(chosen["trunk_from"]).config.model.trunk or None
        chosen["trunk_from"] = str(Path(chosen["trunk_from"]).resolve())
    dataset, schema = load_data(of_data, data_dir=data_dir, seed=seed)
    with common.wrong_use():
        config = resolve(of_data, dataset, Choices(**chosen, seed=seed))
        config.model.build()
        late = [epoch for epoch in devices.keep if not 1 <= epoch <= config.training.epochs]
        if late:
            raise ValueError(f"--keep {late[0]}: there are epochs 1 to {config.training.epochs}.")
    for note in dataset.notes:
        say(f"Note: {note}")
    if dry_run:
        if as_json:
            common.show_json(asdict(config))
        else:
            typer.echo(common.printable(config.to_toml()), nl=False)
        return
    if config.training.compile and class_name(config.model.covariance) == "full":
        say(f"Note: {_NOT_COMPILED}")
    run = Run(out or Path("runs") / Path(data).name.split(".")[0])
    say(_plan(config, dataset, run))
    if resume and run.checkpoint_path.exists():
        say("Going on from its last checkpoint.")
    history = train_run(
        config,
        dataset,
        run,
        schema=schema,
        existing=existing,
        display=Silent() if as_json else terminal_or_lines(common.voice),
        devices=devices,
    )
    _show_trained(run, config, history, as_json=as_json)


def _plan(config: RunConfig, dataset: Dataset, run: Run) -> str:
    """What is going to be trained, on what and where to."""
    widths = "-".join(map(str, config.model.widths))
    watched = len(validation_rows(len(dataset.x), config)[0])
    trunk = f" behind a {config.model.trunk} trunk" if config.model.trunk else ""
    return (
        f"{dataset.name} ({dataset.source}): {len(dataset.x) - watched:,} samples to train on, "
        f"{watched:,} to watch training with, {len(dataset.x_test):,} to test on. "
        f"{config.model.task.capitalize()} by a {config.model.activation} network {widths}{trunk}, "
        f"into {run.path}."
    )


def _show_trained(run: Run, config: RunConfig, history: list[Epoch], *, as_json: bool) -> None:
    measured = run.tracking if class_name(config.model.covariance) == "tracked" else None
    if as_json:
        rows = None if measured is None else [row._asdict() for row in measured.rows]
        epochs = [epoch.to_json() for epoch in history]
        result = {"run": str(run.path), "config": asdict(config), "epochs": epochs}
        common.show_json(result | {"fidelity": rows})
        return
    if not history:
        say("There was nothing left to train.")
    if measured is not None:
        say(summary(measured, config.model.covariance))
    path = common.quoted(run.path)
    say(f"Done. Measure it: covary evaluate {path}. Look at it: covary report {path}.")
