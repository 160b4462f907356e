"""Models of MLflow: a data frame in, the frame of its predictions out.

    import covary.mlflow

    covary.mlflow.save_model(covary.Predictor.load("runs/houses"), "model")
    mlflow.pyfunc.load_model("model").predict(frame)

What MLflow keeps are the plain files of ``Predictor.save``, and the name of this module, which
opens them: nothing is pickled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covary.data import Schema
from covary.data.dataset import needed
from covary.serving import Predictor

if TYPE_CHECKING:
    import pandas as pd

_TYPES = {"number": "double", "date": "datetime", "boolean": "boolean", "category": "string"}
_LIBRARIES = ("covary", "torch", "numpy", "pandas", "pyarrow", "safetensors")


def save_model(predictor: Predictor, path: Path | str, **options: Any) -> None:
    """Write a predictor as a model of MLflow.

    Args:
        predictor: of the run of a table; it keeps its level and flag.
        path: of a new folder.
        options: of ``mlflow.pyfunc.save_model``. ``signature`` (columns and their types, from the
            run's schema), ``input_example`` (one row) and ``pip_requirements`` (the versions
            installed here) are filled in if they are not given.
    """
    _written("save_model", predictor, options | {"path": str(path)})


def log_model(predictor: Predictor, name: str = "model", **options: Any) -> Any:
    """Log a predictor as a model of the active run of MLflow; gives MLflow's ``ModelInfo``.

    Args:
        predictor: of the run of a table; it keeps its level and flag.
        name: of the model.
        options: of ``mlflow.pyfunc.log_model``, as in ``save_model``.
    """
    return _written("log_model", predictor, options | {"name": name})


def _written(function: str, predictor: Predictor, options: dict[str, Any]) -> Any:
    with needed("MLflow", "a model of MLflow", "mlflow"):
        import mlflow.pyfunc as pyfunc
        import pandas as pd
    if not isinstance(predictor.schema, Schema):
        raise ValueError(
            "A model of MLflow takes data frames, and the run is of images: use covary.Predictor, "
            "or the run of a table."
        )
    example = pd.DataFrame(predictor.example())
    options = {
        "signature": _signature(predictor.schema, predictor.frame(example, keep=())),
        "input_example": example,
        "pip_requirements": _requirements(),
        **options,
    }
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "predictor"
        predictor.save(kept)
        write = getattr(pyfunc, function)
        return write(loader_module="covary.mlflow", data_path=str(kept), **options)


def _signature(schema: Schema, predictions: pd.DataFrame) -> Any:
    """Columns and their types, of the schema and of what is predicted."""
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types import ColSpec
    from mlflow.types import Schema as Types

    columns = {name: _TYPES[column.kind] for name, column in schema.inputs.items()}
    columns |= dict.fromkeys(schema.errors.values(), "double")
    inputs = Types([ColSpec(kind, name) for name, kind in columns.items()])
    return ModelSignature(inputs, infer_signature(predictions).inputs)


def _requirements() -> Sequence[str]:
    """What the model needs, at the versions that are installed here."""
    found = []
    for name in _LIBRARIES:
        try:
            number = version(name).partition("+")[0]  # no variant of a machine, as in 2.9+cpu
        except PackageNotFoundError:
            continue
        found.append(f"{'covary[mlflow]' if name == 'covary' else name}=={number}")
    return found


class _Model:
    """What MLflow calls."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def predict(self, rows: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """A data frame of n rows -> the frame of their predictions."""
        return self.predictor.frame(rows, keep=())


def _load_pyfunc(path: str) -> _Model:
    """Called by MLflow with the folder of the files that ``save_model`` kept."""
    return _Model(Predictor.restored(path))
