"""The figures and tables of the paper, each made by one command and judged by stored numbers.

This package is beside the library, in its repository, and not in what pip installs. It uses
``covary``; ``covary`` never uses it. Its command line is ``python -m reproduction``.
"""

from reproduction.catalogue import EXPERIMENTS, get, names
from reproduction.experiment import SCALES, Claim, Experiment, Measured, Part
from reproduction.running import reproduce
from reproduction.store import ResultError, load
from reproduction.workshop import Network, Workshop

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
