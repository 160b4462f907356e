"""Peak memory of a training step above the idle process, in megabytes, in a process of its own.

python -m benchmarks.memory full
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.steps import BATCH, WIDTHS, batch_of, build, training_step
from covary.runs.costs import peak


def most_used() -> float:
    """The most memory that this process has used so far, in MB."""
    most = peak()
    assert most is not None, "this system does not tell"
    return most


def above_idle(kind: str) -> float:
    x, y = batch_of(BATCH, WIDTHS[0])
    step = training_step(build(kind, WIDTHS), x, y)
    idle = most_used()
    for _ in range(3):
        step()
    return most_used() - idle


def measure(kind: str) -> float:
    """The same in a fresh process, where nothing has raised the peak before."""
    command = [sys.executable, "-m", "benchmarks.memory", kind]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    print(above_idle(sys.argv[1]))
