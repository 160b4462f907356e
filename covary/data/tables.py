"""A table of one's own, csv or parquet, as a data set."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from covary.data.dataset import DataError, Dataset
from covary.data.gather import Gathered, Values, gather
from covary.data.schema import Column, Schema
from covary.data.table_files import TableFile, open_table
from covary.data.targets import (
    MAX_CLASSES,
    Rows,
    check_varying,
    kind_of_classes,
    labels,
    quantities,
    split,
    task_of,
)

MAX_CATEGORIES = 100
MIN_ROWS = 10


def read_table(
    path: str | os.PathLike[str],
    *,
    target: str | Sequence[str] | None = None,
    task: str = "auto",
    test_fraction: float = 0.2,
    seed: int = 0,
    missing: str = "error",
    categories: Collection[str] = (),
    drop: Collection[str] = (),
    encoding: str = "utf-8",
    delimiter: str | None = None,
    schema: Schema | None = None,
) -> tuple[Dataset, Schema]:
    """Read a csv file (also tsv, also gzipped) or a parquet file with named columns.

    Numbers stay as they are. Texts become a 0/1 column for each of their values, in sorted order,
    at most 100. A column of ``true`` and ``false`` becomes 0 and 1. A column that is mostly numbers
    with some texts in it is an error. Columns that do not vary in the training part are left out.
    Infinite numbers are an error. Missing is what is empty, or one of ``NA N/A NaN nan null NULL
    None ?``; a column with no value at all is left out. Whatever is left out, dropped or filled is
    told in the notes of the ``Dataset``.

    Args:
        path: the file.
        target: the column to predict, or several (regression).
        task: ``"classification"``, ``"regression"``, or ``"auto"``: classification if the target
            is text, or whole numbers of at most 20 different values.
        test_fraction: the part of the rows kept for testing, each class in proportion.
        seed: of the random division into training and test rows.
        missing: ``"error"``; ``"mean"``, which puts the mean of the training rows in place of a
            missing number, no category in place of a missing text, and adds a 0/1 column
            ``<name> missing``; or ``"drop"``, which drops rows with a missing value. The latter
            two drop the rows without a target.
        categories: columns of numbers that are names, e.g. postcodes.
        drop: columns to leave out.
        encoding: of a csv file.
        delimiter: of a csv file; otherwise the most frequent of ``, ; tab |`` in its header.
        schema: of an earlier table. The rows are then encoded as that one's, and all of them are
            test rows; the target may be absent (``y_test`` then has length 0), and all arguments
            but ``path``, ``encoding`` and ``delimiter`` are without effect.

    Returns:
        The data, and the schema with which to read more of the kind.
    """
    path = Path(path)
    table = open_table(path, encoding=encoding, delimiter=delimiter)
    if schema is not None:
        return _new_rows(path, table, schema), schema
    if not target:
        raise DataError(f"Name the column to predict (--target): {', '.join(table.columns)}.")
    targets = (target,) if isinstance(target, str) else tuple(dict.fromkeys(target))
    _check_choice("task", task, ("auto", "classification", "regression"))
    _check_choice("missing", missing, ("error", "mean", "drop"))
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction must be between 0 and 1, got {test_fraction}.")
    _check_present(path, table, (*targets, *drop, *categories))
    if both := [name for name in targets if name in drop]:
        raise DataError(f"Column {both[0]!r} cannot be the target and be dropped.")
    inputs = [name for name in table.columns if name not in {*targets, *drop}]
    if not inputs:
        raise DataError(f"{path}: no column is left to predict {', '.join(targets)} from.")

    columns = gather(
        table,
        [*inputs, *targets],
        kinds=dict.fromkeys(categories, "text"),
        limits=dict.fromkeys(inputs, MAX_CATEGORIES) | dict.fromkeys(targets, MAX_CLASSES),
    )
    remedy = "correct them, take them as categories with --category {0!r}, or --drop {0!r}"
    _check_values(path, table, columns, remedy)
    notes = [f"column {name!r} was left out as asked" for name in drop]
    remedy = (
        "fill them with --missing mean, drop such rows with --missing drop, or leave columns out "
        "with --drop"
    )
    rows = _rows_to_keep(path, columns, targets, missing, notes, MIN_ROWS, remedy)
    task = task_of(columns, targets, task, rows, notes)
    y: npt.NDArray[Any]
    classes: tuple[str, ...] = ()
    if task == "classification":
        y, classes = labels(columns[targets[0]], rows)
    else:
        y = quantities(columns, targets, rows)
        check_varying(y, targets)
    train, test = split(y, task, test_fraction, seed, notes)
    schema = Schema(
        columns=tuple(_column(path, columns[name], rows[train], missing, notes) for name in inputs),
        task=task,
        targets=targets,
        classes=classes,
        missing=missing,
    )
    if not schema.features:
        raise DataError(f"{path}: no input column varies, so there is nothing to predict from.")
    _note_filled(schema, columns, notes)
    x, x_test = _encode(path, schema, columns, (rows[train], rows[test]))
    return _dataset(path, schema, (x, y[train], x_test, y[test]), notes), schema


def _new_rows(path: Path, table: TableFile, schema: Schema) -> Dataset:
    """All rows of a table encoded by the schema of another one."""
    inputs = [column for column in schema.columns if column.kind != "constant"]
    names = [column.name for column in inputs]
    _check_present(path, table, names)
    targets = [name for name in schema.targets if name in table.columns]
    target_kind = kind_of_classes(schema.classes) if schema.classes else "number"
    columns = gather(
        table,
        [*names, *targets],
        kinds={
            **dict.fromkeys(targets, target_kind),
            **{c.name: "number" if c.kind == "number" else "text" for c in inputs},
        },
        limits={},
    )
    _check_values(path, table, columns, "correct them, as they were numbers in training")
    known = {*columns, *(column.name for column in schema.columns)}
    notes = [f"column {name!r} is not used" for name in table.columns if name not in known]
    present = [name for name in targets if not np.isnan(columns[name].values).all()]
    with_target = len(present) == len(schema.targets)
    if not with_target:
        notes.append("there is no target to compare predictions with")
        columns = {name: columns[name] for name in names}
    kept = schema.targets if with_target else ()
    remedy = "fill them, as the training rows had none"
    rows = _rows_to_keep(path, columns, kept, schema.missing, notes, 1, remedy)
    y: npt.NDArray[Any]
    if schema.task == "classification":
        y = np.empty(0, np.int64)
        if with_target:
            y, _ = labels(columns[schema.targets[0]], rows, schema.classes)
    else:
        y = np.empty((0, len(schema.targets)))
        if with_target:
            y = quantities(columns, schema.targets, rows)
    _note_filled(schema, columns, notes)
    x, x_test = _encode(path, schema, columns, (rows[:0], rows))
    return _dataset(path, schema, (x, y[:0], x_test, y), notes)


def _dataset(
    path: Path, schema: Schema, arrays: tuple[npt.NDArray[Any], ...], notes: Iterable[str]
) -> Dataset:
    x, y, x_test, y_test = (torch.as_tensor(array) for array in arrays)
    return Dataset(
        name=Path(path.name.removesuffix(".gz")).stem,
        task=schema.task,
        x=x,
        y=y,
        x_test=x_test,
        y_test=y_test,
        classes=schema.classes,
        features=schema.features,
        targets=schema.targets,
        source=str(path),
        notes=tuple(notes),
    )


# what must hold


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise DataError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _check_present(path: Path, table: TableFile, names: Iterable[str]) -> None:
    for name in names:
        if name not in table.columns:
            close = difflib.get_close_matches(name, table.columns, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise DataError(
                f"{path} has no column {name!r}.{hint} It has: {', '.join(table.columns)}."
            )


def _check_values(
    path: Path, table: TableFile, columns: Mapping[str, Gathered], remedy: str
) -> None:
    """Refuse texts among numbers, and infinite numbers."""
    for name, column in columns.items():
        if column.strays:
            place = table.where(name, partial(operator.eq, column.stray))
            numbers = np.count_nonzero(~np.isnan(column.values))
            raise DataError(
                f"{path}: column {name!r} holds {numbers} numbers and {column.strays} texts, the "
                f"first {column.stray!r} in {place}; {remedy.format(name)}."
            )
        if count := np.count_nonzero(np.isinf(column.values)):
            place = table.where(name, _is_infinite)
            raise DataError(
                f"{path}: column {name!r} holds {count} infinite numbers, the first in {place}; "
                "correct them, or leave them empty to have them taken as missing."
            )


def _is_infinite(text: str) -> bool:
    try:
        return math.isinf(float(text))
    except ValueError:
        return False


def _rows_to_keep(
    path: Path,
    columns: Mapping[str, Gathered],
    targets: Sequence[str],
    missing: str,
    notes: list[str],
    least: int,
    remedy: str,
) -> Rows:
    """The numbers of the rows that stay, after what ``missing`` says about missing values."""
    total = len(next(iter(columns.values())).values)
    if not total:
        raise DataError(f"{path} has a header but no rows.")
    absent = {
        name: np.isnan(column.values)
        for name, column in columns.items()
        if column.kind or name in targets
    }
    counts = {name: int(mask.sum()) for name, mask in absent.items() if mask.any()}
    if counts and missing == "error":
        told = ", ".join(f"{name!r} ({count})" for name, count in counts.items())
        raise DataError(f"{path}: values are missing in {told} of {total} rows; {remedy}.")
    keep = np.ones(total, bool)
    for name, mask in absent.items():
        if name in targets or missing == "drop":
            keep &= ~mask
    rows = np.flatnonzero(keep)
    if dropped := total - len(rows):
        reason = "a value" if missing == "drop" else "the target"
        notes.append(f"{dropped} of {total} rows were dropped, as {reason} is missing in them")
    if len(rows) < least:
        raise DataError(
            f"{path}: {len(rows)} of {total} rows are left, at least {least} are needed."
        )
    return rows


# inputs


def _column(path: Path, column: Gathered, train: Rows, missing: str, notes: list[str]) -> Column:
    """How a column is to be encoded, from its training rows."""
    name = column.name
    values = column.values[train]
    absent = np.isnan(values)
    present = values[~absent]
    if not len(present) or (not absent.any() and (present == present[0]).all()):
        how = "constant" if column.kind else "empty"
        notes.append(f"column {name!r} is {how} and was left out")
        return Column(name, "constant")
    indicator = missing == "mean" and bool(absent.any())
    if column.kind == "number":
        return Column(name, "number", fill=float(present.mean()), indicator=indicator)
    if {text.lower() for text in column.texts} <= {"true", "false"}:
        codes = _codes(path, Column(name, "boolean"), column)[train]
        return Column(name, "boolean", fill=float(np.nanmean(codes)), indicator=indicator)
    values_of_it = "value" if len(column.texts) == 1 else "values"
    notes.append(f"column {name!r} is a category of {len(column.texts)} {values_of_it}")
    return Column(name, "category", tuple(sorted(column.texts)), indicator=indicator)


def _note_filled(schema: Schema, columns: Mapping[str, Gathered], notes: list[str]) -> None:
    for column in schema.columns:
        if schema.missing != "mean" or column.kind == "constant":
            continue
        if count := np.count_nonzero(np.isnan(columns[column.name].values)):
            how = "taken as no category" if column.fill is None else f"set to {column.fill:g}"
            notes.append(f"column {column.name!r} has {count} missing values, {how}")


def _encode(
    path: Path, schema: Schema, columns: Mapping[str, Gathered], parts: Sequence[Rows]
) -> list[Values]:
    """The inputs ``(n, d)`` of each part."""
    encoded = [np.empty((len(rows), len(schema.features))) for rows in parts]
    start = 0
    for column in schema.columns:
        if column.kind == "constant":
            continue
        values = _codes(path, column, columns[column.name])
        for x, rows in zip(encoded, parts, strict=True):
            taken = values[rows]
            absent = np.isnan(taken)
            if column.kind == "category":
                for i in range(len(column.categories)):
                    x[:, start + i] = taken == i
            else:
                x[:, start] = taken
                if column.fill is not None:
                    x[absent, start] = column.fill
            if column.indicator:
                x[:, start + len(column.features) - 1] = absent
        start += len(column.features)
    return encoded


def _codes(path: Path, column: Column, gathered: Gathered) -> Values:
    """Numbers as they are; the place of each text among the categories; false 0 and true 1."""
    if column.kind == "number":
        return gathered.values
    categories = ("false", "true") if column.kind == "boolean" else column.categories
    places: dict[str, int] = {name: i for i, name in enumerate(categories)}
    texts = [text.lower() if column.kind == "boolean" else text for text in gathered.texts]
    if unseen := [text for text in texts if text not in places]:
        raise DataError(
            f"{path}: column {column.name!r} holds {unseen[0]!r}, which is none of the known "
            f"categories {', '.join(categories)}."
        )
    lookup = np.array([*(places[text] for text in texts), np.nan])
    return lookup[np.where(np.isnan(gathered.values), -1, gathered.values).astype(np.int64)]
