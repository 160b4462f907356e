"""Lines, histograms and differences that several experiments share."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import linregress

from reproduction.experiments.classifiers import drops
from reproduction.experiments.statistics import histograms, line


def test_drops_are_those_of_numbers_that_are_defined():
    known = {"accuracy": [0.5, 0.9], "separability": [0.1, 1.0]}
    series = {
        "with": known | {"separability_by_layer": [0.0, 1.0, 1.5]},
        "without": {"accuracy": [0.4, 0.9], "separability": [None, None]}
        | {"separability_by_layer": [0.0, 0.4, 1.5]},
    }
    found = drops(series)
    assert found["accuracy_drop"] == pytest.approx(0)
    assert found["accuracy_drop_on_the_way"] == pytest.approx(0.05)
    assert np.isnan(found["separability_drop"])
    assert found["separability_drop_last_hidden"] == pytest.approx(0.6)
    assert found["separability_drop_of_layers"] == pytest.approx(0.2)


def test_lines_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x = rng.normal(size=20)
    y = 0.5 * x + rng.normal(size=20)
    ours, theirs = line(list(x), list(y)), linregress(x, y)
    assert ours.slope == pytest.approx(theirs.slope)
    assert ours.intercept == pytest.approx(theirs.intercept)
    assert ours.r_squared == pytest.approx(theirs.rvalue**2)
    assert np.isnan(line([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).slope)


def test_histograms_hold_every_sample_of_every_group():
    rng = np.random.default_rng(0)
    many, few = rng.normal(size=5000), rng.normal(5, 1, size=20)
    few[0], many[0] = 1e9, -np.inf
    found = histograms({"many": many, "few": few, "none": np.array([])})
    assert sum(found["shares"]["many"]) == pytest.approx(1)
    assert sum(found["shares"]["few"]) == pytest.approx(1)
    assert sum(found["shares"]["none"]) == 0
    edges = np.array(found["edges"])
    assert edges[0] < -2
    # A group of few samples counts for the range as one of many does.
    assert edges[-1] > 5
