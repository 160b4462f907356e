"""How well moments describe the stochastic network behind them.

    python -m benchmarks.against_sampling

Relative Frobenius errors of the output mean and covariance, over test inputs, against 2e5 samples
of the steady-state network. Digits are bundled with scikit-learn; the paper's MNIST network is
measured too where $COVARY_DATA has the MNIST files.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from benchmarks import steps, tables
from tests import digits, reference

SAMPLES = 200_000
INPUTS = 8


def errors(
    name: str, net: nn.Sequential, noise: float, inputs: Tensor, accuracy: float | None
) -> dict[str, Any]:
    means, covs = reference.errors_against_sampling(net, inputs, SAMPLES)
    row = {
        "network": name,
        "noise": noise,
        "accuracy": accuracy,
        "mean error": float(np.mean(means)),
        "covariance error": float(np.mean(covs)),
        "worst covariance error": max(covs),
    }
    print(row, flush=True)
    return row


def digits_rows() -> list[dict[str, Any]]:
    inputs = digits.data()[2][:INPUTS]
    rows = []
    for activation, noise in (("relu", 0.2), ("relu", 0.45), ("heaviside", 0.2)):
        net = digits.trained(activation, noise)
        name = f"{activation}, digits, {'-'.join(map(str, digits.WIDTHS))}"
        rows.append(errors(name, net, noise, inputs, digits.accuracy(net)))
    torch.manual_seed(0)
    net = covary.mlp(digits.WIDTHS, activation="heaviside", noise=0.2)
    name = f"heaviside, {'-'.join(map(str, digits.WIDTHS))}"
    return [*rows, errors(name, net, 0.2, inputs, None)]


def read_idx(path: Path, header: int) -> Tensor:
    with gzip.open(path) as file:
        return torch.tensor(np.frombuffer(file.read(), np.uint8, offset=header))


def mnist_rows(folder: Path, epochs: int = 15) -> list[dict[str, Any]]:
    def images(part: str) -> Tensor:
        pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 16)
        return pixels.reshape(-1, 784).float() / 127.5 - 1

    x, x_test = images("train"), images("t10k")
    y, y_test = (
        read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 8).long() for part in ("train", "t10k")
    )
    rows = []
    for activation, noise in (("relu", 0.2), ("relu", 0.45), ("heaviside", 0.2)):
        torch.manual_seed(0)
        net = covary.mlp(steps.WIDTHS, activation=activation, noise=noise, covariance="shared")
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-4, weight_decay=1e-4)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(steps.BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(x[batch]).mean, y[batch]).backward()
                optimizer.step()
        full = covary.with_covariance(net, "full")
        with torch.no_grad():
            guesses = torch.cat([full(part).mean.argmax(-1) for part in x_test.split(500)])
        accuracy = (guesses == y_test).float().mean().item()
        name = f"{activation}, MNIST, {'-'.join(map(str, steps.WIDTHS))}"
        rows.append(errors(name, full, noise, x_test[:INPUTS], accuracy))
    return rows


def main() -> None:
    rows = digits_rows()
    mnist = Path(os.environ.get("COVARY_DATA", ".")) / "mnist"
    if mnist.is_dir():
        rows += mnist_rows(mnist)
    else:
        print("No MNIST in $COVARY_DATA: digits alone.")
    measured = {"samples": SAMPLES, "inputs": INPUTS, "networks": rows}
    command = "python -m benchmarks.against_sampling"
    tables.publish("against_sampling", command, 0, measured, shown=[tables.sampling])


if __name__ == "__main__":
    main()
