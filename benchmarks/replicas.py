"""The 20 splits of small UCI sets: trained together against one after another, in one run.

    python -m benchmarks.replicas

Prints and saves, for each set, how many times faster they are together and by how much the two
differ in what they predict for the test parts, in standard deviations of the target.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import covary
from benchmarks import tables
from covary import data
from covary.training import RegressionLoss, TensorBatches, TrainingConfig, fit
from covary.training.replicas import ReplicaBatches, ReplicaLoss

SETS = ("yacht", "boston-housing")
SPLITS = 20
LEAST_TIMES_FASTER = 8.0  # what the project promises
HIDDEN = 50
NOISE = 0.3
CONFIG = TrainingConfig(epochs=500, batch_size=128, lr=1e-3, weight_decay=0.0)  # the paper's


def network(split: data.Dataset, seed: int) -> nn.Sequential:
    """d-50-1 on the raw scale."""
    torch.manual_seed(seed)
    return nn.Sequential(
        covary.nn.Standardize.of(split.x),
        *covary.mlp([split.x.shape[1], HIDDEN, 1], noise=NOISE, covariance="shared"),
        covary.nn.Rescale.of(split.y),
    )


def objectives(splits: Sequence[data.Dataset]) -> list[RegressionLoss]:
    """A network for each split with its loss, the same whenever they are made."""
    return [RegressionLoss(network(split, seed)) for seed, split in enumerate(splits)]


def alone(split: data.Dataset, objective: RegressionLoss, seed: int) -> float:
    """Train the network of one split; seconds."""
    began = time.perf_counter()
    fit(objective, TensorBatches(split.x, split.y, CONFIG.batch_size, seed=seed), CONFIG)
    return time.perf_counter() - began


def together(splits: Sequence[data.Dataset]) -> tuple[list[nn.Module], float]:
    """The same as replicas, stacking and unstacking included in the seconds."""
    untrained = objectives(splits)
    began = time.perf_counter()
    loss = ReplicaLoss(untrained)
    x, y = (torch.cat([getattr(split, part) for split in splits]) for part in ("x", "y"))
    rows = torch.arange(len(x)).view(len(splits), -1)
    batches = ReplicaBatches(x, y, rows, CONFIG.batch_size, seeds=range(len(splits)))
    fit(loss, batches, CONFIG)
    nets = [getattr(objective, "net") for objective in loss.unstack()]  # noqa: B009
    return nets, time.perf_counter() - began


def predictions(nets: Sequence[nn.Module], splits: Sequence[data.Dataset]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation for the test parts, in standard deviations of the target."""
    means, stddevs = [], []
    with torch.no_grad():
        for net, split in zip(nets, splits, strict=True):
            scale = split.y.std(0, correction=0)
            out = covary.with_covariance(net, "full").eval()(split.x_test)
            means.append(out.mean / scale)
            stddevs.append(out.stddev / scale)
    return torch.cat(means), torch.cat(stddevs)


def measure(name: str) -> dict[str, Any]:
    """Both in one run, in turns, so that a busy moment of the machine hits neither alone.

    The median of the seconds of a network alone, times their number, over the median of three runs
    of all together.
    """
    splits = [data.load(name, split=index) for index in range(SPLITS)]
    singles = objectives(splits)
    seconds_each, seconds_together = [], []
    for seed, (split, objective) in enumerate(zip(splits, singles, strict=True)):
        seconds_each.append(alone(split, objective, seed))
        if seed % 7 == 5:
            replicas, seconds = together(splits)
            seconds_together.append(seconds)
    one_after_another = SPLITS * statistics.median(seconds_each)
    all_together = statistics.median(seconds_together)
    nets = [objective.net for objective in singles]
    gaps = [
        (a - b).abs().max().item()
        for a, b in zip(predictions(nets, splits), predictions(replicas, splits), strict=True)
    ]
    return {
        "dataset": name,
        "splits": SPLITS,
        "samples": len(splits[0].x),
        "epochs": CONFIG.epochs,
        "seconds one after another": round(one_after_another, 2),
        "seconds together": round(all_together, 2),
        "times faster": round(one_after_another / all_together, 2),
        "difference of means": gaps[0],
        "difference of stddevs": gaps[1],
    }


def main() -> None:
    # The first of everything is slow, whoever is measured first.
    few = [data.load("yacht", split=index) for index in range(2)]
    alone(few[0], objectives(few)[0], 0)
    together(few)
    rows = []
    for name in SETS:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    slow = [
        f"{row['dataset']} is not {LEAST_TIMES_FASTER} times faster"
        for row in rows
        if row["times faster"] < LEAST_TIMES_FASTER
    ]
    tables.publish("replicas", "python -m benchmarks.replicas", 0, rows, broken=slow)


if __name__ == "__main__":
    main()
