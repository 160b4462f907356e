"""The figures and tables of the paper, each a row of data: what is measured, what is claimed."""

from covary.experiments.catalogue import EXPERIMENTS, get, names
from covary.experiments.experiment import SCALES, Claim, Experiment, Measured, Part
from covary.experiments.running import reproduce
from covary.experiments.store import ResultError, load
from covary.experiments.workshop import Network, Workshop

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Claim",
    "Experiment",
    "Measured",
    "Network",
    "Part",
    "ResultError",
    "Workshop",
    "get",
    "load",
    "names",
    "reproduce",
]
