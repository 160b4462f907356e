"""torch.compile: how long passes and training steps take compiled, relative to eager ones.

python -m benchmarks.compiled
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import covary
from benchmarks import tables
from benchmarks.steps import ratio

COVARIANCES, BATCHES = ("full", "tracked", "diagonal", "shared"), (1, 128)
WIDTHS, NOISE = [784, 392, 196, 10], 0.2


def measure() -> list[dict[str, Any]]:
    """A row for each covariance and batch: compiled over eager, for inference and training."""
    found = []
    for covariance in COVARIANCES:
        for batch in BATCHES:
            torch.manual_seed(0)
            x, y = torch.rand(batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (batch,))
            row: dict[str, Any] = {"covariance": covariance, "batch": batch}
            for name, of in (("inference", _inference), ("training", _training)):
                torch._dynamo.reset()
                net = covary.mlp(WIDTHS, noise=NOISE, covariance=covariance)
                eager, compiled = of(net, net, x, y), of(net, torch.compile(net), x, y)
                start = time.perf_counter()
                compiled()
                row[f"{name} compiling"] = time.perf_counter() - start
                row[name] = ratio(compiled, eager)
            found.append(row)
            print(json.dumps(row))
    return found


def _inference(net: Any, call: Any, x: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    net.eval()

    @torch.no_grad()
    def run() -> object:
        return call(x).covariance_matrix

    return run


def _training(net: Any, call: Any, x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), 1e-6, fused=True)

    def run() -> object:
        F.cross_entropy(call(x).mean, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return None

    return run


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    tables.save("compiled", {"rows": measure()})
