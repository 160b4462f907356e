"""How the columns of a table become numbers, kept so that new rows are encoded alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError
from covary.data.table_files import Gathered, Values, shortened

Rows = npt.NDArray[np.int64]
_KINDS = ("number", "boolean", "category", "constant")


@dataclass(frozen=True)
class Column:
    """One column of the file.

    Attributes:
        name: as in the file's header.
        kind: ``"number"``, ``"boolean"`` (0 or 1), ``"category"`` (a 0/1 column for each of
            ``categories``) or ``"constant"`` (left out).
        categories: the texts of a category, sorted.
        fill: the training mean, which stands for a missing number where missing values are filled.
        indicator: whether a 0/1 column says where the value was missing.
        error: the column of the file that has the standard deviations of its errors, row by row;
            empty for numbers that are taken as exact.
    """

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    fill: float | None = None
    indicator: bool = False
    error: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"column {self.name!r} is of kind {self.kind!r}, none of {_KINDS}")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ``x`` that this column becomes."""
        if self.kind == "constant":
            return ()
        if self.kind == "category":
            encoded = tuple(f"{self.name}={category}" for category in self.categories)
        else:
            encoded = (self.name,)
        return (*encoded, f"{self.name} missing") if self.indicator else encoded

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
            return cls(name, "constant")
        indicator = missing == "mean" and bool(absent.any())
        if column.kind == "number":
            fill = float(present.mean())
            return cls(name, "number", fill=fill, indicator=indicator, error=error)
        if {text.lower() for text in column.texts} <= {"true", "false"}:
            codes = cls(name, "boolean").codes(column)[train]
            return cls(name, "boolean", fill=float(np.nanmean(codes)), indicator=indicator)
        count = f"{len(column.texts)} value{'s' if len(column.texts) > 1 else ''}"
        notes.append(f"column {name!r} is a category of {count}")
        return cls(name, "category", tuple(sorted(column.texts)), indicator=indicator)

    def codes(self, gathered: Gathered) -> Values:
        """Numbers as they are; the place of each text among the categories; false 0 and true 1."""
        if self.kind == "number":
            return gathered.values
        categories = ("false", "true") if self.kind == "boolean" else self.categories
        places: dict[str, int] = {name: i for i, name in enumerate(categories)}
        texts = [text.lower() if self.kind == "boolean" else text for text in gathered.texts]
        if unseen := [text for text in texts if text not in places]:
            raise DataError(
                f"column {self.name!r} holds {shortened(map(repr, unseen), 3)}, none of the known "
                f"categories {shortened(categories)}; correct it, or train again with such rows"
            )
        lookup = np.array([*(places[text] for text in texts), np.nan])
        return lookup[np.where(np.isnan(gathered.values), -1, gathered.values).astype(np.int64)]

    def encode(self, gathered: Gathered, rows: Rows) -> npt.NDArray[np.generic]:
        """Some rows of the columns of ``x`` that this column becomes."""
        codes = self.codes(gathered)[rows, None]
        absent = np.isnan(codes)
        if self.kind == "category":
            encoded = codes == np.arange(len(self.categories))
        else:
            encoded = codes if self.fill is None else np.where(absent, self.fill, codes)
        return np.hstack([encoded, absent]) if self.indicator else encoded

    def errors(self, columns: Mapping[str, Gathered], rows: Rows) -> Values:
        """(n,) standard deviations of some rows of a number; 0 where the number is missing."""
        values, errors = (columns[name].values[rows] for name in (self.name, self.error))
        return np.where(np.isnan(values), 0.0, errors)


@dataclass(frozen=True)
class Schema:
    """The encoding of a whole table.

    Attributes:
        columns: the input columns in the file's order.
        task: ``"classification"`` or ``"regression"``.
        targets: the target columns.
        classes: the labels' names (classification).
        missing: what is done with missing values: ``"error"``, ``"mean"`` or ``"drop"``.
    """

    columns: tuple[Column, ...]
    task: str
    targets: tuple[str, ...]
    classes: tuple[str, ...] = ()
    missing: str = "error"

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ``x``."""
        return tuple(feature for column in self.columns for feature in column.features)

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
        x = np.empty((len(rows), len(self.features)))
        start = 0
        for column in self.columns:
            if width := len(column.features):
                x[:, start : start + width] = column.encode(columns[column.name], rows)
            start += width
        return x
