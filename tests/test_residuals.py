"""Residuals of held-out rows: what the model of them finds, on data whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from covary.uncertainty import residuals as module
from covary.uncertainty.answering import threshold_of_risk
from covary.uncertainty.novelty import Novelty
from covary.uncertainty.residuals import (
    Evidence,
    FittedResiduals,
    ResidualModel,
    distributions,
    fit_residuals,
)


def evidence(n: int, seed: int = 0, d: int = 2) -> tuple[Evidence, np.random.Generator]:
    random = np.random.default_rng(seed)
    inputs = torch.tensor(random.uniform(-1.7, 1.7, (n, d)))
    emergent = torch.tensor(random.uniform(0.5, 2.0, n))
    spread = torch.tensor(random.uniform(0.0, 0.1, n))
    return Evidence(inputs, inputs[:, 0], emergent, spread, torch.zeros(n)), random


def test_noise_that_differs_from_place_to_place_is_learned():
    known, random = evidence(1500)
    truth = np.where(known.inputs[:, 0].numpy() < 0, 0.1, 0.5)
    found = fit_residuals(known, torch.tensor(truth * random.standard_normal(1500)))
    scales = found.model(known).squared.mean(0)[:, 0].sqrt().numpy()
    for place in (0.1, 0.5):
        assert scales[truth == place].mean() == pytest.approx(place, rel=0.15)
    assert found.without["learned"] - found.model.loss > 0.3
    assert abs(found.without["emergent"] - found.model.loss) < 0.05
    assert found.model.family in ("normal", "student")


def test_emergent_variances_that_are_right_are_believed():
    known, random = evidence(1500)
    known = Evidence(known.inputs * 0, known.mean * 0, known.emergent**4, known.spread, known.known)
    residual = torch.tensor(known.emergent.sqrt().numpy() * random.standard_normal(1500))
    found = fit_residuals(known, residual, parts=("emergent",))
    assert found.shares["emergent"] > 0.8
    assert found.without["emergent"] - found.model.loss > 0.2


@pytest.mark.parametrize(
    ("family", "draw"),
    [
        ("normal", lambda r, n: r.standard_normal(n)),
        ("student", lambda r, n: r.standard_t(2.5, n)),
        ("mixture", lambda r, n: r.choice([-1, 1], n) + 0.1 * r.standard_normal(n)),
    ],
)
def test_the_family_is_that_of_the_residuals(family, draw):
    known, random = evidence(1200, seed=1)
    found = fit_residuals(known, torch.tensor(draw(random, 1200)))
    assert found.losses[found.model.family] == min(found.losses.values())
    if family != "normal":
        assert found.model.family == family
        assert found.losses["normal"] > found.losses[family] + 0.02
    # Probabilities of held-out residuals are even, up to their scatter.
    for level in (0.1, 0.5, 0.9):
        assert (found.levels <= level).double().mean().item() == pytest.approx(level, abs=0.05)


def test_variances_count_where_a_family_is_chosen(monkeypatch):
    known, random = evidence(400)
    residual = torch.tensor(random.choice([-1, 1], 400) + 0.1 * random.standard_normal(400))
    measured, seen = module._error_of_variances, {}

    def measuring(model, *given):
        seen[model.family] = measured(model, *given)
        return seen[model.family] + 100 * (model.family == "mixture")

    assert fit_residuals(known, residual).model.family == "mixture"
    monkeypatch.setattr(module, "_error_of_variances", measuring)
    found = fit_residuals(known, residual, variances_count=0.5)
    assert found.model.family == "normal"
    # Of normal distributions it is the likelihood, but for a constant.
    expected = found.losses["normal"] - 0.5 * math.log(2 * math.pi)
    assert seen["normal"] == pytest.approx(expected, abs=1e-5)
    assert seen["mixture"] == pytest.approx(seen["normal"], abs=0.1)


@pytest.mark.parametrize("family", ["normal", "student", "mixture"])
def test_densities_integrate_to_one_around_a_mean_of_zero(family):
    known, _ = evidence(3)
    torch.manual_seed(0)
    model = ResidualModel(family, 2, 2).requires_grad_(False)
    model.width.fill_(1.0)
    model.low.fill_(-9.0)
    model.high.fill_(9.0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    found = model(known)
    points = np.linspace(-200, 200, 1_000_001)
    for row in range(3):
        one = type(found)(
            found.logits[:, row : row + 1], found.shifts[:, row : row + 1],
            found.squared[:, row : row + 1], found.df, {},
        )  # fmt: skip
        density = one.log_density(torch.tensor(points)).exp().double().numpy()
        assert integrate.trapezoid(density, points, axis=1) == pytest.approx(1.0, abs=0.01)
        assert integrate.trapezoid(points * density, points, axis=1) == pytest.approx(0, abs=0.01)


def test_targets_of_different_families_together():
    known, random = evidence(300)
    residual = torch.tensor(random.standard_normal(300))
    every = [
        fit_residuals(known, residual, families=[family]).model(known)
        for family in ("mixture", "student", "normal")
    ]
    both = distributions(every, np.eye(3))
    y = random.standard_normal((300, 3))
    for column, found in enumerate(every):
        alone = distributions([found], np.eye(1))
        np.testing.assert_allclose(both.cdf(y)[:, column], alone.cdf(y[:, [column]])[:, 0])
        np.testing.assert_allclose(both.ppf(0.9)[:, column], alone.ppf(0.9)[:, 0])
        np.testing.assert_allclose(both.var()[:, column], alone.var()[:, 0])


def test_known_variance_is_not_learned_again():
    known, random = evidence(1000)
    extra = torch.linspace(0.0, 4.0, 1000).double()
    with_extra = Evidence(known.inputs, known.mean, known.emergent, known.spread, extra)
    residual = torch.tensor(np.sqrt(0.25 + extra.numpy()) * random.standard_normal(1000))
    model = fit_residuals(with_extra, residual, families=("normal",)).model
    own = model(known).squared.mean().item()  # without it
    assert own == pytest.approx(0.25, abs=0.15)
    assert model(with_extra).squared.mean().item() == pytest.approx(own + 2.0, rel=0.05)


def test_a_spread_that_is_thrown_away_is_told():
    model = ResidualModel("normal", 1, 2)
    model.levels.copy_(torch.tensor([1.0, 0.5, 1.0]))  # members differ by half of the errors
    found = FittedResiduals(model, torch.zeros(1), {}, {}, {"spread": 0.001})
    assert found.throws_spread_away
    assert not found._replace(shares={"spread": 0.3}).throws_spread_away
    model.levels[1] = 0.01  # or by next to nothing, so that there is nothing to throw away
    assert not found.throws_spread_away


@pytest.mark.parametrize("n", [2, 9, 10, 39, 40])
def test_few_rows(n):
    known, random = evidence(n)
    found = fit_residuals(known, torch.tensor(random.standard_normal(n)))
    assert found.levels.shape == (n,)
    scales = found.model(known)
    assert torch.isfinite(scales.squared).all()
    if n < 40:
        learned = scales.parts["learned"]
        assert torch.allclose(learned, learned[:, :1]), "a constant"


def test_features_beyond_what_was_seen_count_as_its_edge():
    known, random = evidence(200)
    model = fit_residuals(known, torch.tensor(random.standard_normal(200))).model
    edge = known.inputs.max(0).values
    far = Evidence(*(torch.cat([each[:1]] * 2) for each in vars(known).values()))
    far.inputs[0], far.inputs[1] = edge, 1000 * edge
    parts = model(far).parts["learned"]
    torch.testing.assert_close(parts[:, 0], parts[:, 1])


def test_novelty_is_the_distance_from_the_data():
    random = np.random.default_rng(0)
    first = random.standard_normal(500)
    inputs = torch.tensor(np.stack([first, first + 0.1 * random.standard_normal(500)], 1))
    inputs = (inputs - inputs.mean(0)) / inputs.std(0, correction=0)
    novelty = Novelty.fit(inputs)
    assert (novelty(inputs) < 1e-9).all()
    beyond = inputs.max(0).values + torch.tensor([3.0, 0.0])
    assert novelty(beyond[None]).item() >= 3.0
    # Both columns are within their ranges, and never were so together.
    apart = torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    assert novelty(apart).item() > 3.0
    assert novelty(100 * inputs[:5]).min() > 20
    twice = Novelty(2)
    twice.load_state_dict(novelty.state_dict())
    torch.testing.assert_close(twice(apart), novelty(apart))
    assert not math.isnan(novelty.radius.item())


def test_rows_in_any_order_count_alike():
    known, random = evidence(500)
    mark = torch.zeros(500, 1).double()
    mark[410:] = 1.0
    known = Evidence(mark, known.mean, known.emergent, known.spread, known.known)
    residual = torch.tensor(np.where(mark[:, 0] > 0, 5.0, 0.5) * random.standard_normal(500))
    scales = fit_residuals(known, residual).model(known).squared.mean(0).mean(-1).sqrt()
    assert scales[410:].mean().item() == pytest.approx(5.0, rel=0.3)
    assert scales[:410].mean().item() == pytest.approx(0.5, rel=0.3)


def test_known_variance_is_not_scaled_by_heavy_tails():
    known, random = evidence(800)
    found = fit_residuals(known, torch.tensor(random.standard_t(2.5, 800)), families=("student",))
    with_more = Evidence(
        known.inputs, known.mean, known.emergent, known.spread, torch.full((800,), 3.0).double()
    )
    before, after = (
        distributions([found.model(each)], np.eye(1)).var()[:, 0] for each in (known, with_more)
    )
    np.testing.assert_allclose(after - before, 3.0, rtol=1e-3)


def test_a_part_that_is_nothing_gains_nothing():
    known, random = evidence(300)
    none = torch.zeros(300).double()
    known = Evidence(known.inputs, known.mean, none, none, none)
    found = fit_residuals(known, torch.tensor(random.standard_normal(300)), families=("normal",))
    for name in ("emergent", "spread"):
        assert found.without[name] == pytest.approx(found.model.loss, abs=1e-6)


@pytest.mark.parametrize(("n", "d"), [(60, 40), (200, 50), (100, 10), (2000, 3)])
def test_new_rows_of_the_same_kind_are_inside(n, d):
    random = np.random.default_rng(0)
    novelty = Novelty.fit(torch.tensor(random.standard_normal((n, d))))
    new = novelty(torch.tensor(random.standard_normal((1000, d))))
    assert (new > 0).double().mean() < 0.07
    assert (novelty(10 * torch.ones(1, d)) > 5).all()


def test_equal_uncertainties_are_answered_all_or_none():
    wrong = np.zeros(10, bool)
    wrong[9] = True
    assert threshold_of_risk(np.full(10, 0.1), wrong, 0.05) == -np.inf
    assert threshold_of_risk(np.full(10, 0.1), wrong, 0.1) == 0.1
    assert threshold_of_risk(np.arange(10.0), wrong, 0.05) == 8.0
