"""How unsure is a network, and how far is that to be trusted."""

from covary.uncertainty import calibration, metrics, scores
from covary.uncertainty.fitted import FittedScore, fit

__all__ = ["FittedScore", "calibration", "fit", "metrics", "scores"]
