"""Every experiment, in the order of the paper."""

from __future__ import annotations

import difflib

from reproduction.experiment import Experiment
from reproduction.experiments import (
    classification,
    covariance_activations,
    detection,
    dynamics,
    images,
    mechanism,
    sensitivity,
    theorems,
    uci,
)

_ORDER = (
    "mnist-relu",
    "cifar10-relu",
    "mnist-lif",
    "ood-notmnist",
    "fgsm",
    "uci",
    "mechanism",
    "correlation",
    "correlation-cifar10",
    "activations",
    "network-relu",
    "network-heaviside",
    "shared-mnist",
    "shared-cifar10",
    "shared-ood",
    "uci-shared",
    "image-accuracy-shared",
    "mnist-heaviside",
    "cifar10-heaviside",
    "image-accuracy",
    "sensitivity",
    "theorem-1",
    "theorem-2",
    "theorem-3",
)
_KNOWN = {
    experiment.name: experiment
    for topic in (
        classification,
        covariance_activations,
        detection,
        dynamics,
        images,
        mechanism,
        sensitivity,
        theorems,
        uci,
    )
    for experiment in topic.EXPERIMENTS
}
EXPERIMENTS: tuple[Experiment, ...] = tuple(_KNOWN[name] for name in _ORDER)


def names() -> list[str]:
    """What the command line calls them."""
    return [experiment.name for experiment in EXPERIMENTS]


def get(name: str) -> Experiment:
    """The experiment of that name, or an error that says which there are."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    close = difflib.get_close_matches(name.lower(), names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"There is no experiment {name!r}; there are {', '.join(names())}.{hint}")
