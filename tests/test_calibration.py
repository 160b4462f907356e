"""Calibration: against brute force, and where there is nothing to fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.distributions import MultivariateNormal

import covary
from covary.covariance import Diagonal, Full
from covary.files import FileError
from covary.moments import Moments
from covary.runs.results import HeldOut, KeptCalibration
from covary.training.replicas import Replicas
from covary.uncertainty.calibration import (
    LogitCalibration,
    VarianceCalibration,
    choose_noise,
    combined,
    fit_logits,
    fit_variance,
)
from covary.uncertainty.scores import expected_softmax


def moments_of(mean, matrix):
    return Moments(mean, Full(matrix, added=mean.new_zeros(1, 1)))


def drawn(n, t, *, scale, offset, seed=0):
    """Moments of n samples, and targets that scale C + diag(offset) describes."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(n, t, t, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT * torch.rand(n, 1, 1, generator=generator, dtype=torch.float64)
    mean = torch.randn(n, t, generator=generator, dtype=torch.float64)
    true = scale * matrix + torch.diag(torch.as_tensor(offset, dtype=torch.float64).expand(t))
    white = torch.randn(n, t, 1, generator=generator, dtype=torch.float64)
    return moments_of(mean, matrix), mean + (torch.linalg.cholesky(true) @ white)[..., 0]


def log_likelihood(moments, target):
    mean, matrix = moments.mean.double(), moments.covariance_matrix.double()
    return MultivariateNormal(mean, matrix).log_prob(target.double()).mean().item()


@pytest.mark.parametrize(
    ("scale", "offset", "size"), [(0.02, 0.3, 1.0), (5.0, 0.01, 1e-3), (1.0, 0.0, 1e4)]
)
def test_variance_is_the_most_likely_of_a_grid(scale, offset, size):
    moments, target = drawn(200, 1, scale=scale, offset=offset)
    error = (target - moments.mean).square()[:, 0]
    scales = scale * torch.logspace(-1.5, 1.5, 151, dtype=torch.float64)
    offsets = torch.cat([torch.zeros(1), torch.logspace(-5, 1, 151)]).double()
    var = scales[:, None, None] * moments.variance[:, 0] + offsets[:, None]
    on_grid = (-0.5 * (error / var + var.log() + math.log(2 * math.pi))).mean(-1).max()
    scaled = moments_of(moments.mean * size, moments.covariance_matrix * size**2)
    calibrated = fit_variance(scaled, target * size)(scaled)
    found = log_likelihood(calibrated, target * size) + math.log(size)
    assert on_grid - 1e-8 < found < on_grid + 2e-3


def test_scale_and_offsets_of_several_targets_against_a_general_optimizer():
    moments, target = drawn(100, 2, scale=0.5, offset=[0.1, 1.0])
    fitted = fit_variance(moments, target)

    def loss(logs):
        scale, *offsets = np.exp(logs)
        return -log_likelihood(VarianceCalibration(scale, offsets)(moments), target)

    best = minimize(loss, np.log([0.5, 0.1, 1.0]), method="Nelder-Mead", options={"maxiter": 120})
    assert -log_likelihood(fitted(moments), target) < best.fun + 1e-8
    numbers = np.log([fitted.scale.item(), *fitted.offset.tolist()])
    np.testing.assert_allclose(numbers, best.x, atol=0.02)


def test_true_numbers_are_found_with_enough_samples():
    moments, target = drawn(2000, 2, scale=0.3, offset=[0.2, 2.0], seed=1)
    fitted = fit_variance(moments, target)
    # A variance from n samples has a standard deviation of sqrt(2 / n), 3 %, times some 2 since
    # scale and offset are told apart by the same samples. Four of them.
    assert fitted.scale.item() == pytest.approx(0.3, rel=0.25)
    assert fitted.offset.tolist() == pytest.approx([0.2, 2.0], rel=0.25)


def test_without_variances_the_offset_is_the_mean_squared_error():
    generator = torch.Generator().manual_seed(0)
    mean, error = torch.randn(2, 50, 2, generator=generator, dtype=torch.float64)
    target = mean + torch.tensor([1.0, 10.0]) * error
    fitted = fit_variance(Moments(mean, Diagonal(torch.zeros(1, 2).double())), target)
    assert fitted.scale == 1
    torch.testing.assert_close(fitted.offset, (target - mean).square().mean(0))


def test_variances_that_say_nothing_are_dropped():
    """Large where errors are small and the other way round."""
    error = torch.linspace(0.1, 2, 100, dtype=torch.float64)[:, None]
    fitted = fit_variance(moments_of(torch.zeros_like(error), (1 / error)[..., None]), error)
    var = fitted(moments_of(torch.zeros_like(error), (1 / error)[..., None])).variance
    torch.testing.assert_close(var, error.square().mean().expand(100, 1), rtol=1e-2, atol=0)


@pytest.mark.parametrize("constant", [0.0, 5.0, -1e6])
@pytest.mark.parametrize("var", [0.0, 1.0])
def test_constant_targets_that_are_hit_exactly(constant, var):
    mean = torch.full((9, 1), constant, dtype=torch.float64)
    moments = Moments(mean, Diagonal(torch.full((9, 1), var, dtype=torch.float64)))
    out = fit_variance(moments, mean)(moments)
    assert (out.variance > 0).all()
    assert (out.variance.sqrt() < 1e-5 * max(1, abs(constant))).all()


def test_one_lucky_hit_does_not_make_the_likelihood_infinite():
    moments, target = drawn(30, 1, scale=1.0, offset=0.5)
    matrix = moments.covariance_matrix.clone()
    matrix[3] = 0
    target[3] = moments.mean[3]
    fitted = fit_variance(moments_of(moments.mean, matrix), target)
    assert fitted.offset.item() > 1e-9


@pytest.mark.parametrize(
    ("mean", "target", "message"),
    [
        (torch.zeros(1, 1), torch.zeros(1, 1), "2 samples or more"),
        (torch.zeros(4, 1), torch.zeros(4), "shape"),
        (torch.tensor([[0.0], [math.nan]]), torch.zeros(2, 1), "index 1"),
        (torch.zeros(2, 1), torch.tensor([[0.0], [math.inf]]), "1 targets that are not finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(mean, target, message):
    with pytest.raises(ValueError, match=message):
        fit_variance(Moments(mean, Diagonal(torch.ones(1, 1))), target)


def test_the_mean_stays_and_so_does_a_covariance_of_the_whole_batch():
    moments = Moments(torch.randn(5, 2), Full(torch.eye(2)[None], added=torch.ones(1, 1)))
    out = VarianceCalibration(2.0, [0.5, 1.0])(moments)
    assert out.mean is moments.mean
    assert out.cov.variance.shape == (1, 2)
    torch.testing.assert_close(out.covariance_matrix[4], torch.diag(torch.tensor([4.5, 5.0])))
    with pytest.raises(ValueError, match="for 3 targets, got moments of 2"):
        VarianceCalibration(2.0, [0.5, 1.0, 1.0])(moments)


def logits(n=400, *, temperature=2.0, scale=4.0, seed=0):
    """Moments of three logits, and labels drawn as a calibration says."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(n, 3, 3, generator=generator, dtype=torch.float64)
    var = 0.3 * torch.rand(n, 1, 1, generator=generator, dtype=torch.float64)
    mean = 3 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    moments = moments_of(mean, root @ root.mT * var)
    probabilities = expected_softmax(LogitCalibration(temperature, scale)(moments))
    return moments, torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def label_loss(moments, labels):
    return -expected_softmax(moments).gather(-1, labels[:, None]).log().mean().item()


def test_logits_are_the_most_likely_of_a_grid():
    moments, labels = logits(200)

    def loss(temperature, scale):
        prior = (math.log(temperature) ** 2 + math.log(scale) ** 2) / 2
        out = LogitCalibration(temperature, scale)(moments)
        return label_loss(out, labels) + prior / len(labels)

    fitted = fit_logits(moments, labels)
    values = np.logspace(-0.5, 1.5, 13)
    on_grid = min(loss(temperature, scale) for temperature in values for scale in values)
    found = loss(fitted.temperature.item(), fitted.scale.item())
    assert on_grid - 0.01 < found < on_grid + 1e-9


def test_temperature_alone_where_there_is_no_covariance():
    moments, labels = logits(scale=0.0)
    fitted = fit_logits(Moments(moments.mean, Diagonal(torch.zeros(1, 3).double())), labels)
    assert fitted.scale == 1

    def loss(temperature):
        return torch.nn.functional.cross_entropy(moments.mean / temperature, labels).item()

    for factor in (0.99, 1.01):
        assert loss(fitted.temperature) < loss(fitted.temperature * factor)


def test_labels_that_are_all_right_leave_a_finite_temperature():
    mean = 3 * torch.eye(3).repeat(4, 1)
    moments = Moments(mean, Diagonal(torch.full((1, 3), 0.1)))
    fitted = fit_logits(moments, mean.argmax(-1))
    assert 0.3 < fitted.temperature < 1
    assert (expected_softmax(fitted(moments)).argmax(-1) == mean.argmax(-1)).all()


def test_labels_that_are_none_are_refused():
    moments, labels = logits(20)
    with pytest.raises(ValueError, match="20 labels"):
        fit_logits(moments, labels.double())
    with pytest.raises(ValueError, match="from 0 to 2, got 0 to 3"):
        fit_logits(moments, torch.arange(20) % 4)


@pytest.mark.parametrize(
    "fitted", [VarianceCalibration(0.1, [1.0, 1 / 3]), LogitCalibration(1 / 3, 0.0)], ids=str
)
def test_as_json_and_as_state(fitted):
    numbers = HeldOut(fitted, {}, 9, []).numbers()
    about = {"samples": 9, "notes": (), "weights": "", "covariance": "full", "scores": ()}
    kept = KeptCalibration(**vars(numbers), **about)
    copy = KeptCalibration.from_json(json.loads(json.dumps(kept.to_json()))).layer()
    assert type(copy) is type(fitted)
    assert HeldOut(copy, {}, 9, []).numbers() == numbers
    other = replace(kept, scale=7.0).layer()
    other.load_state_dict(fitted.state_dict())
    assert HeldOut(other, {}, 9, []).numbers() == numbers
    with pytest.raises(ValueError, match=r"kind '(logits|variance)' needs '(temperature|offset)'"):
        replace(kept, temperature=None, offset=None)
    with pytest.raises(FileError, match="key 'kind': expected 'logits' or 'variance', got 'other'"):
        KeptCalibration.from_json(kept.to_json() | {"kind": "other"})


def test_numbers_that_are_none_are_refused():
    for scale, offset in [(-1.0, 1.0), (1.0, [1.0, math.nan]), (math.inf, 0.0), (1.0, [])]:
        with pytest.raises(ValueError, match="finite"):
            VarianceCalibration(scale, offset)
    with pytest.raises(ValueError, match="temperature > 0"):
        LogitCalibration(0.0, 1.0)


def test_an_ensemble_has_the_moments_of_draws_from_all_members():
    members = [drawn(3, 2, scale=1.0, offset=0.1, seed=seed)[0] for seed in range(4)]
    out = combined(members)
    generator = torch.Generator().manual_seed(0)
    draws = torch.cat([member.sample(50_000, generator=generator) for member in members])
    for sample in range(3):
        # Standard errors are 1/sqrt(200,000) of the spread.
        torch.testing.assert_close(out.mean[sample], draws[:, sample].mean(0), rtol=0, atol=0.03)
        torch.testing.assert_close(
            out.covariance_matrix[sample], draws[:, sample].T.cov(), rtol=0.03, atol=0.03
        )


def test_an_ensemble_of_replicas_is_that_of_its_networks():
    nets = [covary.mlp([4, 6, 2], noise=noise) for noise in (0.1, 0.4)]
    x = torch.randn(5, 4)
    with torch.no_grad():
        together = combined(Replicas(nets)(x.expand(2, 5, 4)))
        listed = combined([net(x) for net in nets])
        alone = combined([nets[0](x)])
        torch.testing.assert_close(together.mean, listed.mean)
        torch.testing.assert_close(together.covariance_matrix, listed.covariance_matrix)
        torch.testing.assert_close(alone.covariance_matrix, nets[0](x).covariance_matrix)
    with pytest.raises(ValueError, match="members, batch, units"):
        combined(nets[0](x))
    with pytest.raises(ValueError, match="one member"):
        combined([])


@pytest.fixture
def noisy():
    torch.manual_seed(0)
    return covary.mlp([3, 8, 8, 1], noise=0.3), torch.randn(40, 3), torch.randn(40, 1)


def test_chosen_noise_is_the_best_that_was_tried(noisy):
    net, x, y = noisy
    common = choose_noise(net, x, y, candidates=(0.1, 1.0), batch_size=7)
    assert set(common.scores) == {(0.1,) * 3, (0.3,) * 3, (1.0,) * 3}
    assert common.noise == max(common.scores, key=common.scores.__getitem__)
    layered = choose_noise(net, x, y, candidates=(0.1, 1.0), per_layer=True)
    best = layered.scores[layered.noise]
    assert best == max(layered.scores.values()) >= common.scores[common.noise]
    for layer in range(3):
        for sigma in (0.1, 1.0):
            other = (*layered.noise[:layer], sigma, *layered.noise[layer + 1 :])
            assert layered.scores[other] <= best, "no single change is better"
    out = covary.with_noise(net, layered.noise)(x)
    assert log_likelihood(fit_variance(out, y)(out), y) == pytest.approx(best, rel=1e-4)
    assert net.training
    assert [layer.noise for layer in covary.models.noisy_layers(net)] == [0.3] * 3


def test_of_equally_good_noises_the_least_is_chosen(noisy):
    net, x, y = noisy
    assert choose_noise(net, x, y, score=lambda out, y: 1.0).noise == (0.05,) * 3
    values = iter([math.nan, 2.0, math.nan])
    picked = choose_noise(net, x, y, candidates=(0.1, 0.2), score=lambda out, y: next(values))
    assert picked.scores[picked.noise] == 2.0
    with pytest.raises(ValueError, match="one candidate"):
        choose_noise(net, x, y, candidates=())


def test_noise_for_labels():
    torch.manual_seed(0)
    net, x = covary.mlp([3, 8, 3], noise=0.3), torch.randn(30, 3)
    choice = choose_noise(net, x, torch.arange(30) % 3, candidates=(0.1, 0.5))
    assert all(-1.2 < score < 0 for score in choice.scores.values()), "not worse than guessing"


def test_calibration_is_a_layer_of_a_network(noisy):
    net, x, y = noisy
    with torch.no_grad():
        calibrated = nn.Sequential(net, fit_variance(net(x), y))
        assert calibrated(x).mean.dtype == calibrated(x).variance.dtype == torch.float32
        assert "1.scale" in calibrated.state_dict()


@pytest.mark.parametrize("seed", range(4))
def test_several_targets_of_a_narrow_float32_network(seed):
    """Covariances of low rank, singular to rounding: a density is found all the same."""
    torch.manual_seed(seed)
    net = covary.mlp([5, 20, 2, 4], noise=0.3).eval()
    with torch.no_grad():
        out = net(torch.randn(200, 5))
    target = out.sample()
    calibration = fit_variance(out, target)
    assert math.isfinite(calibration.scale.item())
    assert (calibration.offset > 0).all()
    choice = choose_noise(net, torch.randn(50, 5), torch.randn(50, 4), candidates=(0.1,))
    assert all(math.isfinite(score) for score in choice.scores.values())
