"""A table of one's own, csv or parquet, as a data set."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from covary.data.dataset import Array, DataError, Dataset, needed
from covary.data.schema import Column, Rows, Schema
from covary.data.table_files import (
    CsvTable,
    Gathered,
    TableFile,
    Values,
    as_number,
    gather,
    open_table,
    shortened,
)

MAX_CATEGORIES = 100
MAX_CLASSES = 1000
MAX_INTEGER_CLASSES = 20  # a target of more different whole numbers is a quantity
MAX_NUMBER = 1e36  # float32 ends at 3e38
MAX_OF_A_KIND = 3  # problems of one kind that are told at length
MIN_ROWS = 10
_STRAYS, _HUGE = "texts among numbers", "infinite or huge numbers"
_BAD_ERRORS = "errors that are no standard deviations"
_NO_ERRORS: Mapping[str, str] = MappingProxyType({})
# Remedies for texts among numbers and for missing values, in a new table and in later rows.
_CORRECT = (
    "correct them, take them as categories with --category {0!r}, or --drop {0!r}",
    "correct them, as they were numbers in training",
)
_FILL = (
    "fill them with --missing mean, drop such rows with --missing drop, or leave columns out with "
    "--drop",
    "fill them, as the training rows had none",
)


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
    errors: Mapping[str, str] = _NO_ERRORS,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    schema: Schema | None = None,
) -> tuple[Dataset, Schema]:
    """Read a csv file (also tsv, also gzipped) or a parquet file with named columns.

    Numbers stay as they are. Texts become a 0/1 column for each of their values, in sorted order,
    at most 100. A column of ``true`` and ``false`` becomes 0 and 1. A column that is mostly numbers
    with some texts in it is an error. Columns that do not vary in the training part are left out.
    Infinite numbers are an error, and so are those beyond 1e36, which do not fit into the 32 bits
    that networks compute in. All that is wrong with a table is told in one error. Missing is what
    is empty, or one of ``NA N/A NaN nan null NULL None ?``; a column with no value at all is left
    out. Whatever is left out, dropped or filled is told in the notes of the ``Dataset``.

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
        errors: by the name of a column of numbers, the column that has the standard deviations of
            its errors, in the same unit. It is no input; ``Dataset.inputs`` are Moments then.
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
    reading = Reading(path, table, schema, errors if schema is None else schema.errors)
    known = table.columns
    if schema is not None:
        return _new_rows(reading, schema), schema
    if not target:
        raise DataError(f"Name the column to predict (--target): {shortened(known, 25)}.")
    targets = (target,) if isinstance(target, str) else tuple(dict.fromkeys(target))
    reading.notes += [f"column {name!r} was left out as asked" for name in drop]
    reading.check_choice("task", task, ("auto", "classification", "regression"))
    reading.check_choice("missing", missing, ("error", "mean", "drop"))
    if not 0 < test_fraction < 1:
        reading.add(f"test_fraction must be between 0 and 1, got {test_fraction}")
    reading.check_present((*targets, *drop, *categories, *errors, *errors.values()))
    reading.check_roles(targets, drop)
    inputs = [name for name in known if name not in {*targets, *drop, *errors.values()}]
    if not inputs:
        reading.add(f"no column is left to predict {', '.join(targets)} from")
    limits = dict.fromkeys(inputs, MAX_CATEGORIES) | dict.fromkeys(targets, MAX_CLASSES)
    reading.gather([*inputs, *targets], dict.fromkeys(categories, "text"), limits)
    rows = reading.rows_to_keep(inputs, targets, missing)
    y, classes = reading.target(targets, rows, task)
    reading.tell()
    task = "classification" if classes else "regression"
    train, test = _split(y, task, test_fraction, seed, reading.notes)
    schema = Schema(reading.encoded(inputs, rows[train], missing), task, targets, classes, missing)
    if not schema.features:
        raise DataError(f"{path}: no input column varies, so there is nothing to predict from.")
    return reading.dataset(schema, (rows[train], y[train]), (rows[test], y[test])), schema


def _new_rows(reading: Reading, schema: Schema) -> Dataset:
    """All rows of a table encoded by the schema of another one."""
    inputs = {column.name: column for column in schema.columns if column.kind != "constant"}
    reading.check_present([*inputs, *schema.errors.values()])
    targets = [name for name in schema.targets if name in reading.table.columns]
    kinds = dict.fromkeys(targets, _kind_of_classes(schema.classes) if schema.classes else "number")
    for name, column in inputs.items():
        kinds[name] = "number" if column.kind == "number" else "text"
    reading.gather([*inputs, *targets], kinds, limits={})
    used = {column.name for column in schema.columns} | reading.columns.keys()
    unused = [name for name in reading.table.columns if name not in used]
    reading.notes += [f"column {name!r} is not used" for name in unused]
    with_target = all(
        name in reading.columns and not np.isnan(reading.columns[name].values).all()
        for name in schema.targets
    )
    if not with_target:
        reading.notes.append("there is no target to compare predictions with")
        targets = []
    rows = reading.rows_to_keep(inputs, targets, schema.missing)
    y: Array = np.empty(0, np.int64) if schema.classes else np.empty((0, len(schema.targets)))
    if with_target:
        y, _ = reading.target(targets, rows, schema.task)
    for name, column in inputs.items():
        if name in reading.columns:
            with reading.collected():
                column.codes(reading.columns[name])
    reading.tell()
    return reading.dataset(schema, (rows[:0], y[:0]), (rows, y))


class Reading:
    """A table that is being read: its columns, notes on it, and all that is wrong with it.

    Problems are collected, and told in one error.
    """

    def __init__(
        self, path: Path, table: TableFile, schema: Schema | None, errors: Mapping[str, str]
    ) -> None:
        self.path, self.table, self.schema = path, table, schema
        self.errors = errors  # by the name of a column, the one that has its errors
        self.columns: dict[str, Gathered] = {}
        self.notes: list[str] = []
        self.lacks_rows = False  # lines that do not fit the header are among no column's values
        # by kind: sentences without full stop, and the columns that they are about
        self._problems: dict[str, list[tuple[str, str]]] = {}

    def add(self, sentence: str, kind: str = "", column: str = "") -> None:
        """Remember a problem."""
        self._problems.setdefault(kind or sentence, []).append((sentence, column))

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Remember a ``DataError`` instead of raising it."""
        try:
            yield
        except DataError as error:
            self.add(str(error).removesuffix("."))

    def tell(self) -> None:
        """Raise a ``DataError`` that tells everything, three problems of a kind at length."""
        told = []
        for kind, found in self._problems.items():
            told += [sentence for sentence, _ in found[:MAX_OF_A_KIND]]
            if more := found[MAX_OF_A_KIND:]:
                names = shortened(repr(column) for _, column in more)
                told.append(f"{kind} also in {len(more)} more columns: {names}")
        if len(told) == 1:
            raise DataError(f"{self.path}: {told[0]}.")
        if told:
            count = sum(map(len, self._problems.values()))
            listed = "".join(f"\n- {sentence}" for sentence in told)
            raise DataError(f"{self.path} has {count} problems:{listed}")

    def is_fine(self, name: str) -> bool:
        """Whether nothing is wrong with this column so far."""
        return all(name != column for found in self._problems.values() for _, column in found)

    def check_choice(self, name: str, value: str, allowed: Sequence[str]) -> None:
        """An option must have one of the allowed values."""
        if value not in allowed:
            self.add(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    def check_present(self, names: Iterable[str]) -> None:
        """The table must have these columns."""
        known = self.table.columns
        for name in (name for name in dict.fromkeys(names) if name not in known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            what = f"there is no column {name!r}.{hint} It has: {shortened(known, 25)}"
            self.add(what, "names of no column", name)

    def gather(
        self, wanted: Iterable[str], kinds: Mapping[str, str], limits: Mapping[str, int]
    ) -> None:
        """Read those of the wanted columns, and of columns of errors, that can be read."""
        kinds = {**kinds, **dict.fromkeys(self.errors.values(), "number")}
        wanted = dict.fromkeys((*wanted, *self.errors.values()))
        there = [name for name in wanted if name in self.table.columns]
        refused = self.table.refused
        for name in there:
            if name in refused:
                self.add(f"column {name!r} {refused[name]}", "other types", name)
        readable = [name for name in there if name not in refused]
        if readable:  # none would be taken for all by pyarrow
            self.columns = gather(self.table, readable, kinds, limits)
        if isinstance(self.table, CsvTable) and self.table.is_ragged:
            self.lacks_rows = True
            self.add(self.table.ragged_lines())
        for column in self.columns.values():
            self._check_values(column)

    def _check_values(self, column: Gathered) -> None:
        """Refuse too many texts, texts among numbers, numbers without or beyond all size."""
        name, values = column.name, column.values
        if column.has_too_many_texts:
            some = shortened(map(repr, column.texts), 3)
            self.add(
                f"column {name!r} holds more than {column.limit} different texts ({some}); leave "
                f"it out with --drop {name!r}, or put them into groups",
                "too many texts",
                name,
            )
        if column.strays:
            first = shortened([repr(column.stray)])
            remedy = _CORRECT[self.schema is not None].format(name)
            if name in self.errors.values():
                remedy = "correct them, as standard deviations of errors are numbers"
            place = self._place(name, lambda text: text == column.stray, _STRAYS)
            what = f"{np.count_nonzero(~np.isnan(values))} numbers and {column.strays} texts"
            told = f"column {name!r} holds {what}, the first {first} in {place}; {remedy}"
            self.add(told, _STRAYS, name)
        if column.kind != "text" and (count := np.count_nonzero(np.abs(values) > MAX_NUMBER)):
            place = self._place(name, lambda text: abs(as_number(text)) > MAX_NUMBER, _HUGE)
            self.add(
                f"column {name!r} is infinite or beyond {MAX_NUMBER:g} in {count} of {len(values)} "
                f"rows, first in {place}; correct them, choose a larger scale, or leave them empty "
                "to have them taken as missing",
                _HUGE,
                name,
            )

    def _place(self, column: str, matches: Callable[[str], bool], kind: str) -> str:
        """Where a value stands; not looked for where the problem is not told at length."""
        if len(self._problems.get(kind, ())) >= MAX_OF_A_KIND:
            return ""
        places = self.table.places(column)
        return next((place for place, value in places if matches(value.strip())), "an unknown row")

    def check_roles(self, targets: Sequence[str], drop: Collection[str]) -> None:
        """Targets are not left out; errors are of inputs; a column of errors is nothing else."""
        if both := [name for name in targets if name in drop]:
            self.add(f"column {both[0]!r} cannot be the target and be dropped")
        roles = dict.fromkeys(drop, "left out") | dict.fromkeys(targets, "the target")
        for name, error in self.errors.items():
            if name in roles:
                self.add(
                    f"column {name!r} is {roles[name]}; --error is for columns to predict from"
                )
            if error in roles:
                self.add(f"column {error!r} is {roles[error]} and cannot be the errors of {name!r}")
            if error in self.errors:
                self.add(
                    f"column {error!r} is said to hold the errors of {name!r}, so it is no input "
                    "and has no errors of its own"
                )

    def _check_errors(self, rows: Rows) -> None:
        """Errors are of numbers, and 0 or more in each of these rows where there is a number."""
        for name, error in self.errors.items():
            if not {name, error} <= self.columns.keys():
                continue  # which is told already
            if self.columns[name].kind == "text":
                self.add(f"column {name!r} holds texts, which have no errors ({error!r})")
            elif self.is_fine(name) and self.is_fine(error):
                values, std = (self.columns[each].values[rows] for each in (name, error))
                self._check_sizes(error, std[~np.isnan(values)])

    def _check_sizes(self, error: str, std: Values) -> None:
        if negative := np.count_nonzero(std < 0):
            place = self._place(error, lambda text: as_number(text) < 0, _BAD_ERRORS)
            what = f"is negative in {negative} of {len(std)} rows, first in {place}"
            told = f"column {error!r} {what}; standard deviations of errors are 0 or more"
            self.add(told, _BAD_ERRORS, error)
        if absent := np.count_nonzero(np.isnan(std)):
            self.add(
                f"column {error!r} has no error for {absent} of {len(std)} rows; fill them (0 is "
                "an exact value), or drop such rows with --missing drop",
                _BAD_ERRORS,
                error,
            )

    def encoded(self, inputs: Iterable[str], train: Rows, missing: str) -> tuple[Column, ...]:
        """How the input columns are to be encoded, from the training rows."""
        found = tuple(
            Column.of(self.columns[name], train, missing, self.notes, self.errors.get(name, ""))
            for name in inputs
        )
        for column in found:
            if column.error:
                self._tell_errors(column.name, column.error, train)
        return found

    def _tell_errors(self, name: str, error: str, train: Rows) -> None:
        """Note that a column has errors, and if they are larger than what they are of."""
        self.notes.append(f"column {error!r} holds the errors of {name!r} and is no input")
        values, std = (self.columns[each].values[train] for each in (name, error))
        share = (std > np.nanstd(values)).mean()
        if share > 0.5:
            self.notes.append(
                f"errors {error!r} are larger than the spread of {name!r} in {share:.0%} of "
                "the training rows, so that column says little; are they standard deviations "
                "in its unit?"
            )

    def rows_to_keep(self, inputs: Iterable[str], targets: Sequence[str], missing: str) -> Rows:
        """The numbers of the rows that stay, after what ``missing`` says about missing values."""
        wanted = [*inputs, *targets, *(self.errors.values() if missing == "drop" else ())]
        columns = {name: self.columns[name] for name in wanted if name in self.columns}
        total = len(next(iter(columns.values())).values) if columns else 0
        if not total:
            if columns and not self.lacks_rows:
                self.add("has a header but no rows")
            return np.arange(0)
        absent = {
            name: np.isnan(column.values)
            for name, column in columns.items()
            if (column.kind or name in targets) and self.is_fine(name)
        }
        counts = {name: mask.sum() for name, mask in absent.items() if mask.any()}
        if counts and missing == "error":
            told = shortened(f"{name!r} ({count})" for name, count in counts.items())
            remedy = _FILL[self.schema is not None]
            self.add(f"values are missing in {told} of {total} rows; {remedy}")
        keep = np.ones(total, bool)
        for name, mask in absent.items():
            if name in targets or missing == "drop":
                keep &= ~mask
        rows = np.flatnonzero(keep)
        if dropped := total - len(rows):
            reason = "a value" if missing == "drop" else "the target"
            told = f"{dropped} of {total} rows were dropped, as {reason} is missing in them"
            self.notes.append(told)
        least = MIN_ROWS if self.schema is None else 1
        if len(rows) < least:
            if self.lacks_rows:  # too few to say anything of the target
                return rows[:0]
            self.add(f"{len(rows)} of {total} rows are left, at least {least} are needed")
        self._check_errors(rows)
        return rows

    def target(
        self, targets: Sequence[str], rows: Rows, task: str
    ) -> tuple[Array, tuple[str, ...]]:
        """Labels ``(n,)`` and the names of classes, or targets ``(n, t)`` and no names.

        Without the schema of an earlier table, the target must be one that can be learnt.
        """
        schema = self.schema
        if not (len(rows) and all(map(self.is_fine, targets))):
            return rows, ()
        columns = [self.columns[name] for name in targets]
        y = np.stack([column.values[rows] for column in columns], axis=1)
        with self.collected():
            if schema is None:
                task = _task_of(columns, y, task, self.notes)
            if task == "classification":
                return _labels(columns[0], y[:, 0], schema.classes if schema else ())
            for name, values in zip(targets, y.T, strict=True):
                if schema is None and (values == values[0]).all():
                    always = f"The target {name!r} is always {_name(values[0])}"
                    raise DataError(f"{always}; there is nothing to learn.")
        return y, ()

    def dataset(self, schema: Schema, *parts: tuple[Rows, Array]) -> Dataset:
        """The data of a training and a test part: numbers of rows, and their targets."""
        for column in schema.columns:
            if schema.missing != "mean" or column.kind == "constant":
                continue
            if count := np.count_nonzero(np.isnan(self.columns[column.name].values)):
                how = "taken as no category" if column.fill is None else f"set to {column.fill:g}"
                self.notes.append(f"column {column.name!r} has {count} missing values, {how}")
        arrays = [array for rows, y in parts for array in (schema.encode(self.columns, rows), y)]
        name = Path(self.path.name.removesuffix(".gz")).stem
        names = (schema.classes, schema.features, schema.targets)
        found = Dataset.of(name, schema.task, arrays, *names, str(self.path), tuple(self.notes))
        std = [schema.encode_errors(self.columns, rows) for rows, _ in parts]
        x_std, x_test_std = (None if each is None else torch.from_numpy(each) for each in std)
        return replace(found, x_std=x_std, x_test_std=x_test_std)


def _task_of(columns: Sequence[Gathered], y: Array, task: str, notes: list[str]) -> str:
    """What is asked for, or what the target suggests; a note says why."""
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
        task, kind = "classification", "texts"
    elif whole and len(values) <= MAX_INTEGER_CLASSES:
        task, kind = "classification", f"{len(values)} different whole numbers"
    else:
        task, kind = "regression", f"{len(values)} different numbers"
    notes.append(f"{task}, as the target {columns[0].name!r} holds {kind}")
    return task


def _labels(
    column: Gathered, values: Values, classes: tuple[str, ...]
) -> tuple[Array, tuple[str, ...]]:
    """Labels ``(n,)`` and the names of the classes, sorted unless they are given."""
    found, inverse = np.unique(values, return_inverse=True)
    if column.kind == "text":
        texts = list(column.texts)
        names = [texts[int(value)] for value in found]
    else:
        names = [_name(value) for value in found]
    target = f"The target {column.name!r}"
    if not classes:
        classes = tuple(sorted(names) if column.kind == "text" else names)
        if len(classes) < 2:
            raise DataError(f"{target} has a single class, {classes[0]!r}.")
        if len(classes) > MAX_CLASSES:
            many = f"{len(classes)} different values, too many for classes"
            raise DataError(f"{target} has {many}; try --task regression.")
    places = {name: i for i, name in enumerate(classes)}
    if unseen := [name for name in names if name not in places]:
        told = shortened(map(repr, unseen), 3)
        raise DataError(f"{target} holds {told}, none of the classes {shortened(classes)}.")
    return np.array([places[name] for name in names])[inverse], classes


def _name(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(float(value))


def _kind_of_classes(classes: Sequence[str]) -> str:
    """Whether the classes come from a column of numbers or of texts, as ``Gathered.kind``."""
    try:
        numbers = all(_name(float(name)) == name for name in classes)
    except (ValueError, OverflowError):
        numbers = False
    return "number" if numbers else "text"


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
