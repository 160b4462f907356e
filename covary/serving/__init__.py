"""Serving: what a trained run says of new rows, in memory or from file to file."""

from covary.serving.predictor import Predictor
from covary.serving.tables import PredictedTable, predict_table

__all__ = ["PredictedTable", "Predictor", "predict_table"]
