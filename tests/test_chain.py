"""Networks taken apart: what is kept, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import covary
from covary.stochastic import Chain, sample_steady


def test_a_module_that_comes_again_is_there_again():
    torch.manual_seed(0)
    again = covary.nn.ReLU()
    net = nn.Sequential(
        covary.nn.Lift(0.1), covary.nn.Linear(2, 3), again, covary.nn.Linear(3, 3), again
    )
    stages = Chain.of(net).stages
    assert [stage.activation.name for stage in stages] == ["relu", "relu"]


def test_layers_of_which_nobody_knows_the_order_are_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = covary.mlp([2, 3, 2])

    with pytest.raises(ValueError, match=r"nn\.Sequential, whose layers follow.*got Odd"):
        Chain.of(Odd())


def test_a_trunk_stays_in_the_mode_it_was_in():
    trunk = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5))
    net = nn.Sequential(trunk, covary.mlp([4, 3, 2], noise=0.1)).train()
    once, again = (sample_steady(net, torch.ones(1, 2), copies=160)["1.linear2"] for _ in range(2))
    assert torch.equal(once.mean, again.mean)  # without dropout
    assert trunk[1].training


@pytest.mark.parametrize(
    ("x", "said"),
    [(torch.zeros(0, 2), "batch is empty"), (torch.full((1, 2), torch.nan), "NaN or infinite")],
)
def test_inputs_that_nothing_can_be_simulated_for(x, said):
    with pytest.raises(ValueError, match=said):
        sample_steady(covary.mlp([2, 3, 2]), x)
