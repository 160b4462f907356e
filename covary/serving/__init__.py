"""Serving: what a trained run says of new rows, in memory or from file to file."""

from covary.serving.folders import predict_files
from covary.serving.predictor import Predictor
from covary.serving.tables import FileOptions, PredictedTable, predict_table

__all__ = ["FileOptions", "PredictedTable", "Predictor", "predict_files", "predict_table"]
