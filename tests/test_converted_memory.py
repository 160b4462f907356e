"""The memory of a converted network's forward pass is free with its output."""

from __future__ import annotations

import gc

import pytest
import torch

import covary
from covary.covariance.sweep import Tape
from tests.architectures import ARCHITECTURES


def tapes() -> set[int]:
    return {id(each) for each in gc.get_objects() if type(each) is Tape}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
@torch.no_grad()
def test_memory_is_free_as_soon_as_the_output_is(row):
    """Without the garbage collector, which comes late: nothing that a tape holds holds the tape."""
    net = covary.convert(row.build(), noise=0.05, batch_dim=row.batch_dim)
    covary.track(net, [row.inputs(2, seed=0)])
    x = row.inputs(2, seed=1)
    gc.collect()
    gc.disable()
    try:
        before = tapes()
        out = row.run(net, x)
        assert len(tapes() - before) == 1
        del out
        assert not tapes() - before
    finally:
        gc.enable()
