"""Covariances that sweeps compute keep the contract of all covariances, selected or not."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import covary
from covary.covariance.samples import Samples
from covary.covariance.sweep import Swept, Tape
from covary.covariance.terms import IndependentTerm
from covary.testing import CovarianceContract
from covary.testing.covariances import rand
from tests.test_covariance import B, N


def swept(batch: int = B) -> Swept:
    """A linear map of 6 units with noise, gated, and noise once more."""
    weight, gain = torch.randn(N, 6, dtype=torch.float64), rand(batch, N)
    values, units = rand(batch, 6), rand(batch, N)
    tape = Tape(batch)
    first = tape.add(
        (), lambda _: (), IndependentTerm("input", Samples.along(values), var=rand(batch, 6))
    )
    noise = IndependentTerm("gate", Samples.along(units), var=rand(batch, N))
    at = tape.add((first,), lambda rows: ((rows * gain) @ weight,), noise)
    return Swept(tape, at, units)


def chosen() -> Swept:
    """B of more samples, in another order."""
    found = swept(B + 3).select(torch.tensor([6, 0, 3, 1, 7]))
    assert isinstance(found, Swept)
    return found


class TestSwept(CovarianceContract):
    cases: ClassVar = {"all": swept, "chosen": chosen}
    test_is_a_pytree: Any = None  # a tape is made of functions


def test_samples_selected_twice_take_one_factor_each():
    twice = swept().select([1, 1])
    with pytest.raises(IndexError, match=r"selected twice.*covariance_matrix first"):
        twice.scale(rand(2, N))


def network(noise: float = 0.1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = covary.convert(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), noise=noise)
    x = torch.randn(8, 3)
    covary.track(net, x)
    return net, x


def test_layers_take_selected_outputs():
    net, x = network()
    out, linear = net(x), covary.nn.Linear(2, 2)
    matrix = net(x).covariance_matrix
    expected = linear.weight @ matrix[1:3] @ linear.weight.mT
    torch.testing.assert_close(linear(out[1:3]).covariance_matrix, expected)
    noisy = covary.nn.Noise(0.1)(net(x)[2:3])
    torch.testing.assert_close(noisy.variance, matrix[2:3].diagonal(dim1=1, dim2=2) + 0.01)
    assert network(noise=0.0)[0](x)[:2].variance.shape == (2, 2)


def test_variances_are_swept_once(monkeypatch):
    sweeps, sweep = [], Tape.sweep
    monkeypatch.setattr(Tape, "sweep", lambda *args: sweeps.append(1) or sweep(*args))
    few = swept()
    assert torch.equal(few.variance, few.variance)
    assert torch.equal(few.dense().diagonal(dim1=1, dim2=2), few.variance)
    assert len(sweeps) == 1
    monkeypatch.setattr("covary.covariance.sweep._CHEAP", 0)
    many = swept()
    assert torch.equal(many.variance, many.variance)
    assert len(sweeps) == 2


@pytest.mark.parametrize("look", ["variance", "covariance_matrix"])
def test_a_look_without_gradients_takes_none_away(look):
    net, x = network()
    with covary.supervise_covariance():
        out = net(x)
        with torch.no_grad():
            before = getattr(out, look)
        found = getattr(out, look)
        assert not before.requires_grad
        torch.testing.assert_close(found, before)
        found.sum().backward()
        assert net.model[0].weight.grad.abs().sum() > 0


def test_layers_behind_an_output_are_not_kept_by_it():
    net, x = network()
    out, weight = net(x), torch.randn(2, 2)
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(weight)
        linear = out.cov.linear(weight)
        assert linear.variance.shape == (8, 2)
        del linear, weight
        assert kept() is None
    finally:
        gc.enable()
