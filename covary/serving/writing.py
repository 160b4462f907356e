"""Tables written a chunk at a time: csv, JSON lines or parquet; to a file, whole or not at all."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from covary.data import DataError
from covary.files import replacing

FORMATS = ("csv", "jsonl", "parquet")
_ENDINGS = {
    **dict.fromkeys(("", ".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_QUOTED = '["\r\n{}]'  # what a value of csv has to stand in quotes for


class Writer(Protocol):
    """Takes tables of the same columns, one after the other."""

    def __call__(self, columns: Mapping[str, Any]) -> None:
        """Append columns: pyarrow arrays (n,) by name."""


def format_of(path: Path) -> str:
    """The format that the ending of a name says: csv if it has none, empty if it is another."""
    return _ENDINGS.get(Path(path.name.lower().removesuffix(".gz")).suffix, "")


@contextmanager
def writing(out: Path | BinaryIO, form: str) -> Iterator[Writer]:
    """Append to a file, which is there when all went well; or to a stream of bytes.

    A csv whose name ends in ``.tsv`` has tabs between its values; ``.gz`` packs csv or JSON lines.
    """
    if form not in FORMATS:
        raise DataError(f"The format must be one of {', '.join(FORMATS)}, got {form!r}.")
    if not isinstance(out, Path):
        if form == "parquet":
            raise DataError("A stream takes csv or jsonl; write parquet to a file.")
        yield _text_writer(out, form, ",")
        out.flush()  # here, and not when the process ends: a pipe may be closed
        return
    delimiter = "\t" if out.name.lower().removesuffix(".gz").endswith(".tsv") else ","
    with replacing(out) as file:
        if form == "parquet":
            writer = _Parquet(file)
            yield writer
            writer.close()
        elif out.suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                yield _text_writer(packed, form, delimiter)
        else:
            yield _text_writer(file, form, delimiter)


def _text_writer(file: Any, form: str, delimiter: str) -> Writer:
    has_header = False

    def write(columns: Mapping[str, Any]) -> None:
        nonlocal has_header
        if form == "jsonl":
            file.write(_json_lines(columns))
            return
        if not has_header:
            file.write(_csv_lines({name: _one(name) for name in columns}, delimiter))
            has_header = True
        file.write(_csv_lines(columns, delimiter))

    return write


def _one(text: str) -> Any:
    import pyarrow as pa

    return pa.array([text])


def _csv_lines(columns: Mapping[str, Any], delimiter: str) -> bytes:
    """Numbers with the fewest digits that read back the same, texts in quotes where needed."""
    import pyarrow.compute as pc

    texts = []
    for array in columns.values():
        text = _text(array)
        if pc.any(special := pc.match_substring_regex(text, _QUOTED.format(delimiter))).as_py():
            doubled = pc.replace_substring(text, '"', '""')
            text = pc.if_else(special, pc.binary_join_element_wise('"', doubled, '"', ""), text)
        texts.append(pc.fill_null(text, ""))
    if len(texts) == 1:  # an empty line would be no row
        texts = [pc.if_else(pc.equal(texts[0], ""), '""', texts[0])]
    return _joined(pc.binary_join_element_wise(*texts, delimiter))


def _json_lines(columns: Mapping[str, Any]) -> bytes:
    """An object for each row; null for what is missing or infinite."""
    import pyarrow.compute as pc

    names = [json.dumps(name, ensure_ascii=False) + ": " for name in columns]
    values = [
        pc.binary_join_element_wise(name, pc.fill_null(_json_text(array), "null"), "")
        for name, array in zip(names, columns.values(), strict=True)
    ]
    return _joined(
        pc.binary_join_element_wise("{", pc.binary_join_element_wise(*values, ", "), "}", "")
    )


def _json_text(array: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_floating(kind):
        return _text(pc.if_else(pc.is_finite(array), array, None))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_binary(kind):
        return _text(array)  # bytes are JSON already
    encoded = pc.dictionary_encode(_text(array))
    texts = [json.dumps(text, ensure_ascii=False) for text in encoded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(encoded.indices)


def _text(array: Any) -> Any:
    """As texts; bytes, which are JSON of objects and lists, as they are."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.string())


def _joined(lines: Any) -> bytes:
    return ("\n".join(lines.to_pylist()) + "\n").encode()


class _Parquet:
    """Writes parquet, with the types of the first table."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._writer = file, None  # type: BinaryIO, Any

    def __call__(self, columns: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table(dict(columns))
        if self._writer is None:
            fields = [
                pa.field(field.name, pa.string() if pa.types.is_null(field.type) else field.type)
                for field in table.schema
            ]
            self._schema = pa.schema(fields)
            self._writer = parquet.ParquetWriter(self._file, self._schema)
        try:
            table = table.cast(self._schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"A column changes its type on the way, which parquet does not have ({error}); "
                "write csv or jsonl."
            ) from error
        self._writer.write_table(table)

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
