"""The examples run from the command line, on a small scale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_refuse_when_unsure():
    assert run("refuse_when_unsure.py", "--epochs", "2").count("wrong of the surest 90%") == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("convert_trained.py", "deviations from changing"),
        ("convert_and_fine_tune.py", "fine-tuned:"),
        ("convert_from_a_module_on.py", "noise from module 'head' on"),
    ],
)
def test_converting(name, says):
    assert says in run(name, "--epochs", "2")
