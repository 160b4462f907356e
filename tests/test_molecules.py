"""ANI-1x of the example: its energies, what its features do not depend on, and its moments."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from benchmarks import results
from examples import molecules as example
from examples import molecules_network as network

needs_weights = pytest.mark.skipif(
    find_spec("torchani") is None, reason="needs torchani, the extra `molecules`"
)
ROWS = results.load("molecule_energies")["geometries"]
WATER = "OHH", torch.tensor([[0.0, 0.0, 0.12], [0.0, 0.76, -0.48], [0.0, -0.76, -0.48]])


def test_features_depend_on_neither_place_nor_turn_nor_order():
    symbols, at = WATER
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    found = network.features(symbols, at)
    assert found.shape == (3, network.FEATURES)
    torch.testing.assert_close(network.features(symbols, at @ turn + 5.0), found)
    torch.testing.assert_close(network.features("HOH", at[[1, 0, 2]]), found[[1, 0, 2]])


def test_an_atom_alone_sees_nothing():
    assert not network.features("O", torch.zeros(1, 3)).any()
    assert not network.features("OH", torch.tensor([[0.0, 0, 0], [6.0, 0, 0]])).any()


@needs_weights
def test_energies_at_rest_are_those_of_the_reference():
    rows = [row for row in ROWS if row["displacement"] == 0]
    _, found = example.measure(rows)
    assert np.median(found["error"]) < 1.5, "kcal/mol"


@needs_weights
def test_one_pass_agrees_with_draws():
    _, found = example.measure(ROWS[::10])
    drawn = found[f"one network, {example.DRAWS} draws"]
    ratio = found["one network, one pass"] / drawn
    assert 0.9 < np.median(ratio) < 1.1


def test_stored_results_keep_the_promise():
    ranks = results.load("molecules")["ranks"]["all"]["one network, one pass"]
    assert ranks["with the error"] >= 0.65
    assert ranks["with the spread"] >= 0.85


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(network, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"torchani is not installed.*\[molecules\]"):
        network.folder()
