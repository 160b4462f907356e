"""Tables on disk, csv and parquet, read in blocks of rows."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from covary.data.dataset import DataError
from covary.data.optional import needed

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1 << 16
DELIMITERS = ",;\t|"


class TableFile(Protocol):
    """A file of named columns."""

    columns: list[str]

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns, as pyarrow arrays, a block of rows at a time."""

    def where(self, column: str, matches: Callable[[str], bool]) -> str:
        """Where the first value that matches stands in a column, for messages: ``"line 7"``."""


def open_table(path: Path, *, encoding: str, delimiter: str | None) -> TableFile:
    """A csv file (also tsv, also gzipped) or a parquet file, told apart by its first bytes."""
    with needed("pyarrow", "reading a table", "tables"):
        import pyarrow
    # Left to itself it listens to Ctrl-C while it reads, and may keep it to itself.
    pyarrow.enable_signal_handlers(False)
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    with path.open("rb") as file:
        head = file.read(4)
    if not head:
        raise DataError(f"{path} is empty.")
    parquet = head == b"PAR1" or path.suffix == ".parquet"
    table = ParquetTable(path) if parquet else CsvTable(path, encoding, delimiter)
    _check_names(path, table.columns)
    return table


def _check_names(path: Path, names: list[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"{path}: more than one column is called {', '.join(map(repr, repeated))}; "
            "give each its own name."
        )


class CsvTable:
    """A text file with a header line."""

    def __init__(self, path: Path, encoding: str, delimiter: str | None) -> None:
        self.path = path
        # Excel begins a utf-8 file with a byte order mark, which is no part of the first name
        self.encoding = "utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding
        self._check_text()
        self.delimiter = delimiter or self._detect_delimiter()
        if len(self.delimiter) != 1:
            raise DataError(f"The delimiter must be one character, got {self.delimiter!r}.")
        self.header_lines, header = next(self._rows(), (0, []))
        if not header:
            raise DataError(f"{path} is empty.")
        self.columns = [name.strip() or f"column {i}" for i, name in enumerate(header, start=1)]
        if all(_is_number(name) for name in self.columns):
            raise DataError(
                f"{path}: the first line holds numbers alone ({', '.join(self.columns[:3])}, ...); "
                "put a line with the names of the columns before it."
            )

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as texts, as they stand in the file."""
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        try:
            with pa.input_stream(self.path, compression=self._compression()) as stream:
                reader = arrow_csv.open_csv(
                    stream,
                    arrow_csv.ReadOptions(
                        column_names=self.columns,
                        skip_rows=self.header_lines,
                        block_size=BLOCK_BYTES,
                        encoding="utf8" if self.encoding == "utf-8-sig" else self.encoding,
                    ),
                    arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                    arrow_csv.ConvertOptions(
                        include_columns=wanted,
                        column_types=dict.fromkeys(wanted, pa.string()),
                    ),
                )
                for batch in reader:
                    yield dict(zip(wanted, batch.columns, strict=True))
        except UnicodeError as error:
            raise self._wrong_encoding() from error
        except (pa.ArrowInvalid, OSError, EOFError) as error:
            if "skip initial" in str(error):
                return  # a header without an end of line, and nothing after it
            if "UTF8" in str(error):
                raise self._wrong_encoding() from error
            self._check_widths()
            raise DataError(f"{self.path} cannot be read ({error}).") from error

    def where(self, column: str, matches: Callable[[str], bool]) -> str:
        """The number of the line of the first value that matches."""
        place = self.columns.index(column)
        for line, row in self._rows():
            if line > self.header_lines and matches(row[place].strip()):
                return f"line {line}"
        return "an unknown line"

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line number and values, slowly: for the header and for messages."""
        with self._open() as text:
            reader = csv.reader(text, delimiter=self.delimiter)
            try:
                for row in reader:
                    if row:
                        yield reader.line_num, row
            except csv.Error as error:
                raise DataError(f"{self.path}: line {reader.line_num}: {error}.") from error

    def _check_widths(self) -> None:
        for line, row in self._rows():
            if len(row) != len(self.columns):
                raise DataError(
                    f"{self.path}: line {line} has {len(row)} values, expected "
                    f"{len(self.columns)} as in the header; correct the line, or the delimiter "
                    f"{self.delimiter!r} with --delimiter."
                )

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        """The file as text, with an error that says what to do where it is none."""
        try:
            with (
                self.path.open("rb") as file,
                gzip.open(file) if self._compression() else file as plain,
            ):
                yield io.TextIOWrapper(plain, encoding=self.encoding, newline="")
        except UnicodeError as error:
            raise self._wrong_encoding() from error
        except LookupError as error:
            raise DataError(f"There is no encoding {self.encoding!r}; try latin-1.") from error
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path} cannot be read ({error}).") from error

    def _compression(self) -> str | None:
        with self.path.open("rb") as file:
            return "gzip" if file.read(2) == b"\x1f\x8b" else None

    def _check_text(self) -> None:
        """Refuse what is no text at all."""
        with self._open() as text:
            if "\0" in text.read(1 << 16):
                raise self._not_text()

    def _wrong_encoding(self) -> DataError:
        with self.path.open("rb") as file:
            if not self._compression() and b"\0" in file.read(1 << 16):
                return self._not_text()
        encoding = self.encoding.removesuffix("-sig")
        return DataError(
            f"{self.path} is not in {encoding}; name its encoding, e.g. --encoding latin-1."
        )

    def _not_text(self) -> DataError:
        return DataError(f"{self.path} is not a text file; expected csv or parquet.")

    def _detect_delimiter(self) -> str:
        """The most frequent candidate of the first line, outside quotes."""
        with self._open() as text:
            header = next((line for line in text if line.strip()), "")
        unquoted = "".join(header.split('"')[::2])
        return max(DELIMITERS, key=unquoted.count)


class ParquetTable:
    """A parquet file; its columns may be numbers, booleans or texts."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.path = path
        try:
            self.columns = [str(name) for name in parquet.read_schema(path).names]
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a readable parquet file ({error}).") from error

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as float64 or as texts, null where missing."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(BLOCK_ROWS, columns=list(wanted)):
                    yield {name: self._plain(name, batch.column(name)) for name in wanted}
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.path} cannot be read ({error}).") from error

    def _plain(self, name: str, array: Any) -> Any:
        import pyarrow as pa

        kind = array.type
        if pa.types.is_dictionary(kind):
            array, kind = array.dictionary_decode(), kind.value_type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return array.cast(pa.float64(), safe=False)
        if pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return array.cast(pa.string())
        if pa.types.is_null(kind):
            return array.cast(pa.float64())
        raise DataError(
            f"{self.path}: column {name!r} is of type {kind}, expected numbers, booleans or "
            f"texts; convert it, or leave it out with --drop {name!r}."
        )

    def where(self, column: str, matches: Callable[[str], bool]) -> str:
        """The number of the row of the first value that matches, counted from 1."""
        start = 1
        for block in self.blocks([column]):
            for i, found in enumerate(block[column].to_pylist()):
                if found is not None and matches(str(found).strip()):
                    return f"row {start + i}"
            start += len(block[column])
        return "an unknown row"


def _is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
