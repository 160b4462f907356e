"""Serving: what a trained run says of new rows, in memory or from file to file."""

from covary.serving.predictor import Predictor
from covary.serving.tables import Summary, predict_table

__all__ = ["Predictor", "Summary", "predict_table"]
