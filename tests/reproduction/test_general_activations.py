"""Sums of Heaviside steps, students of ReLU and sums of rates, against brute force."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch

from covary import activations
from covary.covariance import Full
from covary.moments import Moments
from covary.nn import Activation, Linear
from reproduction.experiments import (
    general_activations,
    learned_moments,
    staircases,
    teacher_student,
)
from reproduction.experiments.teacher_student import DTYPE, normal
from reproduction.figures.beyond import FIGURES
from reproduction.running import reproduce
from reproduction.workshop import Workshop
from tests import reference

(ROW,) = general_activations.EXPERIMENTS
POINTS = [(0.4, 1.3), (-1.1, 0.5), (2.0, 2.5)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def stairs_of(name, n):
    return staircases.staircase(activations.get(name).function, n)


def test_the_row_runs_and_has_a_figure(tmp_path):
    record = reproduce(ROW, "smoke", Workshop(folder=tmp_path), results=tmp_path / "results")
    for claim in ROW.claims:
        assert claim.values(record), claim.says
    drawing = FIGURES[ROW.name](record)
    assert any(character.isdigit() for character in drawing.alt)
    drawing.figure.savefig(tmp_path / "figure.png")


# The sequence


@pytest.mark.parametrize("name", general_activations.FUNCTIONS)
@pytest.mark.parametrize("n", [0, 2, 5])
def test_staircases_come_near_and_are_never_larger(name, n):
    x = torch.linspace(-2 * (n + 1), 2 * (n + 1), 10_007, dtype=DTYPE)[:-1]
    own, true = stairs_of(name, n)(x), activations.get(name).function(x)
    assert (own.abs() <= true.abs() + 1e-15).all()
    assert (own - true).abs().max() <= 1.1 * 2.0**-n  # a step times the steepest slope


def test_a_staircase_is_the_sum_that_it_stands_for():
    stairs = stairs_of("silu", 2)
    x = torch.cat([normal((50,), seeded()), stairs.edges])  # a step counts where it is
    direct = sum(
        height * (x >= edge) for edge, height in zip(stairs.edges, stairs.heights, strict=True)
    )
    torch.testing.assert_close(stairs(x), direct)


@pytest.mark.parametrize(("mu", "var"), POINTS)
def test_moments_of_a_staircase_are_integrals(mu, var):
    """Of the function as it is, piece by piece, by mpmath."""
    stairs = stairs_of("tanh", 1)
    edges = [mp.mpf(each.item()) for each in stairs.edges]
    levels = stairs.heights.cumsum(0).tolist()
    ends = [*edges[1:], mp.inf]
    deviation = mp.sqrt(var)

    def average(power):
        return sum(
            mp.mpf(level) ** power
            * (mp.ncdf((high - mu) / deviation) - mp.ncdf((low - mu) / deviation))
            for level, low, high in zip(levels, edges, ends, strict=True)
        )

    mean = average(1)
    found = staircases.moments(
        *(torch.tensor([each], dtype=DTYPE) for each in (mu, var)), stairs=stairs
    )
    assert found.mean.item() == pytest.approx(float(mean), abs=1e-12)
    assert found.variance.item() == pytest.approx(float(average(2) - mean**2), abs=1e-12)
    above, below = (
        staircases.moments(
            torch.tensor([mu + shift], dtype=DTYPE), torch.tensor([var], dtype=DTYPE), stairs=stairs
        ).mean.item()
        for shift in (1e-5, -1e-5)
    )
    assert found.gain.item() == pytest.approx((above - below) / 2e-5, abs=1e-8)


def test_moments_of_a_staircase_are_those_of_draws():
    stairs = stairs_of("silu", 1)
    draws = stairs(0.3 + 1.2 * normal((1_000_000,), seeded()))
    mu, var = (torch.tensor([each], dtype=DTYPE) for each in (0.3, 1.44))
    found = staircases.moments(mu, var, stairs=stairs)
    assert found.mean.item() == pytest.approx(draws.mean().item(), abs=5e-3)
    assert found.variance.item() == pytest.approx(draws.var().item(), rel=1e-2)


@pytest.mark.parametrize(("mu", "var"), POINTS)
def test_the_network_of_steps_is_that_of_covary(mu, var):
    """A unit for each step behind one noisy input, and a readout that sums them."""
    stairs = stairs_of("relu", 1)
    count = len(stairs.edges)
    spread = Linear(1, count, dtype=DTYPE)
    spread.load_state_dict({"weight": torch.ones(count, 1).double(), "bias": -stairs.edges})
    summed = Linear(count, 1, bias=False, dtype=DTYPE)
    summed.load_state_dict({"weight": stairs.heights[None]})
    one = torch.tensor([[mu]], dtype=DTYPE)
    given = Moments(
        one, Full(torch.tensor([[[var]]], dtype=DTYPE), added=torch.zeros(1, 1).double())
    )
    with torch.no_grad():
        expected = summed(Activation("heaviside")(spread(given)))
    found = staircases.network_moments(one, torch.tensor([[var]], dtype=DTYPE), stairs=stairs)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)


@pytest.mark.parametrize(("mu", "var"), POINTS)
def test_moments_come_to_those_of_the_function(mu, var):
    """And those of the network of steps to its linear response."""
    mean, variance, gain = (float(each) for each in reference.integrated("relu", mu, var))
    point = [torch.tensor([each], dtype=DTYPE) for each in (mu, var)]
    stairs = stairs_of("relu", 9)
    found = staircases.moments(*point, stairs=stairs)
    assert found.mean.item() == pytest.approx(mean, abs=2e-3)
    assert found.gain.item() == pytest.approx(gain, abs=2e-3)
    assert found.variance.item() == pytest.approx(variance, abs=2e-3)
    network = staircases.network_moments(*point, stairs=stairs).variance.item()
    assert network == pytest.approx(gain**2 * var, abs=5e-3)
    assert network < 0.98 * variance


def test_gradients_go_through_the_means_of_a_staircase():
    mu = torch.tensor([[0.2, -0.7]], dtype=DTYPE, requires_grad=True)
    var = torch.tensor([[0.9, 0.4]], dtype=DTYPE)
    found = general_activations.activation_of("staircase 2")(mu, var)
    (gradient,) = torch.autograd.grad(found.mean.sum(), mu)
    torch.testing.assert_close(gradient, found.gain)


# ReLU in the place of Heaviside


def posed(activation, start="random"):
    settings = {
        "widths": [4, 3],
        "readout": False,
        "start": start,
        "input_variance": [0.3, 0.05],
        "noise": [0.3, 0.5],
    }
    generator = seeded(1)
    made = general_activations.activation_of(activation)
    return *teacher_student.posed(settings, generator, activation=made), generator


def test_layers_of_relu_are_those_of_covary():
    teacher, _, generator = posed("relu")
    x = normal((5, 4), generator)
    linear = Linear(4, 3, dtype=DTYPE)
    linear.load_state_dict({"weight": teacher.weights[0], "bias": teacher.biases[0]})
    given = Moments(x, Full(teacher.input_cov[None], added=torch.full((1, 1), 0.0).double()))
    before = linear(given)
    noisy = Moments(
        before.mean,
        Full(before.covariance_matrix + 0.09 * torch.eye(3), added=torch.zeros(1, 1).double()),
    )
    expected = Activation("relu")(noisy)
    found = teacher.layers(x)[0]
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.cov, expected.covariance_matrix)


def test_no_weights_of_another_noise_have_the_means_of_relu():
    """The best of all multiples of the teacher's weights; of a Heaviside one of them is exact."""
    for name, best in (("heaviside", 0.0), ("relu", 0.01)):
        teacher, student, generator = posed(name)
        x = normal((200, 4), generator)
        true = teacher.output(x)
        found = [
            (student.with_parameters([c * each for each in teacher.parameters]).output(x) - true)
            for c in np.geomspace(0.05, 50, 4000)
        ]
        # Of each unit, its own best multiple.
        errors = torch.stack([each.square().mean(0) for each in found]).amin(0).sqrt()
        relative = (errors / true.std(0)).max().item()
        assert relative > best
        assert (relative < 0.005) is (name == "heaviside")


def test_variances_of_relu_are_not_a_function_of_the_mean():
    mu = torch.tensor([[5.0]], dtype=DTYPE)
    made = [activations.get("relu")(mu, torch.tensor([[var]], dtype=DTYPE)) for var in (0.1, 0.4)]
    assert made[0].mean.item() == pytest.approx(made[1].mean.item(), rel=1e-9)
    assert made[1].variance.item() == pytest.approx(4 * made[0].variance.item(), rel=1e-6)


def test_a_staircase_student_is_scaled_only_with_its_edges():
    """Edges that are scaled along leave the mean as it is; edges that stay do not."""
    stairs = stairs_of("relu", 2)
    mu, var = (torch.tensor([each], dtype=DTYPE) for each in (0.7, 0.5))
    moved = staircases.Staircase(3 * stairs.edges, stairs.heights)
    before = staircases.moments(mu, var, stairs=stairs).mean
    torch.testing.assert_close(staircases.moments(3 * mu, 9 * var, stairs=moved).mean, before)
    assert staircases.moments(3 * mu, 9 * var, stairs=stairs).mean > 2 * before


# Sums of rates


def test_decay_finds_the_power():
    step = np.geomspace(10, 1000, 20)
    values = np.stack([3 * step**-0.75, 0.1 * step**0.2], 1)
    np.testing.assert_allclose(general_activations.decay(step, values), [0.75, -0.2])


def test_variances_in_front_of_a_layer():
    teacher, _, generator = posed("heaviside")
    expected = teacher.layers(normal((1, 4), generator))[0].var[0]
    torch.testing.assert_close(general_activations.variances(teacher), expected)


def test_partial_sums_of_rates():
    """With one step the sums are the products themselves."""
    settings = {
        "kind": "condition",
        "widths": [4, 3],
        "readout": False,
        "start": "random",
        "input_variance": [0.3, 0.05],
        "noise": [0.3, 0.5],
        "batch": 8,
        "rate": 2.0,
        "horizon": 100,
        "power": 0.75,
        "steps": 30,
    }
    series = general_activations._condition(settings, seeded()).series
    rate = 2.0 * 1.01**-0.75
    first, second, alpha = (np.array(series[key])[:, 0] for key in ("first", "second", "alpha"))
    np.testing.assert_allclose(first, rate * alpha)
    np.testing.assert_allclose(second, (rate * alpha) ** 2)
    assert (np.diff(np.array(series["first"]), axis=1) > 0).all()
    assert math.isfinite(np.array(series["second"]).sum())


def test_hidden_units_of_relu_have_a_size_that_nothing_outside_knows():
    """Without noise in front of them, units of another size that are read by less are the same."""
    settings = {
        "widths": [4, 5, 2],
        "readout": True,
        "start": "random",
        "input_variance": [0.3, 0.3],
        "noise": [0.0, 0.0],
    }
    generator = seeded(2)
    relu = general_activations.activation_of("relu")
    teacher, _ = teacher_student.posed(settings, generator, activation=relu)
    size = torch.rand(5, generator=generator, dtype=DTYPE) + 0.5
    (first, second), (bias, last) = teacher.weights, teacher.biases
    other = teacher.with_parameters([size[:, None] * first, second / size, size * bias, last])
    x = normal((30, 4), generator)
    apart = learned_moments.errors(teacher, other, x)
    assert apart["mean"][0] > 0.1
    assert apart["mean"][1] == pytest.approx(0, abs=1e-12)
    fitted = learned_moments.errors(teacher, other, x, scales=True)
    for name in ("mean", "variance", "covariance"):
        assert max(fitted[name]) == pytest.approx(0, abs=1e-12)
