"""What it costs to hold a covariance: time beside the plain network, and memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from covary.runs.directory import Run, RunError

Kind = TypeVar("Kind")
# Of a pass that is over sooner, the fastest of as many as fit this time is taken.
_SECONDS_AT_LEAST = 0.02


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


def peak_memory(run: Run, covariance: str, exact_width: int | None, batch: int) -> float | None:
    """Megabytes for a batch, in a fresh process where nothing else has raised the peak."""
    width = "none" if exact_width is None else str(exact_width)
    command = [sys.executable, "-m", "covary.runs.peak_memory", str(run.path), covariance, width]
    ran = subprocess.run([*command, str(batch)], capture_output=True, text=True, check=False)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise RunError(
            f"The memory that {covariance} covariances take could not be measured ({why}). If "
            "there is too little of it, take a smaller --batch-size."
        )
    found: float | None = json.loads(ran.stdout)
    return found
