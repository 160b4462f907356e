"""Peak memory of a training step above the idle process, in megabytes, in a process of its own.

python -m benchmarks.memory full
"""

from __future__ import annotations

import resource
import subprocess
import sys

from benchmarks.steps import BATCH, WIDTHS, batch_of, build, training_step


def peak() -> float:
    """The most memory this process has held, in MB (ru_maxrss is in bytes on macOS)."""
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def above_idle(kind: str) -> float:
    x, y = batch_of(BATCH, WIDTHS[0])
    step = training_step(build(kind, WIDTHS), x, y)
    idle = peak()
    for _ in range(3):
        step()
    return peak() - idle


def measure(kind: str) -> float:
    """The same in a fresh process, where nothing has raised the peak before."""
    command = [sys.executable, "-m", "benchmarks.memory", kind]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    print(above_idle(sys.argv[1]))
