"""What to compare with: conventional networks of the same widths, and the usual ways to be unsure.

Each way is a ``Method``: ``predict(x)`` gives a ``Prediction``, probabilities or a mean and
covariance, and scores.
"""

from covary.baselines import laplace
from covary.baselines.calibrated import (
    CalibratedClassifier,
    FittedClassifier,
    calibrated_classifier,
    calibrated_regressor,
)
from covary.baselines.networks import (
    DropoutSamples,
    GaussianHead,
    Members,
    Mixture,
    Spread,
    with_variance_head,
)
from covary.baselines.objectives import CrossEntropy, GaussianLikelihood, SquaredError
from covary.baselines.plain import has_slope, plain
from covary.baselines.prediction import (
    AveragedClassifier,
    Classifier,
    GaussianRegressor,
    Method,
    MomentClassifier,
    Prediction,
)

__all__ = [
    "AveragedClassifier",
    "CalibratedClassifier",
    "Classifier",
    "CrossEntropy",
    "DropoutSamples",
    "FittedClassifier",
    "GaussianHead",
    "GaussianLikelihood",
    "GaussianRegressor",
    "Members",
    "Method",
    "Mixture",
    "MomentClassifier",
    "Prediction",
    "Spread",
    "SquaredError",
    "calibrated_classifier",
    "calibrated_regressor",
    "has_slope",
    "laplace",
    "plain",
    "with_variance_head",
]
