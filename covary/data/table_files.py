"""Tables on disk, csv and parquet: read in blocks of rows, gathered as columns of float64."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError, needed, regular_file

Values = npt.NDArray[np.float64]

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1 << 16
DELIMITERS = ",;\t|"
# what stands for a value that is not there
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity|nan))$"


def shortened(names: Iterable[str], most: int = 10) -> str:
    """``"a, b, c"``; of many names the first ones alone, each cut at 60 characters."""
    some = [name if len(name) <= 60 else f"{name[:59]}…" for name in islice(names, most + 1)]
    return ", ".join([*some[:most], *(["..."] if len(some) > most else [])])


class TableFile(Protocol):
    """A file of named columns, of which ``refused`` cannot be read, by name and with the reason."""

    columns: list[str]
    refused: dict[str, str]

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
    with regular_file(path).open("rb") as file:
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
            f"{path}: more than one column is called {shortened(map(repr, repeated))}; "
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
        self.refused: dict[str, str] = {}
        if all(_is_number(name) for name in self.columns):
            raise DataError(
                f"{path}: the first line holds numbers alone ({shortened(self.columns, 3)}); "
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
        wrong = ((line, row) for line, row in self._rows() if len(row) != len(self.columns))
        for first, row in wrong:
            others = shortened(f"line {line}" for line, _ in wrong)
            raise DataError(
                f"{self.path}: line {first} has {len(row)} values, expected {len(self.columns)} as "
                f"in the header{others and f' (others that do not fit: {others})'}; correct the "
                f"lines, or the delimiter {self.delimiter!r} with --delimiter."
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
            schema = parquet.read_schema(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a readable parquet file ({error}).") from error
        self.columns = [str(name) for name in schema.names]
        self.refused = {
            name: f"is of type {kind}, expected numbers, booleans or texts; convert it, or leave "
            f"it out with --drop {name!r}"
            for name, kind in zip(self.columns, schema.types, strict=True)
            if _plain_type(kind) is None
        }

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as float64 or as texts, null where missing."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(BLOCK_ROWS, columns=list(wanted)):
                    yield {name: _plain(batch.column(name)) for name in wanted}
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.path} cannot be read ({error}).") from error

    def where(self, column: str, matches: Callable[[str], bool]) -> str:
        """The number of the row of the first value that matches, counted from 1."""
        start = 1
        for block in self.blocks([column]):
            for i, found in enumerate(block[column].to_pylist()):
                if found is not None and matches(str(found).strip()):
                    return f"row {start + i}"
            start += len(block[column])
        return "an unknown row"


def _plain_type(kind: Any) -> Any:
    """As what a column of a parquet file is read: float64, texts, or None for not at all."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return pa.float64()
    if types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind):
        return pa.string()
    return pa.float64() if types.is_null(kind) else None


def _plain(array: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(_plain_type(array.type), safe=False)


def _is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass
class Gathered:
    """A column as it is read: numbers, or texts that are numbered as they come.

    The first block with a value in it decides which: texts, if more than half of its values are no
    numbers. Texts that then turn up among numbers are counted as strays.

    Attributes:
        name: of the column.
        kind: ``"number"``, ``"text"``, or empty as long as nothing but missing values was seen.
        limit: the largest number of different texts.
        texts: the number of each text.
        strays: how many texts there are among the numbers.
        stray: the first of them.
    """

    name: str
    kind: str = ""
    limit: float = float("inf")
    texts: dict[str, int] = field(default_factory=dict)
    strays: int = 0
    stray: str = ""
    _chunks: list[Values] = field(default_factory=list)

    @cached_property
    def values(self) -> Values:
        """All of the column ``(n,)``: numbers, or the numbers of texts; NaN where missing."""
        chunks, self._chunks = self._chunks, []
        return np.concatenate(chunks) if chunks else np.empty(0)

    @property
    def has_too_many_texts(self) -> bool:
        """Whether there are more different texts than allowed; the rest is then passed over."""
        return len(self.texts) > self.limit

    def add(self, block: Any) -> None:
        """Append a pyarrow array of float64 or of texts."""
        import pyarrow as pa

        if self.has_too_many_texts:
            self._chunks.append(np.full(len(block), np.nan))
        elif self.kind == "text":
            self._add_texts(_without_missing(block.cast(pa.string())))
        else:
            try:
                self._add_numbers(block.cast(pa.float64()))
            except pa.ArrowInvalid:
                self._add_mixture(_without_missing(block))

    def _add_mixture(self, block: Any) -> None:
        import pyarrow.compute as pc

        is_number = pc.match_substring_regex(block, NUMBER)
        texts = block.filter(pc.invert(is_number))
        if not self.kind and 2 * len(texts) > len(block) - block.null_count:
            self.kind = "text"
            self._add_texts(block)
            return
        if len(texts):
            self.stray = self.stray or texts[0].as_py()
            self.strays += len(texts)
        self._add_numbers(pc.if_else(is_number, block, None).cast("float64"))

    def _add_numbers(self, block: Any) -> None:
        # a copy, since pyarrow keeps the memory of blocks for the next ones
        values = np.array(block.to_numpy(zero_copy_only=False))
        if not self.kind and not np.isnan(values).all():
            self.kind = "number"
        self._chunks.append(values)

    def _add_texts(self, block: Any) -> None:
        encoded = block.dictionary_encode()
        numbers = [
            self.texts.setdefault(text, len(self.texts)) for text in encoded.dictionary.to_pylist()
        ]
        # the last place is where index -1 leads
        lookup = np.array([*numbers, np.nan])
        self._chunks.append(lookup[encoded.indices.fill_null(-1).to_numpy()])


def _without_missing(block: Any) -> Any:
    """Texts without spaces around them, null where they stand for nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(block)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)


def gather(
    table: TableFile,
    wanted: Collection[str],
    *,
    kinds: Mapping[str, str],
    limits: Mapping[str, int],
) -> dict[str, Gathered]:
    """Read the wanted columns; ``kinds`` says what is known beforehand of some of them."""
    columns = {
        name: Gathered(name, kinds.get(name, ""), limits.get(name, float("inf"))) for name in wanted
    }
    for block in table.blocks(list(wanted)):
        for name, values in block.items():
            columns[name].add(values)
    return columns
