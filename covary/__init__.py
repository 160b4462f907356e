"""Neural networks that carry the mean and covariance of their activity through every layer."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from covary import activations, covariance, models, moments, nn, rules, sources
from covary.convert import convert
from covary.models import from_plain, mlp, with_covariance, with_dropout, with_noise
from covary.moments import Moments
from covary.recording import record
from covary.settings import check_values, supervise_covariance
from covary.varying import ConversionError

if _TYPE_CHECKING:
    from covary.serving import Predictor, export
    from covary.stochastic.verification import verify
    from covary.tracking import track

__version__ = "0.1.0"

__all__ = [
    "ConversionError",
    "Moments",
    "Predictor",
    "activations",
    "check_values",
    "convert",
    "covariance",
    "export",
    "from_plain",
    "mlp",
    "models",
    "moments",
    "nn",
    "record",
    "rules",
    "sources",
    "supervise_covariance",
    "track",
    "verify",
    "with_covariance",
    "with_dropout",
    "with_noise",
]

# Imported when they are first used: `import covary` takes hardly longer than `import torch`.
_LATE = {
    "Predictor": "covary.serving",
    "export": "covary.serving",
    "track": "covary.tracking",
    "verify": "covary.stochastic.verification",
}
_ROOMS = {
    *("attacks", "data", "mlflow", "posterior", "runs", "serving", "stochastic", "testing"),
    *("training", "uncertainty"),
}


def __getattr__(name: str) -> _Any:
    if name in _ROOMS:
        return _import_module(f"covary.{name}")  # which makes it an attribute, too
    if name not in _LATE:
        raise AttributeError(f"module 'covary' has no attribute {name!r}")
    return getattr(_import_module(_LATE[name]), name)
