"""The examples run from the command line, on a small scale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"examples.{name}", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_refuse_when_unsure():
    assert run("refuse_when_unsure", "--epochs", "2").count("wrong of the surest 90%") == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("convert_trained", "deviations from changing"),
        ("convert_and_fine_tune", "fine-tuned:"),
        ("convert_from_a_module_on", "noise from module 'head' on"),
    ],
)
def test_converting(name, says):
    assert says in run(name, "--epochs", "2")
