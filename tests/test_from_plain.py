"""``covary.from_plain``: a conventional network's weights in a moment neural network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import covary
from covary.models import noise_of, plain

ACTIVATIONS = [
    nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Mish(), nn.GELU(), nn.GELU("tanh"),
    nn.ELU(0.7), nn.CELU(0.8), nn.SELU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Softplus(2.0),
    nn.Hardtanh(-0.5, 0.7), nn.Hardshrink(0.3), nn.Softshrink(0.3), nn.Softsign(), nn.Tanhshrink(),
    nn.Hardsigmoid(), nn.Hardswish(), nn.LogSigmoid(),
]  # fmt: skip


def usual() -> nn.Sequential:
    """As people write them: nested, with batch norm, dropout, and layers that do nothing."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
    inner = nn.Sequential(block, nn.Identity(), nn.Linear(8, 6, bias=False), nn.Tanh())
    net = nn.Sequential(nn.Flatten(), inner, nn.Linear(6, 3))
    net(torch.rand(40, 3, 4))  # so that batch norm has statistics
    return net.eval()


def test_without_noise_means_are_those_of_the_plain_network():
    net, x = usual(), torch.rand(5, 3, 4)
    out = covary.from_plain(net, noise=0.0)(x)
    torch.testing.assert_close(out.mean, net(x))
    assert (out.variance == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_are_those_of_torch(activation):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 50), activation, nn.Linear(50, 2)).double()
    x = 3 * torch.randn(20, 4, dtype=torch.float64)
    torch.testing.assert_close(covary.from_plain(net, noise=0.0)(x).mean, net(x))


def test_parameters_are_shared_and_fit_a_network_of_mlp():
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    net = nn.Sequential(*layers)
    assert covary.from_plain(net, noise=0.3).training
    net.eval()
    made = covary.from_plain(net, noise=0.3, covariance="full")
    assert made.linear1.weight is net[0].weight
    assert made.batch_norm1.running_mean is net[1].running_mean
    assert noise_of(made) == [0.3, 0.3]
    same = covary.mlp([4, 8, 3], noise=0.3, batch_norm=True, dropout=0.1, covariance="full")
    assert list(same.state_dict()) == list(made.state_dict())
    assert repr(same) == repr(made)
    same.load_state_dict(made.state_dict())
    same.eval()
    x = torch.rand(6, 4)
    torch.testing.assert_close(same(x).mean, made(x).mean)


def test_it_is_the_inverse_of_plain():
    torch.manual_seed(0)
    net = covary.mlp([4, 8, 6, 3], activation="probit", noise=[0.1, 0.2, 0.3]).eval()
    front = covary.nn.Standardize.of(torch.rand(9, 4))
    whole = nn.Sequential(front, *net, covary.nn.Rescale.of(torch.rand(9, 3))).eval()
    again = covary.from_plain(plain(whole), noise=[0.1, 0.2, 0.3])
    x = torch.rand(5, 4)
    torch.testing.assert_close(again(x).mean, whole(x).mean)
    torch.testing.assert_close(again(x).covariance_matrix, whole(x).covariance_matrix)


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))


def hooked() -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2)), r"Conv2d \('0'\) has no layer"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), Residual())), r"Residual \('0.1'\) has no"),
        (nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), r"Softmax \('1'\) has no layer"),
        (nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)), r"Flatten \('1'\) has no layer"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), r"BatchNorm1d \('0'\) has"),
        (weight_norm(), r"ParametrizedLinear \('0'\) has no layer"),
        (hooked(), r"Linear \('1.0'\) has hooks"),
        (Residual(), "Residual has no layer of moments here"),
    ],
)
def test_what_cannot_be_taken_is_named_with_the_remedy(net, told):
    with pytest.raises(ValueError, match=rf"{told}[^\n]*covary\.convert\(net, noise=\.\.\.\)"):
        covary.from_plain(net, noise=0.1)


def test_noise_is_checked_and_a_network_needs_weights():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"one noise for all layers or 2 of them .* got 3"):
        covary.from_plain(net, noise=[0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="finite noise >= 0"):
        covary.from_plain(net, noise=-1.0)
    with pytest.raises(ValueError, match=r"network with an nn\.Linear"):
        covary.from_plain(nn.Sequential(nn.ReLU()), noise=0.1)
