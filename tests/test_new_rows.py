"""New rows of a table: read in chunks, from files and streams, and what is unusual about them."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import pickle
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from covary import data
from covary.data import table_files
from covary.runs.records import decoded, to_json
from tests.test_tables import write, write_json

ROWS = 60


def frame(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """A column of each kind, one with errors, and a target of each kind."""
    random = np.random.default_rng(seed)
    start = datetime(2024, 1, 1)
    return pd.DataFrame(
        {
            "id": [f"row {i}" for i in range(rows)],
            "width": random.standard_normal(rows),
            "width_std": random.random(rows),
            "city": random.choice(["Oslo", "Bonn", "Rome"], rows),
            "open": random.random(rows) < 0.5,
            "when": [(start + timedelta(hours=7 * i)).isoformat() for i in range(rows)],
            "country": "Norway",
            "version": 1.5,
            "price": random.standard_normal(rows),
            "kind": random.choice(["a", "b"], rows),
        }
    )


def learnt(folder: Path, target: str = "price", **options) -> data.Schema:
    """The schema of the table, as a run keeps it."""
    other = "kind" if target == "price" else "price"
    options = {"errors": {"width": "width_std"}, **options}
    path = write(folder / "old.csv", frame())
    _, schema = data.read_table(path, target=target, drop=["id", other], **options)
    return decoded(data.Schema, json.loads(json.dumps(to_json(schema))), "schema.json")


@pytest.fixture
def schema(tmp_path) -> data.Schema:
    return learnt(tmp_path)


def stored(folder: Path, kind: str, table: pd.DataFrame) -> Path:
    path = folder / f"new.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    elif "json" in kind:
        write_json(path, table)
    else:
        write(path, table, sep="\t" if "tsv" in kind else ",")
    return path


def strange() -> pd.DataFrame:
    """Rows 2 to 6 each have something that training did not have, row 6 two things."""
    table = frame(seed=1).astype({"open": object})
    table.loc[2, "city"] = "Roma"
    table.loc[3, "width"] = np.nan
    table.loc[4, "open"] = "perhaps"
    table.loc[5, "country"] = "Sweden"
    table.loc[6, ["city", "version"]] = ["Paris", 2.5]
    return table


REASONS = {
    2: "city: unseen 'Roma'",
    3: "width: missing",
    4: "open: unseen 'perhaps'",
    5: "country: constant in training",
    6: "city: unseen 'Paris'; version: constant in training",
}
KINDS = ["csv", "tsv", "csv.gz", "jsonl", "jsonl.gz", "ndjson", "parquet"]


def refused(source, schema, *parts: str, **options) -> str:
    with pytest.raises(data.DataError) as caught:
        list(data.read_rows(source, schema, **options))
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# chunks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["price", "kind"])
@pytest.mark.parametrize("small_blocks", [False, True])
def test_chunks_are_the_whole_table(tmp_path, monkeypatch, kind, target, small_blocks):
    schema = learnt(tmp_path, target)
    table = strange().astype({"open": str}) if kind == "parquet" else strange()
    path = stored(tmp_path, kind, table.sample(frac=1, axis=1, random_state=0))
    if small_blocks:
        monkeypatch.setattr(table_files, "BLOCK_BYTES", 500)
        monkeypatch.setattr(table_files, "BLOCK_ROWS", 11)
    whole, _ = data.read_table(path, schema=schema)
    for size in (1, 7, 60, 1000):
        chunks = list(data.read_rows(path, schema, chunk=size))
        lengths = [len(chunk.x) for chunk in chunks]
        assert lengths == [min(size, ROWS - start) for start in range(0, ROWS, size)]
        assert [chunk.start for chunk in chunks] == list(range(0, ROWS, size))
        np.testing.assert_array_equal(np.concatenate([c.x for c in chunks]), whole.x_test)
        np.testing.assert_array_equal(np.concatenate([c.y for c in chunks]), whole.y_test)
        np.testing.assert_array_equal(np.concatenate([c.std for c in chunks]), whole.x_test_std)
        reasons = {c.start + row: why for c in chunks for row, why in c.reasons.items()}
        assert reasons == whole.reasons == REASONS
        marked = np.concatenate([chunk.unusual for chunk in chunks])
        assert np.flatnonzero(marked).tolist() == list(REASONS)
        assert all(set(chunk.extras) == {"id", {"price": "kind", "kind": "price"}[target]}
                   for chunk in chunks)  # fmt: skip
        ids = [name for chunk in chunks for name in chunk.columns["id"].to_pylist()]
        assert ids == table["id"].tolist()
        assert set(chunks[0].columns) == set(table.columns)


def test_original_columns_are_as_the_file_has_them(tmp_path, schema):
    big = 2**60 + 1
    table = frame(5).assign(id=big, when=pd.Timestamp("2024-03-01 12:30"))
    (chunk,) = data.read_rows(stored(tmp_path, "parquet", table), schema)
    assert chunk.columns["id"].to_pylist() == [big] * 5
    assert pa.types.is_timestamp(chunk.columns["when"].type)
    (chunk,) = data.read_rows(stored(tmp_path, "csv", table), schema)
    assert chunk.columns["id"].to_pylist() == [str(big)] * 5
    lines = [json.loads(line) for line in write_json(tmp_path / "t", frame(5)).open()]
    for i, (line, more) in enumerate(zip(lines, (1, "two", None, [3], True), strict=True)):
        line |= {"id": i, "more": more, "tags": {"a": i}}
    path = tmp_path / "new.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    (chunk,) = data.read_rows(path, schema)
    assert chunk.columns["id"].to_pylist() == list(range(5))
    assert chunk.columns["tags"].to_pylist() == [b'{"a": %d}' % i for i in range(5)]
    assert chunk.columns["more"].to_pylist() == [b"1", b'"two"', None, b"[3]", b"true"]


def test_categories_of_parquet_are_joined_over_blocks(tmp_path, schema, monkeypatch):
    monkeypatch.setattr(table_files, "BLOCK_ROWS", 7)
    table = frame().astype({"city": "category", "id": "category"})
    table.to_parquet(tmp_path / "new.parquet", row_group_size=11)
    chunks = list(data.read_rows(tmp_path / "new.parquet", schema, chunk=20))
    got = [city for chunk in chunks for city in chunk.columns["city"].to_pylist()]
    assert got == table["city"].tolist()
    whole, _ = data.read_table(tmp_path / "new.parquet", schema=schema)
    np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in chunks]), whole.x_test)


def test_a_target_may_be_absent_or_missing_in_some_rows(tmp_path):
    for target, gone in (("price", np.isnan), ("kind", lambda y: y == -1)):
        schema = learnt(tmp_path, target)
        table = frame()
        path = write(tmp_path / "new.csv", table.drop(columns=target))
        assert all(chunk.y is None for chunk in data.read_rows(path, schema, chunk=7))
        table.loc[3:4, target] = None
        write(path, table)
        (chunk,) = data.read_rows(path, schema)
        assert np.flatnonzero(gone(chunk.y)).tolist() == [3, 4]
        each = [one.y for one in data.read_rows(path, schema, chunk=1)]
        np.testing.assert_array_equal(np.concatenate(each), chunk.y)
        whole, _ = data.read_table(path, schema=schema)
        kept = ~gone(chunk.y).reshape(-1)
        np.testing.assert_array_equal(chunk.x[kept], whole.x_test)
        np.testing.assert_array_equal(chunk.y[kept], whole.y_test)
        assert "2 of 60 rows were dropped, as the target is missing in them" in whole.notes


# streams


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_stream_gives_what_a_file_gives(tmp_path, schema, kind, packed, monkeypatch):
    path = stored(tmp_path, kind, strange())
    content = gzip.compress(path.read_bytes()) if packed else path.read_bytes()
    for head in (1 << 20, 1000):  # the header alone, or all of it
        monkeypatch.setattr(table_files, "HEAD_BYTES", head)
        stream = io.BytesIO(content)
        chunks = list(data.read_rows(stream, schema, format=kind, chunk=11))
        expected = list(data.read_rows(path, schema, chunk=11))
        for got, want in zip(chunks, expected, strict=True):
            np.testing.assert_array_equal(got.x, want.x)
            assert got.reasons == want.reasons
            assert got.columns["id"].to_pylist() == want.columns["id"].to_pylist()
        assert not stream.closed


class Dribble(io.RawIOBase):
    """Bytes that come a few at a time, as through a pipe."""

    def __init__(self, content: bytes) -> None:
        self.content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        return self.content.readinto(memoryview(buffer)[:7])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "csv.gz"])
def test_bytes_may_come_a_few_at_a_time(tmp_path, schema, kind, monkeypatch):
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(table_files, "HEAD_BYTES", 1001)
    path = stored(tmp_path, kind, strange())
    form = kind.removesuffix(".gz")
    chunks = list(data.read_rows(Dribble(path.read_bytes()), schema, format=form, chunk=9))
    (whole,) = data.read_rows(path, schema)
    np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in chunks]), whole.x)


def test_standard_input_need_not_end(tmp_path, schema):
    """One may stop after a chunk, or at an error, while nobody closes the other end."""
    (tmp_path / "schema.json").write_text(json.dumps(to_json(schema)))
    code = """
import json, sys
from covary import data
from covary.runs.records import decoded
schema = decoded(data.Schema, json.load(open("schema.json")), "")
chunks = data.read_rows(sys.stdin.buffer, schema, format="csv", chunk=7)
print(len(next(chunks).x), flush=True)
list(chunks)
"""
    header, rows = write(tmp_path / "new.csv", frame()).read_bytes().split(b"\n", 1)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        with suppress(BrokenPipeError):
            process.stdin.write(header + b"\n" + rows * 70 + b"1,2\n" + rows * 200)
            process.stdin.flush()
        assert process.wait(timeout=60) == 1
        assert process.stdout.read().split() == [b"7"]
        told = process.stderr.read()
    assert b"DataError: standard input: line 4202 has 2 values, expected 10" in told
    assert b"Fatal" not in told


class Endless(io.RawIOBase):
    """A table without an end, which counts the bytes that were read of it."""

    def __init__(self, lines) -> None:
        self.lines, self.rest, self.bytes = lines, b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while len(self.rest) < len(buffer):
            self.rest += next(self.lines)
        buffer[:], self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        self.bytes += len(buffer)
        return len(buffer)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_stream_without_end_is_read_in_little_memory(tmp_path, schema, kind):
    """Chunks come as rows do, and none of what was read is kept."""
    body = stored(tmp_path, kind, frame()).read_bytes().splitlines(keepends=True)
    start = [body.pop(0)] if kind == "csv" else []
    stream = Endless(itertools.chain(start, itertools.cycle([b"".join(body)])))
    size, peaks = 3000, []
    chunks = data.read_rows(stream, schema, format=kind, chunk=size)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    for count in (4, 12):
        tracemalloc.reset_peak()
        for _ in range(count):
            assert len(next(chunks).x) == size
            assert pa.total_allocated_bytes() - before < 10e6
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert stream.bytes < 16 * size * sum(map(len, body)) / ROWS + 3e6
    assert peaks[1] < 1.2 * peaks[0] < 30e6


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_a_file_is_read_in_little_memory(tmp_path, schema, kind):
    """Of csv, pyarrow reads 35 MB ahead at most; here, all of the file."""
    table = pd.concat([frame()] * 2000, ignore_index=True)
    path = stored(tmp_path, kind, table)
    before, chunks = pa.total_allocated_bytes(), data.read_rows(path, schema, chunk=1000)
    most = rows = 0
    for chunk in chunks:
        rows += len(chunk.x)
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == len(table)
    assert most < 60e6


def test_streams_that_cannot_be_read_are_told(schema):
    refused(io.BytesIO(b""), schema, "the stream is empty", format="csv")
    refused(io.BytesIO(b""), schema, "the stream is empty", format="jsonl")
    refused(io.BytesIO(b"a"), schema, "csv or jsonl, and which it is has to be said")
    refused(io.BytesIO(b"a"), schema, "got 'parquet'; put other formats", format="parquet")
    refused(io.StringIO("a"), schema, "bytes is needed, such as sys.stdin.buffer", format="csv")
    refused(io.BytesIO(b"a"), schema, "one of csv, jsonl, parquet, got 'xls'", format="xls")
    broken = gzip.compress(b"a,b\n" * 9000)[:-20]
    refused(io.BytesIO(broken), schema, "the stream cannot be read", format="csv")
    refused(io.BytesIO("größe\n".encode("latin-1")), schema, "--encoding latin-1", format="csv")


def test_problems_of_a_stream_are_told_by_row(tmp_path, schema):
    content = write(tmp_path / "new.csv", frame()).read_text().splitlines()
    for wrong, expected in (
        (content[40].replace(",", ",much", 1), "texts, the first 'much"),
        ("1,2,3", "line 41 has 3 values, expected 10 as in the header; correct the lines"),
    ):
        text = "\n".join([*content[:40], wrong, *content[41:]])
        told = refused(io.BytesIO(text.encode()), schema, expected, format="csv", chunk=7)
        assert "much" not in expected or "in row 40; correct them" in told


# what is wrong


def test_columns_that_are_not_there_are_named_before_anything_is_read(tmp_path, schema):
    table = frame().rename(columns={"width": "wdith", "when": "time"}).drop(columns="city")
    path = write(tmp_path / "new.csv", table)
    with pytest.raises(data.DataError) as caught:
        data.read_rows(path, schema)
    told = "there are no columns 'width' (did you mean 'wdith'?), 'city', 'when'; it has id, "
    assert told in str(caught.value)
    with pytest.raises(data.DataError, match="no column 'width_std'"):
        data.read_rows(write(path, frame().drop(columns="width_std")), schema)
    write(path, frame().drop(columns=["country", "version"]))
    (chunk,) = data.read_rows(path, schema)
    assert not chunk.reasons


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_is_told_with_its_place_in_the_file(tmp_path, schema, kind):
    table = frame().astype({"width": object})
    table.loc[45, "width"] = "wide"
    if kind == "parquet":
        table = table.astype({"width": str})
    path = stored(tmp_path, kind, table)
    place = {"parquet": "row 46"}.get(kind, "line 46" if "json" in kind else "line 47")
    told = f"'wide' in {place}; correct them, as they were numbers in training"
    refused(path, schema, told, chunk=10)
    first = next(data.read_rows(path, schema, chunk=10))
    assert len(first.x) == 10


def test_wrong_options_are_told(tmp_path, schema):
    path = write(tmp_path / "new.csv", frame())
    refused(path, schema, "unseen must be one of flag, error, got 'drop'", unseen="drop")
    refused(path, schema, "missing must be one of flag, error, got 'mean'", missing="mean")
    refused(path, schema, "chunk must be 1 row or more, got 0", chunk=0)
    refused(tmp_path / "absent.csv", schema, "is not there")
    refused(write(path, frame(0)), schema, "has a header but no rows")
    path.write_text(path.read_text() + "1,2\n")
    refused(path, schema, "line 2 has 2 values, expected 10")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'[{"a": 1}]\n', "line 1 is no object but [{'a': 1}]; JSON lines have an object in each"),
        (b'{"a": 1}\n{"a": 2\n{"a": 3}\n', "line 2 is no JSON"),
        (b'{"a": 1}\n\n3\n', "line 3 is no object but 3"),
        (b"[" * 100_000, "line 1 is no JSON"),
        (b'{"a": "\xff"}\n', "is not in utf-8"),
        (b"\x00\x01", "is not a text file"),
        (b'{"a": 1}\n' * 20_000 + b'{"b": 1}\n', "line 20001 has 'b', which the first lines do"),
    ],
)
def test_wrong_json_lines_are_told(tmp_path, monkeypatch, content, expected):
    monkeypatch.setattr(table_files, "HEAD_BYTES", 1 << 16)
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(data.DataError) as caught:
        data.read_table(path, target="a")
    assert expected in str(caught.value)


def test_json_lines_may_lack_keys_and_end_without_a_line_end(tmp_path):
    objects = [{"a": i, "y": i + 0.5} | ({"b": i % 3} if i % 2 else {}) for i in range(30)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([*map(json.dumps, objects), '{"a": 7, "y": 1, "c": "late"}']))
    loaded, schema = data.read_table(path, target="y", missing="mean", drop=["c"])
    assert loaded.features == ("a", "b", "b missing")
    rows, _ = data.read_table(path, schema=schema)
    assert rows.x_test[:4].tolist() == [[0, rows.x_test[0, 1], 1], [1, 1, 0],
                                        [2, rows.x_test[0, 1], 1], [3, 0, 0]]  # fmt: skip


def test_objects_and_lists_of_json_lines_are_no_inputs(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"a": i, "b": [i], "y": i / 2}) for i in range(30)))
    with pytest.raises(data.DataError, match=r"'b' holds bytes, objects or lists.*--drop 'b'"):
        data.read_table(path, target="y")
    loaded, _ = data.read_table(path, target="y", drop=["b"])
    assert loaded.features == ("a",)


# what is unusual


def test_unseen_and_missing_values_are_encoded_as_nothing_or_the_mean(tmp_path, schema):
    (chunk,) = data.read_rows(write(tmp_path / "new.csv", strange()), schema)
    place = {name: i for i, name in enumerate(schema.features)}
    cities = [place[f"city={city}"] for city in ("Bonn", "Oslo", "Rome")]
    assert np.flatnonzero(chunk.x[:, cities].sum(1) == 0).tolist() == [2, 6]
    fill = {name: column.fill for name, column in schema.inputs.items()}
    assert chunk.x[3, place["width"]] == fill["width"]
    assert chunk.std[3].sum() == 0
    assert 0 < chunk.x[4, place["open"]] == fill["open"] < 1
    assert np.isfinite(chunk.x).all()


def test_what_is_unusual_is_an_error_if_wanted(tmp_path, schema):
    path = write(tmp_path / "new.csv", strange())
    with pytest.raises(data.DataError) as caught:
        list(data.read_rows(path, schema, unseen="error", missing="error"))
    for part in (
        "has 3 problems",
        "values are missing in 'width' (1) of 60 rows; fill them, as the training rows had none",
        "column 'city' holds 'Roma', 'Paris', none of the known categories Bonn, Oslo, Rome",
        "column 'open' holds 'perhaps', none of the known categories false, true",
    ):
        assert part in str(caught.value)
    with pytest.raises(data.DataError, match="missing in 'width'"):
        data.read_table(path, schema=schema, missing="error")
    loaded, _ = data.read_table(path, schema=schema)
    told = "5 of 60 rows have what training did not have, the first in line 4 (city: unseen 'Roma')"
    assert told in loaded.notes
    assert pickle.loads(pickle.dumps(loaded)).reasons == REASONS


@pytest.mark.parametrize("missing", ["error", "mean", "drop"])
def test_missing_values_are_unusual_where_training_had_none(tmp_path, missing):
    old = frame()
    if missing != "error":
        old.loc[:30, "width"] = np.nan
    path = write(tmp_path / "old.csv", old)
    drop = ["id", "kind", "width_std"]
    _, schema = data.read_table(path, target="price", drop=drop, missing=missing)
    new = frame(4)
    new.loc[0, "width"] = new.loc[1, "city"] = new.loc[2, "when"] = None
    new.loc[3, "country"] = None  # which is no input
    (chunk,) = data.read_rows(write(tmp_path / "new.csv", new), schema)
    expected = {0: "width: missing", 1: "city: missing", 2: "when: missing"}
    if missing == "mean":
        del expected[0]
    assert chunk.reasons == expected
    assert len(chunk.x) == 4
    assert np.isfinite(chunk.x).all()


@pytest.mark.parametrize(
    ("old", "same", "others"),
    [
        ("Norway", ["Norway", " Norway "], ["norway", "1", "true"]),
        (1.5, ["1.5", "1.50", "15e-1"], ["2", "x", "2024-03-01"]),
        (True, ["True", "true", "TRUE"], ["false", "1"]),
        ("2024-03-01", ["2024-03-01", "2024-03-01T00:00Z"], ["2024-03-02", "soon"]),
        (None, ["anything", "3"], []),
    ],
)
def test_another_value_of_a_constant_is_unusual(tmp_path, old, same, others):
    table = frame().assign(constant=old)
    drop = ["id", "kind", "width_std"]
    loaded, schema = data.read_table(
        write(tmp_path / "old.csv", table), target="price", drop=drop, missing="mean"
    )
    assert not any(name.startswith("constant") for name in loaded.features)
    new = frame(len(same) + len(others)).assign(constant=[*same, *others])
    chunks = data.read_rows(write(tmp_path / "new.csv", new), schema, chunk=1)
    assert [chunk.unusual.item() for chunk in chunks] == [False] * len(same) + [True] * len(others)


def test_constants_of_older_runs_are_not_looked_at(tmp_path, schema):
    content = to_json(schema)
    for column in content["columns"]:
        if column["kind"] == "constant":
            column |= {"categories": [], "fill": None}
        del column["parts"]
    older = decoded(data.Schema, content, "schema.json")
    (chunk,) = data.read_rows(write(tmp_path / "new.csv", strange()), older)
    assert list(chunk.reasons) == [2, 3, 4, 6]


def test_booleans_are_read_from_every_kind_of_file(tmp_path, schema):
    expected = frame()["open"].to_numpy(float)
    for kind in KINDS:
        (chunk,) = data.read_rows(stored(tmp_path, kind, frame()), schema)
        assert not chunk.reasons
        np.testing.assert_array_equal(chunk.x[:, schema.features.index("open")], expected)


def test_without_pyarrow_the_remedy_is_told(tmp_path, schema, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'covary\[tables\]'"):
        data.read_rows(tmp_path / "new.csv", schema)
