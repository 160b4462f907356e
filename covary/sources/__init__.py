"""Sources: everything that varies in or before a network, and where it enters.

A source has a name, a place where it enters, a covariance there, and a way to be drawn. Moments and
draws take all of them from here, so that ``covary.verify`` checks each.
"""

from covary.sources.kept import Kept, Posterior, by_name
from covary.sources.plan import DropoutOption, NoiseOption, NoisePlan, Plan, SourceOption
from covary.sources.source import (
    NO_NOISE,
    DropoutMask,
    GaussianNoise,
    InputErrors,
    Relative,
    Rounding,
    Source,
    Targets,
)
from covary.sources.weights import DropConnect, Kernel, Positions, UncertainWeights, WeightTerm

__all__ = [
    "NO_NOISE",
    "DropConnect",
    "DropoutMask",
    "DropoutOption",
    "GaussianNoise",
    "InputErrors",
    "Kept",
    "Kernel",
    "NoiseOption",
    "NoisePlan",
    "Plan",
    "Positions",
    "Posterior",
    "Relative",
    "Rounding",
    "Source",
    "SourceOption",
    "Targets",
    "UncertainWeights",
    "WeightTerm",
    "by_name",
]
