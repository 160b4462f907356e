"""New rows, encoded by the schema of an earlier table: all at once, or a chunk at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from covary.data.columns import Values, shortened
from covary.data.dataset import Array, DataError, Dataset
from covary.data.reading import Reading, kind_of_classes, labels
from covary.data.schema import Schema, unusual
from covary.data.table_files import TableFile, open_table

UNSEEN = ("flag", "error")
Blocks = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows of a table, encoded by the schema of an earlier one.

    Attributes:
        start: the number of its first row in the table, counted from 0.
        x: inputs ``(n, d)``.
        std: standard deviations ``(n, d)`` of their errors; None if the schema has none.
        y: labels ``(n,)``, -1 where they are missing, or targets ``(n, t)``, NaN where they are;
            None if the table lacks a target.
        reasons: by the number of a row in the chunk, what it has that training did not have:
            ``"city: unseen 'Roma'; width: missing; country: constant in training"``.
        columns: all columns as the file has them, by name: pyarrow arrays ``(n,)``. Texts of csv;
            objects and lists of JSON lines are the bytes of their JSON.
        extras: names of the columns that the schema has no use for.
    """

    start: int
    x: Values
    std: Values | None
    y: Array | None
    reasons: Mapping[int, str]
    columns: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()

    @property
    def unusual(self) -> npt.NDArray[np.bool_]:
        """(n,) whether a row has anything that training did not have."""
        return np.isin(np.arange(len(self.x)), list(self.reasons))


def read_rows(
    source: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    schema: Schema,
    *,
    chunk: int = 65536,
    format: str = "",
    unseen: str = "flag",
    missing: str = "flag",
    encoding: str = "utf-8",
    delimiter: str | None = None,
) -> Iterator[Chunk]:
    """Read new rows by the schema of an earlier table, in order, in memory for one chunk.

    Columns are found by their names, in any order. Columns that are not there, and options that
    cannot be, are told when this is called; what is wrong with a row when its chunk is read.

    Args:
        source: a file, as ``read_table`` takes it; or a stream of bytes such as
            ``sys.stdin.buffer``, gzipped or not; or columns in memory, arrays ``(n,)`` by name.
        schema: of the earlier table.
        chunk: rows in a chunk; the last one may have fewer.
        format: ``"csv"`` (also tsv), ``"jsonl"`` or ``"parquet"``. Of a file it is found out, of a
            stream it must be said, and parquet cannot be read.
        unseen: what becomes of a text that is none of the known categories: ``"flag"``, which puts
            0 into all columns of the category (the training mean in place of a truth value) and
            gives the row a reason; or ``"error"``.
        missing: the same for a missing value where the training rows had none: ``"flag"``, which
            puts the training mean in place of a number and no category in place of a text; or
            ``"error"``.
        encoding: of csv or JSON lines.
        delimiter: of csv; otherwise the most frequent of ``, ; tab |`` in its header.

    Yields:
        The rows, a chunk at a time.
    """
    where = Path(source) if isinstance(source, str | os.PathLike) else source
    table = open_table(where, form=format, encoding=encoding, delimiter=delimiter)
    if chunk < 1:
        raise DataError(f"chunk must be 1 row or more, got {chunk}.")
    reading = _checked(table, schema, unseen, missing)
    reading.tell()
    return _chunks(table, schema, chunk, unseen, missing)


def _checked(table: TableFile, schema: Schema, unseen: str, missing: str) -> Reading:
    """Options and columns are checked, and problems remembered."""
    reading = Reading(table, schema, schema.errors)
    reading.check_choice("unseen", unseen, UNSEEN)
    reading.check_choice("missing", missing, ("flag", "error"))
    reading.check_present([*schema.inputs, *schema.errors.values()])
    return reading


def _chunks(
    table: TableFile, schema: Schema, size: int, unseen: str, missing: str
) -> Iterator[Chunk]:
    start = 0
    extras = tuple(_extras(table, schema))
    for blocks in _regrouped(table.blocks(table.columns), size):
        reading = Reading(table, schema, schema.errors, start)
        found = _encoded(reading, schema, blocks, unseen, missing)
        columns = {name: _joined([block[name] for block in blocks]) for name in table.columns}
        yield replace(found, columns=columns, extras=extras)
        start += len(found.x)
    reading = Reading(table, schema, schema.errors, start)
    reading.check_lines()  # there may be no rows after one that does not fit
    if not start and not reading.lacks_rows:
        reading.add("has a header but no rows")
    reading.tell()


def new_rows(table: TableFile, schema: Schema, *, unseen: str, missing: str) -> Dataset:
    """All rows of a table as the test rows of a data set; those without a target are dropped."""
    reading = _checked(table, schema, unseen, missing)
    reading.notes += [f"column {name!r} is not used" for name in _extras(table, schema)]
    blocks = table.blocks(reading.wanted(_used(schema)))
    found = _encoded(reading, schema, blocks, unseen, missing)
    total, y = len(found.x), found.y
    known = np.zeros(total, bool) if y is None else _is_known(y)
    if not known.any():
        reading.notes.append("there is no target to compare predictions with")
        y, rows = None, np.arange(total)
    else:
        rows = np.flatnonzero(known)
        if dropped := total - len(rows):
            reading.notes.append(
                f"{dropped} of {total} rows were dropped, as the target is missing in them"
            )
    if found.reasons:
        first, reason = next(iter(found.reasons.items()))
        reading.notes.append(
            f"{len(found.reasons)} of {total} rows have what training did not have, the first in "
            f"{table.place(first)} ({reason})"
        )
    none = np.empty(0, np.int64) if schema.classes else np.empty((0, len(schema.targets)))
    y = none if y is None else y[rows]
    std = None if found.std is None else found.std[rows]
    places = {row: i for i, row in enumerate(rows.tolist())}
    reasons = {places[row]: why for row, why in found.reasons.items() if row in places}
    train = (found.x[:0], none, None if std is None else std[:0])
    return reading.dataset(schema, train, (found.x[rows], y, std), reasons)


def _encoded(reading: Reading, schema: Schema, blocks: Blocks, unseen: str, missing: str) -> Chunk:
    """The rows of some blocks; raises what is wrong with them."""
    kinds = {column.name: column.gathered_as for column in schema.columns}
    kind = kind_of_classes(schema.classes) if schema.classes else "number"
    kinds |= dict.fromkeys(schema.targets, kind)
    reading.gather(reading.wanted(_used(schema)), kinds, blocks=blocks)
    columns = reading.columns
    total = len(next(iter(columns.values())).values) if columns else 0
    if columns and not (total or reading.lacks_rows):
        reading.add("has a header but no rows")
    if missing == "error":
        _refuse_missing(reading, schema, total)
    if unseen == "error":
        _refuse_unseen(reading, schema)
    rows = np.arange(total)
    reading.check_errors(rows)
    y = _targets(reading, schema)
    reading.tell()
    std = schema.encode_errors(columns, rows)
    reasons = unusual(schema.columns, columns)
    return Chunk(reading.start, schema.encode(columns, rows), std, y, reasons)


def _used(schema: Schema) -> list[str]:
    """Names of the columns that are read, if they are there."""
    return [*(column.name for column in schema.columns), *schema.targets]


def _extras(table: TableFile, schema: Schema) -> list[str]:
    used = {*_used(schema), *schema.errors.values()}
    return [name for name in table.columns if name not in used]


def _refuse_missing(reading: Reading, schema: Schema, total: int) -> None:
    counts = {
        name: count
        for name, column in schema.inputs.items()
        if reading.is_fine(name) and (count := column.lacks(reading.columns[name]).sum())
    }
    if counts:
        told = shortened(f"{name!r} ({count})" for name, count in counts.items())
        what = f"values are missing in {told} of {total} rows"
        reading.add(f"{what}; fill them, as the training rows had none")


def _refuse_unseen(reading: Reading, schema: Schema) -> None:
    for name, column in schema.inputs.items():
        if reading.is_fine(name) and (told := column.told_unseen(reading.columns[name])):
            reading.add(f"{told}; correct it, or train again with such rows")


def _targets(reading: Reading, schema: Schema) -> Array | None:
    """Labels ``(n,)`` or targets ``(n, t)`` of all rows; None if a target is not there."""
    if not all(map(reading.is_fine, schema.targets)):
        return None
    y = np.stack([reading.columns[name].values for name in schema.targets], axis=1)
    if not schema.classes:
        return y
    found, known = np.full(len(y), -1), ~np.isnan(y[:, 0])
    with reading.collected():
        column = reading.columns[schema.targets[0]]
        found[known] = labels(column, y[known, 0], schema.classes)[0]
    return found


def _is_known(y: Array) -> npt.NDArray[np.bool_]:
    """(n,) which rows have all of their targets."""
    return np.asarray(y >= 0 if y.ndim == 1 else ~np.isnan(y).any(1))


def _regrouped(blocks: Blocks, size: int) -> Iterator[list[dict[str, Any]]]:
    """Blocks of any length in groups of so many rows."""
    group: list[dict[str, Any]] = []
    room = size
    for block in blocks:
        length, start = len(next(iter(block.values()))), 0
        while start < length:
            taken = min(room, length - start)
            group.append({name: each.slice(start, taken) for name, each in block.items()})
            start, room = start + taken, room - taken
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group


def _joined(pieces: list[Any]) -> Any:
    """Pieces of a column as one; as texts if they are of several types."""
    import pyarrow as pa

    kinds = {piece.type for piece in pieces} - {pa.null()}
    kind = pa.string() if len(kinds) > 1 else next(iter(kinds), pa.null())
    return pa.chunked_array([piece.cast(kind) for piece in pieces], kind).combine_chunks()
