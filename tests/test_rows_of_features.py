"""Samples that are several rows of features, (B, T, n): layers act on each row, as torch's do."""

import pytest
import torch
from torch import nn

import covary
from covary.uncertainty import scores

KINDS = ("full", "diagonal", "tracked", "shared")


def network(kind: str, activation: str = "relu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        covary.nn.Lift(0.3, kind),
        covary.nn.Linear(5, 7),
        covary.nn.Noise(0.2),
        covary.nn.Activation(activation),
        covary.nn.Linear(7, 6),
        covary.nn.Noise(0.2),
        covary.nn.Activation(activation),
        covary.nn.Linear(6, 3),
    ).double()


@pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
@pytest.mark.parametrize("activation", ["relu", "heaviside"])
@pytest.mark.parametrize("kind", ["full", "diagonal", "tracked"])
def test_rows_have_the_moments_that_they_have_as_samples(kind, activation):
    net = network(kind, activation).eval()
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    out, rows = net(x), net(x.flatten(0, 1))
    torch.testing.assert_close(out.mean, rows.mean.view(4, 6, 3))
    torch.testing.assert_close(out.variance, rows.variance.view(4, 6, 3))
    # Noise of different rows is independent, and no layer mixes them.
    expected = torch.stack(
        [torch.block_diag(*each) for each in rows.covariance_matrix.view(4, 6, 3, 3)]
    )
    torch.testing.assert_close(out.covariance_matrix, expected, atol=1e-12, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_they_train(kind):
    net = network(kind)
    net(torch.randn(4, 6, 5, dtype=torch.float64)).mean.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters())


def test_flattened_rows_are_features_of_the_next_layer():
    torch.manual_seed(0)
    net = nn.Sequential(
        covary.nn.Lift(0.3),
        covary.nn.Linear(5, 7),
        covary.nn.ReLU(),
        covary.nn.Flatten(),
        covary.nn.Linear(14, 2),
    ).double()
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    out = net(x)
    inner = net[:3](x)
    weight = net[4].weight
    torch.testing.assert_close(out.covariance_matrix, weight @ inner.covariance_matrix @ weight.T)
    torch.testing.assert_close(out.mean, inner.mean.flatten(1) @ weight.T + net[4].bias)


def test_corrections_of_tracked_variances_are_measured_on_all_rows():
    net = network("tracked", "heaviside").eval()
    x = torch.randn(64, 6, 5, dtype=torch.float64)
    x[:, 0] += 2.0  # another row than the others
    covary.track(net, x)
    rows = network("tracked", "heaviside").eval()
    covary.track(rows, x.flatten(0, 1), samples=6 * 64)
    for name in ("4", "7"):
        of_rows = rows.get_submodule(name).log_correction
        torch.testing.assert_close(
            net.get_submodule(name).log_correction, of_rows, atol=0.1, rtol=0
        )
    exact = covary.with_covariance(net, "full").eval()
    expected = exact(x).variance
    for row in range(6):
        error = (net(x).variance - expected)[:, row].norm() / expected[:, row].norm()
        assert error < 0.03


@pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_projections_and_selections_are_those_of_the_matrix(kind):
    net = network(kind).eval()
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    out = net(x)
    matrix = out.covariance_matrix
    for rows in (torch.randn(2, 18), torch.randn(4, 2, 18), torch.randn(2, 6, 3)):
        flat = rows.double().reshape(*rows.shape[: rows.dim() - (rows.shape[-1] == 3) - 1], 18)
        found = out.project(rows)
        torch.testing.assert_close(found.covariance_matrix, flat @ matrix @ flat.mT)
    for chosen in (slice(1, 3), [3, 0], torch.tensor([True, False, True, False])):
        torch.testing.assert_close(out[chosen].covariance_matrix, matrix[chosen])
    assert out.sample(7).shape == (7, 4, 6, 3)
    assert out.entropy().shape == (4,)


def test_slopes_of_features_hold_in_each_row():
    slopes = covary.activations.leaky_relu(torch.rand(7, dtype=torch.float64))
    layer = covary.nn.Activation(slopes)
    x = torch.randn(4, 6, 7, dtype=torch.float64)
    lift = covary.nn.Lift(0.3)
    rows = layer(lift(x.flatten(0, 1))).mean.view(4, 6, 7)
    torch.testing.assert_close(layer(lift(x)).mean, rows)


def test_layers_with_other_needs_name_the_remedy():
    images = torch.zeros(2, 1, 28, 28)
    with pytest.raises(ValueError, match=r"784 features, got 28.*\(1, 28, 28\).*Flatten before it"):
        covary.mlp([784, 10], noise=0.1)(images)
    rows = covary.nn.Lift(0.1)(torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match=r"\(batch, features\), got \(2, 4, 3\).*Flatten"):
        covary.nn.BatchNorm1d(3)(rows)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        covary.nn.Lift(0.1)(torch.zeros(3))


def test_scores_of_the_covariance_are_of_all_rows_and_those_of_classes_are_refused():
    out = network("full").eval()(torch.randn(3, 3, 5, dtype=torch.float64))
    matrix = out.covariance_matrix
    torch.testing.assert_close(scores.trace(out), matrix.diagonal(dim1=1, dim2=2).sum(-1))
    torch.testing.assert_close(scores.largest_eigenvalue(out), torch.linalg.eigvalsh(matrix)[:, -1])
    torch.testing.assert_close(scores.entropy(out), out.entropy())
    for score in (scores.max_softmax, scores.expected_max, scores.margin, scores.energy):
        with pytest.raises(ValueError, match=r"shape \(3, 3, 3\)\. .*out\.project"):
            score(out)
