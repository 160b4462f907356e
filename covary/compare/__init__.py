"""What a moment neural network is compared with, and the comparison.

``compare`` trains and measures all methods alike. Each ``Method`` is a network and a rule
(``by_mean``, ``by_expectation``, ``by_average``, ``by_points``, ``by_density``, ``by_targets``)
that gives a ``Prediction``: probabilities or a mean and covariance, and scores.
"""

from covary.compare import laplace
from covary.compare.comparing import compare
from covary.compare.comparison import CompareConfig, Comparison, MethodRow, Summary
from covary.compare.groups import method_names
from covary.compare.methods import (
    Method,
    Prediction,
    by_average,
    by_density,
    by_expectation,
    by_mean,
    by_points,
    by_targets,
    calibrated,
)
from covary.compare.networks import (
    DropoutSamples,
    GaussianHead,
    MemberMoments,
    Members,
    with_variance_head,
    without_masks,
)

__all__ = [
    "CompareConfig", "Comparison", "DropoutSamples", "GaussianHead", "MemberMoments", "Members",
    "Method", "MethodRow", "Prediction", "Summary", "by_average", "by_density", "by_expectation",
    "by_mean", "by_points", "by_targets", "calibrated", "compare", "laplace", "method_names",
    "with_variance_head", "without_masks",
]  # fmt: skip
