"""How unsure is a network, and how far is that to be trusted."""

from covary.uncertainty import metrics, scores
from covary.uncertainty.fitted import FittedScore, fit

__all__ = ["FittedScore", "fit", "metrics", "scores"]
