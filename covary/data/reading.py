"""A table that is being read: columns, notes, and all that is wrong with it in one error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from covary.data.columns import Gathered, Values, gather, hint_of_spelling, shortened, with_nearest
from covary.data.dataset import Array, DataError, Dataset
from covary.data.schema import Rows, Schema
from covary.data.table_files import CsvTable, TableFile

MAX_CLASSES = 1000
MAX_NUMBER = 1e36  # float32 ends at 3e38
MAX_OF_A_KIND = 3  # problems of one kind that are told at length
_STRAYS, _HUGE = "texts among numbers or dates", "infinite or huge numbers"
_BAD_ERRORS = "errors that are no standard deviations"
_NONE: Mapping[Any, Any] = MappingProxyType({})
Part = tuple[Array, Array, Values | None]  # inputs, targets, and errors of inputs if there are any
# Remedies for texts among numbers or dates, in a new table and in later rows.
_CORRECT = (
    "correct them, take them as categories with --category {0!r}, or --drop {0!r}",
    "correct them, as they were {1} in training",
)


class Reading:
    """A table that is being read: its columns, notes on it, and all that is wrong with it.

    Problems are collected, and told in one error.
    """

    def __init__(
        self, table: TableFile, schema: Schema | None, errors: Mapping[str, str], start: int = 0
    ) -> None:
        self.table, self.schema, self.start = table, schema, start
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
            raise DataError(f"{self.table.label}: {told[0]}.")
        if told:
            count = sum(map(len, self._problems.values()))
            listed = "".join(f"\n- {sentence}" for sentence in told)
            raise DataError(f"{self.table.label} has {count} problems:{listed}")

    def is_fine(self, name: str) -> bool:
        """Whether the table has this column, and nothing is wrong with it so far."""
        return name in self.table.columns and all(
            name != column for found in self._problems.values() for _, column in found
        )

    def check_choice(self, name: str, value: str, allowed: Sequence[str]) -> None:
        """An option must have one of the allowed values."""
        if value not in allowed:
            self.add(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    def check_present(self, names: Iterable[str]) -> None:
        """The table must have these columns."""
        known = self.table.columns
        absent = [name for name in dict.fromkeys(names) if name not in known]
        if absent:
            are = "is no column" if len(absent) == 1 else "are no columns"
            told = with_nearest(absent, known)
            self.add(f"there {are} {told}; it has {shortened(known, 25)}")

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Those of these columns, and of columns of errors, that the table has."""
        wanted = dict.fromkeys((*names, *self.errors.values()))
        return [name for name in wanted if name in self.table.columns]

    def gather(
        self,
        wanted: Sequence[str],
        kinds: Mapping[str, str],
        limits: Mapping[str, int] = _NONE,
        blocks: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        """Read columns that the table has, from all of it or from some blocks."""
        if not wanted:
            return  # pyarrow would take none for all
        kinds = {**kinds, **dict.fromkeys(self.errors.values(), "number")}
        blocks = self.table.blocks(wanted) if blocks is None else blocks
        self.columns = gather(blocks, wanted, kinds, limits)
        self.check_lines()
        for column in self.columns.values():
            self._check_values(column)

    def check_lines(self) -> None:
        """Remember that lines do not fit the header, if some of those that were read do not."""
        if isinstance(self.table, CsvTable) and self.table.is_ragged:
            self.lacks_rows = True
            self.add(self.table.ragged_lines())

    def _check_values(self, column: Gathered) -> None:
        """Refuse other types, too many texts, texts among others, numbers beyond all size."""
        name, values = column.name, column.values
        if column.refused:
            remedy = "convert it" if self.schema else f"convert it, or --drop {name!r}"
            expected = "expected numbers, booleans, texts or dates"
            told = f"column {name!r} holds {column.refused}, {expected}; {remedy}"
            self.add(told, "other types", name)
        if column.has_too_many_texts:
            some = shortened(map(repr, column.texts), 3)
            hint = hint_of_spelling(column.texts)
            self.add(
                f"column {name!r} holds more than {column.limit} different texts ({some}); leave "
                f"it out with --drop {name!r}, or put them into groups{hint}",
                "too many texts",
                name,
            )
        if column.strays:
            first = shortened([repr(column.stray)])
            kind = f"{column.kind or 'number'}s"
            remedy = _CORRECT[self.schema is not None].format(name, kind)
            if name in self.errors.values():
                remedy = "correct them, as standard deviations of errors are numbers"
            place = self._place(column.stray_row, _STRAYS)
            what = f"{np.count_nonzero(~np.isnan(values))} {kind} and {column.strays} texts"
            told = f"column {name!r} holds {what}, the first {first} in {place}; {remedy}"
            self.add(told, _STRAYS, name)
        huge = np.flatnonzero(np.abs(values) > MAX_NUMBER)  # no number of a text is
        if count := len(huge):
            place = self._place(huge[0], _HUGE)
            self.add(
                f"column {name!r} is infinite or beyond {MAX_NUMBER:g} in {count} of {len(values)} "
                f"rows, first in {place}; correct them, choose a larger scale, or leave them empty "
                "to have them taken as missing",
                _HUGE,
                name,
            )

    def _place(self, row: int, kind: str) -> str:
        """Where a row stands; not looked for where the problem is not told at length."""
        told = len(self._problems.get(kind, ())) < MAX_OF_A_KIND
        return self.table.place(self.start + int(row)) if told else ""

    def check_errors(self, rows: Rows) -> None:
        """Errors are of numbers, and 0 or more in each of these rows where there is a number."""
        for name, error in self.errors.items():
            if not {name, error} <= self.columns.keys():
                continue  # which is told already
            if (kind := self.columns[name].kind) in ("text", "date"):
                self.add(f"column {name!r} holds {kind}s, which have no errors ({error!r})")
            elif self.is_fine(name) and self.is_fine(error):
                self._check_sizes(error, rows[~np.isnan(self.columns[name].values[rows])])

    def _check_sizes(self, error: str, rows: Rows) -> None:
        std = self.columns[error].values[rows]
        if negative := np.count_nonzero(std < 0):
            place = self._place(rows[np.argmax(std < 0)], _BAD_ERRORS)
            what = f"is negative in {negative} of {len(std)} rows, first in {place}"
            told = f"column {error!r} {what}; standard deviations of errors are 0 or more"
            self.add(told, _BAD_ERRORS, error)
        if absent := np.count_nonzero(np.isnan(std)):
            remedy = "" if self.schema else ", or drop such rows with --missing drop"
            self.add(
                f"column {error!r} has no error for {absent} of {len(std)} rows; fill them (0 is "
                f"an exact value){remedy}",
                _BAD_ERRORS,
                error,
            )

    def dataset(
        self, schema: Schema, train: Part, test: Part, reasons: Mapping[int, str] = _NONE
    ) -> Dataset:
        """The data of a training and a test part, with a note on values that were filled in."""
        dropped = self.schema is None and schema.missing == "drop"
        for column in () if dropped else schema.inputs.values():
            if count := np.count_nonzero(np.isnan(self.columns[column.name].values)):
                how = "taken as no category" if column.fill is None else f"set to {column.fill:g}"
                self.notes.append(f"column {column.name!r} has {count} missing values, {how}")
        name = Path(Path(self.table.label).name.removesuffix(".gz")).stem
        names = (schema.classes, schema.features, schema.targets)
        arrays = (*train[:2], *test[:2])
        found = Dataset.of(name, schema.task, arrays, *names, self.table.label, tuple(self.notes))
        x_std, x_test_std = (
            None if std is None else torch.from_numpy(std) for _, _, std in (train, test)
        )
        return replace(found, x_std=x_std, x_test_std=x_test_std, reasons=dict(reasons))


def labels(
    column: Gathered, values: Values, classes: tuple[str, ...] = ()
) -> tuple[Array, tuple[str, ...]]:
    """Labels ``(n,)`` and the names of the classes, sorted unless they are given."""
    found, inverse = np.unique(values, return_inverse=True)
    if column.kind == "text":
        texts = list(column.texts)
        names = [texts[int(value)] for value in found]
    else:
        names = [name_of(value) for value in found]
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
        raise DataError(
            f"{target} holds {told}, none of the classes {shortened(classes)}; correct it, or "
            "leave the column out."
        )
    return np.array([places[name] for name in names])[inverse], classes


def name_of(value: float) -> str:
    """A number as the name of a class: whole ones without a point."""
    return str(int(value)) if value.is_integer() else repr(float(value))


def kind_of_classes(classes: Sequence[str]) -> str:
    """Whether the classes come from a column of numbers or of texts, as ``Gathered.kind``."""
    try:
        numbers = all(name_of(float(name)) == name for name in classes)
    except (ValueError, OverflowError):
        numbers = False
    return "number" if numbers else "text"
