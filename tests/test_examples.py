"""The examples run from the command line, on a small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "digits.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_digits(tmp_path):
    ran = run("--epochs", "3", "--activations", "relu", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "accuracy" in ran.stdout
    measured = json.loads((tmp_path / "digits.json").read_text())["measured"]["relu"]
    assert 0.2 < measured["accuracy"] < 1
    assert f"{measured['accuracy']:.3f}" in ran.stdout
    assert (tmp_path / "digits.png").stat().st_size > 10_000


def test_digits_lists_what_it_knows(tmp_path):
    ran = run("--activations", "swishy", "--out", str(tmp_path))
    assert ran.returncode == 2
    assert "swishy" in ran.stderr
    assert "heaviside" in ran.stderr
