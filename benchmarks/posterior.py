"""What a Gaussian posterior of all weights knows on MNIST, beside methods measured before.

    python -m benchmarks.posterior              # all seeds: about an hour on one core
    python -m benchmarks.posterior 0            # or one of them

Of the paper's widths, a conventional ReLU network is trained as ``covary compare`` trains it. What
was trained or measured before, in out/posterior, is not done again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks import results
from covary.data import Dataset
from covary.files import read_tensors, write_tensors
from covary.models import plain
from covary.runs import DataConfig
from covary.runs.config import Choices, RunConfig
from covary.runs.samples import load_data, validation_rows
from covary.runs.training import resolve
from covary.training import Checkpoint, ClassificationLoss, MetricsLog, TensorBatches, fit

FOLDER = results.ROOT / "out" / "posterior"
SEEDS = (0, 1, 2)
DATA = DataConfig(name="mnist")


def trained(seed: int, config: RunConfig, dataset: Dataset) -> nn.Sequential:
    """The conventional network of a seed, trained now if it is not there yet."""
    from lightning_fabric import Fabric

    folder: Path = FOLDER / f"seed-{seed}"
    path = folder / "model.safetensors"
    torch.manual_seed(seed)
    net = plain(config.model.build())
    assert isinstance(net, nn.Sequential)
    if path.exists():
        net.load_state_dict(read_tensors(path)[0])
        return net.eval()
    _, rows = validation_rows(len(dataset.x), config)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    fit(
        ClassificationLoss(net),
        TensorBatches(dataset.x[rows], dataset.y[rows], config.training.batch_size, seed=seed),
        config.training,
        fabric=Fabric(accelerator="cpu", devices=1),
        checkpoint=Checkpoint(folder / "checkpoint.safetensors"),
        resume=True,
        log=MetricsLog(folder / "metrics.jsonl", tensorboard=False),
    )
    write_tensors(path, net.state_dict())
    return net.eval()


def main() -> None:
    for seed in map(int, sys.argv[1:]) if len(sys.argv) > 1 else SEEDS:
        dataset, _ = load_data(DATA, seed=seed)
        config = resolve(DATA, dataset, Choices(seed=seed))
        trained(seed, config, dataset)
        print(f"seed {seed}: trained", flush=True)


if __name__ == "__main__":
    main()
