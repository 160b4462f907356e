"""EfficientNet-Lite0 of the example: its size, its weights, and its moments."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import covary
from covary.uncertainty.scores import change_probability
from examples import efficientnet_lite0 as example
from examples import efficientnet_lite0_network as network

needs_packages = pytest.mark.skipif(
    not all(find_spec(package) for package in (network.WEIGHTS, network.PHOTOGRAPHS)),
    reason=f"needs {network.WEIGHTS} and {network.PHOTOGRAPHS}, the extra `examples`",
)


def test_the_network_has_the_published_size():
    net = network.EfficientNetLite0().eval()
    assert sum(parameter.numel() for parameter in net.parameters()) == 4_652_008
    sizes = []
    for block in net.blocks:
        block.register_forward_hook(lambda _block, _x, out: sizes.append(out.shape[-1]))
    with torch.no_grad():
        assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert sizes == [32, 16, 16, 8, 8] + [4] * 6 + [2] * 5


def test_a_missing_package_is_named():
    with pytest.raises(SystemExit, match=r"not_installed is not installed.*\[examples\]"):
        network.folder_of("not_installed")


def test_corruptions_do_what_they_say():
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) - 0.4
    noise, blur, occlusion = (
        example.corrupted(x, kind, strengths[0]) for kind, strengths in example.STRENGTHS.items()
    )
    assert (noise - x).std() == pytest.approx(0.1, rel=0.02)
    # A Gaussian filter of standard deviation s leaves 1 / (4 pi s^2) of white noise's variance.
    assert blur.var() / x.var() == pytest.approx(1 / (4 * torch.pi), rel=0.1)
    assert blur.mean() == pytest.approx(x.mean().item(), abs=0.01)
    assert ((occlusion == 0).all(1).flatten(1).sum(1) == 16 * 16).all()


@needs_packages
@torch.no_grad()
def test_the_trained_network_has_moments():
    """Moments of photographs at half their width and height, to be quick."""
    model = network.pretrained()  # which fails unless every tensor of the file has its place
    x, y = network.photographs()
    assert (model(x[:6]).argmax(1) == y[:6]).sum() >= 5
    x = torch.nn.functional.avg_pool2d(x[:4], 2)
    out = covary.convert(model, noise=0.0)(x[:2])
    torch.testing.assert_close(out.mean, model(x[:2]), rtol=1e-6, atol=1e-6)
    assert out.variance.abs().max() == 0
    net = covary.convert(model, noise=0.05)
    covary.track(net, x)
    best = example.best_classes(net(x[:2]))
    assert best.covariance_matrix.shape == (2, 5, 5)
    assert (best.variance > 0).all()
    probability = change_probability(best)
    assert ((probability >= 0) & (probability <= 1)).all()
