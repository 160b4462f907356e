"""Changed decisions against brute force: integrals of Gaussians, draws of networks."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

import covary
from benchmarks import flips
from covary.covariance import Diagonal, Full
from covary.models import plain
from covary.moments import Moments
from covary.testing.contract import seeded
from covary.testing.scores import gaussians
from covary.uncertainty import changes
from covary.uncertainty.scores import change_probability
from tests import digits

F64 = torch.float64


def one(mean, matrix) -> Moments:
    """Moments of a single sample in double precision."""
    return Moments(torch.tensor([mean], dtype=F64), Full(torch.tensor([matrix], dtype=F64)))


def integral(moments: Moments, index: int, decision: int) -> float:
    """The probability by scipy's integral over the leads; the covariance may be singular."""
    n = moments.mean.shape[1]
    rows = -torch.eye(n, dtype=F64)[[j for j in range(n) if j != decision]]
    rows[:, decision] = 1
    mean = rows @ moments.mean[index].double()
    cov = rows @ moments.covariance_matrix[index].double() @ rows.mT
    gaussian = stats.multivariate_normal(cov=cov.numpy(), allow_singular=True, seed=0)
    return 1 - float(gaussian.cdf(mean.numpy()))


@pytest.mark.parametrize("n", [3, 5, 8])
def test_probabilities_for_any_decision_against_integrals(n):
    moments = gaussians(n, 1.0, batch=12, means=1.0)
    decision = torch.arange(12) % n  # most of them are not the class of the largest mean
    found = change_probability(moments, decision=decision)
    expected = [integral(moments, i, int(decision[i])) for i in range(12)]
    off = (found - torch.tensor(expected, dtype=F64)).abs()
    assert off.mean() < 0.02
    assert off.max() < 0.06
    draws = change_probability(moments, decision=decision, samples=4000, generator=seeded())
    assert (draws - torch.tensor(expected, dtype=F64)).abs().max() < 4 * 0.5 / math.sqrt(4000)


def test_two_classes_are_exact_whichever_is_decided_for():
    moments = one([0.3, 1.0], [[1.0, 0.4], [0.4, 2.0]])
    ahead = stats.norm.cdf(0.7 / math.sqrt(2.2))
    assert change_probability(moments).item() == pytest.approx(1 - ahead, rel=1e-12)
    behind = change_probability(moments, decision=torch.tensor([0])).item()
    assert behind == pytest.approx(ahead, rel=1e-12)


def test_the_decision_of_the_mean_is_the_default():
    moments = gaussians(6, 1.0)
    decision = moments.mean.argmax(-1)
    assert torch.equal(change_probability(moments), change_probability(moments, decision=decision))


def test_without_variance_a_decision_stands_or_is_wrong():
    mean = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 1.0, 0.0]])  # ahead, behind, tie
    moments = Moments(mean, Diagonal(torch.zeros(3, 3)))
    found = change_probability(moments, decision=torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 0.0], dtype=F64))


def test_ties_with_variance():
    equal = Moments(torch.zeros(1, 4), Diagonal(torch.ones(1, 4)))
    for decision in range(4):
        found = change_probability(equal, decision=torch.tensor([decision]))
        assert found.item() == pytest.approx(0.75, abs=0.01)


def test_huge_means():
    moments = one([1e30, 0.0, -1e30], torch.eye(3).tolist())
    for decision, expected in ((0, 0.0), (1, 1.0), (2, 1.0)):
        found = change_probability(moments, decision=torch.tensor([decision]))
        assert found.item() == pytest.approx(expected, abs=1e-300)


@pytest.mark.parametrize("decision", [0, 1])
def test_correlated_rivals_count_once(decision):
    # the second and third logit are the same, so the third adds nothing
    matrix = [[1.0, 0.2, 0.2], [0.2, 1.5, 1.5], [0.2, 1.5, 1.5]]
    moments = one([0.5, 0.1, 0.1], matrix)
    two = one([0.5, 0.1], [[1.0, 0.2], [0.2, 1.5]])
    chosen = torch.tensor([decision])
    expected = change_probability(two, decision=chosen).item()
    assert change_probability(moments, decision=chosen).item() == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("rank", [1, 2])
def test_singular_covariances(rank):
    moments = gaussians(5, 1.0, batch=12, rank=rank, means=1.0)
    decision = torch.arange(12) % 5
    found = change_probability(moments, decision=decision)
    drawn = change_probability(moments, decision=decision, samples=20_000, generator=seeded())
    assert (found - drawn).abs().mean() < 0.03


def test_decisions_that_are_none():
    moments = gaussians(3, 1.0, batch=4)
    for wrong in (
        torch.zeros(3).long(),
        torch.zeros(4),
        torch.tensor([0, 1, 2, 3]),
        -torch.ones(4),
    ):
        for samples in (None, 10):
            with pytest.raises(ValueError, match="a class from 0 to 2 for each sample"):
                change_probability(moments, decision=wrong, samples=samples)
    with pytest.raises(ValueError, match="compares classes and got 1"):
        change_probability(gaussians(1, 1.0), decision=torch.zeros(20).long())


class Parabola(nn.Module):
    """Logits (x_1 + curve x_1^2, 0) of inputs (B, 2), whose slope at x gives the variance."""

    def __init__(self, curve: float, noise: float, more: float = 0.0) -> None:
        super().__init__()
        self.curve, self.noise, self.more = curve, noise, more

    def forward(self, x):
        first = x.flatten(1)[:, 0]
        slope = (1 + 2 * self.curve * first).detach()
        var = (self.noise * slope).square() + self.more
        zero = torch.zeros_like(first)
        return Moments(
            torch.stack([first + self.curve * first**2, zero], 1),
            Diagonal(torch.stack([var, zero], 1)),
        )


@pytest.mark.parametrize("more", [0.0, 0.3])
def test_the_slope_half_way_to_a_change_replaces_that_at_the_input(more):
    noise, curve = 0.5, -0.1
    net = Parabola(curve, noise, more)
    x = torch.tensor([[2.0, 7.0], [0.1, 7.0]], dtype=F64)
    out = changes.bent(net, x, noise)
    torch.testing.assert_close(out.mean, net(x).mean)
    for i, (start, _) in enumerate(x.tolist()):
        slope, lead = 1 + 2 * curve * start, start + curve * start**2
        var = (noise * slope) ** 2 + more
        share = noise * slope / math.sqrt(var)
        t = max(1.0, lead / math.sqrt(var) * share) / 2
        end = start - noise * t
        fall = (lead - (end + curve * end**2)) / t
        expected = var * (1 - share**2) + fall**2
        assert out.variance[i, 0].item() == pytest.approx(expected, rel=1e-9)


def test_inputs_that_noise_cannot_move():
    with pytest.raises(TypeError, match=r"real numbers, got torch.uint8. Pass x.float()"):
        changes.bent(Parabola(0.1, 0.5), torch.zeros(3, 2, dtype=torch.uint8), 0.5)


def test_a_straight_network_is_not_bent():
    torch.manual_seed(0)
    net = covary.mlp([6, 4], noise=0.3).double().eval()
    x = torch.randn(9, 6, dtype=F64)
    out = changes.bent(net, x, 0.3)
    torch.testing.assert_close(out.covariance_matrix, net(x).covariance_matrix)


def test_what_noise_of_the_input_does_not_reach_stays():
    x = torch.full((3, 1, 2, 1), -5.0, dtype=F64)  # the shape of images
    net = Parabola(0.1, 0.0, 0.4)  # its slope is 0 there
    for noise in (0.0, 0.5):
        out = changes.bent(net, x, noise)
        torch.testing.assert_close(out.variance, net(x).variance)
    certain = changes.bent(Parabola(0.1, 0.0), x, 0.5)
    assert (certain.variance == 0).all()


def test_bent_moments_are_closer_to_draws_and_leave_no_gradients():
    noise = 0.4
    net = covary.with_noise(digits.trained("relu", 0.1, epochs=30), [noise, 0.0, 0.0]).eval()
    net.zero_grad()
    x, model = digits.data()[2][:100], plain(net)
    with torch.no_grad():
        decision = model(x).argmax(1)
        noisy = x + noise * torch.randn(4000, *x.shape, generator=seeded())
        truth = (model(noisy).argmax(-1) != decision).double().mean(0)
    bent = change_probability(changes.bent(net, x, noise, decision=decision), decision=decision)
    straight = change_probability(net(x), decision=decision)
    assert (bent - truth).abs().mean() < 0.9 * (straight - truth).abs().mean()
    assert not bent.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.7])
def test_the_scale_of_draws_is_found(scale):
    moments = gaussians(4, 1.0, means=1.5)
    scaled = Moments(moments.mean, Full(scale * moments.covariance_matrix))
    decision = torch.arange(len(moments)) % 4
    changed = change_probability(scaled, decision=decision)
    found = changes.fit(moments, changed, decision=decision)
    assert found.scale.item() == pytest.approx(scale, rel=2e-3)
    assert found.temperature == 1
    torch.testing.assert_close(
        change_probability(found(moments), decision=decision), changed, atol=1e-3, rtol=0
    )


def test_a_scale_that_nothing_tells_is_one():
    certain = Moments(torch.tensor([[1.0, 0.0]]), Diagonal(torch.zeros(1, 2)))
    assert changes.fit(certain, torch.tensor([0.2])).scale == 1


def test_fractions_that_are_none():
    moments = gaussians(3, 1.0, batch=2)
    for wrong in (torch.tensor([0.5]), torch.tensor([0.5, 1.5]), torch.tensor([0.5, math.nan])):
        with pytest.raises(ValueError, match="a fraction from 0 to 1 for each of 2 samples"):
            changes.fit(moments, wrong)


def test_the_error_of_draws_is_that_of_the_binomial():
    probability = torch.tensor([0.0, 1e-4, 0.03, 0.5, 0.97, 1.0], dtype=F64)
    for draws in (1, 7, 300):
        k = torch.arange(draws + 1).numpy()
        errors = [
            (stats.binom.pmf(k, draws, p) * abs(k / draws - p)).sum() for p in probability.tolist()
        ]
        expected = sum(errors) / len(errors)
        assert flips.error_of_draws(probability, draws) == pytest.approx(expected, rel=1e-9)
        assert flips.draws_for(expected * (1 + 1e-9), probability) == draws
