"""What a covariance costs in use beside Monte Carlo dropout on the same widths.

    python -m benchmarks.sampling_cost

The paper's MNIST network, a batch of 128, a forward pass with what says how unsure it is: the
covariance of the outputs, or the outputs of so many dropout masks. With one thread and with all, in
turns in one process; weights are random, which times do not depend on.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

import covary
from benchmarks import tables
from benchmarks.steps import BATCH, NOISE, WIDTHS, batch_of
from covary.compare import DropoutSamples
from covary.models import plain
from covary.nn.fidelity import TrackingWarning
from covary.runs import costs

DROPOUT = 0.1
ROUNDS = 30
KINDS = ("full", "tracked", "shared", "diagonal")
# How many samples of dropout each is to be compared with.
AGAINST = {"full": 30, "tracked": 5, "shared": 5, "diagonal": 5}
# What the project promises: no dearer than that. Full covariances are dearer than 30 samples, and
# what they have to multiply says that they will stay so (docs/architecture.md).
MOST_OVER_SAMPLING = {"shared": 1.0, "diagonal": 1.0}


def inference() -> dict[str, float]:
    """Times of a forward pass over one of the plain network."""
    torch.manual_seed(0)
    net = covary.mlp(WIDTHS, noise=NOISE).eval()
    x, _ = batch_of(BATCH, WIDTHS[0])
    networks = {kind: covary.with_covariance(net, kind).eval() for kind in KINDS}
    ordinary, dropped = plain(net), plain(net, dropout=DROPOUT)
    samplers = {count: DropoutSamples(dropped, count) for count in sorted(set(AGAINST.values()))}
    ways: dict[str, Any] = {"plain": lambda: ordinary(x)}
    for kind, network in networks.items():
        ways[kind] = lambda network=network: network(x).covariance_matrix
    for count, sampler in samplers.items():
        ways[sampled(count)] = lambda sampler=sampler: sampler(x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # nobody trained these weights
        times = costs.fastest(ways, range(ROUNDS))
    return {name: seconds / times["plain"] for name, seconds in times.items()}


def sampled(count: int) -> str:
    """What so many samples are called."""
    return f"MC dropout, {count} samples"


def over_sampling(times: dict[str, float]) -> dict[str, float]:
    """Each representation's time over that of the samples it is compared with."""
    return {kind: times[kind] / times[sampled(count)] for kind, count in AGAINST.items()}


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """Which of the promises above a measurement with one thread does not keep."""
    return [
        f"{kind} takes {measured['1 thread']['over sampling'][kind]:.2f} times as long as "
        f"{sampled(AGAINST[kind])}"
        for kind, most in MOST_OVER_SAMPLING.items()
        if measured["1 thread"]["over sampling"][kind] > most
    ]


def main() -> None:
    threads = torch.get_num_threads()
    measured: dict[str, Any] = {}
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        times = inference()
        name = "1 thread" if count == 1 else f"{count} threads"
        measured[name] = {"over plain": times, "over sampling": over_sampling(times)}
        for kind, ratio in measured[name]["over sampling"].items():
            print(
                f"{name}: {kind} takes {times[kind]:.1f} plain passes, {ratio:.2f} times as long "
                f"as {sampled(AGAINST[kind])}"
            )
    torch.set_num_threads(threads)
    tables.publish("sampling_cost", "make bench", 0, measured, broken=broken_promises(measured))


if __name__ == "__main__":
    main()
