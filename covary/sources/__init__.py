"""Sources: everything that varies in or before a network, and where it enters.

A source has a name, a place where it enters, a covariance there, and a way to be drawn. Moments and
draws take all of them from here, so that ``covary.verify`` checks each.
"""

from covary.sources.plan import DropoutOption, NoiseOption, NoisePlan, Plan, SourceOption
from covary.sources.source import (
    NO_NOISE,
    DropoutMask,
    GaussianNoise,
    InputErrors,
    Relative,
    Rounding,
    Source,
)
from covary.sources.weights import Positions, UncertainWeights, WeightTerm, kernel_of

__all__ = [
    "NO_NOISE",
    "DropoutMask",
    "DropoutOption",
    "GaussianNoise",
    "InputErrors",
    "NoiseOption",
    "NoisePlan",
    "Plan",
    "Positions",
    "Relative",
    "Rounding",
    "Source",
    "SourceOption",
    "UncertainWeights",
    "WeightTerm",
    "kernel_of",
]
