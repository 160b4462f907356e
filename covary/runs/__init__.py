"""Runs: a folder with everything that made a trained network, and what came of it."""

from covary.runs.attack import AttackConfig, attack_run
from covary.runs.config import Choices, DataConfig, DeviceConfig, ModelConfig, RunConfig
from covary.runs.directory import Run, RunError
from covary.runs.directory import open_run as open
from covary.runs.evaluation import evaluate
from covary.runs.representations import measure_fidelity
from covary.runs.results import (
    Attack,
    Evaluation,
    FidelityResult,
    SpikingVerification,
    SteadyVerification,
)
from covary.runs.training import train
from covary.runs.uncertainty import calibrate, uncertainty_of
from covary.runs.verify import verify

__all__ = [
    "Attack",
    "AttackConfig",
    "Choices",
    "DataConfig",
    "DeviceConfig",
    "Evaluation",
    "FidelityResult",
    "ModelConfig",
    "Run",
    "RunConfig",
    "RunError",
    "SpikingVerification",
    "SteadyVerification",
    "attack_run",
    "calibrate",
    "evaluate",
    "measure_fidelity",
    "open",
    "train",
    "uncertainty_of",
    "verify",
]
