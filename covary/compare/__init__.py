"""What a moment neural network is compared with, and the comparison.

``compare`` trains and measures all methods alike. Each method gives a ``Prediction``: probabilities
or a mean and covariance, and scores.
"""

from covary.compare import laplace
from covary.compare.comparing import compare
from covary.compare.comparison import CompareConfig, Comparison, Row, Summary
from covary.compare.groups import method_names
from covary.compare.methods import (
    AveragedClassifier,
    CalibratedClassifier,
    Classifier,
    FittedClassifier,
    GaussianRegressor,
    Method,
    MomentClassifier,
    Prediction,
    calibrated_classifier,
    calibrated_regressor,
)
from covary.compare.networks import (
    DropoutSamples,
    GaussianHead,
    Members,
    Spread,
    with_variance_head,
)

__all__ = [
    "AveragedClassifier",
    "CalibratedClassifier",
    "Classifier",
    "CompareConfig",
    "Comparison",
    "DropoutSamples",
    "FittedClassifier",
    "GaussianHead",
    "GaussianRegressor",
    "Members",
    "Method",
    "MomentClassifier",
    "Prediction",
    "Row",
    "Spread",
    "Summary",
    "calibrated_classifier",
    "calibrated_regressor",
    "compare",
    "laplace",
    "method_names",
    "with_variance_head",
]
