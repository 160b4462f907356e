"""The networks that several experiments look at, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from covary.runs.config import Choices
from covary.runs.presets import PAPER_LIF, PAPER_MNIST, PAPER_VGG13
from reproduction.published import weights
from reproduction.workshop import Network

# Epochs at which a network is looked at: close together where it changes fast.
WATCHED = {
    "smoke": (1, 2, 3),
    "quick": (1, 2, 3, 5, 8, 12),
    "paper": (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 35, 40, 45, 50),
}
WATCHED_LIF = WATCHED | {"quick": (1, 2, 3, 5, 6), "paper": tuple(range(1, 16))}
WATCHED_CIFAR = WATCHED | {
    "quick": tuple(range(1, 11)),
    "paper": (1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120),
}
# Of networks whose convolutions are trained already.
WATCHED_HEADS = {"smoke": (1, 2, 3), "quick": (1, 2, 3, 4)}
# Training and test samples; VGG13 is dear.
_LIMIT = {"smoke": 128, "quick": 0, "paper": 0}
_LIMIT_CIFAR = {"smoke": 16, "quick": 0, "paper": 0}
# Epochs of networks that are trained to see what decides.
_FEW = {"smoke": 1, "quick": 5, "paper": 15}
# What the paper's text says of its networks of digits ("Training implementations", and
# "Classification on MNIST" there), in its words: "we set sigma_l to a value of 0.2 for all layers";
# "the training batch size as 128, the learning rate as 0.0005, weight decay factor as 0.001", and
# of spiking neurons "the factor of weight decay is 0.0001". The optimiser is Adam.
_PRINTED = {"batch_size": 128, "lr": 5e-4, "optimizer": "adam", "schedule": "constant"}
_PRINTED_SIGMA = 0.2
_PRINTED_DECAY = {"relu": 1e-3, "heaviside": 1e-3, "lif": 1e-4}
# Of parts: networks whose weights the authors published; ours of the widths that two of them have.
AUTHORS = "the authors' network"
SMALL = (196, 48)


def _in_full(preset: Choices) -> dict[str, Any]:
    """A preset, the noise of each layer spelled out: results have to say what they were made with.

    And what was measured of a network is of use only as long as all of its settings are the same.
    """
    settings = preset.given()
    first, *hidden = settings["noise"]
    rest = hidden[-1] if hidden else first
    return settings | {"noise": (first, *[rest] * len(settings["hidden"]))}


def mnist(scale: str, activation: str, covariance: str, *, noise: float | None = None) -> Network:
    """The paper's fully connected network; presets of MNIST have its widths, noise and rates."""
    watched = (WATCHED_LIF if activation == "lif" else WATCHED)[scale]
    usual = _in_full(PAPER_LIF if activation == "lif" else PAPER_MNIST)
    settings = usual | {"activation": activation, "covariance": covariance}
    name = f"mnist-{activation}-{covariance}"
    if noise is not None:
        settings["noise"], name = (noise,), f"mnist-{activation}-noise-{noise:g}"
    return Network(
        name=name,
        data="mnist",
        settings=settings | {"epochs": watched[-1]},
        keep=watched,
        limit=_LIMIT[scale],
    )


def printed(scale: str, activation: str, covariance: str) -> Network:
    """The network of ``mnist``, trained as the text says word for word, and not as by the code.

    Sigma of all layers is the printed one, the input's too. What the text does not speak of is left
    out: the learning rate stays the same, and no digits are held out.
    """
    like = mnist(scale, activation, covariance)
    noise = (_PRINTED_SIGMA,) * (1 + len(like.settings["hidden"]))
    decay = _PRINTED_DECAY[activation]
    return replace(
        like,
        name=f"{like.name}-printed",
        settings={**like.settings, **_PRINTED, "noise": noise, "weight_decay": decay},
        validation=0.0,
    )


def cifar10(scale: str, activation: str, covariance: str, *, head: bool = False) -> Network:
    """The paper's mixed network: ten convolutions of VGG13, then moments 64-32-10.

    VGG13 takes up to a third of an hour for an epoch on a core. At scale quick a ``head`` is
    therefore trained behind the convolutions of the ReLU network with a covariance per sample.
    """
    trunk_of = cifar10(scale, "relu", "full") if head and scale != "paper" else None
    watched = WATCHED_CIFAR[scale] if trunk_of is None else WATCHED_HEADS[scale]
    settings = _in_full(PAPER_VGG13) | {
        "trunk": "vgg13",
        "activation": activation,
        "covariance": covariance,
        "epochs": watched[-1],
    }
    return Network(
        name=f"cifar10-{activation}-{covariance}" + ("-head" if trunk_of else ""),
        data="cifar10",
        settings=settings,
        keep=watched,
        limit=_LIMIT_CIFAR[scale],
        augment=True,
        trunk_of=trunk_of,
    )


def plain_cifar10(scale: str) -> Network:
    """The mixed network without noise: an ordinary one."""
    network = cifar10(scale, "relu", "diagonal")
    settings = {**network.settings, "noise": (0.0,)}
    return replace(network, name="cifar10-relu-noise-0", settings=settings)


def plain(scale: str) -> Network:
    """The ordinary ReLU network of the same widths: without noise there is no variance."""
    return mnist(scale, "relu", "diagonal", noise=0.0)


def other(
    scale: str, activation: str, covariance: str, *, hidden: Sequence[int], variance: float
) -> Network:
    """Other widths and another noise than those of ``mnist``, trained for a few epochs."""
    like = mnist(scale, activation, covariance)
    widths = "-".join(map(str, hidden))
    return replace(
        like,
        name=f"mnist-{activation}-{covariance}-{widths}-{variance:g}",
        settings={
            **like.settings,
            "hidden": tuple(hidden),
            "noise": _sigmas([variance] * (1 + len(hidden))),
            "epochs": _FEW[scale],
        },
        keep=(),
    )


def published(
    name: str, scale: str, file: str, activation: str, variances: Sequence[float]
) -> Network:
    """A network of the authors' weights; ``variances`` of its noise are those of their scripts.

    The input's first, then one for each hidden layer.
    """
    settings = {
        "hidden": weights.NETWORKS[file].widths[1:-1],
        "activation": activation,
        "noise": _sigmas(variances),
        "covariance": "full",
        "epochs": 0,
    }
    return Network(
        name=f"authors-{name}", data="mnist", settings=settings, limit=_LIMIT[scale], published=file
    )


def _sigmas(variances: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(math.sqrt(variance), 7) for variance in variances)
