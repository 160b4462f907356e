"""Metrics against scikit-learn, scipy, scoringrules and loops that spell the definition out."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import integrate, stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    log_loss,
    roc_auc_score,
    roc_curve,
    root_mean_squared_error,
)

from covary.report import words
from covary.runs.evaluation import classification_metrics
from covary.runs.predictions import Predictions
from covary.uncertainty import metrics, scores
from covary.uncertainty.metrics import Metric

rng = np.random.default_rng(0)
TWO_GROUPS = [metrics.auroc, metrics.aupr, metrics.fpr95, metrics.separability]
# Few distinct numbers, so that ties come up, and infinite ones, as entropies of no variance are.
SCORES = arrays.arrays(
    np.float64, st.integers(1, 30), elements=st.sampled_from([-np.inf, -70, -1, 0, 0.5, 1, 80])
)


def test_separability_is_the_papers():
    higher, lower = rng.normal(2, 3, 500), rng.normal(-1, 0.5, 80)
    expected = (higher.mean() - lower.mean()) / np.sqrt(higher.var() + lower.var())
    assert metrics.separability(higher, lower) == pytest.approx(expected)
    assert metrics.separability(lower, higher) == pytest.approx(-expected)
    assert math.isnan(metrics.separability([], lower))
    assert metrics.separability([*higher, -np.inf], lower) == pytest.approx(expected)


def labelled(positive, negative):
    """Labels and finite scores of the same order, as scikit-learn takes them."""
    labels = np.r_[np.ones(len(positive)), np.zeros(len(negative))]
    return labels, stats.rankdata(np.r_[positive, negative], method="dense")


def false_positives(positive, negative):
    rate, found, _ = roc_curve(*labelled(positive, negative), drop_intermediate=False)
    return rate[np.argmax(found * len(positive) >= 0.95 * len(positive) - 1e-9)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SCORES, SCORES)
def test_ranking_of_two_groups(positive, negative):
    expected = labelled(positive, negative)
    assert metrics.auroc(positive, negative) == pytest.approx(roc_auc_score(*expected))
    found = metrics.aupr(positive, negative)
    assert found == pytest.approx(average_precision_score(*expected), rel=1e-5)
    assert metrics.fpr95(positive, negative) == pytest.approx(false_positives(positive, negative))


@pytest.mark.parametrize("positives", [1, 19, 20, 21, 40, 100, 999])
def test_ranking_of_distinct_scores(positives):
    # far outside [0, 1], where a sigmoid would tie them
    positive, negative = rng.normal(110, 30, positives), rng.normal(70, 30, 700)
    expected = labelled(positive, negative)
    assert metrics.auroc(positive, negative) == pytest.approx(roc_auc_score(*expected))
    found = metrics.aupr(positive, negative)
    assert found == pytest.approx(average_precision_score(*expected), rel=1e-5)
    assert metrics.fpr95(positive, negative) == pytest.approx(false_positives(positive, negative))


def test_groups_that_tell_nothing():
    same = np.ones(30)
    assert metrics.auroc(same, same) == 0.5
    assert metrics.aupr(same, np.ones(10)) == pytest.approx(0.75)
    assert metrics.fpr95(same, same) == 1
    assert math.isnan(metrics.separability(same, same))
    for metric in TWO_GROUPS:
        assert math.isnan(metric([], [1.0]))
        assert math.isnan(metric([1.0], []))


def test_auroc_is_quick():
    positive, negative = rng.normal(1, 1, 5_000), rng.normal(0, 1, 10_000)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        metrics.auroc(positive, negative)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05


NAN = [0.0, np.nan, 0.5, np.nan]
ONES = np.ones(4)
WITH_NAN = {
    "separability": lambda: metrics.separability(NAN, ONES),
    "auroc": lambda: metrics.auroc(ONES, NAN),
    "aupr": lambda: metrics.aupr(NAN, ONES),
    "fpr95": lambda: metrics.fpr95(NAN, ONES),
    "risk_coverage": lambda: metrics.aurc(NAN, ONES),
    "calibration_bins": lambda: metrics.ece(NAN, ONES),
    "adaptive_ece": lambda: metrics.adaptive_ece(ONES, NAN),
    "nll": lambda: metrics.nll(ONES[:, None], NAN),
    "mse": lambda: metrics.rmse(NAN, ONES),
    "crps_gaussian": lambda: metrics.crps_gaussian(ONES, NAN, ONES),
    "interval_coverage": lambda: metrics.interval_coverage(NAN, ONES, 0.9),
    "interval_width": lambda: metrics.interval_width(NAN, 0.9),
    "rank_correlation": lambda: metrics.rank_correlation(ONES, NAN),
}


@pytest.mark.parametrize("name", WITH_NAN)
def test_nan_is_an_error_that_says_where(name):
    with pytest.raises(
        ValueError, match=f"{name} got NaN for 2 of 4 numbers, the first at index 1"
    ):
        WITH_NAN[name]()


MISMATCHED = {
    "risk_coverage": lambda: metrics.aurc([1.0, 2.0], [1.0]),
    "calibration_bins": lambda: metrics.ece([0.5, 0.5], [1]),
    "adaptive_ece": lambda: metrics.adaptive_ece([0.5], [1, 1]),
    "nll": lambda: metrics.nll([[0.5, 0.5]], [0, 1]),
    "brier": lambda: metrics.brier([0.5, 0.5], [0, 1]),
    "mse": lambda: metrics.mse([[1.0], [2.0]], [1.0, 2.0]),
    "crps_gaussian": lambda: metrics.crps_gaussian([1.0, 2.0], [1.0], [1.0, 2.0]),
    "interval_coverage": lambda: metrics.interval_coverage([1.0, 2.0], [1.0], 0.9),
    "rank_correlation": lambda: metrics.rank_correlation([1.0, 2.0], [1.0]),
    "gaussian_log_likelihood": lambda: metrics.gaussian_log_likelihood([[1.0]], [[1.0]], [[1.0]]),
    "auroc": lambda: metrics.auroc([[1.0]], [1.0]),
}


@pytest.mark.parametrize("name", MISMATCHED)
def test_shapes_that_do_not_fit_are_errors(name):
    with pytest.raises(ValueError, match=f"^{name} needs .* got"):
        MISMATCHED[name]()


def test_values_that_make_no_sense_are_errors():
    for labels in ([-1], [2], [0.5]):
        with pytest.raises(ValueError, match=r"nll needs labels 0 ... 1"):
            metrics.nll([[0.5, 0.5]], labels)
    with pytest.raises(ValueError, match="Logits become probabilities by a softmax"):
        metrics.brier([[3.0, -1.0]], [0])
    with pytest.raises(ValueError, match=r"probabilities in \[0, 1\]"):
        metrics.ece([1.2], [1])
    with pytest.raises(ValueError, match="at least one bin"):
        metrics.ece([0.5], [1], bins=0)
    with pytest.raises(ValueError, match="standard deviations >= 0"):
        metrics.interval_width([-1.0], 0.9)
    with pytest.raises(ValueError, match="scales above 0"):
        metrics.standardised_log_likelihood([1.0], [1.0, 0.0])


def test_no_samples_have_no_average():
    for empty in (
        metrics.aurc([], []),
        metrics.ece([], []),
        metrics.adaptive_ece([], []),
        metrics.nll(np.zeros((0, 3)), []),
        metrics.brier([], []),
        metrics.rmse([], []),
        metrics.crps_gaussian([], [], []),
        metrics.interval_coverage([], [], 0.9),
        metrics.interval_width([], 0.9),
        metrics.rank_correlation([], []),
    ):
        assert math.isnan(empty)


@pytest.mark.parametrize("decimals", [8, 0], ids=["distinct", "ties"])
def test_risk_coverage(decimals):
    score, wrong = rng.normal(0, 2, 60).round(decimals), rng.random(60) < 0.3
    curve = metrics.risk_coverage(score, wrong)
    for k in range(60):
        answered = score <= curve.threshold[k]
        assert curve.risk[k] == pytest.approx(wrong[answered].mean())
        assert answered.sum() >= k + 1
    assert curve.coverage[-1] == 1
    assert curve.risk[-1] == pytest.approx(wrong.mean())
    assert metrics.aurc(score, wrong) == pytest.approx(curve.risk.mean())


def test_a_better_score_has_the_smaller_area():
    wrong = rng.random(300) < 0.2
    perfect, useless = wrong + rng.random(300) / 10, rng.random(300)
    assert metrics.aurc(perfect, wrong) < metrics.aurc(useless, wrong) < 0.35


def test_calibration():
    confidence, right = rng.random(400), rng.random(400) < 0.5
    grouped = metrics.calibration_bins(np.r_[confidence, 0.0, 1.0], np.r_[right, 0, 1], bins=10)
    assert grouped.samples.sum() == 402
    total = 0.0
    for low, high in zip(grouped.edges[:-1], grouped.edges[1:], strict=True):
        inside = (confidence > low) & (confidence <= high)
        total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.ece(confidence, right, bins=10) == pytest.approx(total / 400)
    assert math.isnan(metrics.calibration_bins([0.9], [1]).accuracy[0])
    # Confidences of exactly 1 belong to the last bin, and may make up for others there.
    assert metrics.ece([1.0, 0.95], [0, 1]) == pytest.approx(0.475)


def test_adaptive_calibration():
    confidence, right = rng.random(300), rng.random(300) < 0.5
    accuracy, average = calibration_curve(right, confidence, n_bins=10, strategy="quantile")
    expected = np.abs(accuracy - average).mean()
    assert metrics.adaptive_ece(confidence, right, bins=10) == pytest.approx(expected)
    # equal confidences stay together, in whatever order they come
    tied, order = np.r_[np.full(50, 0.7), confidence[:50]], rng.permutation(100)
    found = [metrics.adaptive_ece(tied[some], right[:100][some]) for some in (slice(None), order)]
    assert found[0] == pytest.approx(found[1])
    assert metrics.adaptive_ece(np.full(80, 0.75), np.arange(80) % 4 > 0) == pytest.approx(0)


def test_probability_scores():
    probabilities = rng.dirichlet(np.ones(4), 50)
    labels = rng.integers(0, 4, 50)
    assert metrics.nll(probabilities, labels) == pytest.approx(
        log_loss(labels, probabilities, labels=range(4))
    )
    two = rng.random(50)
    assert metrics.brier(np.c_[1 - two, two], labels % 2) == pytest.approx(
        2 * brier_score_loss(labels % 2, two)
    )
    assert np.isfinite(metrics.nll([[1.0, 0.0]], [1]))


def test_intervals():
    stddev = rng.random(20_000) + 0.1
    error = rng.normal(0, stddev)
    for level in (0.5, 0.9, 0.95):
        assert metrics.interval_coverage(error, stddev, level) == pytest.approx(level, abs=0.015)
        assert metrics.normal_quantile(level) == pytest.approx(stats.norm.ppf(0.5 + level / 2))
        low, high = stats.norm.interval(level, scale=stddev)
        assert metrics.interval_width(stddev, level) == pytest.approx((high - low).mean())
    with pytest.raises(ValueError, match="between 0 and 1"):
        metrics.normal_quantile(95)


def test_squared_errors():
    mean, target = rng.normal(size=(2, 30, 3))
    assert metrics.rmse(mean, target) == pytest.approx(
        root_mean_squared_error(target.ravel(), mean.ravel())
    )
    assert metrics.mse(mean, target) == pytest.approx(metrics.rmse(mean, target) ** 2)


def test_crps_against_its_definition():
    """The integral of the squared gap of cumulative probabilities."""
    x = np.linspace(-30, 30, 60_001)
    for mean, stddev, target in [(0.0, 1.0, 0.3), (-2.0, 0.5, 4.0), (1.0, 3.0, 1.0)]:
        gap = stats.norm.cdf(x, mean, stddev) - (x >= target)
        expected = integrate.trapezoid(gap**2, x)
        assert metrics.crps_gaussian([mean], [stddev], [target]) == pytest.approx(
            expected, abs=1e-3
        )
    assert metrics.crps_gaussian([1.0, 2.0], [0.0, 0.0], [3.0, 2.0]) == 1.0
    assert metrics.crps_gaussian([0.0], [1e-320], [2.0]) == 2.0


def test_crps_against_scoringrules():
    scoringrules = pytest.importorskip("scoringrules", reason="needs Python 3.11 or newer")
    mean, target = rng.normal(0, 5, (2, 200))
    stddev = np.exp(rng.normal(0, 2, 200))
    expected = scoringrules.crps_normal(target, mean, stddev).mean()
    assert metrics.crps_gaussian(mean, stddev, target) == pytest.approx(expected)


@pytest.mark.parametrize("t", [1, 2, 3, 7])
def test_gaussian_log_likelihood(t):
    # scales that differ by many orders of magnitude
    scales = 10.0 ** rng.integers(-8, 8, t)
    mean, target = rng.normal(size=(2, 6, t)) * scales
    factor = rng.normal(size=(6, t, t)) * scales[:, None]
    cov = factor @ factor.transpose(0, 2, 1)
    ones = np.ones(t)
    inner = cov / scales / scales[:, None]
    own = [
        stats.multivariate_normal(m, c).logpdf(y)
        for m, c, y in zip(mean / scales, inner, target / scales, strict=True)
    ]
    found = metrics.gaussian_log_likelihood(mean, cov, target)
    # targets 10^k times as large: the density is that many times smaller
    np.testing.assert_allclose(found, np.array(own) - np.log(scales).sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics.standardised_log_likelihood(found, scales), own, rtol=1e-6)
    np.testing.assert_allclose(metrics.standardised_log_likelihood(own, ones), own)


def test_no_density_without_full_rank():
    assert metrics.gaussian_log_likelihood([[0.0]], [[[0.0]]], [[1.0]])[0] == -np.inf
    factor = rng.normal(size=(20, 3, 2))
    singular = factor @ factor.transpose(0, 2, 1)
    found = metrics.gaussian_log_likelihood(np.zeros((20, 3)), singular, np.ones((20, 3)))
    assert (found == -np.inf).all()
    tiny = metrics.gaussian_log_likelihood([[0.0, 0.0]], [np.diag([1e-30, 1e20])], [[0.0, 0.0]])
    assert np.isfinite(tiny).all()


def test_rank_correlation():
    a, b = rng.normal(size=80).round(1), rng.normal(size=80).round(1)
    assert metrics.rank_correlation(a, a + b) == pytest.approx(stats.spearmanr(a, a + b).statistic)
    assert math.isnan(metrics.rank_correlation([1, 1], [0, 1]))


def test_a_metric_is_one_entry(monkeypatch):
    """What is in the registry is computed, stored, and shown by its title."""
    half = Metric("half", "One half", "lower", "probabilities", lambda *_: 0.5, meaning="Always.")
    monkeypatch.setitem(metrics.METRICS, "half", half)
    mean, label = np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([0, 0])
    known = Predictions(
        name="test",
        mean=mean,
        variance=mean,
        entropy=label,
        layer_entropy=mean,
        label=label,
        input=mean,
        input_index=label,
        scores={"max_softmax": label},
    )
    assert classification_metrics(known)["half"] == 0.5
    assert words.title_and_meaning("half") == ("One half", "Always.")


def test_metrics_and_scores_have_words():
    for name, metric in metrics.METRICS.items():
        assert metric.name == name
        assert metric.title
        assert metric.meaning.endswith(".")
        assert metric.best in {"", "higher", "lower", "50%", "90%", "95%"}
    for name, score in scores.SCORES.items():
        assert score.name == name
        assert score.meaning
    assert scores.about("max_softmax").title == "max-softmax"
    assert scores.about("of_a_friend").title == "of a friend"
    with pytest.raises(TypeError, match="fitted to held-out data first"):
        scores.SCORES["fitted"](None)
