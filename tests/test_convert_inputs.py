"""What converted networks are called, tracked and verified with, and where noise enters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covary
from covary import ConversionError


def linear(seed=0, n=4, m=3):
    torch.manual_seed(seed)
    return nn.Linear(n, m)


class TimeFirst(nn.Module):
    """(T, B, 4) to (T, B, 3), or to other layouts."""

    def __init__(self, layout=lambda y: y):
        super().__init__()
        self.linear, self.layout = linear(), layout

    def forward(self, x):
        return self.layout(F.relu(self.linear(x)))


def test_verify_moves_draws_as_moments_are():
    net = covary.convert(TimeFirst().eval(), noise=0.3, batch_dim=1)
    covary.track(net, torch.randn(5, 64, 4))
    x = torch.randn(5, 2, 4)
    assert net(x).mean.shape == (2, 5, 3)
    found = covary.verify(net, x, draws=4000)
    assert found.mean.value < 0.05
    assert found.covariance.value < 0.1


LAYOUTS = {
    "as it is": lambda y: y,
    "permuted": lambda y: y.permute(2, 0, 1),
    "batch last": lambda y: y.permute(0, 2, 1) * 1.0,
    "squeezed": lambda y: F.relu(y[:1].squeeze() - 0.1),
    "mean over time": lambda y: y.mean(0),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("is_tracked", [True, False])
@pytest.mark.filterwarnings("ignore:This network was never tracked")
def test_a_batch_of_one_is_as_one_of_many(layout, is_tracked):
    net = covary.convert(TimeFirst(layout).eval(), noise=0.3, batch_dim=1)
    if is_tracked:
        covary.track(net, torch.randn(5, 64, 4))
    x = torch.randn(5, 3, 4)
    one, many = net(x[:, :1]), net(x)
    assert one.mean.shape == (1, *many.mean.shape[1:])
    if is_tracked:
        torch.testing.assert_close(one.mean, many.mean[:1])
        torch.testing.assert_close(one.covariance_matrix, many.covariance_matrix[:1])


@pytest.mark.filterwarnings("ignore:This network was never tracked")
def test_samples_stacked_on_each_other_are_refused_alike():
    net = covary.convert(TimeFirst(lambda y: torch.cat([y, y])).eval(), noise=0.3)
    for n in (1, 2):
        with pytest.raises(ValueError, match="samples of the batch are mixed"):
            net(torch.randn(n, 4))


def test_errors_tell_the_shape_that_was_given():
    net = covary.convert(TimeFirst().eval(), noise=0.3)
    covary.track(net, torch.randn(8, 4))
    with pytest.raises(RuntimeError, match="1x5 and 4x3"):
        net(torch.randn(1, 5))


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear(m=1)

    def forward(self, x):
        return self.linear(x).tanh().squeeze(-1)


def test_one_number_per_sample_stays_one():
    net = covary.convert(Score().eval(), noise=0.3)
    covary.track(net, torch.randn(64, 4))
    x = torch.randn(5, 4)
    out = net(x)
    assert out.mean.shape == out.variance.shape == out.stddev.shape == (5,)
    assert out.event_shape == ()
    assert out.covariance_matrix.shape == (5, 1, 1)
    assert out.entropy().shape == (5,)
    assert out.sample(7).shape == (7, 5)
    assert out.distribution().mean.shape == (5, 1)
    projected = out.project(torch.full((1, 1), 2.0))
    torch.testing.assert_close(projected.variance[:, 0], 4 * out.variance)
    torch.testing.assert_close(net(x[:1]).variance, out.variance[:1])
    assert net(x)[2].mean.shape == (1,)
    assert covary.verify(net, x, draws=4000).variance.value < 0.1


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, mask=None, *, scale=1.0):
        y = F.relu(self.linear(x)) * scale
        return y if mask is None else y * mask


def test_optional_inputs_reach_the_model():
    net = covary.convert(Masked().eval(), noise=0.3)
    x, mask = torch.randn(32, 4), torch.full((32, 1), 5.0)
    seen = []
    net.model.register_forward_pre_hook(
        lambda module, args, named: seen.append((len(args), sorted(named))), with_kwargs=True
    )
    covary.track(net, [(x, torch.zeros(32))])  # the second are labels
    assert {each[0] for each in seen} == {1}
    seen.clear()
    for batches in ([{"x": x, "mask": mask}], {"x": x, "mask": mask}):
        assert covary.track(net, batches).samples == 32
        assert {tuple(each[1]) for each in seen} == {("mask", "x")}
    seen.clear()
    found = covary.verify(net, (x[:2], mask[:2]), draws=1600)
    assert {each[0] for each in seen} == {2}
    assert found.mean.value < 0.1
    named = covary.verify(net, {"x": x[:2], "mask": mask[:2], "scale": 2.0}, draws=1600)
    assert named.mean.value < 0.1


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, a, b):
        return F.relu(self.linear(a + b))


def test_a_tuple_is_one_batch():
    net = covary.convert(Sum().eval(), noise=0.3)
    a, b = torch.randn(40, 4), torch.randn(40, 4)
    assert covary.track(net, (a, b)).samples == 40
    assert covary.track(net, (a, b, torch.zeros(40))).samples == 40
    one = covary.convert(TimeFirst().eval(), noise=0.3)
    assert covary.track(one, (a, torch.zeros(40))).samples == 40
    assert covary.track(one, [a, b]).samples == 80


def small(*more):
    return nn.Sequential(linear(), *more).eval()


def test_noise_that_enters_nowhere_is_refused():
    x = torch.randn(32, 4)
    for noise, model in [
        ({"0": 0.5}, small(nn.ReLU())),
        ({"input": 0.1, "0": 0.5}, small(nn.ReLU())),
        ({nn.Linear: 0.5}, small(nn.ReLU())),
        ({"1": 0.1, nn.ReLU: 0.5}, small(nn.ReLU())),
    ]:
        net = covary.convert(model, noise=noise)
        for run in (net, lambda x, net=net: covary.track(net, x)):
            with pytest.raises(ValueError, match="no noise enters there"):
                run(x)
    covary.track(covary.convert(small(nn.ReLU()), noise={"0": 0.0, "1": 0.1}), x)


def test_which_noise_counts():
    """The longest path, then the type, then the whole model."""
    model = nn.Sequential()
    model.block = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sequential(nn.ReLU()))
    model.input = nn.ReLU()
    model.again = model.block
    model.eval()
    plan = covary.convert(model, noise={"": 0.1, "block": 0.2, "block.2": 0.3, nn.ReLU: 0.9}).noise
    found = {path: plan.at(path).sigma for path in ("block.0", "block.2.0", "input", "other")}
    assert found == {"block.0": 0.2, "block.2.0": 0.3, "input": 0.9, "other": 0.1}
    assert plan.at_input.sigma == 0.1
    again = covary.convert(model, noise={"again": 0.2, "input": 0.4}).noise
    assert again.at("block.1").sigma == 0.2
    assert again.at_input.sigma == 0.4
    assert again.at("input").sigma == 0.0
    with pytest.raises(ValueError, match="twice"):
        covary.convert(model, noise={"again": 0.2, "block": 0.4})


@pytest.mark.filterwarnings("error")
def test_networks_without_nonlinearities_need_no_tracking():
    net, x = covary.convert(small(), noise=0.1), torch.randn(32, 4)
    expected = net(x).covariance_matrix
    covary.track(net, x)
    torch.testing.assert_close(net(x).covariance_matrix, expected)
    other = covary.convert(small(), noise=0.1)
    other.load_state_dict(net.state_dict())
    assert other.sites.is_tracked


def test_tracking_without_noise():
    found = covary.track(covary.convert(small(nn.ReLU()), noise=0), torch.randn(32, 4))
    assert found.samples == 32
    assert not found.shares


def test_a_failed_load_leaves_measurements():
    model = small(nn.ReLU())
    net = covary.convert(model, noise=0.1)
    covary.track(net, torch.randn(32, 4))
    known = net.sites.known()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict(model.state_dict())
    assert net.sites.known().keys() == known.keys()


def test_parametrised_modules():
    model = small(nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    model.eval()
    net, x = covary.convert(model, noise=0.1), torch.randn(32, 4)
    covary.track(net, x)
    with torch.no_grad():
        model[2].parametrizations.weight.original0.mul_(2)
    plain = covary.convert(model, noise=0.0)(x).mean
    torch.testing.assert_close(plain, model(x))


def test_what_becomes_of_the_inputs_later_is_of_no_matter():
    model = nn.Sequential(nn.LayerNorm(4), linear()).eval()
    net, x = covary.convert(model, noise=0.1), torch.randn(32, 4)
    expected = net(x).covariance_matrix
    out = net(x)
    x.mul_(3)
    torch.testing.assert_close(out.covariance_matrix, expected)


RANDOM = {
    "randn": lambda x: x + torch.randn(3),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
}


@pytest.mark.parametrize("function", RANDOM.values(), ids=RANDOM)
def test_models_that_draw_random_numbers(function):
    net = covary.convert(TimeFirst(function).eval(), noise=0.1)
    for run in (net, lambda x: covary.track(net, x)):
        with pytest.raises(ConversionError):
            run(torch.randn(32, 4))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        self.seen = self.seen + len(x)
        return F.relu(self.linear(x))


def test_passes_that_measure_leave_buffers_alone():
    model = Counting().eval()
    net = covary.convert(model, noise=0.1)
    covary.track(net, torch.randn(32, 4))
    covary.verify(net, torch.randn(2, 4), draws=32)
    assert model.count == 0
    net(torch.randn(2, 4))
    assert model.count == 1
    assert model.seen == net.model.seen


def test_numbers_among_inputs_are_constants():
    class Scaled(nn.Module):
        def forward(self, x, scale):
            return x * scale

    net = covary.convert(Scaled().eval(), noise=0.1)
    out = net(torch.randn(3, 4), torch.tensor(2.0))
    torch.testing.assert_close(out.variance, torch.full((3, 4), 0.04))


def test_several_inputs_have_several_names():
    net = covary.convert(Sum().eval(), noise=0.3)
    covary.track(net, (torch.randn(40, 4), torch.randn(40, 4)))
    assert "input#2" in str(net)
    words = covary.convert(nn.Sequential(nn.Embedding(5, 4), nn.ReLU()).eval(), noise=0.1)
    assert "0:embedding" in covary.track(words, torch.randint(0, 5, (8, 3))).shares
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    net = covary.convert(attention, noise=0.1)
    covary.track(net, torch.randn(16, 3, 4))
    rows = str(net).splitlines()
    assert len(rows) == len(set(rows))


MIXED = {
    "times": lambda y: y * torch.ones(3, dtype=torch.float64),
    "sum": lambda y: y.sum(-1, keepdim=True, dtype=torch.float64) + y,
    "plus": lambda y: torch.tanh(y + torch.zeros(3, dtype=torch.float64)),
}


@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED)
def test_models_may_mix_single_and_double_precision(function):
    net = covary.convert(TimeFirst(function).eval(), noise=0.1)
    double = covary.convert(TimeFirst(function).double().eval(), noise=0.1)
    x = torch.randn(64, 4)
    covary.track(net, x)
    covary.track(double, x.double())
    net.sites.replace({name: v.float() for name, v in double.sites.known().items()})
    found, expected = net(x).covariance_matrix, double(x.double()).covariance_matrix
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
