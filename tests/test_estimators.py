"""The estimators: by scikit-learn's own checks, and against the networks inside them."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import covary
from covary.estimators import NOISES, MomentClassifier, MomentRegressor
from covary.estimators.data import cross_validation
from covary.uncertainty.scores import expected_softmax

# Few steps, a high learning rate and few units: the checks fit some 400 times, and some ask for a
# good score.
QUICK: dict[str, Any] = {"hidden": (20,), "batch_size": 128}
CHECKED = [
    MomentRegressor(noise=0.1, epochs=15, lr=0.05, calibrate=False, **QUICK),
    MomentClassifier(noise=0.1, epochs=15, lr=0.05, calibrate=False, **QUICK),
    MomentRegressor(
        noise=(0.1, 0.5), epochs=10, lr=0.1, early_stopping=True, calibrate=False, **QUICK
    ),
    MomentClassifier(noise=0.1, epochs=10, lr=0.1, members=2, folds=2, **QUICK),
]


@parametrize_with_checks(CHECKED)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def diabetes():
    return train_test_split(*load_diabetes(return_X_y=True), random_state=0)


@pytest.fixture(scope="module")
def regressor(diabetes):
    x, _, y, _ = diabetes
    return MomentRegressor(noise=0.3, epochs=15, calibrate=False, random_state=0).fit(x, y)


@pytest.fixture(scope="module")
def two_targets():
    return make_regression(80, 4, n_targets=2, random_state=0)


@pytest.fixture(scope="module")
def two_target_regressor(two_targets):
    return MomentRegressor(noise=0.3, epochs=6, calibrate=False, random_state=0).fit(*two_targets)


@pytest.fixture(scope="module")
def classifier():
    model = MomentClassifier(noise=0.2, epochs=15, calibrate=False, random_state=0)
    return model.fit(*load_iris(return_X_y=True))


def test_predictions_are_the_networks_own(regressor, diabetes, monkeypatch):
    _, x, _, _ = diabetes
    monkeypatch.setattr("covary.estimators.base._NUMBERS_AT_A_TIME", 7 * 50**2 * 10)
    mean, std = regressor.predict(x, return_std=True)
    with torch.no_grad():
        out = regressor.network_(torch.tensor(x))
    np.testing.assert_allclose(mean, out.mean[:, 0], rtol=1e-12)
    np.testing.assert_allclose(std, out.stddev[:, 0], rtol=1e-12)
    np.testing.assert_allclose(regressor.moments(x).mean, out.mean, rtol=1e-12)
    np.testing.assert_allclose(regressor.predict(x), mean)
    np.testing.assert_allclose(regressor.uncertainty(x), std)
    assert (std > 0).all()
    assert std.std() > 0, "a covariance for each sample, not for the batch"


@pytest.mark.parametrize(
    "settings", [{"noise": 0.3}, {"folds": 2}, {"early_stopping": True}], ids=str
)
@pytest.mark.parametrize("kind", [MomentRegressor, MomentClassifier])
def test_what_trained_with_tracked_covariances_predicts_with_exact_ones(kind, settings):
    x, y = load_iris(return_X_y=True)
    estimator = kind((9, 7), covariance="tracked", epochs=2, random_state=0, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.fit(x, y).predict(x)
        out = estimator.moments(x, calibrated=False)
    exact = covary.with_covariance(estimator.network_, "full")(torch.tensor(x))
    torch.testing.assert_close(out.covariance_matrix, exact.covariance_matrix, rtol=0, atol=0)
    torch.testing.assert_close(out.mean, exact.mean.detach(), rtol=0, atol=0)


def test_regression_beats_the_mean_of_the_targets(regressor, diabetes):
    _, x, _, y = diabetes
    assert regressor.score(x, y) > 0.2


def test_several_targets(two_target_regressor, two_targets):
    x, y = two_targets
    mean, cov = two_target_regressor.predict(x, return_cov=True)
    _, std = two_target_regressor.predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape
    assert cov.shape == (len(x), 2, 2)
    np.testing.assert_allclose(np.diagonal(cov, axis1=1, axis2=2), std**2)
    out = two_target_regressor.network_(torch.tensor(x))
    np.testing.assert_allclose(two_target_regressor.uncertainty(x), out.entropy().detach())


def test_predict_gives_one_measure_of_uncertainty_at_a_time(regressor, diabetes):
    with pytest.raises(ValueError, match="not both"):
        regressor.predict(diabetes[1], return_std=True, return_cov=True)


@pytest.mark.parametrize(("factor", "offset"), [(1000.0, 0.0), (1.0, 1e9)])
def test_predictions_have_the_scale_of_the_targets(diabetes, factor, offset):
    x, x_test, y, _ = diabetes
    model = MomentRegressor(noise=0.3, epochs=2, folds=2, random_state=0)
    mean, std = model.fit(x, y).predict(x_test, return_std=True)
    other_mean, other_std = model.fit(x, y * factor + offset).predict(x_test, return_std=True)
    np.testing.assert_allclose(other_mean, mean * factor + offset, rtol=1e-9, atol=1e-3 * factor)
    np.testing.assert_allclose(other_std, std * factor, rtol=1e-4)


def test_inputs_may_have_any_scale(diabetes):
    x, x_test, y, _ = diabetes
    model = MomentRegressor(noise=0.3, epochs=2, folds=2, random_state=0)
    mean = model.fit(x, y).predict(x_test)
    np.testing.assert_allclose(model.fit(x * 1e6 + 1e6, y).predict(x_test * 1e6 + 1e6), mean, 1e-4)


def test_classifier(classifier):
    x, y = load_iris(return_X_y=True)
    with torch.no_grad():
        out = classifier.network_(torch.tensor(x))
    probabilities = classifier.predict_proba(x)
    np.testing.assert_allclose(probabilities, out.mean.softmax(-1))
    np.testing.assert_allclose(classifier.uncertainty(x), out.entropy())
    assert (classifier.predict(x) == probabilities.argmax(-1)).all()
    assert classifier.score(x, y) > 0.9


@pytest.mark.parametrize("covariance", ["shared", "full", "diagonal"])
def test_covariance_of_predictions(covariance):
    x, y = load_iris(return_X_y=True)
    model = MomentClassifier(
        noise=0.2, covariance=covariance, epochs=1, folds=2, random_state=0
    ).fit(x, y)
    matrix = model.moments(x[:5]).covariance_matrix
    off_diagonal = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    assert matrix.shape == (5, 3, 3)
    assert (off_diagonal == 0).all() == (covariance == "diagonal")


def test_automatic_noise_is_the_best_of_those_tried(diabetes):
    x, _, y, _ = diabetes
    model = MomentRegressor((20,), epochs=3, random_state=0).fit(x, y)
    assert tuple(model.noise_scores_) == NOISES
    assert model.noise_ == max(model.noise_scores_, key=model.noise_scores_.__getitem__)
    # Then trained on all the data: as if that noise had been asked for.
    asked = MomentRegressor((20,), noise=model.noise_, epochs=3, random_state=0).fit(x, y)
    np.testing.assert_array_equal(model.predict(x), asked.predict(x))


def test_of_equally_good_noises_the_least_is_chosen(diabetes, monkeypatch):
    monkeypatch.setattr(
        MomentRegressor, "_scores", lambda self, out, y, calibrated: torch.zeros(len(y))
    )
    x, _, y, _ = diabetes
    assert MomentRegressor(epochs=1, random_state=0).fit(x, y).noise_ == min(NOISES)


def test_too_few_samples_to_choose_the_noise_by(two_targets):
    x, y = two_targets
    model = MomentRegressor(epochs=3, early_stopping=True).fit(x[:20], y[:20])
    assert model.noise_ == 0.1
    assert model.noise_scores_ == {}
    assert model.n_iter_ == 3


def test_early_stopping_goes_back_to_the_best_weights(diabetes):
    x, _, y, _ = diabetes
    settings = {"noise": 0.1, "lr": 0.05, "schedule": "constant", "random_state": 0, **QUICK}
    model = MomentRegressor(epochs=60, patience=5, early_stopping=True, **settings).fit(x, y)
    losses = [row.measured["validation_loss"] for row in model.history_]
    best = int(np.argmin(losses)) + 1
    assert model.n_iter_ == best + 5 < 60
    # With a constant learning rate, a run of so many epochs ends in the same weights.
    short = MomentRegressor(epochs=best, patience=5, early_stopping=True, **settings).fit(x, y)
    np.testing.assert_allclose(model.predict(x), short.predict(x), rtol=1e-5)


def test_the_same_random_state_gives_the_same_network(two_targets):
    x, y = two_targets
    model = MomentRegressor(epochs=3, random_state=1).fit(x, y)
    np.testing.assert_array_equal(clone(model).fit(x, y).predict(x), model.predict(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))
    other = clone(model).set_params(random_state=2).fit(x, y)
    assert not np.allclose(other.predict(x), model.predict(x))


def test_fitting_leaves_the_global_random_numbers_alone(two_targets):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    MomentRegressor(epochs=1, random_state=0).fit(*two_targets)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@pytest.fixture(scope="module")
def calibrated_regressor(diabetes):
    x, _, y, _ = diabetes
    settings = {"noise": (0.3, 0.1), "members": 3, "epochs": 6}
    return MomentRegressor(**settings, random_state=0).fit(x, y)


def test_calibrated_predictions_are_two_numbers_away_from_the_networks_own(
    calibrated_regressor, diabetes
):
    x = diabetes[1]
    model, own = calibrated_regressor, calibrated_regressor.moments(x, calibrated=False)
    mean, std = model.predict(x, return_std=True)
    scale, offset = model.calibration_.scale.item(), model.calibration_.offset.item()
    np.testing.assert_allclose(std**2, scale * own.variance[:, 0] + offset)
    np.testing.assert_allclose(mean, own.mean[:, 0])
    with torch.no_grad():
        out = model.network_(torch.tensor(x))
    torch.testing.assert_close(own.covariance_matrix, out.covariance_matrix)
    np.testing.assert_allclose(
        model.predict(x, return_std=True, calibrated=False)[1] ** 2, own.variance[:, 0]
    )
    np.testing.assert_allclose(model.uncertainty(x), std)
    np.testing.assert_allclose(model.predict(x, return_cov=True)[1][:, 0, 0], std**2)
    assert tuple(model.noise_scores_) == (0.1, 0.3)


def test_calibration_makes_held_out_targets_likelier(calibrated_regressor, diabetes):
    _, x, _, y = diabetes
    target = torch.tensor(y)[:, None]
    of = {
        calibrated: calibrated_regressor.moments(x, calibrated=calibrated)
        for calibrated in (False, True)
    }
    density = {
        key: torch.distributions.Normal(out.mean, out.stddev).log_prob(target).mean()
        for key, out in of.items()
    }
    assert density[True] > density[False] + 0.1
    # 111 samples: the average of squares of standard normals is 1 +- sqrt(2 / 111). Four of them.
    assert abs(((of[True].mean - target) / of[True].stddev).square().mean() - 1) < 0.55


def test_an_ensemble_is_its_members(calibrated_regressor, diabetes):
    x_train, x, y_train, _ = diabetes
    model = calibrated_regressor
    with torch.no_grad():
        members = [net(torch.tensor(x)) for net in model.network_.nets]
    means = torch.stack([out.mean for out in members])
    out = model.moments(x, calibrated=False)
    torch.testing.assert_close(out.mean, means.mean(0))
    own = torch.stack([out.variance for out in members]).mean(0)
    torch.testing.assert_close(out.variance, own + means.var(0, correction=0))
    assert (means.var(0) > 0).all(), "other initial weights"
    # The first of them is the network that would have been trained alone.
    alone = MomentRegressor(noise=model.noise_, epochs=6, calibrate=False, random_state=0)
    alone.fit(x_train, y_train)
    np.testing.assert_allclose(alone.predict(x), means[0, :, 0], rtol=1e-4)


def test_calibrated_probabilities_are_expected_ones():
    x, y = load_iris(return_X_y=True)
    model = MomentClassifier(noise=0.3, epochs=5, folds=3, random_state=0)
    model.fit(x, y)
    with torch.no_grad():
        out = model.network_(torch.tensor(x))
        expected = expected_softmax(model.calibration_(out))
    np.testing.assert_allclose(model.predict_proba(x), expected)
    np.testing.assert_allclose(model.predict_proba(x, calibrated=False), out.mean.softmax(-1))
    assert (model.predict(x) == expected.argmax(-1).numpy()).all()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))


def test_calibration_by_a_single_part_and_after_early_stopping(two_targets):
    x, y = two_targets
    for settings in ({"folds": 0}, {"early_stopping": True, "members": 2}):
        model = MomentRegressor(
            noise=0.3,
            epochs=4,
            validation_fraction=0.25,
            random_state=0,
            **settings,
        ).fit(x, y)
        assert model.calibration_.offset.shape == (2,)
        _, cov = model.predict(x, return_cov=True)
        assert (np.linalg.eigvalsh(cov) > 0).all()


def test_too_few_samples_to_calibrate(two_targets):
    x, y = two_targets
    model = MomentRegressor(noise=0.3, epochs=2).fit(x[:9], y[:9])
    assert model.calibration_ is None
    model.predict(x, return_std=True)
    with pytest.raises(ValueError, match="calibrate=True"):
        model.predict(x, return_std=True, calibrated=True)


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
    model = MomentClassifier(noise=0.2, epochs=3, calibrate=False, random_state=0)
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
    fitted = MomentRegressor(noise=0.1, epochs=5, random_state=0).fit(x[:300], y[:300])
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
        ({"noise": "loud"}, "'auto'"),
        ({"noise": ()}, "several to choose from"),
        ({"members": 0}, "members must be 1 or more"),
        ({"folds": 1}, "2 or more, or 0"),
        ({"noise": -0.1}, "noise >= 0"),
        ({"hidden": 50}, "sequence"),
        ({"hidden": (0,)}, "widths of 1 or more"),
        ({"activation": "rleu"}, "did you mean 'relu'"),
        ({"covariance": "ful"}, "known are"),
        ({"validation_fraction": 1.0}, "between 0 and 1"),
        ({"patience": 0}, "1 epoch"),
        ({"epochs": 0}, "1 or more"),
        ({"batch_size": 0}, "batch_size must be 1"),
        ({"schedule": "linear"}, "known are"),
    ],
)
def test_bad_parameters_are_refused(settings, message, two_targets):
    with pytest.raises(ValueError, match=message):
        MomentRegressor(**settings).fit(*two_targets)


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
