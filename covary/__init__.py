"""Neural networks that carry the mean and covariance of their activity through every layer."""

from covary import activations, covariance, models, moments, nn
from covary.models import mlp, with_covariance, with_noise
from covary.moments import Moments
from covary.recording import record
from covary.settings import check_values, supervise_covariance
from covary.tracking import track

__version__ = "0.1.0"

__all__ = [
    "Moments",
    "activations",
    "check_values",
    "covariance",
    "mlp",
    "models",
    "moments",
    "nn",
    "record",
    "supervise_covariance",
    "track",
    "with_covariance",
    "with_noise",
]
