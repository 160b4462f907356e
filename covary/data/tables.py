"""A table of one's own as a data set."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from covary.data.columns import Gathered, hint_of_spelling, shortened
from covary.data.dataset import Array, DataError, Dataset, needed
from covary.data.reading import MAX_CLASSES, Reading, labels, name_of
from covary.data.rows import new_rows
from covary.data.schema import Column, Rows, Schema
from covary.data.table_files import open_table

MAX_CATEGORIES = 100
MAX_INTEGER_CLASSES = 20  # a target of more different whole numbers is a quantity
MIN_ROWS = 10
_NO_ERRORS: Mapping[str, str] = MappingProxyType({})


def read_table(
    path: str | os.PathLike[str],
    *,
    target: str | Sequence[str] | None = None,
    task: str = "auto",
    test_fraction: float = 0.2,
    seed: int = 0,
    missing: str | None = None,
    categories: Collection[str] = (),
    drop: Collection[str] = (),
    errors: Mapping[str, str] = _NO_ERRORS,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    schema: Schema | None = None,
    unseen: str = "flag",
) -> tuple[Dataset, Schema]:
    """Read a file with named columns: csv (also tsv), JSON lines, both also gzipped, or parquet.

    Numbers stay as they are. Texts become a 0/1 column for each of their values, in sorted order,
    at most 100. A column of ``true`` and ``false`` becomes 0 and 1. Dates and times as ISO 8601
    writes them (``2024-03-01``, ``2024-03-01T12:30:00+01:00``; UTC without a time zone) become days
    since 1970-01-01, with sine and cosine of month, weekday and hour where these vary. A column
    that is mostly numbers or dates with other texts in it is an error. Columns that are empty or do
    not vary in the training part are left out. Infinite numbers are an error, and so are those
    beyond 1e36, which do not fit into the 32 bits that networks compute in. All that is wrong with
    a table is told in one error. Missing is what is empty, or one of ``NA N/A NaN nan null NULL
    None ?``. Whatever is left out, dropped or filled is told in the notes of the ``Dataset``.

    Args:
        path: the file.
        target: the column to predict, or several (regression).
        task: ``"classification"``, ``"regression"``, or ``"auto"``: classification if the target
            is text, or whole numbers of at most 20 different values.
        test_fraction: the part of the rows kept for testing, each class in proportion.
        seed: of the random division into training and test rows.
        missing: ``"error"``, as it is by default; ``"mean"``, which puts the mean of the training
            rows in place of a missing number or date, no category in place of a missing text, and
            adds a 0/1 column ``<name> missing``; or ``"drop"``, which drops rows with a missing
            value. The latter two drop the rows without a target. For rows of a ``schema`` see
            ``read_rows``.
        categories: columns of numbers that are names, e.g. postcodes.
        drop: columns to leave out.
        errors: by the name of a column of numbers, the column that has the standard deviations of
            its errors, in the same unit. It is no input; ``Dataset.inputs`` are Moments then.
        encoding: of a csv file or of JSON lines.
        delimiter: of a csv file; otherwise the most frequent of ``, ; tab |`` in its header.
        schema: of an earlier table. The rows are then encoded as that one's, and all of them are
            test rows; the target may be absent (``y_test`` then has length 0), and of the other
            arguments ``missing``, ``unseen``, ``encoding`` and ``delimiter`` have an effect.
        unseen: what becomes of texts that the earlier table did not have: see ``read_rows``.

    Returns:
        The data, and the schema with which to read more of the kind.
    """
    table = open_table(Path(path), encoding=encoding, delimiter=delimiter)
    if schema is not None:
        return new_rows(table, schema, unseen=unseen, missing=missing or "flag"), schema
    missing = missing or "error"
    reading = Reading(table, None, errors)
    if not target:
        raise DataError(f"Name the column to predict (--target): {shortened(table.columns, 25)}.")
    targets = (target,) if isinstance(target, str) else tuple(dict.fromkeys(target))
    reading.notes += [f"column {name!r} was left out as asked" for name in drop]
    reading.check_choice("task", task, ("auto", "classification", "regression"))
    reading.check_choice("missing", missing, ("error", "mean", "drop"))
    if not 0 < test_fraction < 1:
        reading.add(f"test_fraction must be between 0 and 1, got {test_fraction}")
    reading.check_present((*targets, *drop, *categories, *errors, *errors.values()))
    inputs = _inputs(reading, targets, drop)
    limits = dict.fromkeys(inputs, MAX_CATEGORIES) | dict.fromkeys(targets, MAX_CLASSES)
    texts = dict.fromkeys(categories, "text")
    reading.gather(reading.wanted([*inputs, *targets]), texts, limits)
    rows = _rows_to_keep(reading, inputs, targets, missing)
    y, classes = _target(reading, targets, rows, task)
    reading.tell()
    task = "classification" if classes else "regression"
    train, test = _split(y, task, test_fraction, seed, reading.notes)
    columns = _encoded(reading, inputs, rows[train], missing)
    schema = Schema(columns, task, targets, classes, missing)
    return _dataset(reading, schema, (rows[train], y[train]), (rows[test], y[test])), schema


def _dataset(reading: Reading, schema: Schema, *parts: tuple[Rows, Array]) -> Dataset:
    """The data of a training and a test part: numbers of rows, and their targets."""
    if not schema.features:
        label = reading.table.label
        raise DataError(f"{label}: no input column varies, so there is nothing to predict from.")
    columns = reading.columns
    train, test = (
        (schema.encode(columns, rows), y, schema.encode_errors(columns, rows)) for rows, y in parts
    )
    return reading.dataset(schema, train, test)


def _inputs(reading: Reading, targets: Sequence[str], drop: Collection[str]) -> list[str]:
    """The columns to predict from.

    Targets are not left out; errors are of inputs; a column of errors is nothing else.
    """
    if both := [name for name in targets if name in drop]:
        reading.add(f"column {both[0]!r} cannot be the target and be dropped")
    roles = dict.fromkeys(drop, "left out") | dict.fromkeys(targets, "the target")
    for name, error in reading.errors.items():
        if name in roles:
            reading.add(f"column {name!r} is {roles[name]}; --error is for columns to predict from")
        if error in roles:
            reading.add(f"column {error!r} is {roles[error]} and cannot be the errors of {name!r}")
        if error in reading.errors:
            reading.add(
                f"column {error!r} is said to hold the errors of {name!r}, so it is no input "
                "and has no errors of its own"
            )
    others = {*targets, *drop, *reading.errors.values()}
    inputs = [name for name in reading.table.columns if name not in others]
    if not inputs:
        reading.add(f"no column is left to predict {', '.join(targets)} from")
    return inputs


def _encoded(
    reading: Reading, inputs: Iterable[str], train: Rows, missing: str
) -> tuple[Column, ...]:
    """How the input columns are to be encoded, from the training rows."""
    found = tuple(
        Column.of(
            reading.columns[name], train, missing, reading.notes, reading.errors.get(name, "")
        )
        for name in inputs
    )
    for column in found:
        if column.error:
            _tell_errors(reading, column.name, column.error, train)
    return found


def _tell_errors(reading: Reading, name: str, error: str, train: Rows) -> None:
    """Note that a column has errors, and if they are larger than what they are of."""
    reading.notes.append(f"column {error!r} holds the errors of {name!r} and is no input")
    values, std = (reading.columns[each].values[train] for each in (name, error))
    share = (std > np.nanstd(values)).mean()
    if share > 0.5:
        reading.notes.append(
            f"errors {error!r} are larger than the spread of {name!r} in {share:.0%} of "
            "the training rows, so that column says little; are they standard deviations "
            "in its unit?"
        )


def _rows_to_keep(
    reading: Reading, inputs: Iterable[str], targets: Sequence[str], missing: str
) -> Rows:
    """The numbers of the rows that stay, after what ``missing`` says about missing values."""
    wanted = [*inputs, *targets, *(reading.errors.values() if missing == "drop" else ())]
    columns = {name: reading.columns[name] for name in wanted if name in reading.columns}
    total = len(next(iter(columns.values())).values) if columns else 0
    if not total:
        if columns and not reading.lacks_rows:
            reading.add("has a header but no rows")
        return np.arange(0)
    absent = {
        name: np.isnan(column.values)
        for name, column in columns.items()
        if (column.kind or name in targets) and reading.is_fine(name)
    }
    counts = {name: mask.sum() for name, mask in absent.items() if mask.any()}
    if counts and missing == "error":
        told = shortened(f"{name!r} ({count})" for name, count in counts.items())
        reading.add(
            f"values are missing in {told} of {total} rows; fill them with --missing mean, drop "
            "such rows with --missing drop, or leave columns out with --drop"
        )
    keep = np.ones(total, bool)
    for name, mask in absent.items():
        if name in targets or missing == "drop":
            keep &= ~mask
    rows = np.flatnonzero(keep)
    if dropped := total - len(rows):
        reason = "a value" if missing == "drop" else "the target"
        told = f"{dropped} of {total} rows were dropped, as {reason} is missing in them"
        reading.notes.append(told)
    if len(rows) < MIN_ROWS:
        if reading.lacks_rows:  # too few to say anything of the target
            return rows[:0]
        reading.add(f"{len(rows)} of {total} rows are left, at least {MIN_ROWS} are needed")
    reading.check_errors(rows)
    return rows


def _target(
    reading: Reading, targets: Sequence[str], rows: Rows, task: str
) -> tuple[Array, tuple[str, ...]]:
    """Labels ``(n,)`` and the names of classes, or targets ``(n, t)`` and no names.

    The target must be one that can be learnt.
    """
    if not (len(rows) and all(map(reading.is_fine, targets))):
        return rows, ()
    columns = [reading.columns[name] for name in targets]
    y = np.stack([column.values[rows] for column in columns], axis=1)
    with reading.collected():
        if _task_of(columns, y, task, reading.notes) == "classification":
            return labels(columns[0], y[:, 0])
        for name, values in zip(targets, y.T, strict=True):
            if (values == values[0]).all():
                always = f"The target {name!r} is always {name_of(values[0])}"
                raise DataError(f"{always}; there is nothing to learn.")
    return y, ()


def _task_of(columns: Sequence[Gathered], y: Array, task: str, notes: list[str]) -> str:
    """What is asked for, or what the target suggests; a note says why."""
    if dates := [column.name for column in columns if column.kind == "date"]:
        raise DataError(
            f"The target {dates[0]!r} holds dates, which are not predicted; give days as numbers, "
            f"or take them as classes with --category {dates[0]!r}."
        )
    texts = [column.name for column in columns if column.kind == "text"]
    if len(columns) > 1 or task == "regression":
        if texts or task == "classification":
            wrong = f"{texts[0]!r} holds texts" if texts else "there are several targets"
            raise DataError(
                f"Regression needs targets that are numbers, classification a single "
                f"one, but {wrong}."
            )
        return "regression"
    if task == "classification":
        return task
    values = np.unique(y)
    whole = bool((values == np.rint(values)).all())
    if texts:
        if hint := hint_of_spelling(columns[0].texts):
            raise DataError(
                f"The target {texts[0]!r} holds texts{hint}. If they are labels, say so: --task "
                "classification."
            )
        task, kind = "classification", "texts"
    elif whole and len(values) <= MAX_INTEGER_CLASSES:
        task, kind = "classification", f"{len(values)} different whole numbers"
    else:
        task, kind = "regression", f"{len(values)} different numbers"
    notes.append(f"{task}, as the target {columns[0].name!r} holds {kind}")
    return task


def _split(
    y: Array, task: str, test_fraction: float, seed: int, notes: list[str]
) -> tuple[Rows, Rows]:
    """Row numbers for training and for testing."""
    with needed("scikit-learn", "dividing rows at random", "sklearn"):
        from sklearn.model_selection import train_test_split

    rows = np.arange(len(y))
    divided = partial(train_test_split, rows, test_size=test_fraction, random_state=seed)
    if task == "classification":
        try:
            train, test = divided(stratify=y)
            return train, test
        except ValueError:
            notes.append(
                "some classes have too few rows to be divided in proportion, so rows were divided "
                "without regard to them"
            )
    train, test = divided()
    return train, test
