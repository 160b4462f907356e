"""The plain torch networks themselves: they run, and give finite numbers of a sensible size."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests import trained
from tests.architectures import ARCHITECTURES
from tests.architectures_images import resnet18


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
@torch.no_grad()
def test_architectures_run_sample_by_sample(row):
    net, again = row.build(), row.build()
    assert not any(module.training for module in net.modules())
    inputs = row.inputs(64, seed=1)
    out = tree_leaves(row.run(net, inputs))
    for values, same in zip(out, tree_leaves(row.run(again, row.inputs(64, seed=1))), strict=True):
        assert values.isfinite().all()
        assert 0.05 < values.std(0).mean() < 20
        assert torch.equal(values, same)
    one = tree_map(lambda x: x.narrow(row.batch_dim, 5, 1), inputs)
    for values, alone in zip(out, tree_leaves(row.run(net, one)), strict=True):
        torch.testing.assert_close(alone[0], values[5], rtol=1e-4, atol=1e-5)


def test_batch_norms_have_the_statistics_of_their_inputs():
    net = next(row for row in ARCHITECTURES if row.name == "resnet18").build()
    norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(norms) == 20
    for norm in norms:
        assert norm.running_mean.std() > 0.1
        assert norm.running_var.log().std() > 0.1


def test_resnet18_has_its_published_size():
    with torch.device("meta"):
        assert sum(p.numel() for p in resnet18().parameters()) == 11_173_962


@pytest.mark.parametrize("name", trained.NETWORKS)
def test_trained_networks_know_digits(name):
    assert trained.accuracy(name) > 0.95
    _, _, x_test, _ = trained.data(name)
    assert abs(x_test.mean()) < 0.1
    assert 0.7 < x_test.std() < 1.1
