"""Neural networks that carry the mean and covariance of their activity through every layer."""

from covary import activations, covariance, models, moments, nn, rules
from covary.convert import convert
from covary.models import mlp, with_covariance, with_noise
from covary.moments import Moments
from covary.recording import record
from covary.settings import check_values, supervise_covariance
from covary.tracking import track
from covary.varying import ConversionError
from covary.verification import verify

__version__ = "0.1.0"

__all__ = [
    "ConversionError",
    "Moments",
    "activations",
    "check_values",
    "convert",
    "covariance",
    "mlp",
    "models",
    "moments",
    "nn",
    "record",
    "rules",
    "supervise_covariance",
    "track",
    "verify",
    "with_covariance",
    "with_noise",
]
