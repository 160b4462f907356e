"""Moment neural networks as scikit-learn estimators.

They take and give numpy arrays (or data frames), standardise within, and stand wherever
scikit-learn expects an estimator: pipelines, grid searches, cross-validation, conformal wrappers.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "covary.estimators needs scikit-learn: pip install 'covary[sklearn]'"
    ) from error

from covary.estimators.base import EFFORTS
from covary.estimators.classifier import ERROR_SCORES, MomentClassifier
from covary.estimators.regressor import MomentRegressor

__all__ = ["EFFORTS", "ERROR_SCORES", "MomentClassifier", "MomentRegressor"]
