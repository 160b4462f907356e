"""Serving: what a trained run says of new rows, and files of networks for other programs."""

from covary.serving.exporting import Exported, ExportError, export
from covary.serving.exporting_runs import export_run
from covary.serving.folders import predict_files
from covary.serving.predictor import Predictor, labels_of
from covary.serving.tables import FileOptions, PredictedTable, predict_table

__all__ = [
    "ExportError",
    "Exported",
    "FileOptions",
    "PredictedTable",
    "Predictor",
    "export",
    "export_run",
    "labels_of",
    "predict_files",
    "predict_table",
]
