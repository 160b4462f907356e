"""Wrong sources, wrong budgets: each is told in one clear sentence; see also test_input_errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import covary
from covary.sources import Dropout as DropoutMask
from covary.sources import Noise as GaussianNoise
from covary.sources import Relative, Rounding

pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return model.eval()


def inputs(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GaussianNoise(-1.0),
            r"Noise needs a standard deviation, a finite .* got -1",
        ),
        (lambda: Relative(float("nan")), r"Relative needs a share .* 0.01 for 1%.* got nan"),
        (lambda: Rounding(float("inf")), r"Rounding needs the step between two values.* got inf"),
        (lambda: DropoutMask(1.0), r"needs a probability in \[0, 1\), got 1.0"),
        (lambda: DropoutMask(-0.1), r"needs a probability, a finite number >= 0, got -0.1"),
    ],
)
def test_wrong_numbers_of_sources_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("source", [GaussianNoise, Relative, Rounding, DropoutMask])
def test_sources_take_numbers_alone(source):
    for wrong in ("0.1", True, None, torch.tensor(0.1)):
        with pytest.raises(TypeError, match=f"{source.__name__} needs .* a number, got"):
            source(wrong)
    assert vars(source(np.float32(0.5)))  # a number of numpy is one


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"sources": {"7": GaussianNoise(0.1)}},
            ValueError,
            "'7', and this model has no .* '0'",
        ),
        ({"sources": {"0": 0.1}}, TypeError, "sources at '0' .*Noise, Relative or .* got 0.1"),
        ({"sources": {"0": [GaussianNoise(0.1), "a"]}}, TypeError, "sources at '0' .* got 'a'"),
        (
            {"sources": [GaussianNoise(0.1)]},
            TypeError,
            "a mapping from 'input' or .* got list",
        ),
        ({"dropout": ["drop"]}, ValueError, "dropout names 'drop', and this model has no module"),
        ({"dropout": 0.2}, TypeError, "the probabilities are those of the layers. Got 0.2"),
    ],
)
def test_convert_names_wrong_sources(options, error, message):
    with pytest.raises(error, match=message):
        covary.convert(network(), **options)


@pytest.mark.parametrize("run", [lambda net, x: net(x), covary.track])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sources": {"0": GaussianNoise(0.1)}, "start": "1"},
            "module '0', and nothing that varies",
        ),
        ({"dropout": ["0"]}, "module '0' drops nothing that varies: it has no dropout layer"),
        ({"dropout": True, "start": "3"}, "this model drops nothing that varies"),
    ],
)
def test_sources_that_enter_nowhere_are_told(run, options, message):
    net = covary.convert(network(), noise=0.0, **options)
    with pytest.raises(ValueError, match=message):
        run(net, inputs())


def test_a_model_without_dropout_has_no_dropout_as_a_source():
    net = covary.convert(nn.Sequential(nn.Linear(4, 3)).eval(), noise=0.0, dropout=True)
    with pytest.raises(ValueError, match="this model drops nothing that varies"):
        net(inputs())
    with pytest.raises(ValueError, match=r"with_dropout needs a network with covary\.nn\.Dropout"):
        covary.with_dropout(covary.mlp([4, 8, 3]))


def test_a_network_without_sources_has_no_budget():
    out = covary.convert(network(), noise=0.0)(inputs())
    for ask in (out.budget, out.covariance_budget, lambda: out.budget("input")):
        with pytest.raises(ValueError, match="Nothing varies here, so there is no budget"):
            ask()


@pytest.mark.parametrize("covariance", ["full", "diagonal", "shared", "tracked"])
def test_covariances_of_chains_have_no_budget_and_name_convert(covariance):
    out = covary.mlp([4, 8, 3], noise=0.1, covariance=covariance).eval()(inputs())
    for ask in (out.budget, out.covariance_budget):
        with pytest.raises(TypeError, match=r"does not remember .* covary.convert\(net\)"):
            ask()


def test_budgets_name_what_they_have():
    out = covary.convert(network(), noise=0.1)(inputs())
    with pytest.raises(ValueError, match=r"is that of an input \(input\), got 'noise at 1'"):
        out.budget("noise at 1")
    with pytest.raises(KeyError, match="no source 'noise'; there are noise at 1, input"):
        out.budget()["noise"]
    with pytest.raises(ValueError, match=r"rows of shape \(r, 3\).* got \(1, 4\)"):
        out.budget(rows=torch.ones(1, 4))


def test_a_budget_of_some_samples_does_not_depend_on_what_was_looked_at_before():
    net = covary.convert(network(), noise=0.1)
    covary.track(net, inputs(64), progress=False)
    first, second = net(inputs()), net(inputs())
    expected = first[1:3].budget()
    assert second.covariance_matrix.shape == (5, 3, 3)
    for name, part in second[1:3].budget().items():
        torch.testing.assert_close(part, expected[name])


def test_a_source_at_the_model_itself_enters_at_its_output():
    net = covary.convert(network(), noise=0.0, sources={"": GaussianNoise(0.1)})
    assert list(net(inputs()).budget()) == ["noise at output"]


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ({"sources": {"0": Relative(0.1)}}, {}, r"\(share of Relative 1 at 0: 0.1\) .* \(none\)"),
        ({}, {"sources": {"0": Relative(0.1)}}, r"\(none\) .* \(share of Relative 1 at 0: 0.1\)"),
        (
            {"sources": {"input": GaussianNoise(0.1)}},
            {"sources": {"input": GaussianNoise(0.2)}},
            r"\(sigma of .*Noise 1 at input: 0.1\) .* \(sigma of .*Noise 1 at input: 0.2",
        ),
        ({"dropout": True}, {"dropout": ["2"]}, r"\(dropout in all modules.* \(dropout in 2"),
    ],
)
def test_measurements_of_other_sources_are_refused(saved, own, message):
    measured = covary.convert(network(), noise=0.1, **saved)
    covary.track(measured, inputs(32), progress=False)
    state = measured.state_dict()
    covary.convert(network(), noise=0.1, **saved).load_state_dict(state)
    with pytest.raises(ValueError, match=f"other sources or dropout {message}"):
        covary.convert(network(), noise=0.1, **own).load_state_dict(state)


def test_a_covariance_is_repaired_only_if_asked():
    cov = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1e-3]))
    with pytest.raises(ValueError, match=r"sample 0 is -0.001, the largest 1. With repair=True"):
        covary.Moments.of(inputs(), cov=cov)
    repaired = covary.Moments.of(inputs(), cov=cov, repair=True)
    torch.testing.assert_close(repaired.covariance_matrix[0], cov.clamp(min=0))
    # Of the size of rounding it is nobody's mistake.
    covary.Moments.of(inputs(), cov=torch.diag(torch.tensor([1.0, 1.0, 1.0, -1e-7])))


def test_errors_may_be_larger_than_the_values():
    """They are no mistake by themselves, and variances are still those of draws, roughly."""
    net = covary.convert(network(), noise=0.0)
    x = covary.Moments.of(inputs(256), std=100.0)
    covary.track(net, x, progress=False)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.stack([net.draw(x[:4], generator=generator) for _ in range(2000)]).var(0)
    torch.testing.assert_close(net(x[:4]).variance, drawn, rtol=0.3, atol=0)
    linear = covary.convert(nn.Sequential(nn.Linear(4, 3)).eval(), noise=0.0)
    weight = linear.model[0].weight.detach()
    expected = (1e4 * weight.square().sum(1)).expand(256, 3)
    torch.testing.assert_close(linear(x).variance, expected)


def test_inputs_with_errors_are_checked_as_others_are():
    net = covary.convert(network(), noise=0.0)
    with pytest.raises(ValueError, match=r"An input of shape \(5, 4\) has NaN"):
        net(covary.Moments.of(inputs() * float("nan"), std=0.1))
    with pytest.raises(RuntimeError, match=r"x.float\(\)"):
        net(covary.Moments.of(inputs().double(), std=0.1))
