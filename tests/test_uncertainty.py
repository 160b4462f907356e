"""Metrics against scikit-learn, scipy and loops that spell the definition out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

import covary
from covary.uncertainty import metrics, scores

rng = np.random.default_rng(0)


def test_separability_is_the_papers():
    higher, lower = rng.normal(2, 3, 500), rng.normal(-1, 0.5, 80)
    expected = (higher.mean() - lower.mean()) / np.sqrt(higher.var() + lower.var())
    assert metrics.separability(higher, lower) == pytest.approx(expected)
    assert metrics.separability(lower, higher) == pytest.approx(-expected)
    assert math.isnan(metrics.separability([], lower))
    assert metrics.separability([*higher, -np.inf], lower) == pytest.approx(expected)


@pytest.mark.parametrize("decimals", [8, 0], ids=["distinct", "ties"])
def test_auroc(decimals):
    positive, negative = rng.normal(1, 1, 40).round(decimals), rng.normal(0, 1, 70).round(decimals)
    labels = np.r_[np.ones(40), np.zeros(70)]
    expected = roc_auc_score(labels, np.r_[positive, negative])
    assert metrics.auroc(positive, negative) == pytest.approx(expected)
    assert math.isnan(metrics.auroc([], negative))


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
    assert math.isnan(metrics.ece([], []))


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
    with pytest.raises(ValueError, match="between 0 and 1"):
        metrics.normal_quantile(95)


def test_gaussian_log_likelihood():
    mean, target = rng.normal(size=(6, 3)), rng.normal(size=(6, 3))
    factor = rng.normal(size=(6, 3, 3))
    cov = factor @ factor.transpose(0, 2, 1)
    expected = [
        stats.multivariate_normal(m, c).logpdf(y) for m, c, y in zip(mean, cov, target, strict=True)
    ]
    np.testing.assert_allclose(metrics.gaussian_log_likelihood(mean, cov, target), expected)
    assert metrics.gaussian_log_likelihood([[0.0]], [[[0.0]]], [[1.0]])[0] == -np.inf


def test_rank_correlation():
    a, b = rng.normal(size=80).round(1), rng.normal(size=80).round(1)
    assert metrics.rank_correlation(a, a + b) == pytest.approx(stats.spearmanr(a, a + b).statistic)
    assert math.isnan(metrics.rank_correlation([1, 1], [0, 1]))


def test_scores_rise_with_doubt():
    mean = torch.tensor([[5.0, 0.0], [0.1, 0.0]])
    assert scores.max_softmax(mean)[0] < scores.max_softmax(mean)[1]
    quiet, loud = covary.nn.Lift(0.1)(mean), covary.nn.Lift(0.5)(mean)
    assert (scores.entropy(quiet) < scores.entropy(loud)).all()
