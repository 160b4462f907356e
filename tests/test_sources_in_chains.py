"""Converted chains of covary.nn layers, sources in them, and what is loaded and trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import covary
from covary.nn import BatchNorm1d, Dropout, Lift, Linear, Noise, ReLU
from covary.sources import DropConnect, DropoutMask, GaussianNoise, Relative
from tests.test_sources import inputs

pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
N = 6


def normed() -> BatchNorm1d:
    layer = BatchNorm1d(16)
    layer.running_var.fill_(25.0)
    return layer


# Noise stands before, behind and far from the activation that it enters in covary.mlp.
CHAINS = {
    "as in mlp": lambda: [Linear(N, 16), Noise(0.3), ReLU(), Linear(16, 3)],
    "behind an activation": lambda: [Linear(N, 16), ReLU(), Noise(0.3), Linear(16, 3)],
    "before batch norm": lambda: [Linear(N, 16), Noise(0.3), normed(), ReLU(), Linear(16, 3)],
    "before dropout": lambda: [Linear(N, 16), ReLU(), Noise(0.3), Dropout(0.2), Linear(16, 3)],
    "at the input and the output": lambda: [Noise(0.2), Linear(N, 3), Noise(0.3)],
    "one dropout of two": lambda: [
        *(Linear(N, 16), ReLU(), Dropout(0.3, as_noise=True)),
        *(Linear(16, 16), ReLU(), Dropout(0.5), Linear(16, 3)),
    ],
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_converted_chain_has_the_variance_of_the_chain(name):
    torch.manual_seed(0)
    chain = nn.Sequential(Lift(0.1), *CHAINS[name]()).eval()
    net = covary.convert(chain, variances="propagated")
    covary.track(net, inputs(256), progress=False)
    ratio = net(inputs(8)).variance.mean() / chain(inputs(8)).variance.mean()
    assert ratio == pytest.approx(1, abs=0.1)


def test_sources_join_the_noise_of_a_chain():
    chain = nn.Sequential(Lift(0.1), Linear(N, 3), Noise(0.5)).eval()
    net = covary.convert(chain, sources={"1": GaussianNoise(0.5)})
    covary.track(net, inputs(), progress=False)
    more = net(inputs(4)).variance - chain(inputs(4)).variance
    torch.testing.assert_close(more, torch.full_like(more, 0.25))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).eval()


def test_noise_that_is_loaded_after_a_pass_is_there():
    still, noisy = covary.convert(plain(), noise=0.0), covary.convert(plain(), noise=0.2)
    still(inputs(4))
    covary.track(noisy, inputs(), progress=False)
    with pytest.warns(UserWarning, match="takes noise=0.2"):
        still.load_state_dict(noisy.state_dict())
    torch.testing.assert_close(still(inputs(4)).variance, noisy(inputs(4)).variance)


def test_weights_without_measurements_leave_none_behind():
    fresh, net = covary.convert(plain(), noise=0.2).state_dict(), covary.convert(plain(), noise=0.2)
    covary.track(net, inputs(), progress=False)
    net.load_state_dict(fresh)
    assert not net.sites.is_tracked


def test_a_module_that_is_called_as_the_input_is():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.input = nn.Linear(N, 3)

        def forward(self, x):
            return self.input(x)

    net = covary.convert(Named().eval(), noise=0, sources={"input": GaussianNoise(0.1)})
    covary.track(net, inputs(), progress=False)
    assert list(net(inputs(4)).budget()) == ["input"]


@pytest.mark.parametrize(
    "how",
    [{"dropout": True}, {"sources": {"0": Relative(0.3)}}, {"sources": {"3": DropConnect(0.3)}}],
    ids=["dropout", "relative", "dropconnect"],
)
def test_supervised_covariances_have_gradients_through_sources(how):
    torch.manual_seed(0)
    layers = nn.Linear(N, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    model = nn.Sequential(*layers).double().eval()
    net = covary.convert(model, noise=0.1, variances="averaged", **how)
    x = inputs(4).double()
    covary.track(net, inputs(64).double(), progress=False)
    weight, step = model[0].weight, torch.randn(8, N).double()

    def total() -> torch.Tensor:
        with covary.supervise_covariance():
            return net(x).covariance_matrix.sum()

    total().backward()
    assert weight.grad is not None
    found = (weight.grad * step).sum().item()
    with torch.no_grad():
        weight += 1e-5 * step
        above = total().item()
        weight -= 2e-5 * step
        below = total().item()
    # But for what varies with the variance of the values there, which is measured.
    most = 0.02 * (weight.grad.norm() * step.norm()).item()
    assert found == pytest.approx((above - below) / 2e-5, abs=most)


def test_dropout_that_is_a_source_is_one_in_training_too():
    net = covary.convert(plain(), noise=0, dropout=True)
    covary.track(net, inputs(), progress=False)
    net.train()
    first, again = net(inputs(4)), net(inputs(4))
    torch.testing.assert_close(first.mean, again.mean)  # no mask is drawn
    assert bool((first.variance > 0).all())


def test_layers_behind_a_converted_network_invent_no_source():
    net = covary.convert(nn.Sequential(nn.Linear(N, 4)).eval(), noise={"input": 0.3})
    covary.track(net, inputs(), progress=False)
    out = nn.Sequential(net, ReLU())(inputs(4))
    budget = out.budget()
    assert list(budget) == ["input"]
    torch.testing.assert_close(budget.total, out.variance)


def test_spatial_dropout_of_other_ranks_is_refused():
    net = covary.convert(nn.Sequential(nn.Dropout1d(0.5)).eval(), noise=0.1, dropout=True)
    with pytest.raises(covary.ConversionError, match="takes 3 dimensions"):
        net(inputs(4))


def test_dropout_as_noise_is_saved():
    net = covary.mlp([N, 8, 2], noise=0.0, dropout=0.5).eval()
    other = covary.mlp([N, 8, 2], noise=0.0, dropout=0.5).eval()
    with pytest.warns(UserWarning, match="as_noise=True"):
        other.load_state_dict(covary.with_dropout(net).state_dict())
    expected = covary.with_dropout(net)(inputs(4)).variance
    torch.testing.assert_close(other(inputs(4)).variance, expected)


def test_weights_given_by_name_and_tied_ones():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(N, N)
            self.b = nn.Linear(N, N)
            self.b.weight = self.a.weight

        def forward(self, x):
            return nn.functional.linear(x, weight=self.b.weight, bias=self.b.bias)

    model = Tied().eval()
    net = covary.convert(model, noise=0, sources={"b": DropConnect(0.2)})
    (label,) = net(inputs(4)).budget()
    assert label == "dropout at a"
    with pytest.raises(ValueError, match="twice"):
        covary.convert(model, noise=0, sources={"b": [DropConnect(0.2), DropConnect(0.2)]})


def test_parts_of_elements_add_up_where_slopes_vanish():
    class Squares(nn.Module):
        def forward(self, x):
            return x.square().sum(1, keepdim=True)

    net = covary.convert(Squares().eval(), noise=0)
    x = covary.Moments.of(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), std=torch.tensor([0.1, 0.3]))
    covary.track(net, x[torch.arange(256) % 2], progress=False)
    out = net(x)
    found = out.budget("input")[:, 0]
    torch.testing.assert_close(found.sum(-1), out.variance[:, 0])
    torch.testing.assert_close(found[0], torch.tensor([0.0002, 0.0162]), rtol=0.35, atol=1e-4)
    assert found[1, 1] == pytest.approx(0.016, rel=0.35)


def test_a_mask_in_common_has_a_part_of_each_element():
    mask = {"input": DropoutMask(0.2, (1,))}
    net = covary.convert(nn.Sequential(nn.Linear(N, 3)).eval(), noise=0, sources=mask)
    covary.track(net, inputs(), progress=False)
    out = net(inputs(4))
    torch.testing.assert_close(out.budget("input").sum(-1), out.variance)


def test_embeddings_are_inputs_in_a_budget():
    net = covary.convert(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).eval(), noise=0.1)
    out = net(torch.randint(0, 10, (3, 5)))
    assert list(out.budget().by_kind()) == ["input"]
    assert list(out.budget()) == ["input at 0"]


def test_shares_of_a_covariance_are_those_of_its_trace():
    net = covary.convert(plain(), noise=0.1, dropout=True)
    covary.track(net, inputs(), progress=False)
    shares = net(inputs(4)).covariance_budget().average_shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_are_not_those_of_the_seed_that_made_the_inputs(seed):
    torch.manual_seed(seed)
    images = torch.randn(64, 2, 10, 10)
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), *pooled).eval()
    net = covary.convert(model, noise={"": 0.0, "input": 0.1})
    assert covary.track(net, images, progress=False).ratio == pytest.approx(1, abs=0.25)


def test_inputs_by_name_are_called_the_same_in_any_order():
    class Sum(nn.Module):
        def forward(self, p, q):
            return p + 2 * q

    net = covary.convert(Sum().eval(), noise=0)
    p, q = (covary.Moments.of(torch.zeros(4, 2), std=std) for std in (0.1, 0.2))
    covary.track(net, [(p, q)], progress=False)
    first, other = net(p=p, q=q).budget(), net(q=q, p=p).budget()
    torch.testing.assert_close(first["input"], torch.full((4, 2), 0.01))
    torch.testing.assert_close(other["input"], first["input"])
