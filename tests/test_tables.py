"""Tables of one's own: what is read, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from covary import data
from covary.data import columns, table_files, tables
from covary.runs.records import decoded, to_json

ROWS = 60


def frame(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """Two columns of numbers, one of texts, one of truths, and a target of each kind."""
    random = np.random.default_rng(seed)
    length, width = random.standard_normal((2, rows))
    return pd.DataFrame(
        {
            "length": length,
            "width": width,
            "city": random.choice(["Oslo", "Bonn", "Rome"], rows),
            "open": random.random(rows) < 0.5,
            "price": 2 * length + width,
            "kind": random.choice(["b", "a", "c"], rows),
            "count": random.integers(0, 4, rows),
        }
    )


TARGETS = ["price", "kind", "count"]


def read(path, target="price", **options):
    """Read with the other targets left out."""
    others = [name for name in TARGETS if name not in target and name != target]
    dropped, _ = data.read_table(path, target=target, drop=others, **options)
    return dropped


def write(path, table: pd.DataFrame, **options):
    table.to_csv(path, index=False, **options)
    return path


def write_json(path, table: pd.DataFrame):
    """An object per line, to the last digit, which pandas would round."""
    rows = json.loads(table.to_json(orient="records"))
    for name in table.select_dtypes("number"):
        for row, value in zip(rows, table[name].tolist(), strict=True):
            row[name] = None if value != value else value
    made = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(made) if path.suffix == ".gz" else made)
    return path


def text(path, content: str | bytes):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*, header: str = "a,y", rows: int = 20, **replaced: str) -> str:
    """``a,y`` rows of numbers, with some lines (by number, as ``line7=...``) replaced."""
    made = [header, *(f"{i * 0.5},{i * 0.25 + 0.1}" for i in range(rows))]
    for key, line in replaced.items():
        made[int(key.removeprefix("line")) - 1] = line
    return "\n".join(made) + "\n"


def fails(path, *parts: str, target="y", **options) -> str:
    """The message of the error that reading must raise, which holds all of the parts."""
    with pytest.raises(data.DataError) as caught:
        data.read_table(path, target=target, **options)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def rows_of(dataset) -> np.ndarray:
    """All rows with their targets, sorted, to compare sets whatever the split."""
    y, y_test = (
        part.view(len(part), *part.shape[1:] or (1,)) for part in (dataset.y, dataset.y_test)
    )
    rows = torch.cat([torch.cat([dataset.x, y], 1), torch.cat([dataset.x_test, y_test], 1)])
    return np.array(sorted(rows.tolist()))


# what is read


def test_columns_are_encoded_by_their_kind(tmp_path):
    table = frame()
    loaded = read(write(tmp_path / "t.csv", table))
    names = ("length", "width", "city=Bonn", "city=Oslo", "city=Rome", "open")
    assert loaded.features == names
    assert (loaded.name, loaded.task, loaded.targets) == ("t", "regression", ("price",))
    assert (len(loaded.x), len(loaded.x_test)) == (48, 12)
    expected = np.column_stack(
        [
            table.length,
            table.width,
            *(table.city == city for city in ("Bonn", "Oslo", "Rome")),
            table.open,
            table.price,
        ]
    ).astype(float)
    np.testing.assert_array_equal(rows_of(loaded), np.array(sorted(expected.tolist())))


@pytest.mark.parametrize(
    "kind", ["tsv", "csv.gz", "semicolon", "pipe", "parquet", "bom", "latin", "jsonl", "ndjson.gz"]
)
def test_every_kind_of_file_gives_the_same(tmp_path, kind):
    table = frame()
    expected = read(write(tmp_path / "t.csv", table))
    options = {}
    if kind == "parquet":
        path = tmp_path / "t.parquet"
        table.astype({"city": "category", "count": "int32"}).to_parquet(path)
    elif kind == "csv.gz":
        path = tmp_path / "t.csv.gz"
        path.write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    elif "json" in kind:
        path = write_json(tmp_path / f"t.{kind}", table)
    else:
        separator = {"tsv": "\t", "semicolon": ";", "pipe": "|"}.get(kind, ",")
        encoding = {"bom": "utf-8-sig", "latin": "latin-1"}.get(kind, "utf-8")
        path = write(tmp_path / f"t.{kind}", table, sep=separator, encoding=encoding)
        options = {"encoding": "latin-1"} if kind == "latin" else {}
    got = read(path, **options)
    assert got.features == expected.features
    assert torch.equal(got.x, expected.x)
    assert torch.equal(got.y_test, expected.y_test)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_many_small_blocks_give_the_same_as_one(tmp_path, kind, monkeypatch):
    table = frame(500)
    path = tmp_path / f"t.{kind}"
    if kind == "jsonl":
        write_json(path, table)
    else:
        table.to_parquet(path) if kind == "parquet" else write(path, table)
    expected = read(path)
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(table_files, "BLOCK_ROWS", 7)
    assert torch.equal(read(path).x, expected.x)


def test_the_split_follows_the_seed_and_keeps_proportions(tmp_path):
    path = write(tmp_path / "t.csv", frame(300))
    first, again, other = (read(path, "kind", seed=seed, test_fraction=0.3) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert len(first.x_test) == 90
    share = first.y.bincount() / len(first.y)
    torch.testing.assert_close(first.y_test.bincount() / 90, share, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("target", "task", "classes", "note"),
    [
        ("kind", "classification", ("a", "b", "c"), "holds texts"),
        ("open", "classification", ("False", "True"), "holds texts"),
        ("count", "classification", ("0", "1", "2", "3"), "holds 4 different whole numbers"),
        ("price", "regression", (), "holds 60 different numbers"),
    ],
)
def test_the_task_is_guessed_and_told(tmp_path, target, task, classes, note):
    table = frame()
    loaded = read(write(tmp_path / "t.csv", table), target)
    assert (loaded.task, loaded.classes) == (task, classes)
    assert any(task in told and note in told for told in loaded.notes)
    if task == "classification":
        counts = table[target].astype(str).value_counts()
        found = torch.cat([loaded.y, loaded.y_test]).bincount().tolist()
        assert found == [counts[name] for name in classes]


def test_the_task_can_be_said(tmp_path):
    path = write(tmp_path / "t.csv", frame())
    assert read(path, "count", task="regression").y.shape == (48, 1)
    assert read(path, "count", task="classification").classes == ("0", "1", "2", "3")
    both = read(path, ["price", "count"])
    assert (both.task, both.targets, both.y.shape) == ("regression", ("price", "count"), (48, 2))
    fails(path, "'kind' holds texts", target="kind", task="regression")
    fails(path, "several targets", target=["price", "count"], task="classification")
    fails(path, "auto, classification, regression", target="price", task="guess")


def test_numbers_may_be_names(tmp_path):
    path = text(tmp_path / "t.csv", lines(header="postcode,y").replace(".5,", ".0,"))
    plain, _ = data.read_table(path, target="y")
    named, schema = data.read_table(path, target="y", categories=["postcode"])
    assert plain.features == ("postcode",)
    assert named.features == tuple(f"postcode={code}" for code in schema.columns[0].categories)
    assert (named.x.sum(1) == 1).all()


def test_values_are_trimmed_and_blank_lines_passed_over(tmp_path):
    path = text(tmp_path / "t.csv", lines(line3=" 0.5 , 0.35 ", line5="\n1.5,0.85"))
    loaded, _ = data.read_table(path, target="y")
    assert rows_of(loaded).tolist() == [[i * 0.5, i * 0.25 + 0.1] for i in range(20)]


def test_a_value_may_hold_quotes_delimiters_and_line_ends(tmp_path, monkeypatch):
    """Also where a block of the file ends inside such a value."""
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 64)
    content = "name,y\n" + 'plain,2.5\n"a, ""b""\nc",1.5\n' * 12
    loaded, _ = data.read_table(text(tmp_path / "t.csv", content), target="y")
    assert loaded.features == ('name=a, "b"\nc', "name=plain")


# missing values


@pytest.fixture
def with_gaps(tmp_path):
    """Missing: 5 lengths, 3 cities, 2 prices, in different rows."""
    table = frame()
    table.loc[0:4, "length"] = np.nan
    table.loc[5:7, "city"] = None
    table.loc[8:9, "price"] = np.nan
    return write(tmp_path / "t.csv", table)


def test_missing_values_are_an_error_that_counts_them(with_gaps):
    fails(
        with_gaps, "'length' (5)", "'city' (3)", "'price' (2)", "--missing mean", "--missing drop",
        target="price", drop=["kind", "count"],
    )  # fmt: skip


def test_missing_values_are_filled_with_the_training_mean(with_gaps):
    loaded = read(with_gaps, missing="mean")
    column = {name: i for i, name in enumerate(loaded.features)}
    gone = loaded.x[:, column["length missing"]].bool()
    mean = loaded.x[~gone, column["length"]].mean()
    for x in (loaded.x, loaded.x_test):
        absent = x[:, column["length missing"]].bool()
        torch.testing.assert_close(x[absent, column["length"]], mean.expand(int(absent.sum())))
        cities = x[:, [column[f"city={city}"] for city in ("Bonn", "Oslo", "Rome")]]
        assert torch.equal(cities.sum(1), 1 - x[:, column["city missing"]])
    assert len(loaded.x) + len(loaded.x_test) == ROWS - 2
    notes = "; ".join(loaded.notes)
    assert "2 of 60 rows were dropped, as the target is missing" in notes
    assert "'length' has 5 missing values" in notes
    assert "'city' has 3 missing values" in notes


def test_rows_with_missing_values_are_dropped_and_counted(with_gaps):
    loaded = read(with_gaps, missing="drop")
    assert len(loaded.x) + len(loaded.x_test) == ROWS - 10
    assert any("10 of 60 rows were dropped" in note for note in loaded.notes)
    assert not any("missing" in name for name in loaded.features)


@pytest.mark.parametrize("marker", columns.MISSING)
def test_every_way_to_write_nothing_is_missing(tmp_path, marker):
    fails(text(tmp_path / "t.csv", lines(line4=f"{marker},1")), "'a' (1)")


def test_an_empty_column_is_left_out(tmp_path):
    content = lines().replace(",", ",,").replace("a,,y", "a,b,y")
    loaded, _ = data.read_table(text(tmp_path / "t.csv", content), target="y")
    assert loaded.features == ("a",)
    assert "column 'b' is empty and was left out" in loaded.notes


def test_a_column_of_texts_that_begins_empty_is_one_of_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 64)
    content = "a,b,y\n" + "1,,2\n" * 30 + "2,x,3.5\n" * 15 + "3,z,2\n" * 15
    loaded, schema = data.read_table(
        text(tmp_path / "t.csv", content), target="y", missing="drop", task="regression"
    )
    assert schema.columns[1].categories == ("x", "z")
    assert len(loaded.x) + len(loaded.x_test) == 30


# what is wrong with a file


def test_text_among_numbers_is_told_with_its_line(tmp_path):
    path = text(tmp_path / "t.csv", lines(line7="n/k,1", line9="n/k,1", line3="\n0.5,1"))
    message = fails(path, "'a'", "18 numbers and 2 texts", "'n/k' in line 8", "--category 'a'")
    assert "--drop 'a'" in message
    data.read_table(path, target="y", categories=["a"])


def test_text_that_comes_late_is_told_too(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 64)
    content = lines(rows=200) + "x,1\n" * 300
    fails(text(tmp_path / "t.csv", content), "200 numbers and 300 texts", "line 202")


def test_infinite_and_huge_numbers_are_told_with_their_line(tmp_path):
    for value in ("inf", "-Infinity", "1e999", "1e300", "-2e36"):
        path = text(tmp_path / "t.csv", lines(line6=f"{value},1"))
        fails(path, "'a' is infinite or beyond 1e+36 in 1 of 20 rows", "line 6")
    table = frame()
    table.loc[4, "width"] = np.inf
    table.to_parquet(tmp_path / "t.parquet")
    fails(tmp_path / "t.parquet", "'width' is infinite", "row 5", target="price")


def test_constant_columns_are_left_out_and_told(tmp_path):
    table = frame().assign(always=1.5, country="Norway")
    loaded = read(write(tmp_path / "t.csv", table))
    assert not {"always", "country=Norway"} & set(loaded.features)
    for name in ("always", "country"):
        assert f"column {name!r} is constant and was left out" in loaded.notes
    for name in ("kind", "count"):
        assert f"column {name!r} was left out as asked" in loaded.notes


def test_a_column_that_numbers_the_rows_is_told(tmp_path):
    table = frame()
    numbers = np.random.default_rng(0).permutation(len(table)) + 1
    told = read(write(tmp_path / "t.csv", table.assign(id=numbers))).notes
    assert "column 'id' numbers the rows, which is hardly an input (--drop)" in told
    for other in (numbers // 2, numbers + 0.5, numbers**2, numbers + 1990):
        told = read(write(tmp_path / "t.csv", table.assign(id=other))).notes
        assert not any("numbers the rows" in note for note in told)


def test_nothing_to_learn_from_is_told(tmp_path):
    path = text(tmp_path / "t.csv", "a,b,y\n" + "1,x,2.5\n" * 10 + "1,x,3.5\n" * 10)
    fails(path, "no input column varies")
    fails(path, "no column is left", drop=["a", "b"])
    fails(path, "a single class, 'x'", target="b")
    fails(path, "always 1;", target="a", task="regression")


def test_too_many_categories_are_told(tmp_path):
    content = "who,y\n" + "".join(f"person {i},{i}.5\n" for i in range(101))
    fails(text(tmp_path / "t.csv", content), "'who'", "more than 100", "--drop 'who'")
    content = content.removesuffix("person 100,100.5\n")
    loaded, _ = data.read_table(text(tmp_path / "t.csv", content), target="y")
    assert len(loaded.features) == 100


def test_an_absent_column_is_told_with_the_nearest(tmp_path):
    path = write(tmp_path / "t.csv", frame())
    fails(path, "no column 'prize'", "did you mean 'price'?", "length, width", target="prize")
    fails(path, "no column 'citty'", target="price", drop=["citty"])
    fails(path, "--target", target=None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,y\n", "has a header but no rows"),
        ("a,y", "has a header but no rows"),
        (lines(rows=9), "9 of 9 rows are left, at least 10"),
        (lines(header="y,y"), "more than one column is called 'y'"),
        (lines(header="1.5,2"), "first line holds numbers alone"),
        (lines(line5="1,2,3"), "line 5 has 3 values, expected 2"),
        (lines(line5="1,2,3", line7="1", line9="2"), "do not fit: line 7, line 9)"),
        (lines(line3="\n1,2", line8="1"), "line 9 has 1 values, expected 2"),
        (lines(header="größe,y").encode("latin-1"), "--encoding"),
        ((lines(rows=9000) + "ü,1\n").encode("latin-1"), "--encoding"),
        (b"PK\x03\x04\0\0\0\0" + bytes(range(256)), "not a text file"),
        (b"PAR1 and then nothing of the kind", "not a readable parquet"),
        (gzip.compress(lines(rows=9000).encode(), mtime=0)[:-2000], "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_a_wrong_file_is_told(tmp_path, content, message):
    path = text(tmp_path / "t.csv", content)
    assert str(path) in fails(path, message)


def test_wrong_options_are_told(tmp_path):
    path = text(tmp_path / "t.csv", lines())
    fails(tmp_path / "absent.csv", "absent.csv is not there")
    fails(path, "There is no encoding 'klingon'", encoding="klingon")
    fails(path, "one character", delimiter="::")
    fails(path, "error, mean, drop", missing="guess")
    fails(path, "between 0 and 1", test_fraction=1.0)
    fails(path, "cannot be the target and be dropped", drop=["y"])


def test_without_pyarrow_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'covary\[tables\]'"):
        data.read_table(text(tmp_path / "t.csv", lines()), target="y")


def test_dropping_may_leave_no_rows(tmp_path):
    content = "a,b,y\n" + "1,,2.5\n" * 10 + ",1,3\n" * 10
    fails(text(tmp_path / "t.csv", content), "0 of 20 rows are left", missing="drop")


def test_a_class_of_one_row_is_divided_without_proportion(tmp_path):
    table = frame()
    table.loc[0, "kind"] = "rare"
    loaded = read(write(tmp_path / "t.csv", table), "kind")
    assert loaded.classes == ("a", "b", "c", "rare")
    assert any("without regard" in note for note in loaded.notes)


def test_parquet_columns_of_other_types_are_told(tmp_path):
    table = frame().assign(lasts=pd.Timedelta("1h"))
    table.to_parquet(tmp_path / "t.parquet")
    fails(tmp_path / "t.parquet", "'lasts' holds values of type duration", "--drop 'lasts'",
        target="price",
    )  # fmt: skip


def messy(columns: int = 4) -> pd.DataFrame:
    """A column for each thing that can be wrong, and the first of them several times."""
    table = frame()
    huge = pd.DataFrame({f"huge {i}": [1e300, *range(ROWS - 1)] for i in range(columns)})
    table.loc[3, "width"] = np.nan
    mixed = table.length.astype(object)
    mixed[7] = "n/k"
    return pd.concat([table, huge], axis=1).assign(
        mixed=mixed, who=[f"person {i}" for i in range(ROWS)]
    )


def test_all_that_is_wrong_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_CATEGORIES", 50)
    path = write(tmp_path / "t.csv", messy(2))
    message = fails(
        path, "'huge 0' is infinite or beyond 1e+36", "'huge 1'", "first in line 2",
        "'who' holds more than 50", "'width' (1)", "59 numbers and 1 texts, the first 'n/k'",
        "no column 'citty' (did you mean 'city'?)", "'kind' holds texts", "has 7 problems",
        target="kind", task="regression", drop=["citty"],
    )  # fmt: skip
    assert len(message.splitlines()) == 8
    for remedy in ("--category 'mixed'", "--drop 'who'", "--missing mean"):
        assert remedy in message


@pytest.mark.parametrize("ragged", ["1", "1,2,3", "1,2,3,4,5,6"])
def test_lines_that_do_not_fit_hide_no_other_problem(tmp_path, ragged):
    made = ["a,b,c,y", *(f"{i},{i},{i},{i + 0.5}" for i in range(40))]
    for line in (5, 40):
        made[line - 1] = ragged
    made[5], made[6], made[7] = "1e300,2,3,4", "1,n/k,3,4", "1,2,,4"
    message = fails(
        text(tmp_path / "t.csv", "\n".join(made)), "line 5 has", "do not fit: line 40)",
        "first in line 6", "the first 'n/k' in line 7", "missing in 'c' (1)", "no column 'z'",
        drop=["z"],
    )  # fmt: skip
    assert "has 5 problems" in message


def test_lines_that_do_not_fit_are_not_taken_for_other_problems(tmp_path):
    """Too few rows, or a single class, may be all that is left of a table that is fine."""
    for rows in (9, 10, 30):
        wrong = {f"line{i}": "1,2,3" for i in range(2, rows + 1)}
        assert "problems" not in fails(text(tmp_path / "t.csv", lines(rows=rows, **wrong)))
    only = lines(rows=30, **{f"line{i}": "1,2,3" for i in range(2, 32)})
    assert "problems" not in fails(text(tmp_path / "t.csv", only), "line 2 has 3 values")


def test_a_target_that_is_not_there_hides_no_other_problem(tmp_path):
    path = text(tmp_path / "t.csv", lines(line6="1e300,1"))
    fails(path, "no column 'x'", "'a' is infinite or beyond", target="x")


def test_very_many_problems_are_told_in_few_words(tmp_path):
    path = write(tmp_path / "t.csv", messy(200))
    message = fails(
        path, "has 202 problems", "huge numbers also in 197 more columns: 'huge 3',", "'n/k'",
        "'width' (1)", target="price",
    )  # fmt: skip
    assert len(message) < 3000
    names = ["a" * 1000 + str(i) for i in range(300)]
    wide = "\n".join([",".join([*names, "y"]), *["1," * 300 + "2"] * 20])
    assert len(fails(text(tmp_path / "wide.csv", wide), "no column 'z'", target="z")) < 2000


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_what_is_no_file_is_told_at_once(tmp_path, name):
    (tmp_path / name).mkdir()
    fails(tmp_path / name, f"{name} is a folder, where a file is expected")
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    fails(tmp_path / name, f"{name} is a named pipe, where a file is expected")
    fails(Path("/dev/zero"), "is a device")


# new rows


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_schema_encodes_new_rows_alike(tmp_path, kind, target):
    """The rows of a table, read anew with its schema and in their order, are what they were."""
    table = frame().assign(always=1)
    path = tmp_path / f"t.{kind}"
    table.to_parquet(path) if kind == "parquet" else write(path, table)
    others = [name for name in TARGETS if name != target]
    first, schema = data.read_table(path, target=target, drop=others)
    schema = decoded(data.Schema, json.loads(json.dumps(to_json(schema))), "schema.json")
    again, same = data.read_table(path, schema=schema)
    assert same == schema
    assert (again.features, again.classes, again.task) == (
        schema.features,
        first.classes,
        first.task,
    )
    assert (len(again.x), len(again.x_test)) == (0, ROWS)
    np.testing.assert_array_equal(again.x_test[:, 0], table.length)
    np.testing.assert_array_equal(rows_of(again), rows_of(first))


def test_new_rows_may_be_few_lack_a_target_and_have_other_columns(tmp_path):
    _, schema = data.read_table(
        write(tmp_path / "t.csv", frame()), target="kind", drop=["price", "count"]
    )
    few = frame()[["open", "city", "width", "length"]].head(1).assign(more=3)
    loaded, _ = data.read_table(write(tmp_path / "new.csv", few), schema=schema)
    assert (len(loaded.x_test), len(loaded.y_test)) == (1, 0)
    assert "column 'more' is not used" in loaded.notes
    assert "there is no target to compare predictions with" in loaded.notes


def test_new_rows_that_do_not_fit_are_told(tmp_path):
    _, schema = data.read_table(
        write(tmp_path / "t.csv", frame()), target="kind", drop=["price", "count"]
    )
    new = tmp_path / "new.csv"

    def refused(table: pd.DataFrame, *parts: str) -> None:
        fails(write(new, table), *parts, target=None, schema=schema, **strict)

    strict = {"unseen": "error", "missing": "error"}
    refused(frame().replace("Rome", "Roma"), "'city' holds 'Roma'", "Bonn, Oslo, Rome")
    refused(frame().replace("a", "z"), "'kind' holds 'z'", "a, b, c")
    refused(frame().drop(columns="width"), "no column 'width'")
    refused(frame().astype({"width": object}).replace({"width": {frame().width[3]: "x"}}), "line 5")
    refused(frame().assign(length=np.nan), "'length' (60)", "fill them")
    wrong = frame().replace("Rome", "Roma").replace("a", "z").drop(columns="width")
    refused(wrong, "'city' holds 'Roma'", "'kind' holds 'z'", "no column 'width'", "3 problems")
    refused(frame().assign(length=1e300), "'length' is infinite or beyond 1e+36 in 60 of 60 rows")


def test_new_targets_must_be_of_the_old_kind(tmp_path):
    table = frame().assign(code=["01", "02"] * (ROWS // 2))
    path = write(tmp_path / "t.csv", table)
    for target, categories in (("code", ["code"]), ("price", []), ("count", [])):
        others = [name for name in (*TARGETS, "code") if name != target]
        _, schema = data.read_table(path, target=target, drop=others, categories=categories)
        again, _ = data.read_table(path, schema=schema)
        assert len(again.y_test) == ROWS
        new = write(tmp_path / "new.csv", table.assign(**{target: "much"}))
        fails(new, f"{target!r}", "'much'", target=None, schema=schema)
    same = write(tmp_path / "new.csv", table.assign(count=2))
    alike, _ = data.read_table(same, schema=schema)
    assert alike.y_test.tolist() == [2] * ROWS


def test_new_rows_are_filled_with_the_mean_of_the_old_training_rows(tmp_path, with_gaps):
    trained, schema = data.read_table(
        with_gaps, target="price", drop=["kind", "count"], missing="mean"
    )
    new = frame(20, seed=1).assign(length=np.nan, open=None)
    loaded, _ = data.read_table(write(tmp_path / "new.csv", new), schema=schema)
    length, absent = (loaded.features.index(name) for name in ("length", "length missing"))
    known = trained.x[:, absent] == 0
    mean = trained.x[known, length].mean()
    torch.testing.assert_close(loaded.x_test[:, length], mean.expand(20))
    assert (loaded.x_test[:, absent] == 1).all()
    share = trained.x[:, trained.features.index("open")].mean()
    torch.testing.assert_close(loaded.x_test[:, loaded.features.index("open")], share.expand(20))
    assert sum("has 20 missing values" in note for note in loaded.notes) == 2


def test_new_rows_without_any_of_the_columns_name_them(tmp_path):
    frame().to_csv(tmp_path / "old.csv", index=False)
    _, schema = data.read_table(tmp_path / "old.csv", target="price")
    pd.DataFrame({"other": [1.0, 2.0]}).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(data.DataError, match=r"'length', 'width', .*; it has other"):
        data.read_table(tmp_path / "new.csv", schema=schema)


def test_decimal_commas_are_told(tmp_path):
    rows = "\n".join(f"{i},{i % 7};{i % 5},5" for i in range(60))
    path = text(tmp_path / "t.csv", f"a;y\n{rows}\n")
    told = "'y' holds texts; numbers are read if they have a point (3.5) and no comma"
    with pytest.raises(data.DataError, match=re.escape(told)):
        data.read_table(path, target="y")
    labels, _ = data.read_table(path, target="y", task="classification")
    assert labels.classes == ("0,5", "1,5", "2,5", "3,5", "4,5")
    assert any("is a category of 60 values; numbers are read" in note for note in labels.notes)
