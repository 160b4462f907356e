"""Scores of single samples, metrics of data sets, calibration, changed decisions, fitted score."""

from covary.uncertainty import calibration, changes, metrics, scores
from covary.uncertainty.fitted import FittedScore, fit

__all__ = ["FittedScore", "calibration", "changes", "fit", "metrics", "scores"]
