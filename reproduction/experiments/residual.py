"""A small residual network in plain torch for photographs: trained once, then given moments."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.data import Dataset, augmented
from covary.files import read_tensors, write_tensors
from covary.runs import Run
from covary.training import (
    Checkpoint,
    ClassificationLoss,
    MetricsLog,
    TensorBatches,
    TrainingConfig,
    fit,
)
from covary.training.batches import shuffled
from reproduction.workshop import Workshop

_BATCH = 500
# Of the pixels of CIFAR-10's training images, channel by channel.
_MEAN, _DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


class ResidualBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)): (B, c, H, W) to (B, c', H', W').

    He et al., 2016. The shortcut is the identity, or a 1 x 1 convolution with batch norm where the
    shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, H, W) -> (B, c', H', W')."""
        return F.relu(self.body(x) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """(B, 3, H, W) to logits (B, 10): a stem, residual blocks, the average of each channel.

    The stem has stride 2, so that blocks see 16 x 16 pixels; each block behind the first halves
    them. Inputs are those that ``inputs`` gives.

    Args:
        widths: channels of the stem and the first block, and of the blocks behind it.
    """

    def __init__(self, widths: Sequence[int], classes: int = 10) -> None:
        super().__init__()
        first, *rest = widths
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(first)
        )
        blocks = [ResidualBlock(first, first, 1)]
        for before, after in zip(widths, rest, strict=False):
            blocks.append(ResidualBlock(before, after, 2))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes)."""
        x = self.blocks(F.relu(self.stem(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def inputs(images: Tensor) -> Tensor:
    """Bytes (B, 3, H, W) as the network takes them: average 0, deviation 1 in each channel."""
    mean, deviation = (torch.tensor(each)[:, None, None] for each in (_MEAN, _DEVIATION))
    standard = (images.float() - mean) / deviation
    return standard.contiguous(memory_format=torch.channels_last)


def held_out_rows(count: int, settings: Mapping[str, Any], seed: int) -> tuple[Tensor, Tensor]:
    """Which of so many training images to hold out, in random order, and which to train on."""
    order = shuffled(count, seed, 2**31)
    held_out = round(settings["validation"] * count)
    return order[:held_out], order[held_out:].sort().values


def trained(
    network: Mapping[str, Any], seed: int, dataset: Dataset, workshop: Workshop
) -> ResidualNetwork:
    """The network with the weights of its last epoch: trained now, further, or before.

    AdamW and one cycle of the learning rate; random crops and flips.

    Args:
        network: ``name`` of its folder, ``data``, and ``settings``: ``widths``, ``epochs``,
            ``batch_size``, ``lr``, ``weight_decay`` and ``validation``, the part that is held out.
        seed: of the weights at the start and the order of images.
        dataset: its images.
        workshop: where it is kept.
    """
    settings, about = network["settings"], json.dumps([network, seed], sort_keys=True)
    run = Run(workshop.folder / f"{network['name']}-{seed}", data_dir=workshop.data_dir)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ResidualNetwork(settings["widths"]).eval()
        if run.model_path.exists():
            tensors, kept = read_tensors(run.model_path)
            if kept.get("about") == about:
                net.load_state_dict(tensors)
                return net
        workshop.say(f"Training {network['name']}, seed {seed}, into {run.path}.")
        began = time.perf_counter()
        _train(net, settings, seed, dataset, run, about, workshop)
        workshop.spent.append(time.perf_counter() - began)
    write_tensors(run.model_path, net.state_dict(), {"about": about})
    return net


def _train(
    net: ResidualNetwork,
    settings: Mapping[str, Any],
    seed: int,
    dataset: Dataset,
    run: Run,
    about: str,
    workshop: Workshop,
) -> None:
    """Train, from the last checkpoint if there is one of these settings."""
    asked = run.path / "asked.json"
    resume = asked.exists() and asked.read_text(encoding="utf-8") == about
    run.path.mkdir(parents=True, exist_ok=True)
    asked.write_text(about, encoding="utf-8")
    held_out, rows = held_out_rows(len(dataset.x), settings, seed)
    if not resume:
        run.checkpoint_path.unlink(missing_ok=True)
    fit(
        ClassificationLoss(net),
        TensorBatches(
            dataset.x[rows],
            dataset.y[rows],
            settings["batch_size"],
            seed=seed,
            transform=lambda images: inputs(augmented(images)),
        ),
        TrainingConfig(
            epochs=settings["epochs"],
            batch_size=settings["batch_size"],
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            optimizer="adamw",
            schedule="one-cycle",
            seed=seed,
        ),
        checkpoint=Checkpoint(run.checkpoint_path),
        resume=resume,
        validate=lambda: {
            "validation_accuracy": accuracy(net, dataset.x[held_out], dataset.y[held_out])
        },
        log=MetricsLog(run.metrics_path, tensorboard=False),
        display=workshop.display(),
    )


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images (n, 3, H, W) whose largest logit is their label's."""
    found = torch.cat([net(inputs(some)).argmax(1) for some in torch.split(images, _BATCH)])
    return float((found == labels).double().mean())
