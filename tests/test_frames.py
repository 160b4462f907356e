"""Data frames and arrays as inputs of an estimator: learnt, encoded, flagged and refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pytest

from covary import data
from covary.estimators.frames import Frame

ROWS = 40


def table(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "width": random.standard_normal(rows),
            "count": random.integers(0, 9, rows),
            "city": random.choice(["Oslo", "Bonn", "Rome"], rows),
            "open": random.random(rows) < 0.5,
            "when": pd.date_range("2024-01-31 06:30", periods=rows, freq="31h"),
            "always": 3.0,
        }
    )


NAMES = (
    "width", "count", "city=Bonn", "city=Oslo", "city=Rome", "open", "when",
    "when month sin", "when month cos", "when weekday sin", "when weekday cos",
    "when hour sin", "when hour cos", "always",
)  # fmt: skip


def gaps(seed: int = 0) -> pd.DataFrame:
    """Missing: width in row 1, city in row 2, open in row 3, when in row 4."""
    made = table(seed=seed).astype({"open": object})
    made.loc[1, "width"] = np.nan
    made.loc[2, "city"] = None
    made.loc[3, "open"] = None
    made.loc[4, "when"] = pd.NaT
    return made


def test_a_data_frame_is_encoded_as_a_table_of_a_file_is(tmp_path):
    x = table()
    frame = Frame.fit(x)
    assert frame.names == NAMES
    got = frame(x)
    assert got.dtype == np.float64
    assert got.shape == (ROWS, len(NAMES))
    x.assign(y=np.arange(ROWS) / 3).to_csv(tmp_path / "t.csv", index=False)
    _, schema = data.read_table(tmp_path / "t.csv", target="y")
    whole, _ = data.read_table(tmp_path / "t.csv", schema=schema)
    assert (*whole.features, "always") == frame.names
    np.testing.assert_allclose(got[:, :-1], whole.x_test, atol=1e-9)
    assert (got[:, -1] == 3).all()
    assert not frame.unusual(x).any()


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x.astype({"city": "category"}),
        lambda x: x.astype({"city": "string", "open": "boolean", "count": "Int64"}),
        lambda x: x.astype({"width": object, "open": object, "city": object}),
        lambda x: x.assign(when=x.when.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")),
        lambda x: x.assign(when=x.when.map(str)),
        lambda x: x.assign(when=x.when.astype("datetime64[s]")),
        lambda x: x[list(reversed(x.columns))],
        lambda x: x.set_index(np.arange(ROWS) + 7),
    ],
)
def test_types_order_and_index_make_no_difference(changed):
    frame, x = Frame.fit(table()), table(seed=1)
    np.testing.assert_allclose(frame(changed(x)), frame(x), atol=1e-9)
    other = Frame.fit(changed(table()))
    assert set(other.names) == set(frame.names)
    np.testing.assert_allclose(other(x), other(changed(x)), atol=1e-9)


def test_missing_values_are_marked_and_filled():
    x = gaps()
    with pytest.raises(
        ValueError, match=r"Input X contains NaN: .*'width' \(1\), 'city' \(1\), 'o"
    ):
        Frame.fit(x)
    frame = Frame.fit(x, missing="indicator")
    got = dict(zip(frame.names, frame(x).T, strict=True))
    for row, name in enumerate(("width", "city", "open", "when"), start=1):
        assert np.flatnonzero(got[f"{name} missing"]).tolist() == [row]
    assert got["width"][1] == pytest.approx(x.width.mean())
    assert got["open"][3] == pytest.approx(x.open.mean())
    assert sum(got[f"city={city}"][2] for city in ("Bonn", "Oslo", "Rome")) == 0
    assert got["when hour sin"][4] == got["when hour cos"][4] == 0
    assert not frame.unusual(x).any()
    assert np.isfinite(frame(x)).all()


def test_unseen_categories_and_new_gaps_are_flagged():
    frame = Frame.fit(table(), missing="indicator")
    assert frame.names == NAMES
    x = gaps(seed=1)
    x.loc[7, "city"] = "Paris"
    x.loc[8, "open"] = "perhaps"
    assert np.flatnonzero(frame.unusual(x)).tolist() == [1, 2, 3, 4, 7, 8]
    got = frame(x)
    assert np.isfinite(got).all()
    assert got[7, 2:5].tolist() == [0, 0, 0]
    strict = Frame.fit(table())
    unseen = table().assign(city="Paris")
    assert strict.unusual(unseen).all()
    with pytest.raises(ValueError, match="contains NaN"):
        strict(x)
    assert frame(x.assign(width=None, city=None)).shape == got.shape


def test_unseen_categories_are_refused_if_asked_for():
    frame, x = Frame.fit(table(), missing="indicator"), table(seed=1)
    x = x.astype({"open": object})
    frame.check_seen(gaps())
    x.loc[7, "city"], x.loc[9, "city"], x.loc[8, "open"] = "Paris", "Roma", "perhaps"
    told = (
        r"column 'city' holds 'Paris', 'Roma', none of the known categories Bonn, Oslo, Rome; "
        r"column 'open' holds 'perhaps', none of the known categories false, true\. Correct it"
    )
    with pytest.raises(ValueError, match=told):
        frame.check_seen(x)


def test_a_category_of_dates_stays_one_and_truths_may_stand_for_numbers():
    days = pd.DataFrame({"when": ["2024-03-01", "2024-03-05"] * 5})
    assert Frame.fit(days).names == ("when", "when weekday sin", "when weekday cos")
    category = Frame.fit(days.astype("category"))
    assert category.names == ("when=2024-03-01", "when=2024-03-05")
    np.testing.assert_array_equal(category(days), category(days.astype("category")))
    numbers = Frame.fit(pd.DataFrame({"a": [0, 1, 3]}))
    assert numbers(pd.DataFrame({"a": [True, False]})).tolist() == [[1], [0]]
    mixed = Frame.fit(pd.DataFrame({"a": [1, "1", "b"]}))
    assert mixed(pd.DataFrame({"a": [1, "1", "b"]})).tolist() == [[1, 0], [1, 0], [0, 1]]


def test_arrays_pass_through():
    x = np.random.default_rng(0).standard_normal((9, 3))
    frame = Frame.fit(x)
    assert frame.names == ("x0", "x1", "x2")
    np.testing.assert_array_equal(frame(x), x)
    np.testing.assert_array_equal(frame(x.astype(np.float32)), x.astype(np.float32))
    np.testing.assert_array_equal(frame(x.tolist()), x)
    np.testing.assert_array_equal(frame(pd.DataFrame(x)), x)
    holes = x.copy()
    holes[2, 1] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        Frame.fit(holes)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        frame(holes)
    marked = Frame.fit(holes, missing="indicator")
    assert marked.names == ("x0", "x1", "x1 missing", "x2")
    got = marked(holes)
    assert got[2].tolist() == [x[2, 0], np.delete(x[:, 1], 2).mean(), 1, x[2, 2]]
    assert not marked.unusual(holes).any()
    other = x.copy()
    other[4, 0] = np.nan
    assert np.flatnonzero(marked.unusual(other)).tolist() == [4]
    with pytest.raises(ValueError, match="infinity"):
        marked(np.full((1, 3), np.inf))


def test_an_array_may_stand_for_a_data_frame_of_numbers():
    x = table()[["width", "count"]]
    frame = Frame.fit(x)
    np.testing.assert_array_equal(frame(x.to_numpy()), frame(x))
    with pytest.raises(ValueError, match=r"'city' of X holds numbers, and held texts in fit"):
        Frame.fit(table()[["city"]])(np.ones((2, 1)))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (lambda x: x.drop(columns="city"), "other columns than in fit: it lacks 'city'."),
        (lambda x: x.assign(more=1), "it has 'more', which fit did not see."),
        (
            lambda x: x.rename(columns={"width": "wdith"}),
            "it lacks 'width' (did you mean 'wdith'?), and it has 'wdith', which fit did not see.",
        ),
        (lambda x: x.assign(width="wide"), "'width' of X holds texts, and held numbers in fit"),
        (lambda x: x.assign(width=x.when), "'width' of X holds dates, and held numbers in fit"),
        (lambda x: x.assign(when=1.5), "'when' of X holds numbers, and held dates in fit"),
        (lambda x: x.assign(when="soon"), "'when' of X holds 'soon', and held dates in fit; write"),
        (lambda x: x.assign(width=np.inf), "Input X contains infinity, in 'width'."),
        (lambda x: x.assign(width=x.when - x.when), "of type timedelta64[us], expected numbers"),
        (lambda x: x.assign(width=1j), "of type complex128, expected numbers"),
        (lambda x: x.to_numpy()[:, :2].astype(float), "X has 2 features, and 6 were there in fit."),
        (lambda x: pd.DataFrame(), "a data frame without columns"),
        (lambda x: pd.concat([x, x.width], axis=1), "more than one column 'width'"),
        (lambda x: x.assign(city=[["a"]] * ROWS), "'city' of X holds what is no text or number"),
    ],
)
def test_rows_that_do_not_fit_are_told_in_a_sentence(changed, expected):
    frame = Frame.fit(table())
    for use in (frame, frame.unusual):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
            use(changed(table()))
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_cannot_be_learnt_is_told():
    with pytest.raises(ValueError, match="missing must be one of error, indicator, got 'mean'"):
        Frame.fit(table(), missing="mean")
    with pytest.raises(ValueError, match="'width' of X has no value at all; leave it out"):
        Frame.fit(table().assign(width=np.nan), missing="indicator")
    many = pd.DataFrame({"who": [f"person {i}" for i in range(101)]})
    with pytest.raises(ValueError, match="'who' of X holds 101 different texts, at most 100"):
        Frame.fit(many)
    dates = pd.DataFrame({"when": [f"{i % 28 + 1}/{i % 12 + 1}/{2000 + i}" for i in range(101)]})
    with pytest.raises(ValueError, match="written as 2024-03-01"):
        Frame.fit(dates)
    with pytest.raises(ValueError, match="Complex data not supported"):
        Frame.fit(np.ones((3, 2)) * 1j)
    with pytest.raises(ValueError, match="0 sample"):
        Frame.fit(np.ones((0, 2)))
    with pytest.raises(ValueError, match="without rows"):
        Frame.fit(table(0))


def test_a_frame_is_a_value():
    frame = Frame.fit(gaps(), missing="indicator")
    again = pickle.loads(pickle.dumps(frame))
    assert again == frame == copy.deepcopy(frame)
    np.testing.assert_array_equal(again(table()), frame(table()))
