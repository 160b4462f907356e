"""Tables on disk or in a stream: csv, JSON lines and parquet, read in blocks of rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from covary.data.columns import as_number, shortened
from covary.data.dataset import DataError, needed
from covary.files import check_is_file

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1 << 16
STREAM_ROWS = 1 << 12  # in a block of a stream of csv, whose values are objects of Python
HEAD_BYTES = 1 << 20
DELIMITERS = ",;\t|"
FORMATS = ("csv", "jsonl", "parquet")
JSON_SUFFIXES = (".jsonl", ".ndjson")
_GZIP = b"\x1f\x8b"


class _Rejoined(io.RawIOBase):
    """A stream of which the beginning was read already. Closing it leaves the stream open."""

    def __init__(self, start: bytes, rest: Any) -> None:
        self._start, self._rest = io.BytesIO(start), rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._start.read(len(buffer)) or self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _rejoined(start: bytes, rest: Any) -> io.BufferedReader:
    """The same, where what is read is as long as it was asked for."""
    return io.BufferedReader(_Rejoined(start, rest))


class TextFile:
    """The bytes of a text, gzipped or not: a file, or a stream, which can be read once."""

    def __init__(self, where: Path | BinaryIO, encoding: str) -> None:
        self.where, self.is_file = where, isinstance(where, Path)
        from_shell = getattr(where, "name", "") == "<stdin>"
        self.label = (
            "standard input" if from_shell else str(where) if self.is_file else "the stream"
        )
        # Excel begins a utf-8 file with a byte order mark, which is no part of the first name
        self.encoding = "utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding

    @cached_property
    def head(self) -> str:
        """The beginning of the text; what is no text in this encoding is refused."""
        with self.open(whole=False) as stream:
            start = bytes(stream.read(HEAD_BYTES))
            try:
                head = io.TextIOWrapper(io.BytesIO(start), self.encoding, "ignore").read()
            except LookupError as error:
                raise DataError(f"There is no encoding {self.encoding!r}; try latin-1.") from error
            if "\0" in head:
                raise DataError(
                    f"{self.label} is not a text file; expected csv, JSON lines or parquet."
                )
        return head

    @contextmanager
    def open(self, whole: bool = True) -> Iterator[Any]:
        """The bytes, with an error that says what to do where they are no text.

        Of a stream the beginning can be read as often as needed (``whole=False``), and all once.
        """
        import pyarrow as pa

        try:
            if not isinstance(self.where, Path):
                start, rest = self._stream
                yield _rejoined(start, rest) if whole else io.BytesIO(start)
                return
            with self.where.open("rb") as file:
                compression = "gzip" if file.read(2) == _GZIP else None
            with pa.input_stream(self.where, compression=compression) as stream:
                yield stream
        except (UnicodeError, pa.ArrowInvalid, OSError, EOFError) as error:
            if isinstance(error, UnicodeError) or "UTF8" in str(error):
                encoding = self.encoding.removesuffix("-sig")
                told = f"is not in {encoding}; name its encoding, e.g. --encoding latin-1"
                raise DataError(f"{self.label} {told}.") from error
            raise DataError(f"{self.label} cannot be read ({error}).") from error

    @cached_property
    def _stream(self) -> tuple[bytes, Any]:
        """The beginning of a stream, unpacked, and all that comes after it."""
        stream: Any = _rejoined(b"", self.where)
        start = stream.read(2)
        if start == _GZIP:
            stream, start = gzip.GzipFile(fileobj=_rejoined(start, stream)), b""
        return start + stream.read(HEAD_BYTES), stream


class CsvTable:
    """A text with a header line."""

    def __init__(self, text: TextFile, delimiter: str | None) -> None:
        self.text, self.label = text, text.label
        first = next((line for line in text.head.splitlines() if line.strip()), "")
        outside_quotes = "".join(first.split('"')[::2])
        self.delimiter = delimiter or max(DELIMITERS, key=outside_quotes.count)
        if len(self.delimiter) != 1:
            raise DataError(f"The delimiter must be one character, got {self.delimiter!r}.")
        self.header_lines, header = next(self._rows(whole=False), (0, []))
        if not header:
            raise DataError(f"{self.label} is empty.")
        self.columns = [name.strip() or f"column {i}" for i, name in enumerate(header, start=1)]
        self.is_ragged = False  # whether blocks() left out lines of more or fewer values
        self._ragged = ""  # the first of them, of a stream
        if not np.isnan([as_number(name) for name in self.columns]).any():
            raise DataError(
                f"{self.label}: the first line holds numbers alone ({shortened(self.columns, 3)}); "
                "put a line with the names of the columns before it."
            )

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as pyarrow arrays of texts, a block of rows at a time.

        Lines that do not fit the header are left out: ``ragged_lines`` tells which.
        """
        return self._blocks_of_file(wanted) if self.text.is_file else self._blocks_of_stream(wanted)

    def _blocks_of_stream(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """By Python, since pyarrow reads ahead: at exit, it would wait for what does not come."""
        import pyarrow as pa

        places = [self.columns.index(name) for name in wanted]
        rows = (
            row for line, row in self._rows() if line > self.header_lines and self._fits(line, row)
        )
        while block := list(islice(rows, STREAM_ROWS)):
            yield {
                name: pa.array([row[place] for row in block], pa.string())
                for name, place in zip(wanted, places, strict=True)
            }

    def _fits(self, line: int, row: list[str]) -> bool:
        """Whether a line has as many values as the header; the first one that does not is kept."""
        if len(row) == len(self.columns):
            return True
        self.is_ragged = True
        self._ragged = self._ragged or f"line {line} has {len(row)} values"
        return False

    def _blocks_of_file(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        def leave_out(_row: Any) -> str:
            self.is_ragged = True
            return "skip"

        encoding = self.text.encoding
        with self.text.open() as stream:
            try:
                reader = arrow_csv.open_csv(
                    stream,
                    arrow_csv.ReadOptions(
                        column_names=self.columns,
                        skip_rows=self.header_lines,
                        block_size=BLOCK_BYTES,
                        encoding="utf8" if encoding == "utf-8-sig" else encoding,
                    ),
                    arrow_csv.ParseOptions(
                        delimiter=self.delimiter,
                        newlines_in_values=True,
                        invalid_row_handler=leave_out,
                    ),
                    arrow_csv.ConvertOptions(
                        include_columns=wanted,
                        column_types=dict.fromkeys(wanted, pa.string()),
                    ),
                )
                for batch in reader:
                    yield dict(zip(wanted, batch.columns, strict=True))
            except pa.ArrowInvalid as error:
                if "skip initial" in str(error):
                    return  # a header without an end of line, and nothing after it
                if "UTF8" not in str(error) and (told := self.ragged_lines()):
                    raise DataError(f"{self.label}: {told}.") from error
                raise

    def place(self, row: int) -> str:
        """Where a row stands, counted from 0, for messages: ``"line 7"``."""
        if not self.text.is_file:
            return f"row {row + 1}"
        fitting = (
            line
            for line, values in self._rows()
            if line > self.header_lines and len(values) == len(self.columns)
        )
        return f"line {next(islice(fitting, row, None))}"

    def _rows(self, whole: bool = True) -> Iterator[tuple[int, list[str]]]:
        """Line number and values, slowly: for the header and for messages."""
        with self.text.open(whole) as stream:
            text = io.TextIOWrapper(stream, self.text.encoding, newline="")
            reader = csv.reader(text, delimiter=self.delimiter)
            try:
                for row in reader:
                    if row:
                        yield reader.line_num, row
            except csv.Error as error:
                raise DataError(f"{self.label}: line {reader.line_num}: {error}.") from error

    def ragged_lines(self) -> str:
        """Which lines have more or fewer values than the header, in a sentence; empty if none."""
        expected = f"expected {len(self.columns)} as in the header"
        remedy = f"correct the lines, or the delimiter {self.delimiter!r} with --delimiter"
        if not self.text.is_file:
            return f"{self._ragged}, {expected}; {remedy}"
        wrong = ((line, row) for line, row in self._rows() if len(row) != len(self.columns))
        for first, row in wrong:
            others = shortened(f"line {line}" for line, _ in wrong)
            more = others and f" (others that do not fit: {others})"
            return f"line {first} has {len(row)} values, {expected}{more}; {remedy}"
        return ""


class JsonTable:
    """A text with a JSON object in each line.

    Its columns are the keys of the objects at its beginning. A key that an object lacks is a
    missing value; one that comes up later is an error.
    """

    is_ragged = False

    def __init__(self, text: TextFile) -> None:
        self.text, self.label = text, text.label
        *lines, last = text.head.split("\n")
        found = [self._object(line, i) for i, line in enumerate(lines, start=1) if line.strip()]
        with suppress(DataError) if found else nullcontext():  # the last one may be cut
            found += [self._object(last, len(lines) + 1)] if last.strip() else []
        self.columns = list(dict.fromkeys(key for one in found for key in one))
        if not self.columns:
            raise DataError(f"{self.label} is empty.")

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as pyarrow arrays, a block of rows at a time."""
        for block in self._objects():
            yield {name: _json_array([one.get(name) for _, one in block]) for name in wanted}

    def _objects(self) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Line numbers and objects, a block at a time."""
        known, number = set(self.columns), 0
        with self.text.open() as stream:
            text = io.TextIOWrapper(stream, self.text.encoding)
            while lines := text.readlines(BLOCK_BYTES):
                block = []
                for line in lines:
                    number += 1
                    if line.strip():
                        one = self._object(line, number)
                        if not one.keys() <= known:
                            new = shortened(repr(key) for key in one if key not in known)
                            raise DataError(
                                f"{self.label}: line {number} has {new}, which the first lines do "
                                "not have; put it into the first line too, null if it has no value."
                            )
                        block.append((number, one))
                yield block

    def _object(self, line: str, number: int) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong = f"is no JSON ({error})"
        else:
            if isinstance(found, dict):
                return found
            wrong = f"is no object but {found!r:.60}"
        raise DataError(
            f"{self.label}: line {number} {wrong}; JSON lines have an object in each line."
        )

    def place(self, row: int) -> str:
        """Where a row stands, counted from 0, for messages: ``"line 7"``."""
        if not self.text.is_file:
            return f"row {row + 1}"
        lines = (line for block in self._objects() for line, _ in block)
        return f"line {next(islice(lines, row, None))}"


def _json_array(values: list[Any]) -> Any:
    """Values of JSON as a pyarrow array; objects and lists as the bytes of their JSON.

    Of values of several types all become texts.
    """
    import pyarrow as pa

    if any(isinstance(value, dict | list) for value in values):
        return pa.array([None if value is None else json.dumps(value).encode() for value in values])
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array(
            [
                value if value is None or isinstance(value, str) else json.dumps(value)
                for value in values
            ]
        )


class ParquetTable:
    """A parquet file."""

    is_ragged = False

    def __init__(self, path: Path) -> None:
        self.path, self.label = path, str(path)
        with self._open() as file:
            self.columns = [str(name) for name in file.schema_arrow.names]

    @contextmanager
    def _open(self) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                yield file
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.path} is not a readable parquet file ({error}).") from error

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as pyarrow arrays, a block of rows at a time."""
        with self._open() as file:
            for batch in file.iter_batches(BLOCK_ROWS, columns=list(wanted)):
                yield {name: batch.column(name) for name in wanted}

    def place(self, row: int) -> str:
        """Where a row stands, counted from 0, for messages: ``"row 7"``."""
        return f"row {row + 1}"


class ArrayTable:
    """Columns in memory: arrays ``(n,)`` by name."""

    is_ragged = False
    label = "the table"

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._arrays = {str(name): _array(name, values) for name, values in columns.items()}
        self.columns = list(self._arrays)
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            told = shortened(f"{name!r} has {count}" for name, count in lengths.items())
            raise DataError(f"Columns of one table have as many values each, but {told}.")
        if not lengths:
            raise DataError(f"{self.label} is empty.")

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as pyarrow arrays, all rows in one block."""
        yield {name: self._arrays[name] for name in wanted}

    def place(self, row: int) -> str:
        """Where a row stands, counted from 0, for messages: ``"row 7"``."""
        return f"row {row + 1}"


def _array(name: str, values: Any) -> Any:
    """Values of a column in memory, or of a data frame, as a pyarrow array; NaN is missing."""
    import pyarrow as pa

    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise DataError(f"Column {name!r} is {values!r:.60}, expected an array of values (n,).")
    if getattr(values, "ndim", 1) != 1:
        raise DataError(f"Column {name!r} has shape {values.shape}, expected (n,).")
    try:
        found = pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        found = _json_array(list(values))
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


TableFile = CsvTable | JsonTable | ParquetTable | ArrayTable


def open_table(
    where: Path | BinaryIO | Mapping[str, Any],
    *,
    form: str = "",
    encoding: str,
    delimiter: str | None,
) -> TableFile:
    """A table in a file, in memory or, if its format is said (csv or jsonl), in a stream of bytes.

    That a file is a parquet file is told by its first bytes, or, as JSON lines, by its name; all
    others are csv.
    """
    with needed("pyarrow", "reading a table", "tables"):
        import pyarrow
    # Left to itself it listens to Ctrl-C while it reads, and may keep it to itself.
    pyarrow.enable_signal_handlers(False)
    if form not in ("", *FORMATS):
        raise DataError(f"The format must be one of {', '.join(FORMATS)}, got {form!r}.")
    if isinstance(where, Mapping):
        return ArrayTable(where)
    if isinstance(where, Path):
        found = _format_of(where)
        form = form or found
    elif form not in ("csv", "jsonl"):
        got = f"got {form!r}" if form else "and which it is has to be said"
        raise DataError(f"A stream is read as csv or jsonl, {got}; put other formats into a file.")
    elif isinstance(where, io.TextIOBase):
        raise DataError("A stream of bytes is needed, such as sys.stdin.buffer, got one of texts.")
    table: TableFile
    if form == "parquet":
        table = ParquetTable(Path(str(where)))
    elif form == "jsonl":
        table = JsonTable(TextFile(where, encoding))
    else:
        table = CsvTable(TextFile(where, encoding), delimiter)
    if repeated := [name for name, count in Counter(table.columns).items() if count > 1]:
        raise DataError(
            f"{table.label}: more than one column is called {shortened(map(repr, repeated))}; "
            "give each its own name."
        )
    return table


def _format_of(path: Path) -> str:
    check_is_file(path, DataError)
    with path.open("rb") as file:
        head = file.read(4)
    if not head:
        raise DataError(f"{path} is empty.")
    if head == b"PAR1" or path.suffix == ".parquet":
        return "parquet"
    return "jsonl" if path.name.lower().removesuffix(".gz").endswith(JSON_SUFFIXES) else "csv"
