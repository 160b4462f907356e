"""Every experiment, in the order of the paper."""

from __future__ import annotations

from covary.experiments import classification
from covary.experiments.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (*classification.EXPERIMENTS,)


def names() -> list[str]:
    """What the command line calls them."""
    return [experiment.name for experiment in EXPERIMENTS]


def get(name: str) -> Experiment:
    """The experiment of that name, or an error that says which there are."""
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise ValueError(f"There is no experiment {name!r}; there are {', '.join(names())}.")
