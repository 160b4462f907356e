"""torch.compile: passes and training steps compiled, relative to eager ones.

    python -m benchmarks.compiled    # about ten minutes on one core, most of it the compiler's

Each ratio is of medians of processor time, over passes that take turns.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from benchmarks import tables
from benchmarks.tracked import medians

COVARIANCES, SEED = ("full", "tracked", "diagonal", "shared"), 0
WIDTHS, NOISE = [784, 392, 196, 10], 0.2


def inference(net: nn.Module, call: Any, x: Tensor, _: Tensor) -> Callable[[], object]:
    net.eval()

    @torch.no_grad()
    def run() -> object:
        return call(x).covariance_matrix

    return run


def training_step(net: nn.Module, call: Any, x: Tensor, y: Tensor) -> Callable[[], object]:
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-6, fused=True)

    def run() -> None:
        F.cross_entropy(call(x).mean, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


USES = ((inference, 1), (inference, 128), (training_step, 128))


def measure() -> list[dict[str, Any]]:
    """A row for each covariance, batch and use."""
    found = []
    for covariance in COVARIANCES:
        for use, batch in USES:
            torch.manual_seed(SEED)
            torch._dynamo.reset()
            x, y = torch.rand(batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (batch,))
            net = covary.mlp(WIDTHS, noise=NOISE, covariance=covariance)
            compiled = use(net, torch.compile(net), x, y)
            compiled()  # which takes the compiler up to a minute
            ways = {"eager": use(net, net, x, y), "compiled": compiled}
            times = medians(ways, clock=time.process_time)
            row: dict[str, Any] = {"covariance": covariance, "batch": batch, "use": use.__name__}
            row["ratio"] = times["compiled"] / times["eager"]
            found.append(row)
            print(row, flush=True)
    return found


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = measure()
    tables.publish(
        "compiled", "python -m benchmarks.compiled", SEED, measured, shown=[tables.compiled]
    )


if __name__ == "__main__":
    main()
