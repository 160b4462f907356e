"""How good tracking says that the moments of a converted network are."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import covary
from covary.nn.fidelity import TrackingWarning


def network():
    """Images (B, 1, 16, 16) to (B, 10)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 9, padding=4, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).eval()  # fmt: skip


def smooth(model):
    """The same with filters that sum over a patch, so that neighbours vary together."""
    with torch.no_grad():
        for layer in (model[0], model[4]):
            layer.weight.copy_(layer.weight.mean((2, 3), keepdim=True).sign())
    return model


def drawn_over_computed(net, x, draws=600):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.stack([net.draw(x, generator=generator) for _ in range(draws)])
    return (drawn.var(0).sum() / net(x).variance.sum()).item()


@pytest.mark.filterwarnings("error")
def test_good_moments():
    net = covary.convert(network(), noise=0.1)
    x = torch.randn(64, 1, 16, 16)
    found = covary.track(net, x)
    assert found.ratio == pytest.approx(drawn_over_computed(net, x), abs=4 * found.ratio_bar)
    assert 0.9 < found.ratio < 1.1
    assert 0 < found.ratio_bar < 0.1


def test_bad_moments_are_told():
    """On flat images all units are at the kinks, and vary together."""
    net = covary.convert(smooth(network()), noise={"input": 0.1})
    x = torch.zeros(64, 1, 16, 16)
    with pytest.warns(TrackingWarning, match=r"of those of draws.*less noise.*covary\.verify"):
        found = covary.track(net, x)
    expected = drawn_over_computed(net, x[:8])
    assert not 0.85 < expected < 1.18
    assert found.ratio == pytest.approx(expected, abs=4 * found.ratio_bar)


def test_few_inputs_are_no_reason_to_warn():
    """Of one output, 8 draws of 4 inputs say little: their scatter is taken into account."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Flatten(0)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(10):
            torch.manual_seed(seed)
            covary.track(covary.convert(model, noise=0.02), torch.randn(4, 3))


def test_without_noise_there_is_no_ratio():
    found = covary.track(covary.convert(network(), noise=0.0), torch.randn(4, 1, 16, 16))
    assert found.ratio != found.ratio
