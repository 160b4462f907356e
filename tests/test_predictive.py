"""Predictive distributions against scipy and numerical integration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, stats

from covary.uncertainty.predictive import Predictive

RANDOM = np.random.default_rng(0)


def mixture(n: int = 4, t: int = 1, k: int = 3, df: float = np.inf, rho: float = 0.0) -> Predictive:
    weights = RANDOM.uniform(0.2, 1.0, (n, t, k))
    correlation = (1 - rho) * np.eye(t) + rho
    return Predictive(
        weights / weights.sum(-1, keepdims=True),
        RANDOM.standard_normal((n, t, k)),
        RANDOM.uniform(0.2, 1.5, (n, t, k)),
        np.full(t, df),
        correlation,
        t == 1,
    )


@pytest.mark.parametrize("df", [2.5, 7.0, np.inf])
def test_one_component_is_scipys_distribution(df):
    found = mixture(k=1, df=df)
    loc, scale = found.locations[:, 0, 0], found.scales[:, 0, 0]
    known = stats.norm(loc, scale) if np.isinf(df) else stats.t(df, loc, scale)
    y = RANDOM.standard_normal(len(loc))
    for name in ("logpdf", "pdf", "cdf"):
        np.testing.assert_allclose(getattr(found, name)(y), getattr(known, name)(y), rtol=1e-9)
    for q in (0.01, 0.5, 0.95):
        np.testing.assert_allclose(found.ppf(q), known.ppf(q), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.mean(), known.mean())
    np.testing.assert_allclose(found.std(), known.std())


@pytest.mark.parametrize("df", [4.0, np.inf])
def test_mixtures_are_proper_distributions(df):
    found = mixture(n=1, df=df)
    points = np.linspace(-300, 300, 1_200_001)
    density = np.exp(found._log_density(points[:, None])[:, 0])
    assert integrate.trapezoid(density, points) == pytest.approx(1, abs=1e-5)
    mean = integrate.trapezoid(points * density, points)
    assert found.mean()[0] == pytest.approx(mean, abs=1e-4)
    var = integrate.trapezoid((points - mean) ** 2 * density, points)
    assert found.var()[0] == pytest.approx(var, rel=0.01)
    for y in (-1.0, 0.3, 2.0):
        below = points <= y
        area = integrate.trapezoid(density[below], points[below])
        assert found.cdf(y)[0] == pytest.approx(area, abs=1e-3)


@pytest.mark.parametrize("df", [3.0, np.inf])
def test_quantiles_invert_probabilities(df):
    found = mixture(n=50, t=2, df=df)
    for q in (1e-4, 0.05, 0.5, 0.9, 0.9999):
        np.testing.assert_allclose(found.cdf(found.ppf(q)), q, rtol=1e-6)
    low, high = found.interval(0.9)
    np.testing.assert_allclose(found.cdf(high) - found.cdf(low), 0.9, atol=1e-9)


def test_the_joint_density_of_normal_targets_is_that_of_the_multivariate_normal():
    mean = RANDOM.standard_normal((5, 3))
    factor = RANDOM.standard_normal((5, 3, 3))
    cov = factor @ factor.transpose(0, 2, 1) + 0.1 * np.eye(3)
    found = Predictive.normal(mean, cov, is_one_target=False)
    y = mean + RANDOM.standard_normal((5, 3))
    expected = [
        stats.multivariate_normal(m, c).logpdf(v) for m, c, v in zip(mean, cov, y, strict=True)
    ]
    np.testing.assert_allclose(found.logpdf(y), expected, rtol=1e-5)
    np.testing.assert_allclose(found.cov(), cov, rtol=1e-9)


def test_draws_have_the_moments_of_the_distribution():
    found = mixture(n=3, t=2, df=8.0, rho=0.6)
    draws = found.rvs(4_000, random_state=0)
    assert draws.shape == (4_000, 3, 2)
    np.testing.assert_allclose(draws.mean(0), found.mean(), atol=0.1)
    np.testing.assert_allclose(draws.std(0), found.std(), rtol=0.1)
    scores = stats.norm.ppf(np.stack([found.cdf(draw) for draw in draws]))
    assert np.corrcoef(scores[:, 0].T)[0, 1] == pytest.approx(0.6, abs=0.05)


NORMAL = [np.inf, np.inf]
TWO = {  # weights, locations, scales (1, 2, k) and df of two targets
    "Student's t, 3 df": ([[1], [1]], [[0], [2]], [[1], [3]], [3, 3]),
    "Student's t and normal": ([[1], [1]], [[0], [0]], [[1], [1]], [4, np.inf]),
    "normal, two modes": ([[1, 0], [0.5, 0.5]], [[0, 0], [-3, 3]], [[1, 1], [0.3, 0.3]], NORMAL),
    "two modes": ([[0.4, 0.6], [0.5, 0.5]], [[-3, 3]] * 2, [[0.3, 0.3], [0.01, 0.01]], NORMAL),
    "skewed": ([[0.9, 0.1], [0.1, 0.9]], [[-0.5, 5], [-5, 0.5]], [[0.5, 2], [2, 0.5]], NORMAL),
    "Student's t of two scales": ([[0.5, 0.5]] * 2, [[0, 0]] * 2, [[1, 4], [1, 2]], [5, 3]),
}  # fmt: skip


@pytest.mark.parametrize("rho", [0.6, -0.9])
@pytest.mark.parametrize("name", TWO)
def test_covariances_are_those_of_the_targets_and_not_of_normal_scores(name, rho):
    """Against quantiles on a fine grid of normal scores, and against draws."""
    *parts, df = (np.array(part, float) for part in TWO[name])
    matrix = np.array([[1.0, rho], [rho, 1.0]])
    found = Predictive(*(part[None] for part in parts), df, matrix, False)
    cov = found.cov()[0]
    np.testing.assert_allclose(np.diag(cov), found.var()[0])
    z, u = np.linspace(-8, 8, 801), np.linspace(-8, 8, 401)
    g = found._ppf(np.broadcast_to(stats.norm.cdf(z)[:, None, None], (len(z), 1, 2)))[:, 0]
    gap, weights = np.sqrt(1 - rho**2) * u, stats.norm.pdf(u) / stats.norm.pdf(u).sum()
    expected = np.array([weights @ np.interp(rho * at + gap, z, g[:, 1]) for at in z])
    density = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    brute = density @ (g[:, 0] * expected) - (density @ g[:, 0]) * (density @ expected)
    size = np.sqrt(cov[0, 0] * cov[1, 1])
    assert cov[0, 1] / size == pytest.approx(brute / size, abs=0.004)
    draws = found.rvs(30_000, random_state=0)[:, 0]
    assert np.corrcoef(draws.T)[0, 1] == pytest.approx(cov[0, 1] / size, abs=0.03)


def test_covariances_of_many_rows_and_targets_are_positive():
    random, n, t, k = np.random.default_rng(0), 50, 4, 3
    normal = random.standard_normal((n, t, t))
    matrix = normal @ normal.swapaxes(1, 2)
    size = np.sqrt(np.diagonal(matrix, axis1=1, axis2=2))
    parts = (
        random.dirichlet(np.ones(k), (n, t)),
        3 * random.standard_normal((n, t, k)),
        random.uniform(0.1, 2, (n, t, k)),
    )
    df = np.array([3.0, np.inf, 5.0, 2.05])
    found = Predictive(*parts, df, matrix / (size[:, :, None] * size[:, None]), False)
    assert (np.linalg.eigvalsh(found.cov()) > 0).all()
    one = Predictive(*(part[7:8] for part in parts), df, found.correlation[7:8], False)
    np.testing.assert_allclose(one.cov()[0], found.cov()[7], rtol=1e-12)


def test_distributions_are_placed_around_means_with_doubt_added_to_their_variance():
    found = mixture(n=6, t=2)
    centred = replace(found, locations=found.locations - found.mean()[..., None])
    mean, unit, doubt = RANDOM.standard_normal((6, 2)), np.array([2.0, 5.0]), np.full((6, 1), 3.0)
    placed = centred.placed(mean, unit, doubt, is_one_target=False)
    np.testing.assert_allclose(placed.mean(), mean)
    np.testing.assert_allclose(placed.var(), unit**2 * (found.var() + doubt))
    far = np.sort(RANDOM.uniform(0, 0.5, (9, 2)), 0)
    low, high = placed.conformal_interval(0.5, far)
    np.testing.assert_allclose(placed.cdf(high), np.broadcast_to(0.5 + far[4], (6, 2)), atol=1e-9)
    np.testing.assert_allclose(placed.cdf(low), np.broadcast_to(0.5 - far[4], (6, 2)), atol=1e-9)
    assert np.isinf(placed.conformal_interval(0.95, far)).all()


def test_what_distributions_refuse():
    found = mixture(n=4)
    with pytest.raises(ValueError, match="probabilities from 0 to 1"):
        found.ppf(1.01)
    with pytest.raises(ValueError, match="between 0 and 1, got 90"):
        found.interval(90)
    with pytest.raises(ValueError, match=r"of 4 rows and 1 targets take values of shape \(4, 1\)"):
        found.logpdf(np.zeros(5))


@pytest.mark.parametrize("df", [3.0, np.inf])
def test_ends_of_distributions_are_infinite(df):
    found = mixture(n=5, df=df)
    assert (found.ppf(1.0) == np.inf).all()
    assert (found.ppf(0.0) == -np.inf).all()
    assert np.isfinite(found.ppf(1e-300)).all()
    assert (found.logpdf(np.inf) == -np.inf).all()
