"""How many samples and units a training step should measure corrections on, and how fast to forget.

    python -m benchmarks.tracking_probe

The paper's MNIST network trains for one epoch with each choice. Then its running corrections are
compared with those that ``covary.track`` finds for the same weights, and a step is timed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from benchmarks import tables
from benchmarks.steps import BATCH, NOISE, WIDTHS, build, training_step
from covary import data
from covary.covariance import Probe
from covary.nn import Linear, linear
from covary.runs import costs
from covary.training import TensorBatches

CHOICES = [
    Probe(samples, units, momentum)
    for samples, units, momentum in (
        (1, 32, 0.1),
        (2, 32, 0.1),
        (4, 32, 0.1),
        (8, 32, 0.1),
        (4, 8, 0.1),
        (4, 128, 0.1),
        (4, 32, 0.02),
        (4, 32, 0.3),
    )
]


def corrections(net: nn.Module) -> list[Tensor]:
    """Of the hidden layers that have any: the first is exact, the last is not used."""
    linears = [layer for layer in net.modules() if isinstance(layer, Linear)]
    return [layer.get_buffer("log_correction").clone() for layer in linears[1:-1]]


def trained(batches: TensorBatches) -> nn.Module:
    torch.manual_seed(0)
    net = covary.mlp(WIDTHS, noise=NOISE, covariance="tracked")
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    for x, y in batches.epoch(0):
        optimizer.zero_grad()
        F.cross_entropy(net(x).mean, y).backward()
        optimizer.step()
    return net


def main() -> None:
    mnist = data.load("mnist")
    x = mnist.x.flatten(1) / 127.5 - 1
    batches = TensorBatches(x, mnist.y, BATCH, seed=0)
    usual, rows = linear.TRAINING_PROBE, []
    plain = training_step(build("plain", WIDTHS), x[:BATCH], mnist.y[:BATCH])
    try:
        for probe in CHOICES:
            linear.TRAINING_PROBE = probe
            step = training_step(build("tracked", WIDTHS), x[:BATCH], mnist.y[:BATCH])
            seconds = costs.fastest({"step": step, "plain": plain}, range(10))
            net = trained(batches)
            running = corrections(net)
            covary.track(net, x[-512:], samples=512, progress=False)
            errors = [
                (a - b).square().mean().sqrt().item()
                for a, b in zip(running, corrections(net), strict=True)
            ]
            rows.append(
                {
                    **probe._asdict(),
                    "step over plain": seconds["step"] / seconds["plain"],
                    "error of log corrections, by layer": errors,
                }
            )
            print(rows[-1], flush=True)
    finally:
        linear.TRAINING_PROBE = usual
    command = "python -m benchmarks.tracking_probe"
    tables.publish("tracking_probe", command, 0, rows, shown=[tables.tracking_probe])


if __name__ == "__main__":
    main()
