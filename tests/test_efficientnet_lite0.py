"""EfficientNet-Lite0 of the example, without its weights: size, shapes, missing packages."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "efficientnet_lite0.py"


@pytest.fixture(scope="module")
def example():
    """What the script defines, by name."""
    return runpy.run_path(str(EXAMPLE))


def test_the_network_has_the_published_size(example):
    net = example["EfficientNetLite0"]().eval()
    assert sum(parameter.numel() for parameter in net.parameters()) == 4_652_008
    sizes = []
    for block in net.blocks:
        block.register_forward_hook(lambda _block, _x, out: sizes.append(out.shape[-1]))
    with torch.no_grad():
        assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert sizes == [32, 16, 16, 8, 8] + [4] * 6 + [2] * 5


def test_a_missing_package_is_named(example):
    with pytest.raises(SystemExit, match=r"not_installed is not.*pip install --no-deps .*foolbox"):
        example["folder_of"]("not_installed")
