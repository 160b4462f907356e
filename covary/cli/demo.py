"""``covary demo``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from covary.cli.common import Debug, Seed, reported, say
from covary.cli.look import evaluate, report
from covary.cli.train import train
from covary.runs import Run, RunError


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
    said = {"--epochs": epochs, "--seed": seed, "--out": out}
    options = [str(part) for option in said.items() for part in option]
    say("$ " + shlex.join(["covary", "train", "digits", *options, "--overwrite"]), "bold")
    train("digits", out=out, overwrite=True, epochs=epochs, seed=seed, debug=debug)
    say("$ " + shlex.join(["covary", "evaluate", str(out)]), "bold")
    evaluate(out, debug=debug)
    say("$ " + shlex.join(["covary", "report", str(out)]), "bold")
    report(out, debug=debug)
