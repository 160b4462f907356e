"""Layers say themselves what they are: the ones here are known nowhere else."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import covary
from covary import activations
from covary.models import has_slope, noise_of, plain
from covary.nn import BatchNorm1d, Drawn, Lift, Linear, MomentLayer, Noise, Noisy, ReLU, Rescale
from covary.stochastic import Chain, sample_steady
from covary.training import RegressionLoss
from covary.uncertainty.fitted import moment_features, plain_features

NAMED = "Heaviside ReLU LeakyReLU GELU Probit Tanh Sigmoid SiLU Softplus"


class Halve(nn.Module):
    """v -> v / 2."""

    def forward(self, moments):
        half = moments.mean.new_full((1, moments.mean.shape[-1]), 0.5)
        return covary.Moments(moments.mean / 2, moments.cov.scale(half))

    def plain(self):
        return Times(0.5)

    def drawn(self):
        return Drawn(scale=torch.tensor(0.5))


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


class NoisyDense(Noisy):
    """v -> relu(W v + b + noise z), in one layer."""

    def __init__(self, width, units, noise):
        super().__init__()
        self.noise = noise
        self.linear = nn.Linear(width, units)
        self.activation = activations.get("relu")

    def forward(self, moments):
        w, b = self.linear.weight, self.linear.bias
        cov = moments.cov.linear(w).add_noise(self.noise**2)
        after = covary.Moments(moments.mean @ w.mT + b, cov)
        return covary.nn.Activation(self.activation)(after)

    def plain(self):
        return nn.Sequential(self.linear, nn.ReLU())

    def drawn(self):
        return Drawn(
            weight=self.linear.weight,
            shift=self.linear.bias,
            noise=self.noise,
            activation=self.activation,
        )


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(Lift(0.3), NoisyDense(3, 8, 0.4), Linear(8, 2), Halve()).eval()


@pytest.mark.parametrize(
    "layer",
    [Lift(0.1), Noise(0.1), Linear(2, 3), BatchNorm1d(3), ReLU(), Rescale.of(torch.randn(9, 3))],
)
def test_layers_have_the_methods(layer):
    assert isinstance(layer, MomentLayer)


def test_own_layers_are_simulated(net):
    """Sampled moments are those of the layers' own forward passes."""
    x = torch.randn(2, 3)
    first, last = Chain.of(net).stages
    assert (first.name, first.noise, first.activation.name) == ("1", 0.4, "relu")
    torch.testing.assert_close(last.weight, net[2].weight.detach() / 2)
    found = sample_steady(net, x, copies=16 * 4000)["3"]
    with torch.no_grad():
        out = net(x)
    close = {"rtol": 0.05, "atol": 0.01, "check_dtype": False}
    torch.testing.assert_close(found.mean, out.mean, **close)
    torch.testing.assert_close(found.covariance_matrix, out.covariance_matrix, **close)


def test_own_layers_have_a_conventional_version(net):
    x = torch.randn(5, 3)
    conventional = plain(net)
    expected = net[2].plain()(net[1].linear(x).relu()) / 2
    torch.testing.assert_close(conventional(x), expected)
    assert [type(layer).__name__ for layer in conventional] == ["Sequential", "Linear", "Times"]


def test_own_layers_are_watched(net):
    """Three features of the entrance, three of the hidden layer (four if plain), the output's."""
    x = torch.randn(5, 3)
    features, out = moment_features(net, x)
    assert features.shape == (5, 3 + 3 + 4)
    after = net[1](net[0](x))
    torch.testing.assert_close(features[:, 4], after.mean.double().norm(dim=-1).log())
    torch.testing.assert_close(out.mean, net(x).mean)
    features, _ = plain_features(plain(net), x)
    assert features.shape == (5, 3 + 4 + 2)
    hidden = net[1].linear(x).relu().double()
    torch.testing.assert_close(features[:, 3], hidden.norm(dim=-1).log())


def test_own_noise_is_noise(net):
    assert noise_of(covary.with_noise(net, [0.0, 0.7])) == [0.0, 0.7]
    assert net.state_dict()["1.noise"] == 0.4


def test_own_activations_count_for_the_slope():
    class Step(NoisyDense):
        def drawn(self):
            return Drawn(activation=activations.get("heaviside"))

    assert has_slope(nn.Sequential(Lift(0.1), NoisyDense(2, 3, 0.1)))
    assert not has_slope(nn.Sequential(Lift(0.1), Step(2, 3, 0.1)))


def test_layers_without_the_methods_are_refused_behind_lift():
    class Unknown(nn.Module):
        pass

    with pytest.raises(ValueError, match=r"for 2 \(Unknown\(\)\) behind covary\.nn\.Lift"):
        Chain.of(nn.Sequential(Lift(0.1), Linear(2, 3), Unknown()))


@pytest.mark.parametrize(
    ("layers", "where"),
    [
        ([ReLU(), Noise(0.1)], "behind an activation"),
        ([ReLU(), ReLU()], "behind an activation"),
        ([Noise(0.1), BatchNorm1d(3)], "behind noise"),
    ],
)
def test_layers_in_an_order_that_has_no_stage(layers, where):
    with pytest.raises(ValueError, match=where):
        Chain.of(nn.Sequential(Lift(0.1), Linear(2, 3), *layers))
    with pytest.raises(ValueError, match="before the first weights"):
        Chain.of(nn.Sequential(Lift(0.1), *layers))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_and_scale_are_folded_into_weights(bias, affine):
    torch.manual_seed(0)
    norm, rescale = BatchNorm1d(4, affine=affine), Rescale(torch.randn(4), torch.rand(4) + 0.5)
    net = nn.Sequential(Lift(0.3), Linear(3, 4, bias=bias), norm, rescale)
    for _ in range(3):
        net(torch.randn(9, 3))
    (stage,) = Chain.of(net).stages
    x, out = torch.randn(5, 3), net.eval()
    torch.testing.assert_close(x @ stage.weight.mT + stage.bias, out(x).mean.detach())
    covariance = 0.09 * stage.weight @ stage.weight.mT
    found = out(x).covariance_matrix.detach()
    torch.testing.assert_close(found, covariance.expand_as(found))


def nested():
    """Trunk, body with the output's scale inside: none of it at the top."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    rescale = Rescale(torch.tensor([1e6, -2.0]), torch.tensor([1e3, 0.5]))
    body = nn.Sequential(Lift(0.2), Linear(5, 4), Noise(0.1), ReLU())
    head = nn.Sequential(OrderedDict(linear=Linear(4, 2), rescale=rescale))
    return nn.Sequential(trunk, nn.Sequential(body, head))


def test_nested_networks_have_a_conventional_version():
    net, x = nested(), torch.randn(7, 3)
    conventional = plain(net, dropout=0.1)
    kinds = [type(layer).__name__ for layer in conventional]
    assert kinds == ["Sequential", "Linear", "Function", "Dropout", "Linear", "Rescale"]
    assert conventional[0] is net[0]  # conventional already
    silent = covary.with_noise(net, 0.0).eval()
    torch.testing.assert_close(conventional(x), silent(x).mean)
    assert list(plain(covary.mlp([3, 4, 2], batch_norm=True)).state_dict()) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
        "3.weight",
        "3.bias",
    ]


def test_conventional_layers_share_parameters_and_buffers():
    net = covary.mlp([3, 4, 2], batch_norm=True)
    conventional = plain(net).train()
    assert conventional[0].weight is net.linear1.weight
    conventional(torch.randn(6, 3)).sum().backward()
    assert net.linear1.weight.grad is not None
    assert torch.equal(conventional[1].running_mean, net.batch_norm1.running_mean)
    assert net.batch_norm1.num_batches_tracked == 1


def test_the_loss_of_a_nested_regression_is_on_the_standard_scale():
    net = nested()
    flat = nn.Sequential(net[0], *net[1][0], *net[1][1])
    x, y = torch.randn(7, 3), torch.tensor([1e6, -2.0]) + torch.randn(7, 2)
    for ours, theirs in zip(RegressionLoss(net)(x, y), RegressionLoss(flat)(x, y), strict=True):
        assert torch.equal(ours, theirs)
    before = nn.Sequential(*list(flat)[:-1])(x).mean
    gap = before - (y - torch.tensor([1e6, -2.0])) / torch.tensor([1e3, 0.5])
    torch.testing.assert_close(RegressionLoss(net)(x, y)[0], gap.square().mean())


@pytest.mark.parametrize("name", NAMED.split())
def test_named_activations_are_classes(name):
    kind = getattr(covary.nn, name)
    layer = kind()
    assert isinstance(layer, covary.nn.Activation)
    assert type(layer) is kind
    assert repr(layer).startswith(f"{name}(")
    assert not layer.state_dict()
    before = Linear(4, 3)(Lift(0.5)(torch.randn(2, 4)))
    same = covary.nn.Activation(layer.activation)(before)
    assert torch.equal(layer(before).covariance_matrix, same.covariance_matrix)


class Block(nn.Module):
    """A module of one's own with layers of moments inside, some of them nested."""

    def __init__(self):
        super().__init__()
        self.noise = Noise(0.2)
        self.hidden = nn.Sequential(Linear(8, 6), nn.Sequential(Noise(0.1), ReLU()))
        self.branches = nn.ModuleList([Linear(6, 6), covary.nn.Dropout(0.5)])
        self.missing = None
        self.out = covary.nn.Tanh()

    def forward(self, x):
        x = self.hidden(self.noise(x))
        for branch in self.branches:
            x = branch(x)
        return self.out(x)


def deep():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    inner = nn.Sequential(Lift(0.3), nn.Sequential(Linear(3, 8), nn.Sequential(ReLU())))
    return nn.Sequential(trunk, nn.Sequential(inner), Block(), Linear(6, 2)).eval()


def by_hand(net, x):
    """The conventional network of ``deep``, layer after layer."""
    _, (inner,), block, last = net
    x = inner[1][0].plain()(net[0](x)).relu()
    x = block.branches[0].plain()(block.hidden[0].plain()(x).relu()).tanh()
    return last.plain()(x)


def test_layers_are_conventional_however_deep_they_are():
    net, x = deep(), torch.randn(5, 4)
    conventional = plain(net)
    torch.testing.assert_close(conventional(x), by_hand(net, x))
    quiet = covary.with_noise(net, 0.0)(x)
    torch.testing.assert_close(conventional(x), quiet.mean)
    assert not any(isinstance(layer, MomentLayer) for layer in conventional.modules())
    assert conventional[0] is net[0]  # a trunk stays as it is
    assert isinstance(net[2].hidden[0], Linear)  # and so does the network itself
    assert isinstance(net(x), covary.Moments)


def test_deep_layers_share_their_weights():
    net, x = deep(), torch.randn(5, 4)
    conventional = plain(net)
    assert {id(each) for each in net.parameters()} == {id(e) for e in conventional.parameters()}
    conventional(x).sum().backward()
    assert net[2].hidden[0].weight.grad is not None
    with torch.no_grad():
        net[2].branches[0].weight.mul_(2)
    torch.testing.assert_close(conventional(x), by_hand(net, x))


def test_dropout_and_another_activation_reach_deep_layers():
    net, x = deep(), torch.randn(5, 4)
    dropping = plain(net, dropout=0.3)
    assert [layer.p for layer in dropping.modules() if isinstance(layer, nn.Dropout)] == [0.3] * 3
    torch.testing.assert_close(dropping(x), plain(net)(x))
    assert not torch.equal(dropping.train()(x), plain(net)(x))
    found = plain(net, activation="sigmoid")
    names = [repr(layer) for layer in found.modules() if type(layer).__name__ == "Function"]
    assert names == ["Function(sigmoid)"] * 3


def test_a_module_of_ones_own_has_a_conventional_version():
    block, x = deep()[2], torch.randn(5, 8)
    conventional = plain(block)
    assert type(conventional) is Block
    expected = block.branches[0].plain()(block.hidden[0].plain()(x).relu()).tanh()
    torch.testing.assert_close(conventional(x), expected)
    assert isinstance(plain(Linear(3, 2)), nn.Linear)
    assert isinstance(plain(Noise(0.1)), nn.Identity)
    layer = nn.Linear(2, 2)
    assert plain(nn.Sequential(layer, nn.ReLU(), layer))[2] is layer
    with pytest.raises(ValueError, match=r"plain needs a network before torch.compile"):
        plain(torch.compile(deep()))
