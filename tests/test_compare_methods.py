"""Conventional networks and the usual ways to be unsure, against their definitions."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import BayesianRidge
from torch import nn

import covary
from covary.compare import (
    DropoutSamples,
    MemberMoments,
    Members,
    Method,
    by_average,
    by_density,
    by_mean,
    by_points,
    by_targets,
    calibrated,
    laplace,
    with_variance_head,
    without_masks,
)
from covary.models import has_slope, plain
from covary.nn import Rescale
from covary.training import ClassificationLoss, GaussianLikelihood, RegressionLoss
from covary.uncertainty import fit
from covary.uncertainty.calibration import Mixture


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def regression_net(noise: float = 0.2, targets: int = 2) -> nn.Sequential:
    rescale = Rescale(torch.arange(1.0, 1.0 + targets), torch.arange(2.0, 2.0 + targets))
    return nn.Sequential(*covary.mlp([4, 6, targets], noise=noise), rescale)


def test_dropout_stands_behind_each_activation_and_nowhere_else():
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())
    net = nn.Sequential(trunk, *covary.mlp([8, 6, 5, 3], dropout=0.5))
    kinds = [type(layer).__name__ for layer in plain(net, dropout=0.25)[1:]]
    assert kinds == ["Linear", "Function", "Dropout", "Linear", "Function", "Dropout", "Linear"]
    assert plain(net)[0] is trunk
    assert "Dropout" not in [type(layer).__name__ for layer in plain(net)]
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1"):
        plain(net, dropout=1.0)


def test_a_step_is_replaced_by_what_can_be_trained():
    net = covary.mlp([4, 6, 3], activation="heaviside")
    assert not has_slope(net)
    assert has_slope(covary.mlp([4, 6, 3]))
    x = torch.randn(5, 4)
    with torch.no_grad():
        expected = net.linear2.weight @ F.relu(net.linear1(lifted(x)).mean).mT
        found = plain(net, activation="relu")(x) - net.linear2.bias
    torch.testing.assert_close(found, expected.mT)


def lifted(x: torch.Tensor) -> covary.Moments:
    return covary.nn.Lift(0.0)(x)


def test_training_objectives_are_what_they_say():
    x, y = torch.randn(7, 4), torch.randn(7, 2)
    net = regression_net(noise=0.0)
    loss, error = RegressionLoss(plain(net))(x, y)
    expected, same_error = RegressionLoss(net)(x, y)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(error, same_error)
    noisy = regression_net()
    loss, _ = GaussianLikelihood(noisy)(x, y)
    out = noisy(x)
    log_density = out.distribution().log_prob(y) + noisy[-1].scale.log().sum()
    torch.testing.assert_close(loss, -log_density.mean() / 2, rtol=1e-3, atol=1e-3)
    classifier, labels = plain(covary.mlp([4, 6, 3])), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    loss, accuracy = ClassificationLoss(classifier)(x, labels)
    torch.testing.assert_close(loss, F.cross_entropy(classifier(x), labels))
    assert accuracy == (classifier(x).argmax(1) == labels).float().mean()


def test_the_likelihood_of_a_moment_network_teaches_its_covariance():
    """The gradient through the mean alone is another one."""
    x, y = torch.randn(7, 4), torch.randn(7, 2)
    net = regression_net()
    GaussianLikelihood(net)(x, y)[0].backward()
    supervised = net[1].weight.grad.clone()
    net.zero_grad()
    out = net(x)
    gap = (out.mean - y) / net[-1].scale
    (gap.square() / out.variance.detach() * net[-1].scale.square() / 2).mean().backward()
    assert not torch.allclose(supervised, net[1].weight.grad, rtol=0.01)


def test_a_variance_head_keeps_the_mean():
    net = plain(regression_net())
    x = torch.randn(5, 4)
    out = with_variance_head(net)(x)
    torch.testing.assert_close(out.mean, net(x))
    assert (out.variance > 0).all()
    assert with_variance_head(plain(covary.mlp([4, 6, 1])))(x).mean.shape == (5, 1)


def test_dropout_samples_are_repeatable_and_leave_no_trace():
    net = nn.Sequential(nn.Linear(4, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 3))
    draws, x = DropoutSamples(net.eval(), 20), torch.randn(6, 4)
    before, statistics = torch.get_rng_state(), net[1].running_mean.clone()
    first, second = draws(x), draws(x)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(statistics, net[1].running_mean)
    assert not net[2].training
    assert first.shape == (20, 6, 3)
    assert (first.std(0) > 0).all()
    assert not torch.equal(first, DropoutSamples(net, 20, seed=1)(x))
    with pytest.raises(ValueError, match=r"nn.Dropout; this has none"):
        DropoutSamples(nn.Linear(4, 3), 5)
    with pytest.raises(ValueError, match="one sample, got 0"):
        DropoutSamples(net, 0)


def test_dropout_without_masks_is_what_many_masks_average_to():
    net, x = plain(covary.mlp([4, 32, 32, 3]), dropout=0.2), 2 * torch.randn(50, 4)
    masks = Method("masks", "Many.", DropoutSamples(net, 2000), by_average).predict(x)
    found = Method("none", "None.", without_masks(net, x), by_points).predict(x)
    assert list(found.scores) == list(masks.scores)
    torch.testing.assert_close(found.probabilities, masks.probabilities, rtol=0, atol=0.01)
    torch.testing.assert_close(
        found.scores["mutual_information"], masks.scores["mutual_information"], rtol=0.1, atol=1e-3
    )
    whole = without_masks(nn.Sequential(net, nn.Identity()).eval(), x)  # of nested ones, too
    torch.testing.assert_close(whole(x).mean, without_masks(net, x)(x).mean)
    with pytest.raises(ValueError, match=r"nn.Dropout; this has none"):
        without_masks(nn.Linear(4, 3).eval(), x)


def test_an_ensemble_averages_probabilities():
    nets, x = [nn.Linear(4, 3) for _ in range(3)], torch.randn(300, 4)
    method = Method("ensemble", "Three.", Members(nets), by_average)
    found = method.predict(x)
    with torch.no_grad():
        each = torch.stack([net(x).double().softmax(-1) for net in nets]).numpy()
    average = each.mean(0)
    np.testing.assert_allclose(found.probabilities, average, rtol=1e-6)
    np.testing.assert_allclose(found.score, 1 - average.max(1), rtol=1e-6)
    entropy = -(average * np.log(average)).sum(-1) + (each * np.log(each)).sum(-1).mean(0)
    np.testing.assert_allclose(found.scores["mutual_information"], entropy, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(method.logits(x).softmax(-1), found.probabilities)
    single = Method("one", "One.", Members(nets[:1]), by_average).predict(x)
    assert list(single.scores) == ["max_probability"]
    with pytest.raises(ValueError, match="at least one network"):
        Members([])


def test_confident_predictions_keep_their_order():
    net = nn.Linear(1, 2, bias=False)
    nn.init.constant_(net.weight, 1.0)
    net.weight.data[1] = -1.0
    x = torch.tensor([[20.0], [25.0], [30.0]])
    score = Method("one", "One.", Members([net]), by_average).predict(x).score
    assert score[0] > score[1] > score[2] > 0


def test_a_mixture_has_the_moments_of_its_members_and_their_spread():
    nets = [covary.mlp([4, 6, 2]) for _ in range(4)]
    x = torch.randn(3, 4)
    with torch.no_grad():
        out = Mixture(nets)(x)
        members = [net(x) for net in nets]
    means = torch.stack([member.mean for member in members])
    within = torch.stack([member.covariance_matrix for member in members]).mean(0)
    spread = torch.stack([means[:, i].mT.cov(correction=0) for i in range(3)])
    torch.testing.assert_close(out.mean, means.mean(0))
    torch.testing.assert_close(out.covariance_matrix, within + spread)


def test_predictions_come_batch_by_batch():
    net = covary.mlp([4, 6, 3])
    method = Method("MNN", "It.", net, by_mean)
    x = torch.randn(11, 4)
    whole, parts = method.predict(x), method.predict(x, batch_size=4)
    torch.testing.assert_close(whole.probabilities, parts.probabilities)
    torch.testing.assert_close(whole.score, parts.score)
    assert whole.variance is None
    with pytest.raises(ValueError, match="MNN got no inputs"):
        method.predict(x[:0])


def test_laplace_is_the_inverse_of_curvature_and_prior():
    net, x = plain(covary.mlp([4, 5, 3])), torch.randn(40, 4)
    y = torch.randint(3, (40,))
    found = laplace.fit_classifier(net, x, (x, y), precisions=[0.7])
    features = F.pad(net[:-1](x).detach().double(), (0, 1), value=1.0)
    flat = torch.cat([net[-1].weight, net[-1].bias[:, None]], 1).detach().double().flatten()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        # The Fisher information of the softmax is the Hessian of its loss.
        return F.cross_entropy(features @ weight.view(3, 6).mT, y, reduction="sum")

    curvature = torch.autograd.functional.hessian(loss, flat)
    inverse = torch.linalg.inv(curvature + 0.7 * torch.eye(18))
    rows = torch.stack([torch.block_diag(*[one[None]] * 3) for one in features[:4]])
    with torch.no_grad():
        out = found(x[:4])
        torch.testing.assert_close(out.mean.float(), net(x[:4]))
    torch.testing.assert_close(out.covariance_matrix, rows @ inverse @ rows.mT)


def test_a_kronecker_product_is_exact_for_a_single_input():
    net, x = plain(covary.mlp([4, 5, 3])), torch.randn(1, 4)
    held_out, elsewhere = (x, torch.tensor([1])), torch.randn(6, 4)
    whole = laplace.fit_classifier(net, x, held_out, precisions=[0.3])
    product = laplace.fit_classifier(net, x, held_out, precisions=[0.3], most_weights=0)
    assert product[-1].outer is not None
    with torch.no_grad():
        torch.testing.assert_close(
            product(elsewhere).covariance_matrix, whole(elsewhere).covariance_matrix
        )


def test_laplace_chooses_its_prior_on_held_out_data():
    """Wrong labels ask for less certainty than right ones, so for a wider prior."""
    net, x = plain(covary.mlp([4, 5, 3])), torch.randn(60, 4)
    net[-1].weight.data *= 20
    right = net(x).argmax(1)
    sure = laplace.fit_classifier(net, x[:30], (x[30:], right[30:]))
    unsure = laplace.fit_classifier(net, x[:30], (x[30:], (right[30:] + 1) % 3))
    assert sure[-1].precision > unsure[-1].precision


def test_bayesian_regression_is_that_of_scikit_learn():
    net = plain(regression_net(targets=1))
    x = torch.randn(80, 4)
    y = (net(x).detach() + 0.5 * torch.randn(80, 1)).double()
    found = laplace.fit_regressor(net, x, y)
    features = F.pad(net[:-2](x).detach().double(), (0, 1), value=1.0).numpy()
    nothing = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0.0)
    reference = BayesianRidge(fit_intercept=False, max_iter=5000, tol=1e-12, **nothing)
    target = (y - net[-1].shift) / net[-1].scale
    reference.fit(features, target[:, 0].numpy())
    mean, stddev = reference.predict(features, return_std=True)
    with torch.no_grad():
        out = found(x)
    scale, shift = net[-1].scale.item(), net[-1].shift.item()
    np.testing.assert_allclose(out.mean[:, 0], mean * scale + shift, rtol=1e-4)
    np.testing.assert_allclose(out.stddev[:, 0], stddev * scale, rtol=1e-3)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_bayesian_heads_can_be_kept(task):
    x = torch.randn(30, 4)
    if task == "regression":
        net = plain(regression_net())
        found = laplace.fit_regressor(net, x, torch.randn(30, 2))
    else:
        net = plain(covary.mlp([4, 5, 3]))
        found = laplace.fit_classifier(net, x, (x, torch.randint(3, (30,))))
    again = laplace.with_head(net, laplace.head_state(found))
    with torch.no_grad():
        one, other = found(x), again(x)
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.covariance_matrix, other.covariance_matrix)
    with pytest.raises(ValueError, match="no Bayesian last layer"):
        laplace.head_state(net)
    with pytest.raises(ValueError, match=r"ends with an nn.Linear; this ends with"):
        laplace.with_head(found, laplace.head_state(found))


def test_a_constant_variance_is_the_mean_squared_error():
    net = plain(regression_net())
    x, y = torch.randn(50, 4), torch.randn(50, 2).double()
    method = Method("plain", "It.", MemberMoments(Members([net])), by_targets)
    found = calibrated(method, x, y).predict(x)
    error = (found.mean - y).square().mean(0)
    torch.testing.assert_close(found.variance, error.expand(50, 2), rtol=1e-4, atol=0.0)
    assert (found.score == found.score[0]).all()
    assert found.covariance.shape == (50, 2, 2)


def test_calibration_makes_held_out_labels_likelier():
    net, x = nn.Linear(4, 3), torch.randn(400, 4)
    net.weight.data *= 5
    y = torch.distributions.Categorical(logits=net(x)).sample()
    sharp = nn.Linear(4, 3)
    sharp.load_state_dict({name: 8 * value for name, value in net.state_dict().items()})
    method = Method("sharp", "Eight times too sure.", Members([sharp]), by_average)
    better = calibrated(method, x, y)
    before, after = method.predict(x), better.predict(x)
    rows = torch.arange(400)
    assert after.probabilities[rows, y].log().mean() > before.probabilities[rows, y].log().mean()
    assert better.module.calibration.temperature.item() == pytest.approx(8, rel=0.25)
    assert torch.equal(after.probabilities.argmax(1), before.probabilities.argmax(1))
    assert better.name == "sharp, calibrated"
    assert math.isfinite(after.score.sum())


@pytest.mark.parametrize("kind", ["moments", "plain"])
def test_a_fitted_score_comes_with_the_prediction(kind):
    net = covary.mlp([4, 6, 3]).eval()
    net = plain(net) if kind == "plain" else net
    held_out, x = torch.randn(100, 4), torch.randn(9, 4)
    score = fit(net, held_out)
    found = Method("it", "It.", net, partial(by_density, score=score)).predict(x, batch_size=5)
    torch.testing.assert_close(found.score, score(net, x))
    with torch.no_grad():
        out = net(x)
    logits = out.mean if kind == "moments" else out
    torch.testing.assert_close(found.probabilities, logits.double().softmax(-1))
