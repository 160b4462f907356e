"""Sources: each one's moments against draws of it, alone; where they enter; what is saved."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import covary
from covary.covariance import Full, LowRank
from covary.covariance.samples import Samples
from covary.covariance.terms import Term
from covary.nn.fidelity import TrackingWarning
from covary.sources import (
    DropoutMask,
    GaussianNoise,
    InputErrors,
    Relative,
    Rounding,
    UncertainWeights,
    WeightTerm,
)
from covary.testing import SourceContract

pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
B, N = 4, 6


def model(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(N, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Dropout(dropout), nn.Linear(16, 3)).eval()


def images() -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.1)]
    second = [nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)]
    return nn.Sequential(*first, *second).eval()


class Attending(nn.Module):
    """A layer of a transformer, whose attention drops weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


def attending() -> nn.Module:
    torch.manual_seed(0)
    return Attending().eval()


def inputs(count: int = 64) -> Tensor:
    return torch.randn(count, N, generator=torch.Generator().manual_seed(1))


def agrees(net: Any, x: Any, within: float, train: Any = None) -> None:
    covary.track(net, inputs() if train is None else train, progress=False)
    found = covary.verify(net, x, draws=6400, progress=False)
    assert found.variance.value < within + 2 * found.variance.bar, str(found)


class TestSource(SourceContract):
    cases: ClassVar = {
        "noise": GaussianNoise(0.3),
        "relative": Relative(0.2),
        "rounding": Rounding(0.5),
        "dropout": DropoutMask(0.3),
        "dropout of all together": DropoutMask(0.3, common=(1,)),
        "errors": InputErrors(Full(None, torch.rand(2, 5).double()), 0),
        "correlated errors": InputErrors(LowRank(torch.rand(1, 5, 2).double()), 0),
    }


SOURCES = {
    "noise": {"0": GaussianNoise(0.3)},
    "relative": {"input": Relative(0.1)},
    "relative behind a module": {"3": Relative(0.3)},
    "rounding": {"input": Rounding(0.5)},
    "several": {"input": [Relative(0.1), Rounding(0.5)], "3": GaussianNoise(0.1)},
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_alone_is_what_its_draws_say(name):
    agrees(covary.convert(model(), noise=0, sources=SOURCES[name]), inputs(B), 0.05)


def test_dropout_is_what_masks_say():
    agrees(covary.convert(model(), noise=0, dropout=True), inputs(B), 0.05)


def test_spatial_dropout_is_what_masks_say():
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    agrees(covary.convert(images(), noise=0, dropout=True), x[:B], 0.1, train=x)


def test_dropout_of_attention_is_what_masks_say():
    x = torch.randn(64, 5, 8, generator=torch.Generator().manual_seed(1))
    net = covary.convert(attending(), noise=0, dropout=True)
    agrees(net, x[:B], 0.1, train=x)
    names = [name for name, kind in net.calls if kind == "dropout enters"]
    assert len(names) == 4, "attention, behind it, inside and behind the feed-forward block"


@pytest.mark.parametrize("what", ["std", "cov", "factor"])
def test_errors_of_inputs_are_what_their_draws_say(what):
    generator = torch.Generator().manual_seed(2)
    root = 0.2 * torch.rand(64, N, 2, generator=generator)
    errors = {"std": root[..., 0], "cov": root @ root.mT, "factor": root}[what]
    x = covary.Moments.of(inputs(), **{what: errors})
    net = covary.convert(model(), noise=0)
    agrees(net, x[:B], 0.05, train=x)
    assert net.sites.propagates, "errors differ from sample to sample"


def test_a_chain_takes_errors_and_dropout_as_its_draws_do():
    torch.manual_seed(0)
    chain = covary.mlp([N, 32, 16, 3], noise=0.05, dropout=0.1).eval()
    x = covary.Moments.of(inputs(), std=0.1)
    net = covary.with_dropout(chain)
    found = covary.verify(net, x[:B], draws=6400, progress=False)
    assert found.variance.value < 0.05, str(found)
    # the same network, converted: by a sweep, with measured variances at nonlinearities
    converted = covary.convert(net)
    covary.track(converted, x, progress=False)
    torch.testing.assert_close(converted(x[:B]).variance, net(x[:B]).variance, rtol=0.1, atol=0)
    kinds = converted(x[:B]).budget().by_kind()
    assert set(kinds) == {"input", "noise", "dropout"}


def test_dropout_as_noise_is_the_formula_in_every_covariance():
    torch.manual_seed(0)
    moments = covary.Moments.of(inputs(B), std=0.3)
    lift = covary.nn.Lift(0.0)
    for kind in ("full", "diagonal", "tracked:100"):
        lift.covariance = kind
        before = lift.eval()(moments)
        after = covary.nn.Dropout(0.25, as_noise=True).eval()(before)
        expected = before.variance + (before.mean**2 + before.variance) / 3
        torch.testing.assert_close(after.variance, expected)
        assert torch.equal(after.mean, before.mean)


def test_without_dropout_it_does_nothing_in_evaluation_and_masks_in_training():
    net = covary.convert(model(), noise=0.1)
    same = covary.convert(model(0.0), noise=0.1)
    for each in (net, same):
        covary.track(each, inputs(), progress=False)
    torch.testing.assert_close(net(inputs(B)).variance, same(inputs(B)).variance)
    chosen = covary.convert(model(), noise=0, dropout=["2"])
    covary.track(chosen, inputs(), progress=False)
    assert list(chosen(inputs(B)).budget()) == ["dropout at 2"]


def test_a_mask_in_common_is_correlated():
    source = DropoutMask(0.5, common=(1,))
    value = torch.ones(2000, 3)
    drawn = source.draw(value, torch.Generator().manual_seed(0))
    assert torch.equal(drawn[:, 0], drawn[:, 2])
    assert set(drawn.unique().tolist()) == {0.0, 2.0}


def test_inputs_of_several_kinds_and_without_errors():
    """Of two inputs one has errors; the other is a plain tensor; both lie in batch dimension 1."""

    class Two(nn.Module):
        def forward(self, x, y):
            return (torch.tanh(x) * y).sum(-1).transpose(0, 1)

    net = covary.convert(Two().eval(), noise=0, batch_dim=1)
    x, y = torch.randn(5, 64, 3), torch.randn(5, 64, 3)
    # Moments have their batch in front; the model's inputs lie as batch_dim says.
    errors = covary.Moments.of(x.transpose(0, 1), std=torch.tensor([0.1, 0.2, 0.0]))
    covary.track(net, (errors, y), progress=False)
    out = net(errors, y)
    torch.testing.assert_close(out.budget().total, out.variance)
    parts = out.budget("input")
    assert parts.shape == (64, 5, 5, 3)
    assert bool((parts[..., 2] == 0).all())
    torch.testing.assert_close(parts.sum((-2, -1)), out.variance)


def test_sources_are_part_of_the_state():
    made = {"input": Relative(0.1)}
    net = covary.convert(model(), noise=0, sources=made, dropout=True)
    covary.track(net, inputs(), progress=False)
    state = net.state_dict()
    same = covary.convert(model(), noise=0, sources=made, dropout=True)
    same.load_state_dict(state)
    torch.testing.assert_close(same(inputs(B)).variance, net(inputs(B)).variance)
    other = covary.convert(model(), noise=0, sources={"input": Relative(0.2)}, dropout=True)
    with pytest.raises(ValueError, match=r"other sources or dropout.*Relative"):
        other.load_state_dict(state)


def test_errors_that_a_network_was_not_tracked_with_are_measured_anew():
    net = covary.convert(model(), noise=0.01)
    covary.track(net, inputs(), progress=False)
    x = covary.Moments.of(inputs(), std=0.5)
    with pytest.warns(TrackingWarning, match="tracked on inputs without errors"):
        before = net(x)
    covary.track(net, x, progress=False)
    torch.testing.assert_close(net(x).variance, before.variance, rtol=0.35, atol=0)


def test_moments_go_back_in():
    torch.manual_seed(0)
    step = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).eval()
    net = covary.convert(step, noise=0)
    x = covary.Moments.of(torch.randn(32, 2), std=0.1)
    covary.track(net, x, progress=False)
    twice = net(net(x))
    assert twice.mean.shape == (32, 2)
    assert bool((twice.variance > 0).all())


@pytest.mark.parametrize("name", TestSource.cases)
def test_parts_of_elements_are_those_of_the_slope(name):
    """What terms write out is what any term has: the row times half the slope of its variance."""
    mean = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    var, rows = torch.full((1, 1), 0.2).double(), torch.randn(3, 2, 5).double()
    term = TestSource.cases[name].term(name, Samples.along(mean), "noise", mean, var)
    torch.testing.assert_close(Term.by_element(term, rows), term.by_element(rows))


def test_parts_of_elements_of_weights_add_up():
    inputs, rows = torch.randn(2, 4, 6).double(), torch.randn(3, 2, 4, 5).double()
    samples, weights = Samples.along(rows[0]), UncertainWeights(torch.rand(5, 6).double())
    term = WeightTerm(
        "fc:weights",
        samples,
        weights=weights,
        inputs=lambda: inputs,
        more=torch.zeros(1, 1, 1).double(),
        arrange=lambda rows: rows,
    )
    torch.testing.assert_close(term.by_element(rows).sum((2, 3)).mT, term.variances(rows))
