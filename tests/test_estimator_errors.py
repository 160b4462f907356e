"""Estimators whose inputs have errors, and what their variance is made of."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

from covary.estimators import MomentClassifier, MomentRegressor

SETTINGS: dict[str, Any] = {
    "effort": "quick",
    "hidden": (12, 8),
    "activation": "relu",
    "epochs": 40,
    "random_state": 0,
}


def problem(n: int = 80) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, errors of the first of them, targets that depend on it most."""
    random = np.random.default_rng(0)
    x = random.standard_normal((n, 3)) * [10.0, 1.0, 0.1]
    std = np.zeros_like(x)
    std[:, 0] = random.uniform(1.0, 5.0, n)
    return x, std, 2 * x[:, 0] + x[:, 1]


@pytest.fixture(scope="module")
def regressor() -> MomentRegressor:
    x, std, y = problem()
    return MomentRegressor(**SETTINGS, covariance="full").fit(x, y, X_std=std)


def test_errors_of_inputs_widen_what_is_predicted(regressor):
    x, std, _ = problem()
    _, without = regressor.predict(x, return_std=True)
    mean, found = regressor.predict(x, return_std=True, X_std=std)
    assert mean.shape == found.shape == (len(x),)
    assert (found > without).all()
    _, cov = regressor.predict(x, return_cov=True, X_std=std)
    np.testing.assert_allclose(cov[:, 0, 0], found**2)
    np.testing.assert_allclose(regressor.uncertainty(x, X_std=std), found, rtol=1e-6)
    _, common = regressor.predict(x, return_std=True, X_std=np.array([3.0, 0.0, 0.0]))
    _, each = regressor.predict(x, return_std=True, X_std=np.tile([3.0, 0.0, 0.0], (len(x), 1)))
    np.testing.assert_allclose(common, each)
    _, exact = regressor.predict(x, return_std=True, X_std=np.zeros(3))
    np.testing.assert_allclose(exact, without)


def test_training_sees_the_errors(regressor):
    x, std, y = problem()
    other = MomentRegressor(**SETTINGS, covariance="full").fit(x, y)
    assert not np.allclose(other.predict(x), regressor.predict(x))
    zero = MomentRegressor(**SETTINGS, covariance="full").fit(x, y, X_std=0 * std)
    np.testing.assert_allclose(zero.predict(x), other.predict(x), rtol=1e-4, atol=1e-3)


def test_a_classifier_takes_errors():
    x, std, y = problem()
    model = MomentClassifier(**SETTINGS).fit(x, y > 0, X_std=std)
    sure, unsure = model.predict_proba(x), model.predict_proba(x, X_std=3 * std)
    assert unsure.max(1).mean() < sure.max(1).mean()
    assert model.predict(x, X_std=std).shape == (len(x),)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        (np.array([1.0, -1.0, 0.0]), "finite and 0 or more; 1 are not, the first is -1"),
        (np.array([1.0, np.nan, 0.0]), "finite and 0 or more; 1 are not, the first is nan"),
        (np.ones(2), r"has the shape \(2,\); of inputs \(80, 3\) it is \(3,\)"),
        (0.5, r"has the shape \(\); of inputs"),
        (["a", "b", "c"], "standard deviations, numbers"),
    ],
)
def test_errors_that_are_none(regressor, std, expected):
    x, _, y = problem()
    with pytest.raises(ValueError, match=expected):
        regressor.predict(x, X_std=std)
    fresh = MomentRegressor(**SETTINGS)
    with pytest.raises(ValueError, match=expected):
        fresh.fit(x, y, X_std=std)
    with pytest.raises(NotFittedError):
        fresh.predict(x)


def test_errors_of_other_columns_and_errors_larger_than_the_data():
    x, std, y = problem()
    names = ["a", "b", "c"]
    model = MomentRegressor(**SETTINGS).fit(pd.DataFrame(x, columns=names), y)
    table = pd.DataFrame(x, columns=names)
    with pytest.raises(ValueError, match=r"X_std has the columns \['b', 'a', 'c'\]"):
        model.predict(table, X_std=pd.DataFrame(std, columns=["b", "a", "c"]))
    with pytest.warns(UserWarning, match=r"features \['b'\] are larger than their spread"):
        model.predict(table, X_std=pd.DataFrame(np.add(std, [0, 9, 0]), columns=names))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(table, X_std=pd.DataFrame(std, columns=names))


def test_the_budget_adds_up_to_the_variance(regressor):
    x, std, _ = problem()
    budget = regressor.budget(x, X_std=std)
    assert set(budget) == {"noise of the data", "doubt of the model", "errors of the inputs"}
    _, found = regressor.predict(x, return_std=True, X_std=std)
    np.testing.assert_allclose(budget.total[:, 0], found**2, rtol=1e-5)
    # y = 2 x0 + x1: the errors of x0 are twice as large in y, and are not scaled by residuals.
    known = budget["errors of the inputs"][:, 0].sqrt().numpy()
    assert np.median(known / (2 * std[:, 0])) == pytest.approx(1, abs=0.25)
    assert set(regressor.budget(x)) == {"noise of the data", "doubt of the model"}
