"""Inputs with errors of their own: Moments.of, and networks that take Moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import covary
from covary.covariance import Diagonal

pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
B, N = 6, 4


def inputs() -> torch.Tensor:
    return torch.randn(B, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def covariances(count: int = B) -> torch.Tensor:
    roots = torch.randn(count, N, N, generator=torch.Generator().manual_seed(1)).double()
    return 0.1 * roots @ roots.mT


def network(covariance: str = "full", noise: float = 0.3) -> torch.nn.Sequential:
    torch.manual_seed(0)
    net = covary.mlp([N, 20, 15, 3], covariance=covariance, noise=noise)
    return net.double().eval()


@pytest.mark.parametrize("std", [0.2, [0.1, 0.2, 0.0, 0.5], np.full((B, 1), 0.3)])
def test_errors_are_for_all_for_each_feature_or_for_each_value(std):
    made = covary.Moments.of(inputs(), std=torch.as_tensor(std))
    expected = torch.as_tensor(std).double().expand(B, N)
    torch.testing.assert_close(made.stddev, expected)
    assert len(covary.Moments.of(inputs().numpy(), std=np.ones((B, N)))) == B


@pytest.mark.parametrize("covariance", ["full", "diagonal", "shared", "tracked:100"])
def test_errors_of_the_size_of_noise_are_that_noise(covariance):
    noisy = network(covariance)
    noises = [0.0, *(layer.noise for layer in noisy.modules() if hasattr(layer, "noise"))][2:]
    quiet = covary.with_noise(noisy, [0.0, *noises])
    x = inputs()
    expected, found = noisy(x), quiet(covary.Moments.of(x, std=0.3))
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance_matrix, expected.covariance_matrix)


@pytest.mark.parametrize("count", [1, B])
@pytest.mark.parametrize("covariance", ["full", "tracked:100"])
def test_a_first_layer_makes_of_a_covariance_what_its_weight_does(covariance, count):
    net, x, cov = network(covariance), inputs(), covariances(count)
    with covary.record(net) as layers:
        out = net(covary.Moments.of(x, cov=cov if count > 1 else cov[0]))
    weight = net.linear1.weight
    expected = weight @ (cov + 0.09 * torch.eye(N)) @ weight.mT
    found = layers["linear1"].covariance_matrix
    torch.testing.assert_close(found, expected.expand_as(found))
    assert out.covariance_matrix.shape == (B, 3, 3)


def test_variances_agree_with_draws_of_the_inputs():
    """Small errors: large ones of four inputs leave a few directions, which are not Gaussian."""
    net, x, cov = network(noise=0.0), inputs(), 0.02 * covariances()
    given = covary.Moments.of(x, cov=cov)
    draws = given.sample(20_000, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        drawn = net(draws.flatten(0, 1)).mean.unflatten(0, draws.shape[:2]).var(0)
    torch.testing.assert_close(net(given).variance, drawn, rtol=0.1, atol=1e-6)


def test_what_comes_out_goes_in_again():
    step = covary.mlp([N, 16, N], noise=0.05).double().eval()
    state = covary.Moments.of(inputs(), std=0.1)
    for _ in range(3):
        state = step(state)
    assert state.covariance_matrix.shape == (B, N, N)
    diagonal = covary.Moments(inputs(), Diagonal(torch.full((1, N), 0.04).double()))
    torch.testing.assert_close(
        step(diagonal).covariance_matrix,
        step(covary.Moments.of(inputs(), std=0.2)).covariance_matrix,
    )


def test_gradients_of_the_mean_pass_through_inputs_with_errors():
    net = network()
    net(covary.Moments.of(inputs(), std=0.2)).mean.sum().backward()
    assert net.linear1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"std": -0.1}, "finite and 0 or more; 1 are not, the first is -0.1"),
        ({"std": torch.tensor([0.1, float("nan"), 0.1, 0.1])}, "the first is nan"),
        ({"std": torch.ones(3)}, r"std has the shape \(3,\), and values have \(6, 4\)"),
        ({}, "one of std"),
        ({"std": 0.1, "cov": torch.eye(N)}, "one of std"),
        ({"cov": torch.eye(3)}, r"cov has the shape \(3, 3\); of 4 units it is \(4, 4\)"),
        ({"cov": torch.full((N, N), float("inf"))}, "NaN or infinite"),
        ({"cov": torch.eye(N).cumsum(0)}, "not symmetric"),
        ({"cov": torch.diag(torch.tensor([1.0, -0.5, 1, 1]))}, "least .* sample 0 is -0.5"),
    ],
)
def test_wrong_errors_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        covary.Moments.of(inputs(), **wrong)


def test_values_are_a_batch_of_real_numbers():
    with pytest.raises(ValueError, match=r"real numbers, got torch.int64 of shape \(2, 3\)"):
        covary.Moments.of(torch.ones(2, 3, dtype=torch.int64), std=0.1)
    with pytest.raises(ValueError, match=r"of shape \(3,\)"):
        covary.Moments.of(torch.ones(3), std=0.1)


def test_the_nearest_covariance_is_taken_if_asked_for():
    cov = torch.diag(torch.tensor([1.0, -0.5, 1, 1]))
    made = covary.Moments.of(inputs(), cov=cov, repair=True)
    torch.testing.assert_close(made.variance[0], torch.tensor([1.0, 0, 1, 1]).double())


def test_moments_of_images_are_flattened_first():
    images = covary.Moments.of(torch.rand(2, 3, 4, 4), std=0.1)
    net = covary.mlp([48, 8, 2], noise=0.1)
    assert net(covary.nn.Flatten()(images)).mean.shape == (2, 2)
    with pytest.raises(ValueError, match=r"got \(2, 3, 4, 4\). Put a covary.nn.Flatten"):
        net(images)


def test_a_network_of_raw_columns_takes_their_errors():
    shift, scale = torch.tensor([5.0, 0, -3, 1e6]), torch.tensor([2.0, 1, 10, 1e3])
    net = torch.nn.Sequential(
        covary.nn.Standardize(shift.double(), scale.double()), *network()
    ).double()
    x = shift + scale * inputs()
    found = net(covary.Moments.of(x, std=0.2 * scale))
    expected = network()(covary.Moments.of(inputs(), std=0.2))
    torch.testing.assert_close(found.covariance_matrix, expected.covariance_matrix)
    cov = covariances()[0] * scale[:, None] * scale
    found = net(covary.Moments.of(x, cov=cov))
    expected = network()(covary.Moments.of(inputs(), cov=covariances()[0]))
    torch.testing.assert_close(found.variance, expected.variance)
