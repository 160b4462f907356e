"""Residuals of nearby rows, against loops over rows, folds and neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from covary.estimators import MomentRegressor
from covary.estimators.neighbours import Neighbours, shares

N, D, T, FOLDS, K = 60, 3, 2, 4, 7


@pytest.fixture(scope="module")
def table():
    random = np.random.default_rng(0)
    inputs = random.standard_normal((N, D))
    residuals = random.standard_normal((FOLDS, N, T))
    return inputs, residuals, random.permutation(N) % FOLDS


def reference(table, x: np.ndarray, fold: int | None) -> tuple[np.ndarray, np.ndarray, float]:
    """Of one row, averages of residuals, of their squares and of squared distances."""
    inputs, residuals, own = table
    usual = np.mean([np.sort(((inputs - row) ** 2).sum(1))[1 : K + 1].mean() for row in inputs])
    square = ((inputs - x) ** 2).sum(1) + 0.03**2 * usual
    # A held-out row finds itself first, which is of its own fold.
    closest = np.argsort(square, kind="stable")[: K if fold is None else K + 1]
    near = [j for j in closest if own[j] != fold]
    weights = np.array([square[j] ** -1.5 for j in near])
    weights /= weights.sum()
    found, squares, distance = np.zeros(T), np.zeros(T), 0.0
    for w, j in zip(weights, near, strict=True):
        trained_on_it = [f for f in range(FOLDS) if f != own[j]]
        found += w * (residuals[:, j].mean(0) if fold is None else residuals[fold, j])
        by = trained_on_it if fold is None else [fold]
        squares += w * np.mean([residuals[f, j] ** 2 for f in by], 0)
        distance += w * square[j] / usual
    return found, squares, distance


def logs(squares: np.ndarray, distance: float, residuals: np.ndarray) -> tuple[np.ndarray, float]:
    return np.log(squares + 1e-3 * (residuals**2).mean((0, 1))), 0.5 * np.log(distance)


def test_held_out_rows_are_told_what_other_folds_say(table):
    inputs, residuals, own = table
    local = Neighbours(inputs, residuals, own, K)(inputs, own)
    for i in range(N):
        found, squares, distance = reference(table, inputs[i], own[i])
        log_square, log_distance = logs(squares, distance, residuals)
        np.testing.assert_allclose(local.residual[i], found, rtol=1e-9)
        np.testing.assert_allclose(local.log_square[i], log_square, rtol=1e-9)
        np.testing.assert_allclose(local.log_distance[i], log_distance, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(local.features(1)[i], [found[1], log_square[1], log_distance])


def test_new_rows_are_told_of_all_rows_by_all_networks(table):
    inputs, residuals, own = table
    new = np.random.default_rng(1).standard_normal((5, D))
    local = Neighbours(inputs, residuals, own, K)(new)
    for i, x in enumerate(new):
        found, squares, distance = reference(table, x, None)
        log_square, log_distance = logs(squares, distance, residuals)
        np.testing.assert_allclose(local.residual[i], found)
        np.testing.assert_allclose(local.log_square[i], log_square)
        np.testing.assert_allclose(local.log_distance[i], log_distance)
    empty = Neighbours(inputs, residuals, own, K)(new[:0])
    assert [each.shape for each in empty] == [(0, T), (0, T), (0,)]


def test_rows_that_are_there_twice_do_not_make_intervals_too_narrow():
    """New rows that are copies of training rows, and such that are not, of one distribution."""
    random = np.random.default_rng(0)
    x = random.standard_normal((250, 4))
    y = x[:, 0] + np.sin(3 * x[:, 1]) + 0.5 * random.standard_normal(250)
    train, test = random.integers(0, 250, 400), random.integers(0, 250, 300)
    model = MomentRegressor("quick", random_state=0).fit(x[train], y[train])
    low, high = model.predict_interval(x[test])
    inside = (low <= y[test]) & (y[test] <= high)
    assert inside.mean() > 0.85  # 68% where new rows were told less of their copies


def test_neighbours_that_are_all_held_out_say_nothing(table):
    inputs, residuals, _ = table
    together = np.zeros(N, dtype=np.int64)
    local = Neighbours(inputs, residuals, together, K)(inputs, together)
    assert (local.residual == 0).all()
    assert np.isfinite(local.features(0)).all()


def test_identical_rows_and_perfect_networks_are_no_problem():
    found = Neighbours(np.zeros((5, 2)), np.zeros((2, 5, 1)), np.array([0, 1, 0, 1, 0]), 16)
    for rows in (np.ones((3, 2)), np.zeros((3, 2))):
        assert all(np.isfinite(each).all() for each in found(rows))


def test_shares_are_those_of_least_squares_between_0_and_2():
    random = np.random.default_rng(0)
    local = random.standard_normal((100, 4))
    noise = 0.1 * random.standard_normal((100, 4))
    found = shares(local, local * [0.5, 3.0, -1.0, 1.2] + noise)
    expected, *_ = np.linalg.lstsq(local[:, :1], (local * 0.5 + noise)[:, 0], rcond=None)
    np.testing.assert_allclose(found[0], expected[0])
    np.testing.assert_allclose(found[1:], [2.0, 0.0, 1.2], atol=0.05)
    np.testing.assert_array_equal(shares(np.zeros((9, 1)), np.ones((9, 1))), [0.0])


def test_neighbours_know_what_networks_do_not():
    """A rough function: pairs of nearby rows say more of each other than a small network does."""
    random = np.random.default_rng(0)
    x = random.uniform(0, 1, (800, 1))
    y = np.sin(200 * x[:, 0]) + 0.05 * random.standard_normal(800)
    train, test = slice(0, 600), slice(600, 800)
    settings = {"effort": "quick", "epochs": 15, "random_state": 0}
    with_them = MomentRegressor(**settings).fit(x[train], y[train])
    alone = MomentRegressor(**settings, neighbours=0).fit(x[train], y[train])
    assert with_them.neighbour_shares_[0] > 0.5
    errors = [np.square(m.predict(x[test]) - y[test]).mean() for m in (with_them, alone)]
    assert errors[0] < 0.5 * errors[1]
    assert with_them.held_out_loss_ < alone.held_out_loss_ - 0.3


@pytest.mark.parametrize("wrong", [-1, 1.5, "many", True])
def test_wrong_numbers_of_neighbours(wrong):
    with pytest.raises(ValueError, match="neighbours must be 0 or more"):
        MomentRegressor("quick", neighbours=wrong).fit(np.zeros((9, 1)), np.zeros(9))
