"""How the columns of a table become numbers, kept so that new rows are encoded alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from covary.data.columns import Gathered, Values, as_days, as_number, hint_of_spelling, shortened

Rows = npt.NDArray[np.int64]
_KINDS = ("number", "date", "boolean", "category", "constant")
_TRUTHS = ("false", "true")
_PARTS = ("month", "weekday", "hour")
_SECONDS = 86400
_LEAST_NUMBERED = 20  # rows: of fewer a measurement may well have all whole numbers in a row


@dataclass(frozen=True)
class Column:
    """One column of the file.

    Attributes:
        name: as in the file's header.
        kind: ``"number"``, ``"date"`` (days since 1970-01-01, and ``parts``), ``"boolean"`` (0 or
            1), ``"category"`` (a 0/1 column for each of ``categories``) or ``"constant"`` (left
            out).
        categories: the texts of a category, sorted; the text of a constant.
        fill: the training mean, which stands for a missing number; the number of a constant.
        indicator: whether a 0/1 column says where the value was missing.
        error: the column of the file that has the standard deviations of its errors, row by row;
            empty for numbers that are taken as exact.
        parts: which of month, weekday and hour (with its minutes) vary in a date. Each becomes the
            sine and cosine of where it is in its year, week or day.
    """

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    fill: float | None = None
    indicator: bool = False
    error: str = ""
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"column {self.name!r} is of kind {self.kind!r}, none of {_KINDS}")
        if unknown := [part for part in self.parts if part not in _PARTS]:
            raise ValueError(f"column {self.name!r} has the part {unknown[0]!r}, none of {_PARTS}")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ``x`` that this column becomes."""
        if self.kind == "constant":
            return ()
        if self.kind == "category":
            encoded = tuple(f"{self.name}={category}" for category in self.categories)
        else:
            waves = (f"{self.name} {part} {of}" for part in self.parts for of in ("sin", "cos"))
            encoded = (self.name, *waves)
        return (*encoded, f"{self.name} missing") if self.indicator else encoded

    @property
    def gathered_as(self) -> str:
        """The kind of ``Gathered`` that reads it: ``"number"``, ``"date"`` or ``"text"``."""
        return self.kind if self.kind in ("number", "date") else "text"

    @classmethod
    def of(
        cls, column: Gathered, train: Rows, missing: str, notes: list[str], error: str = ""
    ) -> Column:
        """How a column is to be encoded, from its training rows; ``error`` has its errors."""
        name, values = column.name, column.values[train]
        absent = np.isnan(values)
        present = values[~absent]
        if not len(present) or (not absent.any() and (present == present[0]).all()):
            how = "constant" if column.kind else "empty"
            notes.append(f"column {name!r} is {how} and was left out")
            if not len(present):
                return cls(name, "constant")
            if column.kind == "text":
                return cls(name, "constant", (list(column.texts)[int(present[0])],))
            return cls(name, "constant", fill=float(present[0]))
        return cls.varying(column, train, missing == "mean" and bool(absent.any()), notes, error)

    @classmethod
    def varying(
        cls, column: Gathered, train: Rows, indicator: bool, notes: list[str], error: str = ""
    ) -> Column:
        """How a column that has values is to be encoded, from its training rows."""
        name, values = column.name, column.values[train]
        present = values[~np.isnan(values)]
        if column.kind == "number":
            if _numbers_the_rows(column.values):
                notes.append(f"column {name!r} numbers the rows, which is hardly an input (--drop)")
            fill = float(present.mean())
            return cls(name, "number", fill=fill, indicator=indicator, error=error)
        if column.kind == "date":
            parts = tuple(part for part in _PARTS if len(np.unique(_turns(part, present))) > 1)
            more = f", with {', '.join(parts)} as sine and cosine" if parts else ""
            notes.append(f"column {name!r} is a date: days since 1970-01-01{more}")
            if len(column.zones) > 1:
                told = "times with and without a time zone; those without are taken as UTC"
                notes.append(f"column {name!r} has {told}")
            fill = float(present.mean())
            return cls(name, "date", fill=fill, indicator=indicator, parts=parts)
        if {text.lower() for text in column.texts} <= set(_TRUTHS):
            codes = cls(name, "boolean").codes(column)[train]
            return cls(name, "boolean", fill=float(np.nanmean(codes)), indicator=indicator)
        count = f"{len(column.texts)} value{'s' if len(column.texts) > 1 else ''}"
        notes.append(f"column {name!r} is a category of {count}{hint_of_spelling(column.texts)}")
        return cls(name, "category", tuple(sorted(column.texts)), indicator=indicator)

    def example(self) -> npt.NDArray[Any]:
        """(1,) a value that it takes: the training mean, or the first of the categories."""
        if self.kind == "boolean":
            return np.array([False])
        if self.kind == "category":
            return np.array([self.categories[0]], object)
        days = np.array([0.0 if self.fill is None else self.fill])
        if self.kind != "date":
            return days
        return (days * _SECONDS * 1e9).astype("datetime64[ns]")

    def codes(self, gathered: Gathered) -> Values:
        """Numbers and days as they are; the place of each text among the categories.

        Of booleans, false is 0 and true 1. NaN where a value is missing or a text is unseen.
        """
        if self.gathered_as != "text":
            return gathered.values
        places = {name: i for i, name in enumerate(self.known)}
        codes = (places.get(self._spelt(text), np.nan) for text in gathered.texts)
        lookup = np.array([*codes, np.nan])
        return lookup[np.where(np.isnan(gathered.values), -1, gathered.values).astype(np.int64)]

    @property
    def known(self) -> tuple[str, ...]:
        """The texts of a category, or of truth values."""
        return _TRUTHS if self.kind == "boolean" else self.categories

    def _spelt(self, text: str) -> str:
        return text.lower() if self.kind == "boolean" else text

    def unseen(self, gathered: Gathered) -> list[str]:
        """The texts of new rows that training did not have, in a category or in a constant."""
        if self.kind in ("category", "boolean"):
            return [text for text in gathered.texts if self._spelt(text) not in self.known]
        if self.kind == "constant":
            return [text for text in gathered.texts if not self._is_constant(text)]
        return []

    def told_unseen(self, gathered: Gathered) -> str:
        """That a category has texts that training did not have, in words; empty if it has none."""
        texts = [] if self.kind == "constant" else self.unseen(gathered)
        if not texts:
            return ""
        told, known = shortened(map(repr, texts), 3), shortened(self.known)
        return f"column {self.name!r} holds {told}, none of the known categories {known}"

    def _is_constant(self, text: str) -> bool:
        """Whether this is the value of a constant, as far as it is known."""
        if self.fill is not None:
            return self.fill in (as_number(text), as_days(text))
        if not self.categories:
            return True
        known = self.categories[0]
        return text == known or text.lower() == known.lower() in _TRUTHS

    def lacks(self, gathered: Gathered) -> npt.NDArray[np.bool_]:
        """(n,) whether a value of new rows is missing, where training had none missing."""
        absent = np.isnan(gathered.values)
        return absent if not (self.indicator or self.kind == "constant") else absent & False

    def encode(self, gathered: Gathered, rows: Rows) -> npt.NDArray[np.generic]:
        """Some rows of the columns of ``x`` that this column becomes."""
        codes = self.codes(gathered)[rows, None]
        absent = np.isnan(codes)
        if self.kind == "category":
            encoded = codes == np.arange(len(self.categories))
        else:
            encoded = codes if self.fill is None else np.where(absent, self.fill, codes)
        for part in self.parts:
            turns = 2 * np.pi * _turns(part, np.where(absent, 0.0, codes))
            waves = np.hstack([np.sin(turns), np.cos(turns)])
            encoded = np.hstack([encoded, np.where(absent, 0.0, waves)])
        missing = np.isnan(gathered.values)[rows, None]
        return np.hstack([encoded, missing]) if self.indicator else encoded

    def errors(self, columns: Mapping[str, Gathered], rows: Rows) -> Values:
        """(n,) standard deviations of some rows of a number; 0 where the number is missing."""
        values, errors = (columns[name].values[rows] for name in (self.name, self.error))
        return np.where(np.isnan(values), 0.0, errors)


def _numbers_the_rows(values: Values) -> bool:
    """Whether these are 0 or 1 to the number of rows, each once, in any order."""
    n = len(values)
    if n < _LEAST_NUMBERED or values.min() not in (0, 1) or np.ptp(values) != n - 1:
        return False
    return bool((np.sort(values) == np.arange(n) + values.min()).all())


def _turns(part: str, days: Values) -> Values:
    """Where days since 1970 are in their year (by month), week (from Monday) or day: 0 to 1."""
    whole = np.floor(days)
    if part == "month":
        months = whole.astype("datetime64[D]").astype("datetime64[M]")
        return (months.astype(np.int64) % 12) / 12
    if part == "weekday":
        return (whole + 3) % 7 / 7  # 1970-01-01 was a Thursday
    return np.rint((days - whole) * _SECONDS) % _SECONDS / _SECONDS


@dataclass(frozen=True)
class Schema:
    """The encoding of a whole table.

    Attributes:
        columns: the input columns in the file's order.
        task: ``"classification"`` or ``"regression"``.
        targets: the target columns.
        classes: the labels' names (classification).
        missing: what was done with missing values: ``"error"``, ``"mean"`` or ``"drop"``.
    """

    columns: tuple[Column, ...]
    task: str
    targets: tuple[str, ...]
    classes: tuple[str, ...] = ()
    missing: str = "error"

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ``x``."""
        return features(self.columns)

    @property
    def inputs(self) -> dict[str, Column]:
        """The columns that ``x`` is made of, by name: all but those that were constant."""
        return {column.name: column for column in self.columns if column.kind != "constant"}

    @property
    def errors(self) -> dict[str, str]:
        """By the name of a column, the column with the standard deviations of its errors."""
        return {column.name: column.error for column in self.columns if column.error}

    def encode_errors(self, columns: Mapping[str, Gathered], rows: Rows) -> Values | None:
        """Standard deviations ``(n, d)`` of the errors of inputs; None without error columns."""
        if not self.errors:
            return None
        std, places = np.zeros((len(rows), len(self.features))), list(self.features)
        for column in self.columns:
            if column.error:
                std[:, places.index(column.name)] = column.errors(columns, rows)
        return std

    def encode(self, columns: Mapping[str, Gathered], rows: Rows) -> Values:
        """The inputs ``(n, d)`` of some rows."""
        return encoded(self.columns, columns, rows)


def features(columns: Sequence[Column]) -> tuple[str, ...]:
    """Names of the features that columns become."""
    return tuple(feature for column in columns for feature in column.features)


def encoded(columns: Sequence[Column], values: Mapping[str, Gathered], rows: Rows) -> Values:
    """The features ``(n, d)`` that some rows of columns become."""
    x = np.empty((len(rows), len(features(columns))))
    start = 0
    for column in columns:
        if width := len(column.features):
            x[:, start : start + width] = column.encode(values[column.name], rows)
        start += width
    return x


def unusual(columns: Sequence[Column], values: Mapping[str, Gathered]) -> dict[int, str]:
    """By the number of a row, what it has in these columns that training did not have."""
    found: dict[int, list[str]] = {}
    for column in columns:
        if column.name not in values:  # a constant, which new rows need not have
            continue
        gathered = values[column.name]
        reasons = [(np.flatnonzero(column.lacks(gathered)), "missing")]
        for text in column.unseen(gathered):
            why = "constant in training" if column.kind == "constant" else f"unseen {text!r:.60}"
            reasons.append((gathered.rows_of(text), why))
        for rows, why in reasons:
            for row in rows.tolist():
                found.setdefault(row, []).append(f"{column.name}: {why}")
    return {row: "; ".join(found[row]) for row in sorted(found)}
