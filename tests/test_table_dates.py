"""Columns of dates: how they are read, what is refused, and what becomes of them in new rows."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pytest
import torch

from covary import data
from covary.data import columns, table_files
from covary.runs.records import decoded, to_json

ROWS = 60
START = datetime(2024, 1, 31, 6, 30)


def moments(step: timedelta) -> list[datetime]:
    return [START + i * step for i in range(ROWS)]


def frame(when) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame({"a": random.random(ROWS), "when": when, "y": random.random(ROWS)})


def written(path, table: pd.DataFrame):
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True, double_precision=15)
    else:
        table.to_csv(path, index=False)
    return path


def days(when: datetime) -> float:
    return (when - datetime(1970, 1, 1)) / timedelta(days=1)


def of_all(path, schema) -> dict[str, np.ndarray]:
    """All rows in their order, by feature."""
    rows, _ = data.read_table(path, schema=schema)
    return dict(zip(rows.features, rows.x_test.numpy().T, strict=True))


@pytest.mark.parametrize(
    ("written_as", "exact"),
    [
        ("%Y-%m-%d", False),
        ("%Y-%m-%d %H:%M:%S", True),
        ("%Y-%m-%dT%H:%M:%S.%f", True),
        ("%Y-%m-%d %H:%M", True),
        ("%Y-%m-%dT%H:%M:%SZ", True),
        (" %Y-%m-%d %H:%M:%S+00:00 ", True),
    ],
)
def test_iso_dates_are_days_with_parts_that_vary(tmp_path, written_as, exact):
    when = moments(timedelta(days=5, hours=7))
    path = written(tmp_path / "t.csv", frame([each.strftime(written_as) for each in when]))
    loaded, schema = data.read_table(path, target="y")
    schema = decoded(data.Schema, json.loads(json.dumps(to_json(schema))), "schema.json")
    parts = ("month", "weekday", "hour") if exact else ("month", "weekday")
    waves = tuple(f"when {part} {of}" for part in parts for of in ("sin", "cos"))
    assert loaded.features == ("a", "when", *waves)
    told = f"column 'when' is a date: days since 1970-01-01, with {', '.join(parts)} as sine and"
    assert any(told in note for note in loaded.notes)
    found = of_all(path, schema)
    if not exact:
        when = [each.replace(hour=0, minute=0) for each in when]
    np.testing.assert_allclose(found["when"], [days(each) for each in when], rtol=0, atol=1e-10)
    expected = {
        "month": [(each.month - 1) / 12 for each in when],
        "weekday": [each.weekday() / 7 for each in when],
        "hour": [(each.hour + each.minute / 60) / 24 for each in when],
    }
    for part in parts:
        turns = 2 * np.pi * np.array(expected[part])
        np.testing.assert_allclose(found[f"when {part} sin"], np.sin(turns), atol=1e-9)
        np.testing.assert_allclose(found[f"when {part} cos"], np.cos(turns), atol=1e-9)


def test_only_parts_that_vary_are_features(tmp_path):
    same_hour = frame([each.isoformat() for each in moments(timedelta(days=7 * 52))])
    loaded, _ = data.read_table(written(tmp_path / "t.csv", same_hour), target="y")
    assert loaded.features == ("a", "when", "when month sin", "when month cos")
    same_day = frame([each.isoformat() for each in moments(timedelta(minutes=3))])
    loaded, _ = data.read_table(written(tmp_path / "t.csv", same_day), target="y")
    assert loaded.features == ("a", "when", "when hour sin", "when hour cos")
    never = frame("2024-03-01")
    loaded, _ = data.read_table(written(tmp_path / "t.csv", never), target="y")
    assert loaded.features == ("a",)
    assert "column 'when' is constant and was left out" in loaded.notes


@pytest.mark.parametrize("kind", ["date", "s", "ms", "us", "ns", "zone", "text"])
def test_parquet_types_of_dates_are_read_alike(tmp_path, kind):
    when = moments(timedelta(days=5) if kind == "date" else timedelta(days=5, hours=7))
    made = {
        "date": lambda: [each.date() for each in when],
        "zone": lambda: pd.Series(when).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
        "text": lambda: [each.isoformat() for each in when],
    }
    values = made.get(kind, lambda: pd.Series(when).astype(f"datetime64[{kind}]"))()
    table = frame(values)
    loaded, schema = data.read_table(written(tmp_path / "t.parquet", table), target="y")
    if kind == "date":
        when = [datetime.combine(each.date(), datetime.min.time()) for each in when]
    found = of_all(tmp_path / "t.parquet", schema)
    np.testing.assert_allclose(found["when"], [days(each) for each in when], atol=1e-9)
    again = of_all(written(tmp_path / "t.csv", frame([f"{each}Z" for each in when])), schema)
    for name in loaded.features:
        np.testing.assert_allclose(again[name], found[name], atol=1e-9)


def test_time_zones_are_taken_into_account():
    offset = timezone(timedelta(hours=5, minutes=30))
    here = datetime(2024, 3, 1, 12, 30, tzinfo=offset)
    expected = days(datetime(2024, 3, 1, 7))
    for text in (here.isoformat(), "2024-03-01 07:00", "2024-03-01T07:00:00Z",
                 "2024-03-01 12:30:00+0530", "2024-03-01 10:00 +03"):  # fmt: skip
        assert columns.as_days(text) == pytest.approx(expected, abs=1e-10)
    for text in ("2024-02-30", "2024-13-01", "03/04/2024", "2024-3-1", "20240301", "2024-03",
                 "2024-03-01T25:00", "2024-03-01x", "x2024-03-01", "12:30", "2024-W09-5",
                 "2024-03-01T12:30+99:00", ""):  # fmt: skip
        assert np.isnan(columns.as_days(text)), text
    assert columns.as_days("1969-12-31") == -1
    assert columns.as_days("0001-01-01") == -(date(1970, 1, 1) - date(1, 1, 1)).days


def test_times_with_and_without_a_zone_are_told(tmp_path):
    texts = [each.isoformat() for each in moments(timedelta(hours=5))]
    plain, _ = data.read_table(written(tmp_path / "t.csv", frame(texts)), target="y")
    assert not any("UTC" in note for note in plain.notes)
    texts[:20] = [f"{text}+02:00" for text in texts[:20]]
    texts[50] = "2024-02-01"  # a day has none
    mixed, _ = data.read_table(written(tmp_path / "t.csv", frame(texts)), target="y")
    told = "times with and without a time zone; those without are taken as UTC"
    assert f"column 'when' has {told}" in mixed.notes


def test_texts_among_dates_are_told_with_their_place(tmp_path, monkeypatch):
    texts = [each.isoformat() for each in moments(timedelta(days=1))]
    texts[7] = texts[40] = "soon"
    for kind, place in (("csv", "line 9"), ("parquet", "row 8"), ("jsonl", "line 8")):
        path = written(tmp_path / f"t.{kind}", frame(texts))
        with pytest.raises(data.DataError) as caught:
            data.read_table(path, target="y")
        told = f"column 'when' holds 58 dates and 2 texts, the first 'soon' in {place}; correct"
        assert told in str(caught.value)
        assert "take them as categories with --category 'when', or --drop 'when'" in str(
            caught.value
        )
        loaded, _ = data.read_table(path, target="y", categories=["when"])
        assert "when=soon" in loaded.features
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 300)
    with pytest.raises(data.DataError, match=r"58 dates and 2 texts, the first 'soon' in line 9"):
        data.read_table(tmp_path / "t.csv", target="y")


def test_ambiguous_dates_stay_texts_and_it_is_said_how_to_write_them(tmp_path):
    texts = [each.strftime("%d/%m/%Y") for each in moments(timedelta(days=1))]
    loaded, _ = data.read_table(written(tmp_path / "t.csv", frame(texts)), target="y")
    assert "when=31/01/2024" in loaded.features
    assert any("category of 60 values; dates are read if" in note for note in loaded.notes)
    many = pd.concat([frame([f"{i}.{m}.2024" for i in range(ROWS)]) for m in (1, 2)])
    with pytest.raises(data.DataError, match=r"'when' holds more than 100.*written as 2024-03-01"):
        data.read_table(written(tmp_path / "t.csv", many), target="y")


def test_dates_are_no_target_and_have_no_errors(tmp_path):
    table = frame([each.isoformat() for each in moments(timedelta(days=1))])
    path = written(tmp_path / "t.csv", table)
    with pytest.raises(data.DataError, match=r"The target 'when' holds dates.*--category 'when'"):
        data.read_table(path, target="when")
    with pytest.raises(data.DataError, match=r"'when' holds dates, which have no errors \('a'\)"):
        data.read_table(path, target="y", errors={"when": "a"})
    classes, _ = data.read_table(path, target="when", categories=["when"])
    assert len(classes.classes) == ROWS


def test_missing_dates_are_filled_and_have_no_part(tmp_path):
    texts = [each.isoformat() for each in moments(timedelta(days=1))]
    texts[:20] = [None] * 20
    path = written(tmp_path / "t.csv", frame(texts))
    loaded, schema = data.read_table(path, target="y", missing="mean")
    assert loaded.features[-1] == "when missing"
    found = of_all(path, schema)
    gone = np.arange(ROWS) < 20
    np.testing.assert_array_equal(found["when missing"], gone)
    for name in ("when month sin", "when month cos", "when weekday sin", "when weekday cos"):
        assert not found[name][gone].any()
    known = loaded.x[:, loaded.features.index("when missing")] == 0
    mean = loaded.x[known, loaded.features.index("when")].mean().item()
    np.testing.assert_allclose(found["when"][gone], mean)
    assert torch.isfinite(loaded.x).all()


def test_new_rows_must_have_dates_where_training_had(tmp_path):
    table = frame([each.isoformat() for each in moments(timedelta(days=1))])
    _, schema = data.read_table(written(tmp_path / "t.csv", table), target="y")
    for kind, values, first in (
        ("csv", 12.5, "12.5"),
        ("parquet", 12.5, "12.5"),
        ("jsonl", "soon", "soon"),
    ):
        path = written(tmp_path / f"new.{kind}", frame(values))
        with pytest.raises(data.DataError) as caught:
            data.read_table(path, schema=schema)
        told = f"column 'when' holds 0 dates and 60 texts, the first '{first}' in"
        assert told in str(caught.value)
        assert "correct them, as they were dates in training" in str(caught.value)
    _, schema = data.read_table(written(tmp_path / "t.csv", frame(range(ROWS))), target="y")
    with pytest.raises(data.DataError, match=r"0 numbers and 60 texts.*were numbers in training"):
        data.read_table(written(tmp_path / "new.parquet", table), schema=schema)


def test_a_part_that_no_column_has_is_refused():
    with pytest.raises(ValueError, match=r"has the part 'decade', none of"):
        data.Column("when", "date", parts=("decade",))
