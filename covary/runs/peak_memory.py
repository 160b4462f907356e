"""Memory that a forward pass and its covariance take, in a process of their own.

python -m covary.runs.peak_memory RUN COVARIANCE EXACT_WIDTH BATCH

Prints megabytes above the idle process, or null where the system does not tell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from covary.models import with_covariance
from covary.runs.directory import Run
from covary.runs.tracking import quietly

_STATUS = Path("/proc/self/status")


def peak() -> float | None:
    """The most memory that this process has held, in MB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    if _STATUS.exists():
        # Linux: ru_maxrss would begin with what the parent process held when it started this one.
        lines = _STATUS.read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1.024e-3
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1e6 if sys.platform == "darwin" else 1e3  # bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@torch.no_grad()
@quietly()
def above_idle(run: Run, covariance: str, exact_width: int | None, batch: int) -> float | None:
    """Peak of one batch, covariances of the outputs included, above what was held before."""
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
    held = with_covariance(net, covariance, exact_width=exact_width)(x).covariance_matrix
    most = peak()
    del held
    return None if idle is None or most is None else most - idle


if __name__ == "__main__":
    path, covariance, exact_width, batch = sys.argv[1:]
    width = None if exact_width == "none" else int(exact_width)
    sys.stdout.write(json.dumps(above_idle(Run(path), covariance, width, int(batch))))
