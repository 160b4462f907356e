"""A table of one's own, csv or parquet, as a data set."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError, Dataset, needed
from covary.data.schema import Column, Rows, Schema
from covary.data.table_files import Gathered, TableFile, Values, gather, open_table, shortened

MAX_CATEGORIES = 100
MAX_CLASSES = 1000
MAX_INTEGER_CLASSES = 20  # a target of more different whole numbers is a quantity
MAX_NUMBER = 1e36  # float32 ends at 3e38
MAX_OF_A_KIND = 3  # problems of one kind that are told at length
MIN_ROWS = 10
_STRAYS, _HUGE = "texts among numbers", "infinite or huge numbers"
_CATEGORIES = "correct them, take them as categories with --category {0!r}, or --drop {0!r}"
_FILL = (
    "fill them with --missing mean, drop such rows with --missing drop, or leave columns out with "
    "--drop"
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
        raise DataError(f"Name the column to predict (--target): {shortened(table.columns, 25)}.")
    targets = (target,) if isinstance(target, str) else tuple(dict.fromkeys(target))
    problems = Problems(path, table)
    notes = [f"column {name!r} was left out as asked" for name in drop]
    problems.check_choice("task", task, ("auto", "classification", "regression"))
    problems.check_choice("missing", missing, ("error", "mean", "drop"))
    if not 0 < test_fraction < 1:
        problems.add(f"test_fraction must be between 0 and 1, got {test_fraction}")
    if both := [name for name in targets if name in drop]:
        problems.add(f"column {both[0]!r} cannot be the target and be dropped")
    problems.check_present((*targets, *drop, *categories))
    inputs = [name for name in table.columns if name not in {*targets, *drop}]
    if not inputs:
        problems.add(f"no column is left to predict {', '.join(targets)} from")
    limits = dict.fromkeys(inputs, MAX_CATEGORIES) | dict.fromkeys(targets, MAX_CLASSES)
    kinds = dict.fromkeys(categories, "text")
    columns = problems.gather([*inputs, *targets], kinds, _CATEGORIES, limits)
    rows = problems.rows_to_keep(columns, targets, missing, notes, least=MIN_ROWS, remedy=_FILL)
    aim = _target(problems, columns, targets, task, rows, notes)
    train, test = split(aim.y, aim.task, test_fraction, seed, notes)
    encoding_of = partial(Column.of, train=rows[train], missing=missing, notes=notes)
    described = tuple(encoding_of(columns[name]) for name in inputs)
    schema = Schema(described, aim.task, targets, aim.classes, missing)
    if not schema.features:
        raise DataError(f"{path}: no input column varies, so there is nothing to predict from.")
    schema.note_filled(columns, notes)
    x, x_test = schema.encode(columns, (rows[train], rows[test]))
    return _dataset(path, schema, (x, aim.y[train], x_test, aim.y[test]), notes), schema


def _new_rows(path: Path, table: TableFile, schema: Schema) -> Dataset:
    """All rows of a table encoded by the schema of another one."""
    problems, notes = Problems(path, table), []
    inputs = [column for column in schema.columns if column.kind != "constant"]
    names = [column.name for column in inputs]
    problems.check_present(names)
    targets = [name for name in schema.targets if name in table.columns]
    target_kind = kind_of_classes(schema.classes) if schema.classes else "number"
    kinds = {
        **dict.fromkeys(targets, target_kind),
        **{column.name: "number" if column.kind == "number" else "text" for column in inputs},
    }
    remedy = "correct them, as they were numbers in training"
    columns = problems.gather([*names, *targets], kinds, remedy)
    known = {*columns, *(column.name for column in schema.columns)}
    notes += [f"column {name!r} is not used" for name in table.columns if name not in known]
    present = [
        name for name in targets if name in columns and not np.isnan(columns[name].values).all()
    ]
    with_target = len(present) == len(schema.targets)
    if not with_target:
        notes.append("there is no target to compare predictions with")
        columns = {name: column for name, column in columns.items() if name in names}
    kept = schema.targets if with_target else ()
    remedy = "fill them, as the training rows had none"
    rows = problems.rows_to_keep(columns, kept, schema.missing, notes, least=1, remedy=remedy)
    classify = schema.task == "classification"
    y: npt.NDArray[Any] = np.empty(0, np.int64) if classify else np.empty((0, len(schema.targets)))
    if with_target and problems.concern_none_of(targets):
        with problems.collected():
            if classify:
                y, _ = labels(columns[schema.targets[0]], rows, schema.classes)
            else:
                y = quantities(columns, schema.targets, rows)
    for column in inputs:
        if column.name in columns:
            with problems.collected():
                column.codes(columns[column.name])
    problems.tell()
    schema.note_filled(columns, notes)
    x, x_test = schema.encode(columns, (rows[:0], rows))
    return _dataset(path, schema, (x, y[:0], x_test, y), notes)


def _dataset(
    path: Path, schema: Schema, arrays: tuple[npt.NDArray[Any], ...], notes: Iterable[str]
) -> Dataset:
    name = Path(path.name.removesuffix(".gz")).stem
    names = (schema.classes, schema.features, schema.targets)
    return Dataset.of(name, schema.task, arrays, *names, str(path), tuple(notes))


# what must hold


class Problems:
    """All that is wrong with a table, told in one error and not one by one."""

    def __init__(self, path: Path, table: TableFile) -> None:
        self.path, self.table = path, table
        self._found: dict[str, list[tuple[str, str]]] = {}

    def add(self, sentence: str, kind: str = "", column: str = "") -> None:
        """Remember a problem: a sentence without full stop, and the column that it is about."""
        self._found.setdefault(kind or sentence, []).append((sentence, column))

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
        for kind, found in self._found.items():
            told += [sentence for sentence, _ in found[:MAX_OF_A_KIND]]
            if more := found[MAX_OF_A_KIND:]:
                names = shortened(repr(column) for _, column in more)
                told.append(f"{kind} also in {len(more)} more columns: {names}")
        if len(told) == 1:
            raise DataError(f"{self.path}: {told[0]}.")
        if told:
            count = sum(map(len, self._found.values()))
            listed = "".join(f"\n- {sentence}" for sentence in told)
            raise DataError(f"{self.path} has {count} problems:{listed}")

    def concern_none_of(self, names: Iterable[str]) -> bool:
        """Whether nothing is wrong with these columns so far."""
        known = {column for found in self._found.values() for _, column in found}
        return known.isdisjoint(names)

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
        self,
        wanted: Iterable[str],
        kinds: Mapping[str, str],
        remedy: str,
        limits: Mapping[str, int] | None = None,
    ) -> dict[str, Gathered]:
        """Those of the wanted columns that can be read; ``remedy`` is for texts among numbers."""
        there = [name for name in wanted if name in self.table.columns]
        for name in there:
            if name in self.table.refused:
                self.add(f"column {name!r} {self.table.refused[name]}", "other types", name)
        readable = [name for name in there if name not in self.table.refused]
        if not readable:  # which pyarrow would take for all columns
            return {}
        columns = gather(self.table, readable, kinds=kinds, limits=limits or {})
        for column in columns.values():
            self._check_values(column, remedy.format(column.name))
        return columns

    def _check_values(self, column: Gathered, remedy: str) -> None:
        """Refuse too many texts, texts among numbers, numbers without or beyond all size."""
        name, values = column.name, column.values
        if column.has_too_many_texts:
            some = shortened(map(repr, column.texts), 3)
            what = f"more than {column.limit} different texts ({some})"
            remedy = f"leave it out with --drop {name!r}, or put them into groups"
            self.add(f"column {name!r} holds {what}; {remedy}", "too many texts", name)
        if column.strays:
            first = shortened([repr(column.stray)])
            place = self._place(name, partial(operator.eq, column.stray), _STRAYS)
            what = f"{np.count_nonzero(~np.isnan(values))} numbers and {column.strays} texts"
            told = f"column {name!r} holds {what}, the first {first} in {place}; {remedy}"
            self.add(told, _STRAYS, name)
        if column.kind != "text" and (count := np.count_nonzero(np.abs(values) > MAX_NUMBER)):
            place = self._place(name, _is_too_large, _HUGE)
            self.add(
                f"column {name!r} is infinite or beyond {MAX_NUMBER:g} in {count} of {len(values)} "
                f"rows, first in {place}; correct them, choose a larger unit, or leave them empty "
                "to have them taken as missing",
                _HUGE,
                name,
            )

    def _place(self, column: str, matches: Callable[[str], bool], kind: str) -> str:
        """Where a value stands; not looked for where the problem is not told at length."""
        told = len(self._found.get(kind, ())) < MAX_OF_A_KIND
        return self.table.where(column, matches) if told else ""

    def rows_to_keep(
        self,
        columns: Mapping[str, Gathered],
        targets: Sequence[str],
        missing: str,
        notes: list[str],
        *,
        least: int,
        remedy: str,
    ) -> Rows:
        """The numbers of the rows that stay, after what ``missing`` says about missing values."""
        total = len(next(iter(columns.values())).values) if columns else 0
        if not total:
            if columns:
                self.add("has a header but no rows")
            return np.arange(0)
        absent = {
            name: np.isnan(column.values)
            for name, column in columns.items()
            if (column.kind or name in targets) and self.concern_none_of([name])
        }
        counts = {name: int(mask.sum()) for name, mask in absent.items() if mask.any()}
        if counts and missing == "error":
            told = shortened(f"{name!r} ({count})" for name, count in counts.items())
            self.add(f"values are missing in {told} of {total} rows; {remedy}")
        keep = np.ones(total, bool)
        for name, mask in absent.items():
            if name in targets or missing == "drop":
                keep &= ~mask
        rows = np.flatnonzero(keep)
        if dropped := total - len(rows):
            reason = "a value" if missing == "drop" else "the target"
            notes.append(f"{dropped} of {total} rows were dropped, as {reason} is missing in them")
        if len(rows) < least:
            self.add(f"{len(rows)} of {total} rows are left, at least {least} are needed")
        return rows


def _is_too_large(text: str) -> bool:
    try:
        return abs(float(text)) > MAX_NUMBER
    except ValueError:
        return False


# what is to be predicted


class Target(NamedTuple):
    """The task, labels ``(n,)`` or targets ``(n, t)``, and the names of classes."""

    task: str
    y: npt.NDArray[Any]
    classes: tuple[str, ...] = ()


def _target(
    problems: Problems,
    columns: Mapping[str, Gathered],
    targets: Sequence[str],
    task: str,
    rows: Rows,
    notes: list[str],
) -> Target:
    """What is to be predicted; before that, whatever is wrong with the table is told."""
    aim = Target(task, rows)
    if problems.concern_none_of(targets) and len(rows):
        with problems.collected():
            task = task_of(columns, targets, task, rows, notes)
            if task == "classification":
                aim = Target(task, *labels(columns[targets[0]], rows))
            else:
                aim = Target(task, quantities(columns, targets, rows))
                check_varying(aim.y, targets)
    problems.tell()
    return aim


def task_of(
    columns: Mapping[str, Gathered],
    targets: Sequence[str],
    task: str,
    rows: Rows,
    notes: list[str],
) -> str:
    """What is asked for, or what the target suggests; a note says why."""
    texts = [name for name in targets if columns[name].kind == "text"]
    if len(targets) > 1 or task == "regression":
        if texts or task == "classification":
            wrong = f"{texts[0]!r} holds texts" if texts else "there are several targets"
            raise DataError(
                f"Regression needs targets that are numbers, classification a single "
                f"one, but {wrong}."
            )
        return "regression"
    if task == "classification":
        return task
    (name,) = targets
    if texts:
        notes.append(f"classification, as the target {name!r} holds texts")
        return "classification"
    values = np.unique(columns[name].values[rows])
    whole = bool((values == np.rint(values)).all())
    if whole and len(values) <= MAX_INTEGER_CLASSES:
        notes.append(
            f"classification, as the target {name!r} holds {len(values)} different whole numbers"
        )
        return "classification"
    notes.append(f"regression, as the target {name!r} holds {len(values)} different numbers")
    return "regression"


def labels(
    column: Gathered, rows: Rows, classes: tuple[str, ...] = ()
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels ``(n,)`` and the names of the classes, sorted unless they are given."""
    found, inverse = np.unique(column.values[rows], return_inverse=True)
    if column.kind == "text":
        texts = list(column.texts)
        names = [texts[int(value)] for value in found]
        order = sorted(names)
    else:
        names = [_name(float(value)) for value in found]
        order = names
    if classes:
        if unseen := [name for name in names if name not in classes]:
            raise DataError(
                f"The target {column.name!r} holds {shortened(map(repr, unseen), 3)}, none of the "
                f"classes {shortened(classes)}."
            )
    else:
        classes = tuple(order)
        if len(classes) < 2:
            raise DataError(f"The target {column.name!r} has a single class, {classes[0]!r}.")
        if len(classes) > MAX_CLASSES:
            raise DataError(
                f"The target {column.name!r} has {len(classes)} different values, too many for "
                "classes; try --task regression."
            )
    places = {name: i for i, name in enumerate(classes)}
    return np.array([places[name] for name in names])[inverse], classes


def _name(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def kind_of_classes(classes: Sequence[str]) -> str:
    """Whether the classes come from a column of numbers or of texts, as ``Gathered.kind``."""
    try:
        numbers = all(_name(float(name)) == name for name in classes)
    except (ValueError, OverflowError):
        numbers = False
    return "number" if numbers else "text"


def quantities(columns: Mapping[str, Gathered], targets: Sequence[str], rows: Rows) -> Values:
    """Targets ``(n, t)``."""
    return np.stack([columns[name].values[rows] for name in targets], axis=1)


def check_varying(y: Values, targets: Sequence[str]) -> None:
    """Refuse a target ``(n, t)`` that is always the same."""
    for name, values in zip(targets, y.T, strict=True):
        if (values == values[0]).all():
            raise DataError(
                f"The target {name!r} is always {_name(values[0])}; there is nothing to learn."
            )


def split(
    y: npt.NDArray[Any], task: str, test_fraction: float, seed: int, notes: list[str]
) -> tuple[Rows, Rows]:
    """Row numbers for training and for testing."""
    with needed("scikit-learn", "dividing rows at random", "sklearn"):
        from sklearn.model_selection import train_test_split

    rows = np.arange(len(y))
    if task == "classification":
        try:
            train, test = train_test_split(
                rows, test_size=test_fraction, random_state=seed, stratify=y
            )
            return train, test
        except ValueError:
            notes.append(
                "some classes have too few rows to be divided in proportion, so rows were divided "
                "without regard to them"
            )
    train, test = train_test_split(rows, test_size=test_fraction, random_state=seed)
    return train, test
