"""Tables on disk, csv and parquet: read in blocks of rows, gathered as columns of float64."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError, needed
from covary.files import check_is_file

Values = npt.NDArray[np.float64]

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1 << 16
HEAD_BYTES = 1 << 16
DELIMITERS = ",;\t|"
# what stands for a value that is not there
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity|nan))$"


def shortened(names: Iterable[str], most: int = 10) -> str:
    """``"a, b, c"``; of many names the first ones alone, each cut at 60 characters."""
    some = [name if len(name) <= 60 else f"{name[:59]}…" for name in islice(names, most + 1)]
    return ", ".join([*some[:most], *(["..."] if len(some) > most else [])])


def as_number(text: str) -> float:
    """The number that a text is, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


class CsvTable:
    """A text file with a header line, gzipped or not."""

    def __init__(self, path: Path, encoding: str, delimiter: str | None) -> None:
        self.path = path
        # Excel begins a utf-8 file with a byte order mark, which is no part of the first name
        self.encoding = "utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding
        with path.open("rb") as file:
            self._compression = "gzip" if file.read(2) == b"\x1f\x8b" else None
        head = self._head()
        first = next((line for line in head.splitlines() if line.strip()), "")
        outside_quotes = "".join(first.split('"')[::2])
        self.delimiter = delimiter or max(DELIMITERS, key=outside_quotes.count)
        if len(self.delimiter) != 1:
            raise DataError(f"The delimiter must be one character, got {self.delimiter!r}.")
        self.header_lines, header = next(self._rows(), (0, []))
        if not header:
            raise DataError(f"{path} is empty.")
        self.columns = [name.strip() or f"column {i}" for i, name in enumerate(header, start=1)]
        self.refused: dict[str, str] = {}
        self.is_ragged = False  # whether blocks() left out lines of more or fewer values
        if not np.isnan([as_number(name) for name in self.columns]).any():
            raise DataError(
                f"{path}: the first line holds numbers alone ({shortened(self.columns, 3)}); "
                "put a line with the names of the columns before it."
            )

    def _head(self) -> str:
        """The beginning of the file; what is no text in this encoding is refused."""
        with self._open() as stream:
            start = bytes(stream.read(HEAD_BYTES))
            try:
                head = io.TextIOWrapper(io.BytesIO(start), self.encoding, "ignore").read()
            except LookupError as error:
                raise DataError(f"There is no encoding {self.encoding!r}; try latin-1.") from error
            if "\0" in head:
                raise DataError(f"{self.path} is not a text file; expected csv or parquet.")
        return head

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The bytes of the file, with an error that says what to do where they are no text."""
        import pyarrow as pa

        try:
            with pa.input_stream(self.path, compression=self._compression) as stream:
                yield stream
        except (UnicodeError, pa.ArrowInvalid, OSError, EOFError) as error:
            if isinstance(error, UnicodeError) or "UTF8" in str(error):
                encoding = self.encoding.removesuffix("-sig")
                raise DataError(
                    f"{self.path} is not in {encoding}; name its encoding, e.g. --encoding latin-1."
                ) from error
            raise DataError(f"{self.path} cannot be read ({error}).") from error

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The wanted columns as pyarrow arrays of texts, a block of rows at a time.

        Lines that do not fit the header are left out: ``ragged_lines`` tells which.
        """
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        def leave_out(_row: Any) -> str:
            self.is_ragged = True
            return "skip"

        with self._open() as stream:
            try:
                reader = arrow_csv.open_csv(
                    stream,
                    arrow_csv.ReadOptions(
                        column_names=self.columns,
                        skip_rows=self.header_lines,
                        block_size=BLOCK_BYTES,
                        encoding="utf8" if self.encoding == "utf-8-sig" else self.encoding,
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
                    raise DataError(f"{self.path}: {told}.") from error
                raise

    def places(self, column: str) -> Iterator[tuple[str, str]]:
        """Where each value of a column stands, for messages: ``"line 7"``, and the value."""
        place = self.columns.index(column)
        for line, row in self._rows():
            if line > self.header_lines and len(row) == len(self.columns):
                yield f"line {line}", row[place]

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line number and values, slowly: for the header and for messages."""
        with self._open() as stream:
            text = io.TextIOWrapper(stream, self.encoding, newline="")
            reader = csv.reader(text, delimiter=self.delimiter)
            try:
                for row in reader:
                    if row:
                        yield reader.line_num, row
            except csv.Error as error:
                raise DataError(f"{self.path}: line {reader.line_num}: {error}.") from error

    def ragged_lines(self) -> str:
        """Which lines have more or fewer values than the header, in a sentence; empty if none."""
        wrong = ((line, row) for line, row in self._rows() if len(row) != len(self.columns))
        for first, row in wrong:
            others = shortened(f"line {line}" for line, _ in wrong)
            return (
                f"line {first} has {len(row)} values, expected {len(self.columns)} as in the "
                f"header{others and f' (others that do not fit: {others})'}; correct the lines, or "
                f"the delimiter {self.delimiter!r} with --delimiter"
            )
        return ""


class ParquetTable:
    """A parquet file; its columns may be numbers, booleans or texts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            schema = file.schema_arrow
        self.columns = [str(name) for name in schema.names]
        self.refused = {
            name: f"is of type {kind}, expected numbers, booleans or texts; convert it, or leave "
            f"it out with --drop {name!r}"
            for name, kind in zip(self.columns, schema.types, strict=True)
            if _plain_type(kind) is None
        }

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
        """The wanted columns as pyarrow arrays of float64 or of texts, null where missing."""
        import pyarrow as pa

        with self._open() as file:
            for batch in file.iter_batches(BLOCK_ROWS, columns=list(wanted)):
                block = {}
                for name in wanted:
                    array = batch.column(name)
                    if pa.types.is_dictionary(array.type):
                        array = array.dictionary_decode()
                    block[name] = array.cast(_plain_type(array.type), safe=False)
                yield block

    def places(self, column: str) -> Iterator[tuple[str, str]]:
        """Where each value of a column stands, counted from 1: ``"row 7"``, and the value."""
        values = (value for block in self.blocks([column]) for value in block[column].to_pylist())
        for row, value in enumerate(values, start=1):
            yield f"row {row}", str(value)


def _plain_type(kind: Any) -> Any:
    """As what a column of a parquet file is read: float64, texts, or None for not at all."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind):
        return pa.string()
    numbers = (types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    return pa.float64() if any(is_kind(kind) for is_kind in numbers) else None


TableFile = CsvTable | ParquetTable


def open_table(path: Path, *, encoding: str, delimiter: str | None) -> TableFile:
    """A csv file (also tsv, also gzipped) or a parquet file, told apart by its first bytes."""
    with needed("pyarrow", "reading a table", "tables"):
        import pyarrow
    # Left to itself it listens to Ctrl-C while it reads, and may keep it to itself.
    pyarrow.enable_signal_handlers(False)
    check_is_file(path, DataError)
    with path.open("rb") as file:
        head = file.read(4)
    if not head:
        raise DataError(f"{path} is empty.")
    parquet = head == b"PAR1" or path.suffix == ".parquet"
    table = ParquetTable(path) if parquet else CsvTable(path, encoding, delimiter)
    if repeated := [name for name, count in Counter(table.columns).items() if count > 1]:
        raise DataError(
            f"{path}: more than one column is called {shortened(map(repr, repeated))}; "
            "give each its own name."
        )
    return table


@dataclass
class Gathered:
    """A column as it is read: numbers, or texts that are numbered as they come.

    The first block with a value in it decides which: texts, if more than half of its values are no
    numbers. Texts that then turn up among numbers are counted as strays.
    """

    name: str
    kind: str = ""  # number, text, or empty as long as nothing but missing values was seen
    limit: float = float("inf")  # the largest number of different texts
    texts: dict[str, int] = field(default_factory=dict)  # the number of each text
    strays: int = 0  # how many texts there are among the numbers
    stray: str = ""  # the first of them
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
        texts = encoded.dictionary.to_pylist()
        numbers = [self.texts.setdefault(text, len(self.texts)) for text in texts]
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
    table: TableFile, wanted: Sequence[str], kinds: Mapping[str, str], limits: Mapping[str, int]
) -> dict[str, Gathered]:
    """Read the wanted columns; ``kinds`` says what is known beforehand of some of them."""
    columns = {
        name: Gathered(name, kinds.get(name, ""), limits.get(name, float("inf"))) for name in wanted
    }
    for block in table.blocks(wanted):
        for name, values in block.items():
            columns[name].add(values)
    return columns
