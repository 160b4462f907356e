"""Runs: a folder with everything that made a trained network, and what came of it."""

from covary.runs.attack import attack_run
from covary.runs.config import DataConfig, ModelConfig, RunConfig
from covary.runs.directory import Run, RunError
from covary.runs.evaluation import evaluate
from covary.runs.fidelity import measure_fidelity
from covary.runs.training import train
from covary.runs.uncertainty import calibrate, uncertainty_of
from covary.runs.verify import verify

__all__ = [
    "DataConfig",
    "ModelConfig",
    "Run",
    "RunConfig",
    "RunError",
    "attack_run",
    "calibrate",
    "evaluate",
    "measure_fidelity",
    "train",
    "uncertainty_of",
    "verify",
]
