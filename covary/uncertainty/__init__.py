"""Scores of single samples, metrics of data sets, calibration, and the fitted score."""

from covary.uncertainty import calibration, metrics, scores
from covary.uncertainty.fitted import FittedScore, fit

__all__ = ["FittedScore", "calibration", "fit", "metrics", "scores"]
