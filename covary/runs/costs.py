"""What it costs to store a covariance: time beside the plain network, and memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from covary.models import with_covariance
from covary.runs.directory import Run, RunError
from covary.runs.tracking import quietly

Kind = TypeVar("Kind")
# Of a pass that is over sooner, the fastest of as many as fit this time is taken.
_SECONDS_AT_LEAST = 0.02
_STATUS = Path("/proc/self/status")


def fastest(
    passes: Mapping[Kind, Callable[[], object]], rounds: Iterable[object]
) -> dict[Kind, float]:
    """Seconds of the fastest pass of each kind; in turns, so that all meet the same machine."""
    seconds = dict.fromkeys(passes, math.inf)
    for _ in rounds:
        for name, one_pass in passes.items():
            seconds[name] = min(seconds[name], _fastest(one_pass))
    return seconds


def _fastest(one_pass: Callable[[], object]) -> float:
    began, best = time.perf_counter(), math.inf
    while True:
        before = time.perf_counter()
        one_pass()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        after = time.perf_counter()
        best = min(best, after - before)
        if after - began >= _SECONDS_AT_LEAST:
            return best


def peak_memory(run: Run, covariance: str, batch: int) -> float | None:
    """Megabytes for a batch, in a fresh process where nothing else has raised the peak."""
    arguments = json.dumps([str(run.path), covariance, batch])
    program = "from covary.runs import costs; costs.print_above_idle()"
    command = [sys.executable, "-c", program, arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise RunError(
            f"The memory that {covariance} covariances take could not be measured ({why}). If "
            "there is too little of it, take a smaller --batch-size."
        )
    found: float | None = json.loads(ran.stdout)
    return found


def print_above_idle() -> None:
    """What the fresh process does: arguments of ``above_idle`` in, its result out, as JSON."""
    path, covariance, batch = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(above_idle(Run(path), covariance, batch)))


@torch.no_grad()
@quietly()
def above_idle(run: Run, covariance: str, batch: int) -> float | None:
    """Peak of one batch, covariances of the outputs included, above what was used before.

    In megabytes, or None where the system does not tell.
    """
    model = run.config.model
    net = run.network()
    # Memory does not depend on values, and data would raise the peak while they are read.
    dtype = torch.uint8 if model.is_image else torch.float64
    x = torch.zeros(batch, *model.input_shape, dtype=dtype)
    if torch.cuda.is_available():
        net, x = net.cuda(), x.cuda()
    # What torch loads when it first computes is not for the covariance to answer for.
    with_covariance(net, "diagonal")(x[:1])
    idle = peak()
    matrix = with_covariance(net, covariance)(x).covariance_matrix
    most = peak()
    del matrix
    return None if idle is None or most is None else most - idle


def peak() -> float | None:
    """The most memory that this process has used, in MB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    if _STATUS.exists():
        # Linux: ru_maxrss would begin with what the parent process used when it started this one.
        lines = _STATUS.read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1.024e-3
    try:
        import resource
    except ImportError:  # Windows
        return None
    per_mb = 1e6 if sys.platform == "darwin" else 1e3  # bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mb
