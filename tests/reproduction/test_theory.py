"""Experiments of mathematics and small networks, against brute force."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import multivariate_normal

from reproduction.experiments import (
    covariance_activations,
    mechanism,
    sensitivity,
    theorems,
)
from reproduction.figures import mechanism as mechanism_figures
from reproduction.figures import theory as theory_figures
from reproduction.running import reproduce
from reproduction.workshop import Workshop
from tests import reference

ROWS = (
    *mechanism.EXPERIMENTS,
    *sensitivity.EXPERIMENTS,
    *covariance_activations.EXPERIMENTS,
    *theorems.EXPERIMENTS,
)
FIGURES = {**mechanism_figures.FIGURES, **theory_figures.FIGURES}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Every row runs, and its figure is drawn from what was stored.


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_run_and_have_figures(row, tmp_path):
    record = reproduce(row, "smoke", Workshop(folder=tmp_path), results=tmp_path / "results")
    labels = {part.label for part in row.parts["paper"]}
    for claim in row.claims:
        assert set(claim.labels) <= labels
        assert claim.values(record) or claim.label == "constant", claim.metric
    drawing = FIGURES[row.name](record)
    assert drawing.name == row.name
    assert drawing.caption.endswith(".")
    assert any(character.isdigit() for character in drawing.alt)
    drawing.figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_paper_scale_has_three_seeds_of_everything(row):
    labels = {part.label for part in row.parts["paper"]}
    for label in labels:
        assert len([part for part in row.parts["paper"] if part.label == label]) >= 3


# Mechanism


def test_bins_average_what_is_in_them():
    distance = np.array([0.01] * 10 + [0.11] * 12 + [0.35] * 3)
    entropy = np.array([4.0, 6.0] * 5 + [1.0] * 12 + [9.0] * 3)
    bins = mechanism.by_distance(distance, entropy)
    assert bins["entropy"] == [5.0, 1.0]  # three samples are too few for a bin
    assert bins["deviation"] == [1.0, 0.0]
    np.testing.assert_allclose(bins["distance"], [0.01, 0.11])


# Sensitivity


@pytest.mark.parametrize("m", [0.0, 0.7, -2.0, 6.0])
@pytest.mark.parametrize("v", [0.3, 1.25, 4.0])
def test_exact_entropy_is_the_integral_over_the_density(m, v):
    """-int p log p dy for the logit-normal density of y, which is integrated over s."""

    def integrand(s):
        density = math.exp(-((s - m) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
        slope = 1 / (4 * math.cosh(s / 2) ** 2)
        return -density * math.log(density / slope)

    reach = 12 * math.sqrt(v)
    expected, _ = quad(integrand, m - reach, m + reach, points=[m, 0.0], limit=200)
    assert sensitivity.exact_entropy(m, v) == pytest.approx(expected, abs=1e-6)


def test_gaussian_entropy_has_the_variance_of_samples():
    s = 0.8 + math.sqrt(1.25) * np.random.default_rng(0).standard_normal(400_000)
    expected = 0.5 * math.log(2 * math.pi * math.e * (1 / (1 + np.exp(-s))).var())
    assert sensitivity.gaussian_entropy(0.8) == pytest.approx(expected, abs=0.01)


def test_linear_entropy_is_too_high_everywhere():
    m = np.linspace(-8, 8, 101)
    assert (sensitivity.linear_entropy(m) > sensitivity.exact_entropy(m)).all()


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda rng: rng.uniform(0, 3, 50_000), math.log(3)),
        (
            lambda rng: 0.2 * rng.standard_normal(50_000),
            0.5 * math.log(2 * math.pi * math.e * 0.04),
        ),
        (lambda rng: rng.exponential(2.0, 50_000), 1 + math.log(2)),
    ],
    ids=["uniform", "normal", "exponential"],
)
def test_entropy_from_samples(draw, expected):
    found = sensitivity.sampled_entropy(draw(np.random.default_rng(1)))
    assert found == pytest.approx(expected, abs=0.015)


# Covariance activations

PAIRS = [((0.3, -0.8), (1.0, 0.5)), ((-1.5, -1.0), (0.7, 1.2))]


@pytest.mark.parametrize("name", covariance_activations.NAMES)
@pytest.mark.parametrize("rho", [0.2, -0.4])
def test_exact_covariances(name, rho):
    mean, stddev = (np.array(each) for each in zip(*PAIRS, strict=True))
    pairs = covariance_activations.Pairs(mean, stddev, rho)
    expected = [
        float(reference.pair_covariance(name, tuple(m), tuple(s**2), rho))
        for m, s in zip(mean, stddev, strict=True)
    ]
    np.testing.assert_allclose(covariance_activations.exact(name, pairs), expected, rtol=1e-9)


def test_exact_heaviside_covariance_is_a_bivariate_probability():
    pairs = covariance_activations.drawn(5, 0.3, np.random.default_rng(0))
    for (a, b), found in zip(
        pairs.z, covariance_activations.exact("heaviside", pairs), strict=True
    ):
        both = multivariate_normal.cdf([a, b], cov=[[1, 0.3], [0.3, 1]])
        assert found == pytest.approx(both - float(mp.ncdf(a) * mp.ncdf(b)), abs=1e-6)


def test_first_order_is_the_slope_of_the_exact_covariance():
    rng = np.random.default_rng(0)
    pairs = covariance_activations.drawn(20, 1e-6, rng)
    for name in covariance_activations.NAMES:
        first, exact = (
            each(name, pairs)
            for each in (covariance_activations.first_order, covariance_activations.exact)
        )
        np.testing.assert_allclose(first, exact, rtol=1e-4)


@pytest.mark.parametrize("rho", [0.01, 0.2])
def test_monte_carlo_agrees_within_its_error(rho):
    rng = np.random.default_rng(3)
    pairs = covariance_activations.drawn(20, rho, rng)
    for name, (seen, error) in covariance_activations.sampled(pairs, 200_000, rng).items():
        exact = covariance_activations.exact(name, pairs)
        assert np.linalg.norm(seen - exact) < 1.6 * np.linalg.norm(error)
        assert np.linalg.norm(seen - exact) > 0.4 * np.linalg.norm(error)
        assert np.linalg.norm(error) < 0.12 * np.linalg.norm(exact)


def test_unknown_exact_covariance_says_what_is_known():
    pairs = covariance_activations.drawn(2, 0.1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="heaviside, relu, not of tanh"):
        covariance_activations.exact("tanh", pairs)
