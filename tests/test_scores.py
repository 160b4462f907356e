"""Scores against sampling, against each other, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from covary.covariance import Diagonal, Full
from covary.moments import Moments
from covary.testing import ScoreContract
from covary.testing.contract import seeded
from covary.testing.scores import gaussians
from covary.uncertainty import scores

SAMPLED = [
    scores.expected_max,
    scores.predictive_entropy,
    scores.expected_entropy,
    scores.mutual_information,
    scores.change_probability,
]
OF_MOMENTS = {name: score for name, score in scores.SCORES.items() if score.of is not None}
OF_CLASSES = [name for name, score in OF_MOMENTS.items() if score.needs != "covariance"]


class TestScore(ScoreContract):
    cases = OF_MOMENTS

    def is_of_classes(self, name):
        return name in OF_CLASSES

    def sees_covariance(self, name):
        return name not in ("max_softmax", "softmax_entropy", "energy")


def test_draws_have_the_shape_of_what_they_replace():
    moments = gaussians(3, 1.0, batch=5)
    for score in SAMPLED:
        assert score(moments, samples=7).shape == (5,)
    assert scores.expected_softmax(moments).shape == (5, 3)
    assert scores.expected_softmax(moments, samples=7).shape == (5, 3)
    assert scores.averaged_softmax(moments).shape == (5, 3)
    assert scores.points(moments).shape == (128, 5, 3)


def test_scores_of_the_covariance():
    moments = gaussians(4, 1.0)
    eigenvalues = torch.linalg.eigvalsh(moments.covariance_matrix)
    torch.testing.assert_close(scores.trace(moments), eigenvalues.sum(-1))
    torch.testing.assert_close(scores.largest_eigenvalue(moments), eigenvalues[:, -1])
    torch.testing.assert_close(scores.entropy(moments), moments.entropy())
    one = Moments(torch.zeros(3, 1), Diagonal(torch.tensor([[1.0], [2.0], [3.0]])))
    found = scores.of_moments(one, classify=False)
    assert list(found) == ["entropy", "trace", "largest_eigenvalue"]
    for values in found.values():
        assert (values.diff() > 0).all()


def test_scores_of_the_mean():
    moments = gaussians(5, 1.0)
    probabilities = moments.mean.softmax(-1)
    torch.testing.assert_close(scores.max_softmax(moments), 1 - probabilities.amax(-1))
    expected = torch.distributions.Categorical(probabilities).entropy()
    torch.testing.assert_close(scores.softmax_entropy(moments), expected)
    torch.testing.assert_close(scores.energy(moments), -moments.mean.exp().sum(-1).log())


def test_confident_samples_keep_their_order():
    leads = torch.tensor([60.0, 80.0, 100.0])
    mean = torch.stack([leads, torch.zeros(3), torch.zeros(3)], 1)
    moments = Moments(mean, Diagonal(torch.full_like(mean, 0.5)))
    for name in OF_CLASSES:
        found = scores.SCORES[name](moments)
        assert (found.diff() < 0).all() or name == "change_probability", name
    torch.testing.assert_close(scores.max_softmax(moments), 2 * torch.exp(-leads.double()))
    near = Moments(mean / 6, moments.cov)
    found = scores.change_probability(near)
    # not by torch.special.ndtr, which is 0 from -9 on
    assert found.tolist() == pytest.approx((2 * stats.norm.sf(leads / 6)).tolist(), rel=1e-6, abs=0)


@pytest.mark.parametrize("n", [2, 10])
def test_without_covariance_there_is_nothing_to_expect(n):
    mean = gaussians(n, 1.0).mean
    for var in (0.0, 1e-12):
        moments = Moments(mean, Diagonal(torch.full_like(mean, var)))
        torch.testing.assert_close(
            scores.expected_softmax(moments), mean.softmax(-1), rtol=1e-6, atol=1e-9
        )
        torch.testing.assert_close(
            scores.averaged_softmax(moments), mean.softmax(-1), rtol=1e-4, atol=1e-9
        )
        certain = scores.softmax_entropy(moments)
        torch.testing.assert_close(scores.expected_entropy(moments), certain, rtol=0, atol=1e-9)
        torch.testing.assert_close(scores.predictive_entropy(moments), certain, rtol=0, atol=1e-9)
        assert (scores.mutual_information(moments) < 1e-9).all()
        assert (scores.change_probability(moments) < 1e-9).all()
    assert (scores.margin(Moments(mean, Diagonal(torch.zeros_like(mean)))) == -math.inf).all()


def test_large_logits_and_variances():
    mean = torch.tensor([[1e4, 0.0, -1e4], [3e38, 0.0, 1e38], [0.0, 0.0, 0.0]])
    for var in (0.0, 1.0, 1e10, 1e30):
        moments = Moments(mean, Diagonal(torch.full_like(mean, var)))
        probabilities = scores.expected_softmax(moments)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(3, dtype=torch.float64))


# What docstrings promise: the largest error of probabilities by the formula and by points, the
# average error of the entropies, and the average and largest one of the probability of a change.
PROMISES = {
    0.3: (0.06, 0.002, 0.002, 0.005, 0.04),
    1.0: (0.17, 0.01, 0.008, 0.02, 0.07),
    3.0: (0.3, 0.03, 0.02, 0.02, 0.07),
}


@pytest.mark.parametrize("stddev", PROMISES)
@pytest.mark.parametrize("rank", [2, 10])
def test_approximations_against_sampling(stddev, rank):
    moments = gaussians(10, stddev, rank=rank, means=2 + stddev / 3)
    samples = 2500
    softmax, averaged, entropies, change, worst = PROMISES[stddev]

    def errors(score):
        return (score(moments) - score(moments, samples=samples, generator=seeded())).abs()

    # The draws' own error, of a probability at most 1 / (2 sqrt(samples)), comes on top.
    noise = 0.5 / math.sqrt(samples)
    assert errors(scores.expected_softmax).max() < softmax + 3 * noise
    drawn = scores.expected_softmax(moments, samples=20_000, generator=seeded())
    assert (scores.averaged_softmax(moments) - drawn).abs().max() < averaged + 1.5 / 20_000**0.5
    for score in (scores.predictive_entropy, scores.expected_entropy, scores.mutual_information):
        assert errors(score).mean() < entropies + noise
    assert errors(scores.change_probability).mean() < change + noise
    assert errors(scores.change_probability).max() < worst + 4 * noise


def test_many_classes():
    moments = gaussians(60, 1.0, batch=10)
    for score in SAMPLED:
        error = score(moments) - score(moments, samples=2000, generator=seeded())
        # The formula behind expected_max is the coarse one.
        assert error.abs().mean() < (0.25 if score is scores.expected_max else 0.05), score.__name__


def test_change_probability_of_two_and_three_classes():
    two = gaussians(2, 1.0)
    lead = (two.mean[:, 0] - two.mean[:, 1]).abs()
    matrix = two.covariance_matrix
    stddev = (matrix[:, 0, 0] + matrix[:, 1, 1] - 2 * matrix[:, 0, 1]).sqrt()
    torch.testing.assert_close(scores.margin(two), -lead / stddev)
    torch.testing.assert_close(
        scores.change_probability(two), torch.special.ndtr(scores.margin(two))
    )
    three = gaussians(3, 1.0, batch=5, means=1.0)
    found = scores.change_probability(three)
    for i in range(5):
        best = int(three.mean[i].argmax())
        others = [j for j in range(3) if j != best]
        leads = torch.zeros(2, 3, dtype=torch.float64)
        leads[:, best] = 1
        leads[range(2), others] = -1
        gaussian = stats.multivariate_normal(cov=leads @ three.covariance_matrix[i] @ leads.mT)
        assert found[i] == pytest.approx(1 - gaussian.cdf(leads @ three.mean[i]), abs=0.03)


def test_what_all_logits_share_makes_no_difference():
    moments = gaussians(4, 0.7)
    shifted = Moments(moments.mean + 3, Full(moments.covariance_matrix + 9, torch.zeros(1, 1)))
    for name in OF_CLASSES:
        if name != "energy":
            score = scores.SCORES[name]
            torch.testing.assert_close(score(shifted), score(moments), rtol=1e-6, atol=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6),
    st.floats(0, 1e6, width=32),
    st.integers(0, 3),
)
def test_ranges(mean, scale, rank):
    n = len(mean)
    factor = torch.randn(1, n, rank, generator=seeded(n)) * math.sqrt(scale)
    moments = Moments(torch.tensor([mean]), Full(factor @ factor.mT, torch.zeros(1, 1)))
    probabilities = scores.expected_softmax(moments)
    assert (probabilities >= 0).all()
    assert probabilities.sum() == pytest.approx(1)
    assert 0 <= scores.mutual_information(moments) <= math.log(n) + 1e-9
    assert 0 <= scores.expected_entropy(moments) <= math.log(n) + 1e-9
    assert 0 <= scores.change_probability(moments) <= 1
    assert scores.margin(moments) <= 0
    torch.testing.assert_close(
        scores.predictive_entropy(moments) - scores.expected_entropy(moments),
        scores.mutual_information(moments),
        rtol=0,
        atol=1e-12,
    )


def test_two_equal_outputs_never_overtake_each_other():
    # var(x_0 - x_1) is nothing but the round-off of float32 here
    factor = torch.tensor([[0.1, 0.7], [0.1, 0.7], [0.3, -0.2]])
    moments = Moments(
        torch.tensor([[9.0, 9.0, 0.0]]), Full((factor @ factor.mT)[None], torch.zeros(1, 1))
    )
    assert scores.change_probability(moments) < 1e-9
    assert scores.margin(moments) == 0


def test_draws_are_the_generators():
    moments = gaussians(3, 1.0)
    for score in SAMPLED:
        first, again = (score(moments, samples=50, generator=seeded(3)) for _ in range(2))
        assert torch.equal(first, again)
    state = torch.get_rng_state()
    scores._sobol.cache_clear()
    scores.mutual_information(moments)
    assert torch.equal(torch.get_rng_state(), state)


def test_work_is_split(monkeypatch):
    moments = gaussians(3, 1.0)
    whole = [score(moments) for score in SAMPLED]
    monkeypatch.setattr(scores, "_NUMBERS", 500)
    for score, expected in zip(SAMPLED, whole, strict=True):
        torch.testing.assert_close(score(moments), expected)
        assert score(moments, samples=9).shape == expected.shape


def test_expected_softmax_has_a_gradient():
    scale = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    moments = gaussians(3, 1.0)
    for start in (0.0, 1.0):
        matrix = (scale + start) * moments.covariance_matrix
        scaled = Moments(moments.mean, Full(matrix, torch.zeros(1, 1, dtype=torch.float64)))
        loss = scores.expected_softmax(scaled)[:, 0].log().sum()
        (slope,) = torch.autograd.grad(loss, scale)
        assert slope.isfinite()
        assert slope != 0


def test_layer_entropies():
    layers = {"first": gaussians(3, 1.0), "second": gaussians(2, 0.1)}
    found = scores.layer_entropies(layers)
    assert list(found) == ["first", "second"]
    for name, moments in layers.items():
        assert torch.equal(found[name], moments.entropy())


def test_errors_name_the_remedy():
    one = Moments(torch.zeros(3, 1), Diagonal(torch.ones(3, 1)))
    for name in OF_CLASSES:
        with pytest.raises(ValueError, match=f"{name} compares classes and got 1"):
            scores.SCORES[name](one)
    with pytest.raises(ValueError, match="expected_softmax compares classes"):
        scores.expected_softmax(one)
    with pytest.raises(ValueError, match="averaged_softmax compares classes"):
        scores.averaged_softmax(one)
    with pytest.raises(TypeError, match="take Moments and got Tensor"):
        scores.entropy(torch.zeros(3, 2))
    moments = gaussians(3, 1.0)
    for sampled in SAMPLED:
        with pytest.raises(ValueError, match="samples >= 1"):
            sampled(moments, samples=0)
        with pytest.raises(ValueError, match="generator but no samples"):
            sampled(moments, generator=seeded())


def test_expected_softmax_of_two_classes_is_as_close_as_it_says():
    nodes = torch.linspace(-12, 12, 8001, dtype=torch.float64)
    weights = torch.softmax(-nodes.square() / 2, 0)
    for spread, bound in ((1.0, 0.005), (3.0, 0.018), (30.0, 0.018), (1000.0, 0.018)):
        lead = torch.linspace(0, 6 * spread, 200, dtype=torch.float64)
        exact = torch.sigmoid(lead[:, None] + spread * nodes) @ weights
        half = torch.full((1, 2), spread**2 / 2, dtype=torch.float64)
        found = scores.expected_softmax(Moments(torch.stack([lead, 0 * lead], 1), Diagonal(half)))
        assert (found[:, 0] - exact).abs().max() < bound
