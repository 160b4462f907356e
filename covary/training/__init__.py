"""One training loop for every network, from a scikit-learn estimator to several devices."""

from covary.training.batches import Batches, TensorBatches
from covary.training.checkpoint import Checkpoint
from covary.training.config import TrainingConfig
from covary.training.display import Display, Silent, terminal_or_lines
from covary.training.log import Epoch, MetricsLog
from covary.training.loop import DivergedError, StoppedError, fit
from covary.training.objectives import ClassificationLoss, GaussianLikelihood, RegressionLoss

__all__ = [
    "Batches",
    "Checkpoint",
    "ClassificationLoss",
    "Display",
    "DivergedError",
    "Epoch",
    "GaussianLikelihood",
    "MetricsLog",
    "RegressionLoss",
    "Silent",
    "StoppedError",
    "TensorBatches",
    "TrainingConfig",
    "fit",
    "terminal_or_lines",
]
