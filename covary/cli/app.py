"""The commands, put together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from covary.cli.attack import attack
from covary.cli.calibrate import calibrate
from covary.cli.compare import compare
from covary.cli.data import fetch_data, list_data
from covary.cli.demo import demo
from covary.cli.export import export
from covary.cli.fidelity import fidelity
from covary.cli.look import evaluate, report
from covary.cli.train import train
from covary.cli.verify import verify

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


app.command()(train)
app.command()(evaluate)
app.command()(calibrate)
app.command()(fidelity)
app.command()(verify)
app.command()(compare)
app.command()(attack)
app.command()(report)
app.command()(export)
app.command()(demo)
app.add_typer(data, name="data")
data.command("list")(list_data)
data.command("fetch")(fetch_data)
