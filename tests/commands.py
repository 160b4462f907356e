"""Runs that are trained in seconds, and commands that are called in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from covary.cli import app
from covary.runs import Choices, DataConfig, Run
from covary.runs.samples import load_data
from covary.runs.training import resolve, train


def trained_run(path: Path, name: str, **chosen: Any) -> Run:
    """A run on a named set, with these settings in place of the preset's."""
    config = DataConfig(name=name)
    dataset, _ = load_data(config)
    train(resolve(config, dataset, Choices(**chosen)), dataset, Run(path))
    return Run(path)


def covary(*arguments: object, code: int = 0) -> str:
    """What a command prints on a terminal of 80 columns, errors included."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.output
