"""The 20 splits of small UCI sets: trained together against one after another, in one run.

    python -m benchmarks.replicas

Prints and saves, for each set, how many times faster they are together and by how much the two
differ in what they predict for the test parts, in standard deviations of the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import covary
from benchmarks import results
from covary import data
from covary.replicas import ReplicaBatches, ReplicaLoss
from covary.training import RegressionLoss, TensorBatches, TrainingConfig, fit

SETS = ("yacht", "boston-housing")
SPLITS = 20
HIDDEN = 50
NOISE = 0.3
CONFIG = TrainingConfig(epochs=300, batch_size=128, lr=1e-3, weight_decay=0.0)


def network(split: data.Dataset, seed: int) -> nn.Sequential:
    """d-50-1 in raw units."""
    torch.manual_seed(seed)
    return nn.Sequential(
        covary.nn.Standardize(split.x.mean(0), split.x.std(0, correction=0)),
        *covary.mlp([split.x.shape[1], HIDDEN, 1], noise=NOISE, covariance="shared"),
        covary.nn.Rescale(split.y.mean(0), split.y.std(0, correction=0)),
    )


def objectives(splits: Sequence[data.Dataset]) -> list[RegressionLoss]:
    """A network for each split with its loss, the same whenever they are made."""
    return [
        RegressionLoss(network(split, seed), split.y.std(0, correction=0))
        for seed, split in enumerate(splits)
    ]


def one_after_another(splits: Sequence[data.Dataset]) -> tuple[list[nn.Module], float]:
    """The trained networks, and seconds."""
    untrained = objectives(splits)
    began = time.perf_counter()
    for seed, (split, objective) in enumerate(zip(splits, untrained, strict=True)):
        fit(objective, TensorBatches(split.x, split.y, CONFIG.batch_size, seed=seed), CONFIG)
    return [objective.net for objective in untrained], time.perf_counter() - began


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


def measure(name: str) -> dict[str, str | int | float]:
    splits = [data.load(name, split=index) for index in range(SPLITS)]
    alone, seconds_alone = one_after_another(splits)
    replicas, seconds_together = together(splits)
    gaps = [
        (a - b).abs().max().item()
        for a, b in zip(predictions(alone, splits), predictions(replicas, splits), strict=True)
    ]
    return {
        "dataset": name,
        "splits": SPLITS,
        "samples": len(splits[0].x),
        "epochs": CONFIG.epochs,
        "seconds one after another": round(seconds_alone, 2),
        "seconds together": round(seconds_together, 2),
        "times faster": round(seconds_alone / seconds_together, 2),
        "difference of means": gaps[0],
        "difference of stddevs": gaps[1],
    }


def main() -> None:
    # The first of everything is slow, whoever is measured first.
    few = [data.load("yacht", split=index) for index in range(2)]
    for run in (one_after_another, together):
        run(few)
    rows = []
    for name in SETS:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    print("saved", results.save("replicas", "python -m benchmarks.replicas", 0, rows))


if __name__ == "__main__":
    main()
