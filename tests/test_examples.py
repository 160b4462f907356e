"""The examples run from the command line, on a small scale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_refuse_when_unsure():
    command = [sys.executable, str(EXAMPLES / "refuse_when_unsure.py"), "--epochs", "2"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("wrong of the surest 90%") == 2
