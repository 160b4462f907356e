"""The estimators: by scikit-learn's own checks, against their networks, and on known noise."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from covary.estimators import ERROR_SCORES, MomentClassifier, MomentRegressor, base
from covary.estimators.data import cross_validation
from covary.uncertainty.metrics import auroc

# Few steps, a high learning rate and few units: the checks fit some 400 times, and some ask for a
# good score.
TINY: dict[str, Any] = {
    "hidden": (12,), "activation": "relu", "folds": 2, "members": 1, "weight_decay": 0.01,
    "epochs": 12, "batch_size": 128, "lr": 0.1,
}  # fmt: skip
CHECKED = [
    MomentRegressor(**TINY, distribution="normal"),
    MomentRegressor(**TINY | {"members": 2}, variance="emergent", distribution="student"),
    MomentRegressor(
        **TINY | {"weight_decay": 0.0, "epochs": 60}, loss="likelihood", distribution="normal"
    ),
    MomentClassifier(**TINY | {"epochs": 25}),
]
SMALL: dict[str, Any] = {
    "effort": "quick",
    "hidden": (20,),
    "activation": "relu",
    "random_state": 0,
}


@pytest.mark.filterwarnings("ignore:Held-out rows give")
@parametrize_with_checks(CHECKED)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def diabetes():
    return train_test_split(*load_diabetes(return_X_y=True), random_state=0)


@pytest.fixture(scope="module")
def regressor(diabetes):
    x, _, y, _ = diabetes
    return MomentRegressor(**SMALL).fit(x, y)


@pytest.fixture(scope="module")
def two_targets():
    x, y = make_regression(150, 4, n_targets=2, random_state=0)
    noise = np.random.default_rng(0).multivariate_normal([0, 0], [[1, 0.9], [0.9, 1]], len(x))
    return x, y + 30 * noise


@pytest.fixture(scope="module")
def two_target_regressor(two_targets):
    return MomentRegressor(**SMALL).fit(*two_targets)


@pytest.fixture(scope="module")
def cancer():
    return train_test_split(*load_breast_cancer(return_X_y=True), random_state=0)


@pytest.fixture(scope="module")
def classifier(cancer):
    x, _, y, _ = cancer
    return MomentClassifier(**SMALL).fit(x, y)


def sine(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A sine whose noise is 0.1 left of 0, and 0.5 right of it."""
    random = np.random.default_rng(seed)
    x = random.uniform(-3, 3, (n, 1))
    return x, np.sin(2 * x[:, 0]) + np.where(x[:, 0] < 0, 0.1, 0.5) * random.standard_normal(n)


@pytest.fixture(scope="module")
def of_sine():
    return MomentRegressor("quick", random_state=0).fit(*sine(1000, 0))


def test_the_mean_is_that_of_the_networks_and_of_neighbours(regressor, diabetes):
    x_train, x, y_train, _ = diabetes
    mean, std = regressor.predict(x, return_std=True)
    with torch.no_grad():
        out = regressor.network_(torch.tensor(x))
    alone = MomentRegressor(**SMALL, neighbours=0).fit(x_train, y_train)
    np.testing.assert_allclose(alone.predict(x), out.mean[:, 0], rtol=1e-9)
    np.testing.assert_array_equal(alone.neighbour_shares_, [0.0])
    added = 0.0
    if regressor._neighbours is not None:
        local = regressor._neighbours(regressor.network_.standardize(torch.tensor(x)).numpy())
        added = regressor.neighbour_shares_ * local.residual * y_train.std()
    np.testing.assert_allclose(mean, (out.mean.numpy() + added)[:, 0], rtol=1e-9)
    np.testing.assert_allclose(regressor.predict(x), mean)
    np.testing.assert_allclose(regressor.uncertainty(x), std, rtol=1e-6)
    np.testing.assert_allclose(regressor.moments(x).stddev[:, 0], std)
    found = regressor.predict_distribution(x)
    np.testing.assert_allclose(found.std(), std)
    low, high = regressor.predict_interval(x, level=0.8)
    np.testing.assert_allclose(found.cdf(high) - found.cdf(low), 0.8, atol=1e-6)
    assert (std > 0).all()


def test_members_are_weighted_and_averaged(regressor, diabetes):
    x = regressor.network_.standardize(torch.tensor(diabetes[1]))
    with torch.no_grad():
        members = [member(x) for member in regressor.network_.members]
    assert len(members) == 3 * 2
    out = regressor.network_.outputs(torch.tensor(diabetes[1]))
    means = torch.stack([each.mean for each in members])
    torch.testing.assert_close(out.mean, means.mean(0))
    spread = means.unflatten(0, (3, 2)).var(1).mean(0)[:, 0]  # of members of a fold, on average
    torch.testing.assert_close(out.spread[:, 0, 0], spread)
    emergent = torch.stack([each.variance for each in members]).mean(0)
    torch.testing.assert_close(out.emergent[:, 0, 0], emergent[:, 0])
    assert sum(regressor.recipes_.values()) == pytest.approx(1)
    assert min(regressor.recipe_errors_.values()) == min(
        regressor.recipe_errors_[recipe] for recipe in regressor.recipes_
    )


def test_regression_beats_the_mean_of_the_targets(regressor, diabetes):
    _, x, _, y = diabetes
    assert regressor.score(x, y) > 0.3


def test_noise_that_differs_from_place_to_place(of_sine):
    x, y = sine(600, 1)
    found = of_sine.predict_distribution(x)
    left = x[:, 0] < 0
    assert found.std()[left].mean() < 0.2 < 0.4 < found.std()[~left].mean() < 0.6
    assert -found.logpdf(y).mean() < 0.3  # with one variance for all, 0.45 at best
    parts = of_sine.variance_parts_
    assert parts["learned"].gain > 0.2
    assert sum(part.share for part in parts.values()) == pytest.approx(1, abs=1e-6)


def test_targets_of_two_modes():
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (600, 2))
    y = random.choice([-1, 1], 600) * (2 + x[:, 0]) + 0.1 * random.standard_normal(600)
    model = MomentRegressor("quick", random_state=0).fit(x[:500], y[:500])
    assert model.distribution_ == ["mixture"]
    found = model.predict_distribution(x[500:])
    assert -found.logpdf(y[500:]).mean() < 1.2  # one Gaussian has 2.1
    assert (found.pdf(found.mean()) < 0.2 * found.pdf(2 + x[500:, 0])).all()


def test_off_the_data_errors_bars_grow_and_say_so(of_sine):
    inside = of_sine.predict(sine(200, 2)[0], return_std=True)[1].mean()
    deviation = sine(1000, 0)[0].std()
    for far, times in ((3, 2), (10, 5), (100, 20)):
        x = np.array([[3 + far * deviation], [-3 - far * deviation]])
        assert (of_sine.predict(x, return_std=True)[1] >= times * inside).all()
        assert (of_sine.novelty(x) > 0.9 * far).all()
        assert of_sine.budget(x).shares()["doubt of the model"].min() > 0.5
    assert (of_sine.novelty(sine(1000, 0)[0]) == 0).all()


def test_several_targets(two_target_regressor, two_targets):
    x, y = two_targets
    mean, cov = two_target_regressor.predict(x, return_cov=True)
    _, std = two_target_regressor.predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape
    np.testing.assert_allclose(np.diagonal(cov, axis1=1, axis2=2), std**2)
    assert (np.linalg.eigvalsh(cov) > 0).all()
    # The noise of the targets is correlated, and so are the residuals.
    assert cov[0, 0, 1] / (std[0, 0] * std[0, 1]) == pytest.approx(0.9, abs=0.1)
    found = two_target_regressor.predict_distribution(x)
    assert found.logpdf(y).mean() > found._log_density(y).sum(1).mean() + 0.2


def _normal(x, random):
    return np.sin(2 * x[:, 0]) + x[:, 1] + 0.5 * random.standard_normal(len(x))


def _heavy_tails(x, random):
    return np.sin(2 * x[:, 0]) + x[:, 1] + 0.5 * random.standard_t(2.5, len(x))


def _scatter_that_differs(x, random):
    return x[:, 1] + np.exp(x[:, 0]) * random.standard_normal(len(x))


def _skewed(x, random):
    return np.sin(2 * x[:, 0]) + random.exponential(1.0, len(x))


def _two_targets(x, random):
    noise = random.standard_normal(len(x))
    return np.stack([x[:, 0] + 0.5 * noise, x[:, 2] + noise * (0.2 + np.abs(x[:, 0]))], 1)


# What is drawn, and the distribution that is fitted to it, which need not be the right one.
DRAWN = [
    (_normal, "normal"),
    (_heavy_tails, "student"),
    (_scatter_that_differs, "auto"),
    (_skewed, "normal"),
    (_two_targets, "student"),
]


@pytest.mark.filterwarnings("ignore:Held-out rows give")
def test_conformal_intervals_hold_what_they_promise_on_fifty_sets():
    """Coverage at two levels, of new rows, after fits to 60 to 150 rows.

    Given the rows that were fitted to, the coverage p of a conformal interval of level p scatters
    by sqrt(p (1 - p) / (n + 2)), as the share of a beta distribution does; counting it on m new
    rows adds p (1 - p) / m to that variance. The average over 50 sets is to be at least the level
    less two standard errors of it, 0.9 - 0.009. What is proven of cross-conformal intervals is less
    (1 - 2 alpha, 0.8). Each set is to be above the level less four standard deviations. Intervals
    that are much too wide would hold as well, so that the average has an upper bound, too.
    """
    levels, new, found = (0.8, 0.9), 1000, []
    for seed in range(50):
        random, (draw, distribution) = np.random.default_rng(seed), DRAWN[seed % len(DRAWN)]
        n = int(random.integers(60, 151))
        x, x_new = random.standard_normal((n, 3)), random.standard_normal((new, 3))
        y, y_new = draw(x, random), draw(x_new, random).reshape(new, -1)
        model = MomentRegressor(
            "quick", epochs=40, batch_size=150, hidden=(16,), members=1, weight_decay=0.4,
            distribution=distribution, random_state=seed,
        ).fit(x, y)  # fmt: skip
        for level in levels:
            ends = model.predict_interval(x_new, level, conformal=True)
            low, high = (end.reshape(new, -1) for end in ends)
            variance = level * (1 - level) * (1 / (n + 2) + 1 / new)
            inside = ((low <= y_new) & (y_new <= high)).mean(0)
            assert inside.min() > level - 4 * np.sqrt(variance), (seed, level, inside)
            found.append((level, inside.mean(), variance))
    for level in levels:
        _, inside, variance = np.transpose([row for row in found if row[0] == level])
        error = np.sqrt(variance.sum()) / len(inside)
        print(f"level {level}: {inside.mean():.4f} on average, {inside.min():.4f} at least")
        assert level - 2 * error < inside.mean() < level + 0.05


def test_few_rows_promise_nothing_at_a_high_level():
    model = MomentRegressor(**SMALL).fit(*sine(15, 0))
    low, high = model.predict_interval(sine(20, 1)[0], 0.99, conformal=True)
    assert np.isinf(high - low).all()


def test_targets_of_different_distributions():
    """One of two modes and one normal: as many components as the one has, without weight."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (300, 1))
    modes = np.where(random.random(300) < 0.5, -3.0, 3.0) + 0.1 * random.standard_normal(300)
    y = np.stack([modes, x[:, 0] + random.standard_normal(300)], 1)
    model = MomentRegressor(**SMALL, epochs=10).fit(x, y)
    assert model.distribution_[0] == "mixture"
    assert model.distribution_[1] != "mixture"
    found = model.predict_distribution(x)
    alone = found.ppf(0.3)[:, 1]
    np.testing.assert_allclose(found.cdf(np.stack([alone, alone], 1))[:, 1], 0.3, atol=1e-9)
    np.testing.assert_allclose(found.weights.sum(-1), 1)
    assert found.std()[:, 1].mean() == pytest.approx(1, abs=0.3)
    assert np.isfinite(found.logpdf(y)).all()
    low, high = model.predict_interval(x, 0.9)
    assert (((low <= y) & (y <= high)).mean(0) > 0.8).all()


def test_what_regressors_refuse(regressor, diabetes):
    x = diabetes[1]
    with pytest.raises(ValueError, match="not both"):
        regressor.predict(x, return_std=True, return_cov=True)
    with pytest.raises(ValueError, match="between 0 and 1, got 90"):
        regressor.predict_interval(x, level=90)
    with pytest.raises(ValueError, match="between 0 and 1, got 90"):
        regressor.predict_interval(x, level=90, conformal=True)


@pytest.mark.parametrize(("factor", "offset"), [(1000.0, 0.0), (1.0, 1e9)])
def test_predictions_have_the_scale_of_the_targets(diabetes, factor, offset):
    x, x_test, y, _ = diabetes
    model = MomentRegressor(**SMALL, epochs=3, distribution="normal")
    mean, std = model.fit(x, y).predict(x_test, return_std=True)
    other_mean, other_std = model.fit(x, y * factor + offset).predict(x_test, return_std=True)
    np.testing.assert_allclose(other_mean, mean * factor + offset, rtol=1e-9, atol=1e-3 * factor)
    np.testing.assert_allclose(other_std, std * factor, rtol=1e-3)


def test_inputs_may_have_any_scale(diabetes):
    x, x_test, y, _ = diabetes
    model = MomentRegressor(**SMALL, epochs=2, distribution="normal")
    mean = model.fit(x, y).predict(x_test)
    np.testing.assert_allclose(model.fit(x * 1e6 + 1e6, y).predict(x_test * 1e6 + 1e6), mean, 1e-4)


def test_variances_that_emerge_alone(diabetes):
    x, x_test, y, _ = diabetes
    model = MomentRegressor(**SMALL, variance="emergent", distribution="normal").fit(x, y)
    assert set(model.variance_parts_) == {"emergent"}
    _, std = model.predict(x_test, return_std=True)
    own = model.network_.outputs(torch.tensor(x_test)).emergent[:, 0, 0].numpy()
    inside = model.novelty(x_test) == 0
    # A line: one number times it, and another one added.
    assert np.corrcoef(own[inside], std[inside] ** 2)[0, 1] > 0.9999


def test_classifier(classifier, cancer):
    _, x, _, y = cancer
    probabilities = classifier.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (classifier.predict(x) == probabilities.argmax(-1)).all()
    assert classifier.score(x, y) > 0.93
    off = classifier.predict_proba(x + 1000 * x.std(0))
    assert off.max(1).mean() < probabilities.max(1).mean() - 0.1
    assert (classifier.novelty(x + 1000 * x.std(0)) > 100).all()
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(x), probabilities)


def test_the_score_of_a_classifier_finds_errors_as_well_as_its_largest_probability():
    random = np.random.default_rng(0)
    x = random.standard_normal((900, 3))
    y = (x[:, 0] + 0.7 * random.standard_normal(900) > 0).astype(int)
    model = MomentClassifier(**SMALL).fit(x[:600], y[:600])
    assert model.score_ in ERROR_SCORES
    assert model.score_aurocs_[model.score_] == max(model.score_aurocs_.values())
    wrong = model.predict(x[600:]) != y[600:]
    own, largest = model.uncertainty(x[600:]), 1 - model.predict_proba(x[600:]).max(1)
    assert auroc(own[wrong], own[~wrong]) > auroc(largest[wrong], largest[~wrong]) - 0.02


def test_off_the_data_a_classifier_is_less_sure_even_of_noise():
    for seed in range(2):
        random = np.random.default_rng(seed)
        x = random.standard_normal((200, 4))
        model = MomentClassifier(**SMALL).fit(x, random.integers(0, 2, 200))
        for far in (10, 100):
            there = x[:50] + far
            inside, off = (model.predict_proba(each).max(1).mean() for each in (x, there))
            assert off <= inside + 0.01
            assert model.uncertainty(there).mean() >= model.uncertainty(x).mean() - 0.01


def test_a_column_that_never_varied():
    x, y = sine(200, 0)
    x = np.column_stack([x, np.full(200, 1e6)])
    model = MomentRegressor(**SMALL).fit(x, y)
    other = x.copy()
    other[:, 1] = 2e6
    np.testing.assert_allclose(model.predict(other), model.predict(x), rtol=1e-9)
    assert (model.novelty(other) == 1).all()
    assert (model.predict(other, return_std=True)[1] > y.std()).all()


def test_rows_in_order_are_fitted_as_shuffled_ones():
    x, y = sine(600, 0)
    order = np.argsort(x[:, 0])
    test_x, test_y = sine(600, 1)
    loss = [
        -MomentRegressor(**SMALL).fit(x[o], y[o]).predict_distribution(test_x).logpdf(test_y).mean()
        for o in (order, np.arange(600))
    ]
    assert abs(loss[0] - loss[1]) < 0.15


def test_many_recipes_that_are_alike():
    x, y = sine(60, 0)
    model = MomentRegressor(
        **SMALL | {"hidden": (4,)}, noise=(0.1, 0.11, 0.12), weight_decay=(1, 1.1, 1.2, 1.3),
        epochs=2, distribution="normal",
    ).fit(x, y)  # fmt: skip
    assert sum(model.recipes_.values()) == pytest.approx(1)
    assert np.isfinite(model.predict(x)).all()


def test_prediction_sets_hold_the_true_class(classifier, cancer):
    _, x, _, y = cancer
    for level in (0.8, 0.95):
        sets = classifier.predict_set(x, level)
        assert sets[np.arange(len(y)), y].mean() > level - 0.07
        assert sets[np.arange(len(y)), classifier.predict_proba(x).argmax(1)].all()
    assert classifier.predict_set(x, 0.999).mean() >= classifier.predict_set(x, 0.5).mean()


def test_a_risk_and_costs_say_when_to_ask():
    random = np.random.default_rng(0)
    x = random.standard_normal((1200, 2))
    y = np.where(x[:, 0] + 0.7 * random.standard_normal(1200) > 0, "yes", "no")
    model = MomentClassifier(**SMALL).fit(x[:800], y[:800])
    answered = model.uncertainty(x[800:]) <= model.threshold(risk=0.1)
    wrong = model.predict(x[800:]) != y[800:]
    assert 0.2 < answered.mean() < 1
    assert wrong[answered].mean() < 0.15 < wrong.mean()
    # A missed "yes" costs ten times as much: it is predicted more often, and asked for.
    label, asked = model.decide(x[800:], [[0, 1], [10, 0]], ask=0.5)
    assert (label == "yes").sum() > (model.predict(x[800:]) == "yes").sum()
    assert 0 < asked.mean() < 1
    with pytest.raises(ValueError, match=r"costs are \(2, 2\) finite numbers"):
        model.decide(x, [1, 2], ask=1)
    with pytest.raises(ValueError, match="A risk is a share of errors"):
        model.threshold(risk=5)


@pytest.mark.parametrize("covariance", ["shared", "full", "diagonal", "tracked"])
def test_covariance_of_predictions(covariance):
    x, y = load_iris(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MomentClassifier(
            "quick", hidden=(9, 7), covariance=covariance, epochs=1, random_state=0
        ).fit(x, y)
        emergent = model.network_.outputs(torch.tensor(x[:5])).emergent
    off_diagonal = emergent - torch.diag_embed(emergent.diagonal(dim1=-2, dim2=-1))
    assert emergent.shape == (5, 3, 3)
    assert (off_diagonal == 0).all() == (covariance == "diagonal")


def test_the_same_random_state_gives_the_same_network(two_targets):
    x, y = two_targets
    model = MomentRegressor(**SMALL | {"random_state": 1}, epochs=2).fit(x, y)
    np.testing.assert_array_equal(clone(model).fit(x, y).predict(x), model.predict(x))
    kept = pickle.loads(pickle.dumps(model))
    for mine, other in zip(
        model.predict(x, return_std=True), kept.predict(x, return_std=True), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    other = clone(model).set_params(random_state=2).fit(x, y)
    assert not np.allclose(other.predict(x), model.predict(x))


def test_fitting_leaves_the_global_random_numbers_alone(two_targets):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    MomentRegressor(**SMALL, epochs=1).fit(*two_targets)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@pytest.mark.parametrize("n", [2, 3, 9, 12, 30])
def test_few_rows(n):
    x, y = sine(n, 0)
    model = MomentRegressor(**SMALL, epochs=3).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


@pytest.mark.parametrize(("n", "folds"), [(23, 5), (20, 4), (10, 5)])
def test_cross_validation_holds_every_row_out_once(n, folds):
    strata = np.arange(n) % 2
    parts = cross_validation(n, folds, 0, strata)
    assert sorted(np.concatenate([part.held_out for part in parts])) == list(range(n))
    assert len({len(part.training) for part in parts}) == 1, "so that they can train together"
    for training, held_out in parts:
        assert not set(training) & set(held_out)
        assert n - 1 <= len(training) + len(held_out) <= n
        share = strata[held_out].mean() * len(held_out)
        assert abs(share - len(held_out) / 2) <= 1


def test_data_frames_pipelines_and_searches():
    frame, labels = load_iris(return_X_y=True, as_frame=True)
    model = MomentClassifier(**SMALL, epochs=2)
    names = labels.map({0: "setosa", 1: "versicolor", 2: "virginica"})
    assert model.fit(frame, names).feature_names_in_.tolist() == frame.columns.tolist()
    assert set(model.predict(frame)) <= set(names)
    pipeline = make_pipeline(StandardScaler(), clone(model))
    search = GridSearchCV(pipeline, {"momentclassifier__noise": [0.1, 0.5]}, cv=2)
    search.fit(frame, labels)
    assert search.best_params_["momentclassifier__noise"] in (0.1, 0.5)
    assert cross_val_score(model, frame, labels, cv=2).shape == (2,)


def test_conformal_intervals_cover():
    from mapie.regression import SplitConformalRegressor

    x, y = make_regression(1000, 3, noise=20.0, random_state=0)
    fitted = MomentRegressor(**SMALL, epochs=5).fit(x[:300], y[:300])
    conformal = SplitConformalRegressor(fitted, confidence_level=0.9, prefit=True)
    conformal.conformalize(x[300:650], y[300:650])
    _, intervals = conformal.predict_interval(x[650:])
    covered = (intervals[:, 0, 0] <= y[650:]) & (y[650:] <= intervals[:, 1, 0])
    # 350 samples to calibrate on and 350 to test: each adds a standard deviation of
    # sqrt(0.9 * 0.1 / 350) = 0.016, together 0.023. Four of them.
    assert abs(covered.mean() - 0.9) < 0.09


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"effort": "huge"}, "effort must be one of quick, default, thorough"),
        ({"variance": "none"}, "variance must be one of learned, emergent"),
        ({"loss": "nll"}, "loss must be one of mean, likelihood"),
        ({"loss": "likelihood", "noise": 0}, "needs noise"),
        ({"loss": "likelihood", "covariance": "shared"}, "a covariance for each row"),
        ({"distribution": "gauss"}, "distribution must be auto or one of normal"),
        ({"noise": "auto"}, "noise must be a number >= 0, or several"),
        ({"noise": ()}, "noise must be a number >= 0, or several"),
        ({"noise": -0.1}, "noise must be a number >= 0"),
        ({"weight_decay": -1}, "weight_decay must be a number >= 0"),
        ({"members": 0}, "members must be 1 or more"),
        ({"folds": 1}, "folds must be 2 or more"),
        ({"hidden": 50}, "hidden must be a sequence"),
        ({"hidden": (0,)}, "widths of 1 or more"),
        ({"activation": "rleu"}, "did you mean 'relu'"),
        ({"covariance": "ful"}, "known are"),
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"folds": 2.5}, r"folds must be 2 or more \(a whole number\)"),
        ({"batch_size": 0}, "batch_size must be 1"),
    ],
)
def test_bad_parameters_are_refused(settings, message, two_targets):
    with pytest.raises(ValueError, match=message):
        MomentRegressor(**settings).fit(*two_targets)


@pytest.mark.parametrize("dtype", ["boolean", "category", "Int64", "object"])
def test_labels_of_pandas_keep_their_type(dtype):
    x = np.random.default_rng(0).standard_normal((40, 2))
    truth = pd.Series(x[:, 0] > 0)
    y = (truth.astype(int) if dtype == "Int64" else truth).astype(dtype)
    model = MomentClassifier(**TINY).fit(x, y)
    assert model.classes_.dtype == (int if dtype == "Int64" else bool)
    assert model.predict(x).dtype == model.classes_.dtype
    words = MomentClassifier(**TINY).fit(x, truth.map({True: "yes", False: "no"}))
    assert words.classes_.tolist() == ["no", "yes"]
    with pytest.raises(ValueError, match=r"NaN|missing|NA"):
        model.fit(x, pd.Series([None, *truth[1:]], dtype="boolean"))


def test_warnings_point_to_the_line_of_the_user():
    x, y = np.random.default_rng(0).standard_normal((40, 2)), np.arange(40.0)
    model = MomentRegressor(**TINY, distribution="normal", random_state=0)
    calls = [
        lambda: model.fit(x, y, X_std=[9.0, 0.0]),
        lambda: model.predict(x, X_std=[9.0, 0.0]),
        lambda: model.predict_interval(x, X_std=[9.0, 0.0]),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="are larger than their spread") as seen:
            call()
        assert {each.filename for each in seen if "spread in" in str(each.message)} == {__file__}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("verbose", "is_terminal", "patience", "told"),
    [
        ("auto", True, 0.0, ["training", "12/12"]),
        ("auto", True, 1e6, []),
        ("auto", False, 0.0, []),
        (False, True, 0.0, []),
        (True, True, 1e6, ["training", "12/12", "epoch 12 of 12"]),
        (True, False, 1e6, ["epoch 12 of 12: loss"]),
    ],
)
def test_progress_is_shown_if_wanted_or_if_it_takes_long(
    verbose, is_terminal, patience, told, monkeypatch, capsys
):
    said = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(base, "PATIENCE", patience)
    random = np.random.default_rng(0)
    small: dict[str, Any] = {"folds": 2, "members": 1, "epochs": 12, "batch_size": 100}
    model = MomentRegressor("quick", **small, random_state=0, verbose=verbose)
    model.fit(random.standard_normal((40, 2)), random.standard_normal(40))
    found = said.getvalue()
    assert all(each in found for each in told)
    assert bool(found) == bool(told)
    if verbose == "auto" and told:
        assert "epoch" not in found
        assert found.endswith("\x1b[2K")  # the bar is gone
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="verbose must be True, False or 'auto', got 'yes'"):
        model.set_params(verbose="yes").fit(random.standard_normal((40, 2)), np.arange(40.0))


def test_other_threads_and_processes_show_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert base._progress("auto") is not None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(base._progress, "auto").result() is None
    monkeypatch.setattr(base, "parent_process", lambda: "the one that started this")
    assert base._progress("auto") is None


def test_a_resolution_bounds_variances_from_below():
    """Whole numbers that networks know exactly: a density could grow without end."""
    x = np.repeat(np.arange(4.0), 40)[:, None]
    y = 10.0 * x[:, 0]
    known = MomentRegressor(**SMALL, resolution=6.0).fit(x, y)
    assert (known.predict(x, return_std=True)[1] >= 6 / np.sqrt(12) * (1 - 1e-6)).all()
    unknown = MomentRegressor(**SMALL).fit(x, y)
    assert unknown.predict(x, return_std=True)[1].mean() < 6 / np.sqrt(12)
    with pytest.raises(ValueError, match="resolution must be a number >= 0, got -1"):
        MomentRegressor(resolution=-1.0).fit(x, y)


def test_the_likelihood_teaches_networks_where_noise_is():
    """Their own variance, not what residuals have shown: larger where noise is."""
    x, y = sine(600, 0)
    model = MomentRegressor("quick", loss="likelihood", variance="emergent", random_state=0)
    model.fit(x, y)
    inner = np.linspace(-2.5, 2.5, 100)[:, None]
    with torch.no_grad():
        std = model.network_(torch.tensor(inner)).stddev[:, 0].numpy()
    left, right = inner[:, 0] < -0.3, inner[:, 0] > 0.3
    assert std[right].mean() > 1.4 * std[left].mean()
    assert model.variance_parts_["emergent"].share > 0.2
    test_x, test_y = sine(600, 1)
    mean, std = model.predict(test_x, return_std=True)
    assert spearmanr(std, np.abs(test_y - mean)).statistic > 0.35


def test_the_likelihood_of_two_targets(two_targets):
    x, y = two_targets
    model = MomentRegressor(**SMALL, loss="likelihood", epochs=3).fit(x, y)
    _, cov = model.predict(x[:5], return_cov=True)
    assert cov.shape == (5, 2, 2)
    assert (np.linalg.eigvalsh(cov) > 0).all()


def test_bad_data_are_refused(regressor):
    x, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="NaN"):
        MomentClassifier().fit(np.where(x > 7, np.nan, x), y)
    with pytest.raises(ValueError, match="2 classes or more, got 1 class"):
        MomentClassifier().fit(x[:50], y[:50])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        MomentRegressor().fit(x, y[:-1])
    with pytest.raises(ValueError, match="expecting 10 features"):
        regressor.predict(x)
    with pytest.raises(NotFittedError):
        MomentClassifier().predict(x)


def test_spiking_neurons_are_refused():
    with pytest.raises(ValueError, match="spiking neurons"):
        MomentClassifier(activation="lif").fit(np.zeros((20, 2)), np.arange(20) % 2)


def test_data_frames_with_categories_dates_and_missing_values():
    random = np.random.default_rng(0)
    n = 200
    frame = pd.DataFrame(
        {
            "city": random.choice(["Bern", "Rome", "Oslo"], n),
            "size": random.uniform(20, 200, n),
            "new": random.random(n) < 0.5,
            "sold": pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 700, n), "D"),
        }
    )
    price = frame["size"] * (1 + (frame["city"] == "Oslo")) + 50 * frame["new"]
    frame.loc[:20, "size"] = np.nan
    with pytest.raises(ValueError, match=r"missing in 'size' \(21\).*missing='indicator'"):
        MomentRegressor(**SMALL).fit(frame, price)
    model = MomentRegressor(**SMALL, missing="indicator").fit(frame, price)
    assert model.n_features_in_ == 4
    assert list(model.feature_names_in_) == list(frame.columns)
    assert model.score(frame.loc[50:], price[50:]) > 0.8
    turned = frame[["sold", "new", "size", "city"]]
    np.testing.assert_array_equal(model.predict(turned), model.predict(frame))
    other = frame.loc[50:52].assign(city=["Bern", "Paris", "Rome"])
    np.testing.assert_array_equal(model.novelty(other) >= 1, [False, True, False])
    _, std = model.predict(other, return_std=True)
    assert std[1] > price.std()
    model.set_params(unseen="error")
    with pytest.raises(
        ValueError, match=r"column 'city' holds 'Paris', none of .* Bern, Oslo, Rome"
    ):
        model.predict(other)
    model.predict(other[["size", "new", "sold"]].assign(city="Bern"))
    with pytest.raises(ValueError, match="unseen must be one of flag, error, got 'widen'"):
        MomentRegressor(**SMALL, unseen="widen").fit(frame, price)
    with pytest.raises(ValueError, match=r"lacks 'city'.*it has 'town'"):
        model.predict(frame.rename(columns={"city": "town"}))
    with pytest.raises(ValueError, match="X_std are errors of numbers"):
        model.predict(frame, X_std=np.zeros(4))
    with pytest.raises(ValueError, match="missing must be one of error, indicator"):
        MomentRegressor(**SMALL, missing="mean").fit(frame, price)
    kept = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(kept.predict(frame), model.predict(frame))
