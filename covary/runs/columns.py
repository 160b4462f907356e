"""Columns of a table as the report shows them: slices of rows, and values that they move over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from covary.data import Schema
from covary.runs.results import ColumnEffect, SliceCoverage
from covary.uncertainty.slices import (
    beyond_chance,
    chance_of_hits,
    partial_dependence,
    quantile_slices,
    share_interval,
)

Array = np.ndarray[Any, Any]
LEVEL = 0.9  # of the intervals
_UNUSUAL = 0.05  # a chance below this is beyond it, of all rows together
# Slices of a column of numbers, and levels of a category that have one of their own; their rows.
_SLICES, _LEVELS, LEAST_ROWS = 5, 8, 20
# Values that a column of numbers moves over, and rows that it moves in: as many as time allows.
_POINTS, _ROWS, _PASSES = 7, 200, 100_000
_MISSING = "missing"


class TableColumn(NamedTuple):
    """A column of a table, and the columns of the inputs (n, d) that it became.

    Attributes:
        name: of the column.
        kind: as ``covary.data.Column`` has it.
        places: of its features among the inputs.
        texts: of a category or of truth values, in the order of the features or codes.
        indicator: the place of the feature that is 1 where the value was missing; None: no such.
    """

    name: str
    kind: str
    places: tuple[int, ...]
    texts: tuple[str, ...] = ()
    indicator: int | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether its values are numbers or days."""
        return self.kind in ("number", "date")

    def slices(self, x: Array, most: int, least: int) -> dict[str, Array]:
        """Rows of inputs (n, d) that are alike in this column, by what they have in common.

        Of numbers and dates in their order, of texts the most frequent first; the rare ones are
        put together. Slices of fewer than ``least`` rows are left out.
        """
        absent = np.zeros(len(x), dtype=bool)
        if self.indicator is not None:
            absent = x[:, self.indicator] > 0.5
        there = np.flatnonzero(~absent)
        values = x[there, self.places[0]]
        found: dict[str, Array] = {}
        if self.is_ordered:
            parts = quantile_slices(values, most, least) if len(there) else []
            ends = [(float(values[rows].min()), float(values[rows].max())) for rows in parts]
            for text, rows in zip(self.ranges(ends), parts, strict=True):
                found[text] = there[rows]
        else:
            codes = values if self.kind == "boolean" else _place_of_one(x[there], self.places)
            rows_of = {text: there[codes == i] for i, text in enumerate(self.texts)}
            texts = sorted(rows_of, key=lambda text: -len(rows_of[text]))
            own = [text for text in texts[:_LEVELS] if len(rows_of[text]) >= least]
            found = {text: rows_of[text] for text in own}
            if rare := texts[len(own) :]:
                label = rare[0] if len(rare) == 1 else f"{len(rare)} others"
                found[label] = np.concatenate([rows_of[text] for text in rare])
        if absent.any():
            found[self.missing] = np.flatnonzero(absent)
        return {text: rows for text, rows in found.items() if len(rows) >= least}

    @property
    def missing(self) -> str:
        """What rows without a value are called: no text of the column."""
        return f"({_MISSING})" if _MISSING in self.texts else _MISSING

    def text(self, value: float, digits: int = 3) -> str:
        """A value as a reader expects it."""
        if self.kind == "date":
            return str(np.datetime64(int(np.floor(value)), "D"))
        if 1e3 <= abs(value) < 1e6:
            return f"{value:,.{max(0, digits - len(str(int(abs(value)))))}f}"
        return f"{value:.{digits}g}"

    def ranges(self, ends: Sequence[tuple[float, float]]) -> list[str]:
        """From the least to the largest value of slices, with the digits that tell them apart."""
        texts: list[str] = []
        for digits in range(3, 18):
            both = [(self.text(low, digits), self.text(high, digits)) for low, high in ends]
            texts = [low if low == high else f"{low} to {high}" for low, high in both]
            if len({*texts}) == len(texts):
                break
        return texts


def _place_of_one(x: Array, places: Sequence[int]) -> Array:
    """(n,) which of these columns is 1; -1 where none is."""
    block = x[:, list(places)] > 0.5
    return np.where(block.any(1), block.argmax(1), -1)


def table_columns(schema: Schema | None, features: Sequence[str]) -> list[TableColumn]:
    """The columns that inputs of these features are made of; numbers, if there is no schema."""
    if schema is None:
        return [TableColumn(name, "number", (i,)) for i, name in enumerate(features)]
    found, start = [], 0
    for name, column in schema.inputs.items():
        places = tuple(range(start, start + len(column.features)))
        start += len(places)
        indicator = places[-1] if column.indicator else None
        own = places[:-1] if column.indicator else places
        found.append(TableColumn(name, column.kind, own, column.known, indicator))
    return found


def usual_coverage(inside: Array) -> float:
    """The coverage that slices are compared with: the level of the intervals.

    Where intervals (n,) hold too few or too many targets of all rows together, beyond chance, it
    is theirs: slices are to say where that is better or worse, not that it is so.
    """
    chance = chance_of_hits([inside.sum()], [len(inside)], LEVEL)[0]
    return LEVEL if chance >= _UNUSUAL else float(inside.mean())


def coverage_by_slice(
    columns: Sequence[TableColumn], x: Array, inside: Array
) -> tuple[SliceCoverage, ...]:
    """How many of the intervals hold their target, in slices of each column; the worst first.

    Args:
        columns: of the table.
        x: (n, d) inputs.
        inside: (n,) whether the interval of a row holds its target.
    """
    named = [
        (column.name, label, len(rows), int(inside[rows].sum()))
        for column in columns
        for label, rows in column.slices(x, _SLICES, LEAST_ROWS).items()
        if len(rows) < len(x)  # else it is no slice
    ]
    if not named:
        return ()
    _, _, count, hits = (np.array(each) for each in zip(*named, strict=True))
    chance = chance_of_hits(hits, count, usual_coverage(inside))
    found = zip(named, chance, *share_interval(hits, count), beyond_chance(chance), strict=True)
    every = [
        SliceCoverage(*about, low=float(low), high=float(high), chance=float(p), is_beyond=bool(b))
        for about, p, low, high, b in found
    ]
    return tuple(sorted(every, key=lambda one: (one.chance, one.inside / one.samples)))


def effects_on_std(
    columns: Sequence[TableColumn], x: Array, stds: Callable[[Array, Array], Array], seed: int
) -> tuple[list[list[ColumnEffect]], int]:
    """What each column does to the standard deviations, by target; and in how many rows.

    A column moves over its values, a few quantiles or its levels, while the other columns stay as
    they are in rows.

    Args:
        columns: of the table.
        x: (n, d) inputs to choose rows and values from.
        stds: inputs (m, d) and which rows of ``x`` they were (m,) -> (m, t) standard deviations.
        seed: decides which rows.
    """
    points = {column.name: _points(column, x) for column in columns}
    moving = [column for column in columns if len(points[column.name]) > 1]
    passes = sum(len(points[column.name]) for column in moving)
    few = int(np.clip(_PASSES // max(1, passes), 20, _ROWS))
    rows = np.sort(np.random.default_rng(seed).permutation(len(x))[:few])
    found: list[list[ColumnEffect]] = []
    for column in moving:
        places = [*column.places, *([] if column.indicator is None else [column.indicator])]
        donors = x[list(points[column.name].values())]
        moved = partial_dependence(lambda some: stds(some, rows), x[rows], places, donors)
        average, (lower, upper) = moved.mean(1), np.quantile(moved, [0.25, 0.75], axis=1)
        found.append(
            [
                ColumnEffect(
                    column=column.name,
                    is_ordered=column.is_ordered,
                    labels=tuple(points[column.name]),
                    std=tuple(average[:, target].tolist()),
                    lower=tuple(lower[:, target].tolist()),
                    upper=tuple(upper[:, target].tolist()),
                )
                for target in range(moved.shape[2])
            ]
        )
    by_target = [sorted(each, key=lambda one: -one.change) for each in zip(*found, strict=True)]
    return by_target, len(rows)


def _points(column: TableColumn, x: Array) -> dict[str, int]:
    """Rows whose values a column moves over: in the middle of slices; by what a reader calls it."""
    middles: list[tuple[str, int]] = []
    for label, rows in column.slices(x, _POINTS, 1).items():
        if not (column.is_ordered or label in (*column.texts, column.missing)):
            continue  # the rare ones together
        values = x[rows, column.places[0]]
        middles.append((label, int(rows[np.argsort(values, kind="stable")[len(rows) // 2]])))
    moved = [row for label, row in middles if column.is_ordered and label != column.missing]
    at = [float(x[row, column.places[0]]) for row in moved]
    names = dict(zip(moved, column.ranges([(value, value) for value in at]), strict=True))
    return {names.get(row, label): row for label, row in middles}
