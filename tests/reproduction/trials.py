"""Experiments that take no time, and commands as they are typed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproduction.cli import app
from reproduction.experiment import SCALES, Claim, Experiment, Measured, Part, seeds
from reproduction.workshop import Workshop

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "reproduction"
with_mnist = pytest.mark.skipif(
    "COVARY_DATA" not in os.environ, reason="needs MNIST in $COVARY_DATA"
)


def trial(measure=None, claims=None, **more) -> Experiment:
    """An experiment of two labels, three seeds each, whose number is 10 * size + seed."""

    def usual(part: Part, _workshop: Workshop) -> Measured:
        return Measured({"number": 10.0 * part.settings["size"] + part.seed}, {"points": [1 / 3]})

    parts = (*seeds("small", 3, size=1), *seeds("large", 3, size=2))
    return Experiment(
        name="trial",
        title="A trial",
        paper="Fig. 0",
        about="Nothing.",
        measure=measure or usual,
        parts=dict.fromkeys(SCALES, parts) | more,
        claims=claims or (Claim(says="It is large.", metric="number", least=11.0),),
    )


def workshop(folder: Path) -> Workshop:
    return Workshop(folder=folder / "work")


def command(*arguments: object, code: int = 0) -> str:
    """Run a command in this process; its output, errors included."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output
