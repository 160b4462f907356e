"""Slices of rows, errors by error bar and partial dependence, against brute force."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from covary import runs
from covary.data import read_table
from covary.report import read
from covary.runs import columns
from covary.runs.row_model import row_model
from covary.uncertainty import metrics
from covary.uncertainty.predictive import Predictive
from covary.uncertainty.slices import (
    beyond_chance,
    chance_of_hits,
    errors_by_std,
    expected_unusual,
    partial_dependence,
    quantile_slices,
    share_interval,
)
from tests.commands import covary
from tests.report_runs import Page
from tests.test_predict import frame


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 7), st.integers(1, 9))
def test_slices_have_all_rows_once_and_part_no_ties(values, most, least):
    numbers = np.array(values, float)
    found = quantile_slices(numbers, most, least)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(values)))
    assert len(found) <= most
    for first, second in itertools.pairwise(found):
        assert numbers[first].max() < numbers[second].min()
    if len(found) > 1:
        assert min(map(len, found)) >= least


def test_slices_of_numbers_that_differ_are_of_equal_size():
    values = np.random.default_rng(0).permutation(100).astype(float)
    found = quantile_slices(values, 5, 20)
    assert [len(rows) for rows in found] == [20] * 5
    assert [values[rows].min() for rows in found] == [0, 20, 40, 60, 80]
    assert len(quantile_slices(values, 5, 60)) == 1
    levels = quantile_slices(np.repeat([3.0, 1.0, 2.0], 30), 5, 20)
    assert [len(rows) for rows in levels] == [30] * 3


@pytest.mark.parametrize("count", [1, 7, 40])
def test_chances_and_intervals_of_shares_are_exact(count):
    hits = np.arange(count + 1)
    low, high = share_interval(hits, np.full(count + 1, count))
    chance = chance_of_hits(hits, np.full(count + 1, count), 0.9)
    for k in hits:
        exact = stats.binomtest(int(k), count).proportion_ci(0.95, method="exact")
        np.testing.assert_allclose([low[k], high[k]], exact, atol=1e-9)
        law = stats.binom(count, 0.9)
        tail = min(law.cdf(k), law.sf(k - 1))
        assert chance[k] == pytest.approx(min(1.0, 2 * tail), abs=1e-12)
    np.testing.assert_array_equal((low > 0.9) | (high < 0.9), chance < 0.05)
    expected = stats.binom(count, 0.9).pmf(hits)[chance < 0.05].sum()
    assert expected_unusual([count] * 3, 0.9) == pytest.approx(3 * expected)


def test_unusual_slices_are_as_many_as_expected_and_hardly_any_is_beyond_chance():
    random = np.random.default_rng(0)
    count = np.repeat([20, 50, 133], 10)
    draws = random.binomial(count, 0.9, (2000, len(count)))
    chance = np.array([chance_of_hits(hits, count, 0.9) for hits in draws])
    expected = expected_unusual(count, 0.9)
    assert (chance < 0.05).sum(1).mean() == pytest.approx(expected, abs=0.1)
    falsely = np.mean([beyond_chance(each).any() for each in chance])
    assert falsely < 0.06


def test_holm_is_that_of_the_book():
    chance = np.array([0.04, 0.001, 0.02, 0.012, 1.0])
    # 0.001 * 5, 0.012 * 4, then 0.02 * 3 is too much, and so are all after it.
    assert beyond_chance(chance).tolist() == [False, True, False, True, False]
    assert beyond_chance([]).tolist() == []


def test_errors_by_error_bar_are_those_of_groups():
    random = np.random.default_rng(0)
    std = random.gamma(2.0, 1.0, 103)
    error = random.normal(0, std)
    found = errors_by_std(std, error, 10)
    order = np.argsort(std)
    sizes = [11, 11, 11, *[10] * 7]
    assert found.samples.tolist() == sizes
    start = 0
    for i, size in enumerate(sizes):
        rows = order[start : start + size]
        start += size
        assert found.std[i] == pytest.approx(np.sqrt(np.mean(std[rows] ** 2)))
        assert found.rmse[i] == pytest.approx(np.sqrt(np.mean(error[rows] ** 2)))
        draws = random.choice(error[rows], (4000, size))
        ends = np.quantile(np.sqrt((draws**2).mean(1)), [0.05, 0.95])
        np.testing.assert_allclose([found.low[i], found.high[i]], ends, rtol=0.12)
    assert len(errors_by_std([1.0], [2.0]).rmse) == 1


def test_partial_dependence_is_what_loops_find():
    random = np.random.default_rng(0)
    x, donors = random.standard_normal((6, 4)), random.standard_normal((3, 4))

    def function(rows):
        return np.stack([rows[:, 0] * rows[:, 1] + rows[:, 3], np.sin(rows[:, 2])], 1)

    before = x.copy()
    found = partial_dependence(function, x, [1, 2], donors)
    assert found.shape == (3, 6, 2)
    for g, donor in enumerate(donors):
        for row in range(len(x)):
            one = [x[row, 0], donor[1], donor[2], x[row, 3]]
            expected = one[0] * one[1] + one[3], np.sin(one[2])
            np.testing.assert_allclose(found[g, row], expected)
    np.testing.assert_array_equal(x, before)


def test_batches_join_and_targets_part():
    random = np.random.default_rng(0)
    weights = random.dirichlet(np.ones(3), (9, 2))
    locations, scales = random.standard_normal((9, 2, 3)), random.gamma(2.0, 1.0, (9, 2, 3))
    df, y = np.array([4.0, np.inf]), random.standard_normal((9, 2))
    whole = Predictive(weights, locations, scales, df, np.eye(2), False)
    parts = [
        Predictive(weights[rows], locations[rows], scales[rows], df, np.eye(2), False)
        for rows in (slice(0, 4), slice(4, 9))
    ]
    np.testing.assert_array_equal(Predictive.joined(parts).cdf(y), whole.cdf(y))
    for i in range(2):
        one = whole.of_target(i)
        assert one.mean().shape == (9,)
        np.testing.assert_allclose(one.ppf(0.3), whole.ppf(0.3)[:, i])
        np.testing.assert_allclose(one.cdf(y[:, i]), whole.cdf(y)[:, i])
    independent = sum(whole.of_target(i).logpdf(y[:, i]) for i in range(2))
    np.testing.assert_allclose(whole.logpdf(y), independent, atol=1e-6)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A table with a column of every kind, read."""
    random = np.random.default_rng(0)
    rows = 300
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 300, rows), "D")
    table = pd.DataFrame(
        {
            "size": random.standard_normal(rows),
            "when": days.strftime("%Y-%m-%d"),
            "flag": random.choice(["true", "false"], rows),
            "city": random.choice(["Oslo", "Bonn", "Rome", "Ulm"], rows, p=[0.6, 0.3, 0.06, 0.04]),
            "rooms": random.integers(1, 4, rows),
            "price": random.standard_normal(rows),
        }
    )
    table.loc[random.permutation(rows)[:60], "size"] = np.nan
    path = tmp_path_factory.mktemp("mixed") / "mixed.csv"
    table.to_csv(path, index=False)
    data, schema = read_table(path, target="price", missing="mean", test_fraction=0.5)
    return data.x_test.numpy(), {
        one.name: one for one in columns.table_columns(schema, data.features)
    }


def test_slices_of_columns_of_every_kind(mixed):
    x, named = mixed
    sizes = {
        name: {label: len(rows) for label, rows in one.slices(x, 5, 20).items()}
        for name, one in named.items()
    }
    assert list(sizes["city"])[:2] == ["Oslo", "Bonn"]
    assert set(sizes["flag"]) == {"true", "false"}
    assert list(sizes["rooms"]) == ["1", "2", "3"]
    assert "missing" in sizes["size"]
    assert all(label.startswith("2024-") for label in sizes["when"])
    for name in ("flag", "rooms", "when", "size"):
        assert sum(sizes[name].values()) == len(x)
    assert all(count >= 20 for each in sizes.values() for count in each.values())
    city = named["city"].slices(x, 5, 1)
    together = named["city"].slices(x, 5, 13)["2 others"]
    assert sorted(together) == sorted([*city["Rome"], *city["Ulm"]])


def test_columns_move_whole(mixed):
    """A date moves with its month and weekday, a category with all its levels."""
    x, named = mixed
    seen = {}

    def stds(some, rows):
        blocks = [tuple(one.places) for one in named.values()]
        for name, places in zip(named, blocks, strict=True):
            known = {tuple(row) for row in x[:, places].round(9)}
            assert {tuple(row) for row in some[:, places].round(9)} <= known
            seen[name] = True
        return np.abs(some[:, [0, 1]]) + 1 + 0 * rows[:, None]

    found, rows = columns.effects_on_std(list(named.values()), x, stds, seed=0)
    assert set(seen) == set(named)
    assert rows == 150
    first = {one.column: one for one in found[0]}
    assert found[0][0].column == "size"
    assert first["city"].change == pytest.approx(0)
    assert set(first["city"].labels) == {"Oslo", "Bonn", "Rome", "Ulm"}
    place = named["size"].places[0]
    for label, std in zip(first["size"].labels, first["size"].std, strict=True):
        if label != "missing":
            own = x[np.argmin(np.abs(x[:, place] - float(label))), place]
            assert std == pytest.approx(abs(own) + 1, abs=0.01)


def test_a_slice_in_which_intervals_fail_is_found():
    random = np.random.default_rng(0)
    x = random.uniform(size=(600, 3))
    inside = random.uniform(size=600) < np.where(x[:, 1] > 0.8, 0.6, 0.97)
    named = columns.table_columns(None, ["a", "b", "c"])
    found = columns.coverage_by_slice(named, x, inside)
    assert len(found) == 15
    worst = found[0]
    assert (worst.column, worst.samples, worst.is_beyond) == ("b", 120, True)
    rows = np.argsort(x[:, 1])[-120:]
    assert worst.inside == inside[rows].sum()
    assert worst.share == inside[rows].mean()
    assert {one.column for one in found if one.is_beyond} == {"b"}
    assert columns.coverage_by_slice(named, x[:30], inside[:30]) == ()


def test_slices_are_compared_with_all_rows_if_those_are_off():
    """Intervals that are too narrow everywhere fail nowhere in particular."""
    random = np.random.default_rng(0)
    x, inside = random.uniform(size=(900, 3)), random.uniform(size=900) < 0.75
    assert columns.usual_coverage(inside) == inside.mean()
    named = columns.table_columns(None, ["a", "b", "c"])
    assert not any(one.is_beyond for one in columns.coverage_by_slice(named, x, inside))
    inside = random.uniform(size=900) < np.where(x[:, 0] > 0.8, 0.4, 0.8)
    found = columns.coverage_by_slice(named, x, inside)
    assert (found[0].column, found[0].is_beyond) == ("a", True)
    assert columns.usual_coverage(random.uniform(size=900) < 0.9) == 0.9


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    frame(500).drop(columns="kind").to_csv(folder / "houses.csv", index=False)
    targets = ("--target", "price", "--target", "other")
    options = ("--epochs", 5, "--validation", 0.3, "--out", folder / "run")
    covary("train", folder / "houses.csv", *targets, *options)
    shown = covary("evaluate", folder / "run")
    return runs.open(folder / "run"), shown


def test_an_evaluation_is_of_what_covary_predict_gives(both):
    run, shown = both
    found, model = run.evaluation.calibration, row_model(run)
    said, y = model.distribution(run.data.test_inputs), run.data.y_test.numpy()
    assert found.test["log_likelihood"] == pytest.approx(said.logpdf(y).mean())
    for i, target in enumerate(found.targets):
        expected = metrics.of_distribution(said.of_target(i), y[:, i])
        for name in ("log_likelihood", "crps", "coverage_90", "width_90", "spearman_error"):
            assert target.test[name] == pytest.approx(expected[name])
        low, high = said.of_target(i).interval(0.9)
        inside = (low <= y[:, i]) & (y[:, i] <= high)
        ages = [one for one in target.slices if one.column == "age"]
        assert sum(one.samples for one in ages) == len(y)
        assert sum(one.inside for one in ages) == inside.sum()
        assert set(target.shares) == set(target.gains) == {"emergent", "learned"}
    assert [target.name for target in found.targets] == ["price", "other"]
    assert found.test["crps"] == pytest.approx(np.mean([t.test["crps"] for t in found.targets]))
    held_out = run.config.data.validation * len(run.data.x)
    assert found.held_out_samples == round(held_out)
    answered = {f"stddev_{i}": found.thresholds[f"stddev_{i}"] for i in (1, 2)}
    assert all(value > 0 for value in answered.values())
    assert "slices of the test rows" in shown
    assert "distributions" in shown
    assert "price, network" in shown


def test_effects_are_those_of_the_model(both):
    run, _ = both
    model, effects = row_model(run), run.evaluation.calibration.targets[0].effects
    (city,) = [one for one in effects if one.column == "city"]
    x, features = run.data.x, list(run.data.features)
    rows = np.sort(np.random.default_rng(0).permutation(len(x))[:200])
    for label, std in zip(city.labels, city.std, strict=True):
        moved = x[rows].clone()
        for name in ("Bonn", "Oslo", "Rome"):
            moved[:, features.index(f"city={name}")] = float(name == label)
        expected = model(moved, near=True).said.std()[:, 0].mean()
        assert std == pytest.approx(expected)
    assert [one.change for one in effects] == sorted((one.change for one in effects), reverse=True)


def test_the_page_is_made_of_files_alone(both):
    run, _ = both
    covary("report", run.path)
    page = Page(run.path / "report.html")
    figures = {path.stem for path in (run.path / "figures").glob("*.png")}
    every = {f"{name}-{i}" for name in ("slices", "effects") for i in (1, 2)}
    assert every | {"variance-parts"} <= figures
    assert read(run.path).distribution is not None
    assert "Where it fails, and what makes error bars" in page.texts("h2")


def test_other_covariances_of_the_network_are_told(both):
    run, _ = both
    found = runs.evaluate(run, covariance="diagonal")
    assert any("have diagonal covariances; distributions, as those" in note for note in found.notes)
    again = runs.evaluate(run)
    assert again.calibration.test == found.calibration.test
    assert again.parts["test"] != found.parts["test"]
    assert not any("have diagonal covariances" in note for note in again.notes)


def test_a_noise_that_held_out_data_chose_is_that_of_the_distributions(both):
    run, _ = both
    before = row_model(run)
    covary("calibrate", run.path, "--noise", "one")
    again = runs.open(run.path)
    (noise,) = {float(each) for each in again.kept_calibration.noise}
    after = row_model(again)
    expected = library_noise(after)
    assert expected == {noise}
    x = run.data.x_test[:5]
    assert not torch.equal(torch.tensor(before(x).said.std()), torch.tensor(after(x).said.std()))
    assert row_model(runs.open(run.path)).seen_error.equal(after.seen_error)


def library_noise(model):
    from covary.models import noise_of

    return {float(each) for each in noise_of(model.net)}


def test_few_test_rows_make_a_page_that_says_so(tmp_path):
    frame(60).drop(columns=["kind", "other"]).to_csv(tmp_path / "few.csv", index=False)
    options = ("--target", "price", "--epochs", 2, "--validation", 0.4, "--out", tmp_path / "run")
    covary("train", tmp_path / "few.csv", *options)
    covary("report", tmp_path / "run")
    page = Page(tmp_path / "run" / "report.html")
    assert "There are 12 test rows, too few to say where" in " ".join(page.texts("p"))
    content = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert content["calibration"]["targets"][0]["slices"] == []


@pytest.mark.parametrize(("low", "high"), [(-122.5, -122.0), (100.0, 100.4), (5e6, 5.001e6)])
def test_slices_of_a_narrow_range_are_told_apart(low, high):
    x = np.random.default_rng(0).uniform(low, high, (1000, 1))
    column = columns.TableColumn("place", "number", (0,))
    slices = column.slices(x, 5, 20)
    assert len(slices) == 5
    assert sorted(np.concatenate(list(slices.values())).tolist()) == list(range(1000))


def test_a_category_that_is_called_missing_is_not_a_missing_value():
    x = np.zeros((100, 3))
    x[:40, 0], x[40:70, 1], x[70:, 2] = 1.0, 1.0, 1.0
    column = columns.TableColumn("state", "category", (0, 1), ("missing", "there"), 2)
    assert {text: len(rows) for text, rows in column.slices(x, 5, 20).items()} == {
        "missing": 40,
        "there": 30,
        "(missing)": 30,
    }
