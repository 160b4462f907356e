"""The commands, put together, and the demo, which runs three of them."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from covary.cli.common import Debug, Seed, reported, say
from covary.cli.compare import compare
from covary.cli.data import fetch_data, list_data
from covary.cli.export import export
from covary.cli.look import calibrate, evaluate, report
from covary.cli.predict import predict
from covary.cli.probe import attack, fidelity, verify
from covary.cli.serve import serve
from covary.cli.train import train
from covary.runs import Run, RunError

app = typer.Typer(
    name="covary",
    help="Neural networks that know when they are guessing: train one, measure what it is unsure "
    "of, look at it.",
    epilog="Start with `covary demo`, or with your own: `covary train houses.csv --target price`, "
    "`covary evaluate runs/houses`, `covary report runs/houses`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
data = typer.Typer(
    help="What data there are, where they are, and whether they are what they should be.",
    no_args_is_help=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("covary"))
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")
    ] = False,
) -> None:
    """Neural networks that know when they are guessing."""


@reported
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run.")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the data.")] = 100,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Train on bundled digits, measure and report, in about a minute and without a download.

    The three commands it runs are printed; they are the ones to use on your own data.

    Example:

    - `covary demo`
    """
    run = Run(out)
    if run.exists() and run.config.data.name != "digits":
        raise RunError(f"{out} holds a run on other data. Choose another folder (--out).")
    options = ["--epochs", str(epochs), "--seed", str(seed), "--out", str(out), "--overwrite"]
    say(f"$ {shlex.join(['covary', 'train', 'digits', *options])}", "bold")
    train("digits", out=out, overwrite=True, epochs=epochs, seed=seed, debug=debug)
    for command in (evaluate, report):
        say(f"$ {shlex.join(['covary', command.__name__, str(out)])}", "bold")
        command(out, debug=debug)


for each in (
    train, evaluate, predict, serve, calibrate, fidelity, verify, compare, attack, report, export,
    demo,
):  # fmt: skip
    app.command()(each)
app.add_typer(data, name="data")
data.command("list")(list_data)
data.command("fetch")(fetch_data)
