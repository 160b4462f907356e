"""Predictions for a table or images, from file to file, in memory for one chunk."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from covary.data import Chunk, DataError, ImageSchema, Schema
from covary.data.columns import Gathered, shortened, with_nearest
from covary.serving.predictor import ANSWER, Columns, Predictor, check_not_taken, labels_of
from covary.serving.writing import FORMATS, format_of, writing


@dataclass
class PredictedTable:
    """What came of a table or of images.

    Attributes:
        rows: how many rows or images there were.
        answered: how many of them are flagged ``"answer"``.
        scores: by name, and for ``"all"`` rows with a target and ``"answered"`` ones, what
            predictions are off by; empty if the table has no target.
    """

    rows: int = 0
    answered: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


def predict_table(
    predictor: Predictor,
    source: str | os.PathLike[str] | BinaryIO,
    out: Path | BinaryIO,
    *,
    keep: str | Sequence[str] = "all",
    format: str = "",
    overwrite: bool = False,
    source_format: str = "",
    encoding: str = "utf-8",
    delimiter: str | None = None,
    array: str = "",
    chunk: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PredictedTable:
    """Write predictions for each row of a table or each image, in their order.

    The file is there when all of it is written, and not before.

    Args:
        predictor: what predicts.
        source: a file or a stream of bytes, as ``covary.data.read_rows`` takes it; for a run of
            images, a folder or a file as ``covary.data.read_images`` takes it.
        out: a file, or a stream of bytes.
        keep: which columns of the table stand before the predictions: ``"all"``, ``"none"``, or
            their names. Images have one: ``file``, or ``image``, the place in an array.
        format: of what is written: ``"csv"``, ``"jsonl"`` or ``"parquet"``. By default what the
            name of the file says; csv for a stream, and for a name that says nothing.
        overwrite: replace a file that is there.
        source_format: of the table; a stream's has to be said.
        encoding: of the table, if it is csv or JSON lines; what is written is UTF-8.
        delimiter: of the table, if it is csv.
        array: that of the images, in an npz file with several.
        chunk: rows or images at a time.
        progress: called with the number of rows of each chunk.
    """
    if isinstance(out, Path) and out.is_dir():
        raise DataError(f"{out} is a folder, where predictions are a file: name one in it.")
    is_there = isinstance(out, Path) and out.exists()
    table = Path(source) if isinstance(source, str | os.PathLike) else None
    if is_there and table is not None and table.exists() and table.samefile(str(out)):
        raise DataError(f"{out} is the table itself, not a place for predictions: name another.")
    if is_there and not overwrite:
        raise DataError(f"{out} exists already. Replace it (--overwrite) or choose another name.")
    form = format or (format_of(out) if isinstance(out, Path) else "csv")
    if not form:
        raise DataError(
            f"What {out} is to be, its ending does not say: end it in .csv, .tsv, .jsonl or "
            f".parquet, or choose a format ({', '.join(FORMATS)}; --format)."
        )
    chunks = predictor.read(
        source, chunk=chunk, array=array, format=source_format, encoding=encoding,
        delimiter=delimiter,
    )  # fmt: skip
    summary, score = PredictedTable(), _Score(predictor.schema)
    with writing(out, form) as write:
        for some in chunks:
            found = predictor.of_chunk(some)
            kept = _kept(some, keep, found)
            if form != "csv" and isinstance(predictor.schema, Schema):
                kept |= _numbers(kept, predictor.schema)
            write({**kept, **_arrays(found)})
            answered = found["flag"] == ANSWER
            summary.rows += len(answered)
            summary.answered += int(answered.sum())
            score.add(some, found, answered)
            if progress is not None:
                progress(len(answered))
    summary.scores = score.found()
    return summary


@dataclass(frozen=True)
class FileOptions:
    """How files are read, and which of their columns are written: as in ``predict_table``."""

    keep: str | tuple[str, ...] = "all"
    format: str = ""
    source_format: str = ""
    encoding: str = "utf-8"
    delimiter: str | None = None
    array: str = ""

    def options(self) -> dict[str, Any]:
        """Arguments of ``predict_table``; the format of what is written is in its name."""
        return {name: value for name, value in asdict(self).items() if name != "format"}


@dataclass(frozen=True)
class Work:
    """One file, and where its predictions go."""

    source: Path
    out: Path

    def done(self, predictor: Predictor, how: FileOptions, **more: Any) -> PredictedTable:
        """Predict it, in place of what was there."""
        more |= how.options()
        return predict_table(predictor, self.source, self.out, overwrite=True, **more)


def _kept(chunk: Chunk, keep: str | Sequence[str], found: Columns) -> dict[str, Any]:
    """The columns of a table that are written before its predictions."""
    if keep == "none":
        return {}
    wanted = list(chunk.columns) if keep == "all" else [keep] if isinstance(keep, str) else keep
    if absent := [name for name in wanted if name not in chunk.columns]:
        raise DataError(
            f"There is no column {with_nearest(absent, list(chunk.columns))} to keep; the table "
            f"has {shortened(chunk.columns, 25)}."
        )
    check_not_taken(wanted, found)
    return {name: chunk.columns[name] for name in wanted}


def _numbers(kept: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Columns that were read as numbers, as numbers: those of csv are texts."""
    import pyarrow as pa

    numbers = {column.name for column in schema.columns if column.kind == "number"}
    numbers |= {*schema.errors.values(), *(() if schema.classes else schema.targets)}
    found = {}
    for name in numbers & kept.keys():
        if pa.types.is_string(kept[name].type):
            column = Gathered(name, "number")
            column.add(kept[name])
            found[name] = pa.array(column.values, from_pandas=True)
    return found


def _arrays(found: Columns) -> dict[str, Any]:
    import pyarrow as pa

    return {name: pa.array(values) for name, values in found.items()}


class _Score:
    """How good predictions are where the table has the targets: sums over rows."""

    def __init__(self, schema: Schema | ImageSchema) -> None:
        self.schema = schema
        self._sums: dict[str, Counter[str]] = {"all": Counter(), "answered": Counter()}

    def add(self, chunk: Chunk, found: Columns, answered: np.ndarray) -> None:
        """Count some rows."""
        if chunk.y is None:
            return
        known = chunk.y >= 0 if self.schema.classes else ~np.isnan(chunk.y).any(1)
        values = self._of_classes(chunk, found) if self.schema.classes else _of(chunk, found)
        for name, rows in {"all": known, "answered": known & answered}.items():
            sums = {key: float(value[rows].sum()) for key, value in values.items()}
            self._sums[name].update({"rows": int(rows.sum()), **sums})

    def _of_classes(self, chunk: Chunk, found: Columns) -> dict[str, np.ndarray]:
        assert chunk.y is not None
        truth = np.array([*self.schema.classes, ""], object)[chunk.y]
        labels = {each: labels_of(each) for each in set(found["set"])}
        inside = [one in labels[each] for one, each in zip(truth, found["set"], strict=True)]
        return {"wrong": found["prediction"] != truth, "in the set": np.array(inside)}

    def found(self) -> dict[str, dict[str, float]]:
        """Averages; of squares their roots."""
        return {
            name: {"rows": sums["rows"], **_averages(sums)}
            for name, sums in self._sums.items()
            if sums["rows"]
        }


def _of(chunk: Chunk, found: Columns) -> dict[str, np.ndarray]:
    """By what is measured, (n,) of each target."""
    assert chunk.y is not None
    values: dict[str, np.ndarray] = {}
    names = [name.removeprefix("prediction") for name in found if name.startswith("prediction")]
    for name, y in zip(names, chunk.y.T, strict=True):
        error = y - found[f"prediction{name}"]
        inside = (found[f"low{name}"] <= y) & (y <= found[f"high{name}"])
        values |= {f"root mean squared error{name}": error**2}
        values |= {f"mean absolute error{name}": np.abs(error), f"in the interval{name}": inside}
    return values


def _averages(sums: Counter[str]) -> dict[str, float]:
    averages = {key: value / sums["rows"] for key, value in sums.items() if key != "rows"}
    return {
        key: math.sqrt(value) if key.startswith("root") else value
        for key, value in averages.items()
    }
