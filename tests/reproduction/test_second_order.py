"""Higher cumulants of draws, and what they do to entropies and intervals, against brute force."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

import covary
from covary.stochastic import Chain, sample_steady
from reproduction.experiments import cumulants, second_order
from reproduction.experiments.cumulants import GROUPS, PowerSums
from reproduction.figures.beyond import FIGURES
from reproduction.running import reproduce
from reproduction.workshop import Workshop
from tests.reproduction.trials import with_mnist

(ROW,) = second_order.EXPERIMENTS


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gamma(shape, *size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).gamma(shape, size=size))


def test_every_claim_is_about_parts_that_there_are():
    labels = {part.label for part in ROW.parts["paper"]}
    assert {label for claim in ROW.claims for label in claim.labels} == labels
    for label in labels:
        assert len([part for part in ROW.parts["paper"] if part.label == label]) >= 3


def test_random_networks_run_and_have_a_figure(tmp_path):
    record = reproduce(
        ROW,
        "smoke",
        Workshop(folder=tmp_path),
        results=tmp_path / "results",
        only=list(second_order._WIDTHS),
    )
    assert len(record["parts"]) == len(second_order._WIDTHS)
    FIGURES[ROW.name](record).figure.savefig(tmp_path / "figure.png")


@with_mnist
@pytest.mark.parametrize("label", list(second_order._TRAINED))
def test_trained_networks_run_and_have_a_figure(label, tmp_path):
    workshop = Workshop(folder=tmp_path, data_dir=os.environ["COVARY_DATA"])
    record = reproduce(ROW, "smoke", workshop, results=tmp_path / "results", only=[label])
    for claim in ROW.claims:
        if label in claim.labels:
            assert claim.values(record), claim.says
    drawing = FIGURES[ROW.name](record)
    assert any(character.isdigit() for character in drawing.alt)
    drawing.figure.savefig(tmp_path / "figure.png")


# Cumulants


def test_shapes_are_those_of_scipy():
    values = gamma(2.0, GROUPS, 2, 500, 3).float()
    powers = PowerSums(values[:, :, :100])
    for start in (0, 100, 300):
        powers.add(values[:, :, start : [100, 300, 500][[0, 100, 300].index(start)]])
    found = cumulants.shape_of(powers)
    flat = values.transpose(0, 1).flatten(1, 2).double().numpy()
    np.testing.assert_allclose(found.skewness, stats.skew(flat, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.kurtosis, stats.kurtosis(flat, axis=1), rtol=1e-5)


def test_standard_errors_are_the_spread_of_repetitions():
    values = torch.randn(GROUPS, 400, 500, 1, generator=seeded())
    powers = PowerSums(values)
    powers.add(values)
    found = cumulants.shape_of(powers)
    for name in ("skewness", "kurtosis"):
        spread = getattr(found, name).std().item()
        error = getattr(found, f"{name}_error").square().mean().sqrt().item()
        assert error == pytest.approx(spread, rel=0.12)
    assert found.skewness_error.square().mean().sqrt().item() == pytest.approx(
        math.sqrt(6 / 8000), rel=0.1
    )


def test_what_does_not_vary_has_no_shape():
    values = torch.ones(GROUPS, 1, 50, 2)
    values[..., 1] = torch.randn(GROUPS, 1, 50, generator=seeded())
    powers = PowerSums(values)
    powers.add(values)
    found = cumulants.shape_of(powers)
    assert found.skewness.isnan().tolist() == [[True, False]]
    assert math.isfinite(cumulants.size(found.skewness, found.skewness_error)[0])


def test_sizes_are_without_the_noise_of_sampling():
    values = torch.full((4000,), 0.3) + 0.2 * torch.randn(4000, generator=seeded())
    errors = torch.full((4000,), 0.2)
    assert cumulants.size(values, errors)[0] == pytest.approx(0.3, abs=0.01)
    alone, least = cumulants.size(values - 0.3, errors)
    assert alone < 3 * least < 0.15


def test_networks_are_drawn_as_the_library_draws_them():
    torch.manual_seed(0)
    net = covary.mlp([5, 12, 8, 3], noise=[0.4, 0.2, 0.1]).eval()
    x = torch.randn(2, 5, generator=seeded())
    expected = sample_steady(net, x, copies=200_000)["linear3"]
    draws = cumulants.drawn(Chain.of(net), x, copies=200_000, seed=1)
    flat = draws.output.transpose(0, 1).flatten(1, 2).double()
    torch.testing.assert_close(flat.mean(1), expected.mean, rtol=0.02, atol=0.003)
    torch.testing.assert_close(flat.var(1), expected.variance, rtol=0.03, atol=1e-4)
    assert list(draws.shapes) == ["activation1", "activation2", "linear3"]


def test_in_front_of_the_first_activation_all_is_gaussian():
    torch.manual_seed(0)
    net = covary.mlp([5, 40, 3], noise=0.4).eval()
    draws = cumulants.drawn(Chain.of(net), torch.zeros(2, 5), copies=64_000, seed=1)
    first, last = draws.shapes.values()
    for values, errors in (
        (first.skewness, first.skewness_error),
        (first.kurtosis, first.kurtosis_error),
    ):
        assert ((values / errors).square().mean() < 2).item()
    assert (last.skewness / last.skewness_error).abs().max() > 5


# Entropies


def test_white_values_have_no_covariance_left():
    mixed = gamma(3.0, GROUPS, 200, 4) @ torch.randn(4, 4, generator=seeded()).double()
    flat = torch.cat([mixed, mixed[..., :1]], -1)  # one direction twice
    values = cumulants.white(flat).flatten(0, 1)
    assert values.shape[1] == 4
    torch.testing.assert_close(
        values.mT @ values / len(values), torch.eye(4).double(), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("d", [1, 3])
def test_edgeworth_of_gammas_is_what_their_entropy_lacks(d):
    """Of a gamma with a large shape a: J = 1 / (3 a) + ...; of d of them, mixed, d times that."""
    shape = 60.0
    entropy = stats.gamma(shape).entropy()
    lost = 0.5 * math.log(2 * math.pi * math.e * shape) - entropy
    rotation = torch.linalg.qr(torch.randn(d, d, generator=seeded()).double())[0]
    values = cumulants.white(gamma(shape, GROUPS, 20_000, d) @ rotation)
    found = cumulants.edgeworth(values)
    assert found.value == pytest.approx(d * lost, abs=3 * found.error + 0.05 * d * lost)
    assert found.error < 0.15 * d * lost


def test_edgeworth_of_gaussians_is_nothing_within_its_error():
    found = [
        cumulants.edgeworth(
            cumulants.white(torch.randn(GROUPS, 500, 3, generator=seeded(i)).double())
        )
        for i in range(20)
    ]
    values = np.array([each.value for each in found])
    errors = np.array([each.error for each in found])
    assert abs(values.mean()) < 3 * values.std() / math.sqrt(20)
    assert 0.5 < np.sqrt((errors**2).mean()) / values.std() < 2


@pytest.mark.parametrize(
    ("draw", "entropy"),
    [
        (lambda rng, size: rng.uniform(0, 1, size), 0.0),
        (lambda rng, size: rng.exponential(1.0, size), 1.0),
        (lambda rng, size: rng.standard_normal(size), 0.5 * math.log(2 * math.pi * math.e)),
    ],
    ids=["uniform", "exponential", "normal"],
)
@pytest.mark.parametrize("d", [1, 2])
def test_entropies_by_neighbours(draw, entropy, d):
    rng = np.random.default_rng(0)
    draws = torch.from_numpy(draw(rng, (3000, d)))
    points = cumulants.white(draws)
    variance = draws.var(0).log().mean().item()
    lost = 0.5 * (math.log(2 * math.pi * math.e) + variance) - entropy
    references = cumulants.gaussian_log_distances(3000, d, seed=0)
    assert cumulants.by_neighbours(points, references) / d == pytest.approx(lost, abs=0.04)


def test_in_ten_dimensions_neighbours_find_less_than_there_is():
    """Of gammas, whose entropy is known: half of it or more, and not all."""
    shape, d = 2.0, 10
    points = cumulants.white(gamma(shape, 2000, d))
    lost = 0.5 * math.log(2 * math.pi * math.e * shape) - stats.gamma(shape).entropy()
    references = cumulants.gaussian_log_distances(2000, d, seed=0)
    found = cumulants.by_neighbours(points, references) / d
    assert 0.4 * lost < found < lost


def test_a_discrete_distribution_has_no_density():
    points = torch.randint(0, 3, (500, 2), generator=seeded()).double()
    assert cumulants.by_neighbours(points, [0.0]) == math.inf
    assert cumulants.repeated(points) == 1.0
    assert cumulants.repeated(torch.randn(500, 2, generator=seeded())) == 0.0


def test_log_determinants():
    mixing = torch.tensor([[2.0, 0.0], [1.0, 0.5]])
    values = torch.randn(200_000, 2, generator=seeded()) @ mixing
    assert cumulants.log_determinant(values) == pytest.approx(0.0, abs=0.02)


# Intervals


def test_shares_within_intervals():
    z = torch.randn(400_000, 2, generator=seeded())
    found = cumulants.shares_within(z, second_order.LEVELS)
    expected = torch.tensor(second_order.LEVELS)[:, None].expand(-1, 2).double()
    torch.testing.assert_close(found, expected, atol=0.004, rtol=0)
    skewed = -torch.log(torch.rand(400_000, 1, generator=seeded())) - 1
    within = cumulants.shares_within(skewed, [0.95])[0, 0].item()
    assert within == pytest.approx(1 - math.exp(-1 - 1.959964), abs=0.002)


# The central limit


def test_a_sum_of_independent_units_comes_to_a_gaussian():
    """Skewness of a sum of n rectified Gaussians is that of one over sqrt(n)."""
    n = 9
    chain = Chain(
        torch.nn.Sequential(),
        1.0,
        False,
        (
            second_order.Stage(
                "hidden", torch.eye(n), torch.zeros(n), 0.0, covary.activations.get("relu")
            ),
            second_order.Stage(
                "output", torch.ones(1, n), torch.zeros(1), 0.0, covary.activations.get("identity")
            ),
        ),
    )
    shape = cumulants.drawn(chain, torch.zeros(1, n), copies=160_000, seed=0).shapes["output"]
    one = torch.relu(torch.randn(2_000_000, generator=seeded()).double()).numpy()
    expected = stats.skew(one) / math.sqrt(n)
    assert shape.skewness.item() == pytest.approx(expected, abs=5 * shape.skewness_error.item())
