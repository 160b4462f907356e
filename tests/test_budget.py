"""Budgets: parts add up to the variance, are never negative, and are what draws say of a source."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from covary.convert import Converted
from covary.sources import GaussianNoise, Relative, Rounding, UncertainWeights

pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
B, SEEDS = 4, (0, 1, 2)


class Residual(nn.Module):
    """(B, 6) to (B, 3): a value that is used twice, and a product."""

    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        x = x + self.drop(F.relu(self.inner(x)))
        return self.leave(x * torch.sigmoid(x))


class TwoInputs(nn.Module):
    """(B, 5) and (B, 4) to (B, 3)."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.leave = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        return self.leave(F.gelu(self.left(x) + self.right(y)))


def encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=batch_first)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2)
    )


class Case(NamedTuple):
    """A network, the shapes of its inputs (B, ...), and which of its weights vary."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    weights: tuple[str, ...] = ()
    batch_dim: int = 0


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(
            nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.Tanh(),
            nn.Linear(8, 3),
        ),
        ((B, 5),),
        ("3.weight",),
    ),
    "cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2),
            nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(16, 3),
        ),
        ((B, 1, 8, 8),),
        ("4.weight", "8.weight"),
    ),
    "transformer": Case(
        lambda: encoder(batch_first=True), ((B, 3, 8),), ("0.layers.0.linear1.weight",)
    ),
    "time first": Case(
        lambda: encoder(batch_first=False), ((B, 3, 8),), ("0.layers.0.linear1.weight",), 1
    ),
    "residual": Case(Residual, ((B, 6),), ("inner.weight",)),
    "two inputs": Case(TwoInputs, ((B, 5), (B, 4)), ("left.weight",)),
}  # fmt: skip
QUIET: dict[str, Any] = {"noise": 0.0, "dropout": False, "sources": None}
every_case = pytest.mark.parametrize("name", CASES)
every_seed = pytest.mark.parametrize("seed", SEEDS)


def network(case: Case, seed: int, *, weights: bool = True, **options: Any) -> Converted:
    """The converted network with noise, dropout, relative errors and weights that vary."""
    torch.manual_seed(seed)
    model = case.make().double().eval()
    drops = any(isinstance(each, nn.modules.dropout._DropoutNd) for each in model.modules())
    usual: dict[str, Any] = {"noise": 0.1, "dropout": drops, "sources": {"input": Relative(0.05)}}
    net = covary.convert(model, batch_dim=case.batch_dim, **usual | options)
    if weights:
        found = {path: uncertain(model.get_parameter(path)) for path in case.weights}
        net.posterior.replace(found, dict.fromkeys(found, 1.0), model, linearised=False)
    return net


def uncertain(weight: Tensor, share: float = 0.1) -> UncertainWeights:
    """Weights that vary by a share of their spread, in bases of their own."""
    flat = weight.detach().flatten(1)
    left, right = (torch.linalg.qr(torch.randn(n, n).to(flat))[0] for n in flat.shape)
    return UncertainWeights(torch.rand_like(flat) * (share * flat.std()) ** 2, left, right)


def inputs(case: Case, seed: int) -> tuple[covary.Moments, ...]:
    """Inputs with errors of their own, which differ by sample and by feature."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> covary.Moments:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return covary.Moments.of(x, std=0.2 * torch.rand(shape, generator=generator).double())

    return tuple(map(one, case.shapes))


@cache
def output(name: str, seed: int) -> covary.Moments:
    """What the network of a case gives."""
    case = CASES[name]
    given: covary.Moments = network(case, seed)(*inputs(case, seed))
    return given


@every_seed
@every_case
def test_parts_add_up_to_the_variance_and_none_is_negative(name, seed):
    out = output(name, seed)
    budget = out.budget()
    torch.testing.assert_close(budget.total, out.variance, rtol=1e-5, atol=0)
    assert all((part >= 0).all() for part in budget.values())
    assert {"input", "noise", "weights"} <= set(budget.by_kind())
    torch.testing.assert_close(budget.by_kind().total, out.variance, rtol=1e-5, atol=0)
    shares = torch.stack(list(budget.shares().values())).sum(0)
    torch.testing.assert_close(shares, torch.ones_like(shares))


@every_case
def test_a_budget_is_the_same_again(name):
    case, out = CASES[name], output(name, 0)
    first, second = out.budget(), network(case, 0)(*inputs(case, 0)).budget()
    assert list(first) == list(second)
    assert all(torch.equal(first[source], second[source]) for source in first)


@every_seed
@every_case
def test_parts_of_rows_add_up_to_their_variance(name, seed):
    out = output(name, seed)
    units = out.flat_mean.shape[1]
    rows = torch.randn(len(out), 2, units, generator=torch.Generator().manual_seed(seed)).double()
    for chosen in (rows, rows[0]):  # of each sample, or the same for all
        budget = out.budget(rows=chosen)
        torch.testing.assert_close(budget.total, out.project(chosen).variance, rtol=1e-5, atol=0)
        assert all((part >= 0).all() for part in budget.values())


@every_case
def test_a_budget_of_chosen_samples_is_that_part_of_all(name):
    out = output(name, 0)
    whole, some = out.budget(), out[[2, 0]].budget()
    for source, part in some.items():
        torch.testing.assert_close(part, whole[source][[2, 0]], rtol=1e-9, atol=0)


@every_seed
@every_case
def test_parts_of_the_covariance_add_up_and_are_covariances(name, seed):
    out = output(name, seed)
    budget, matrix = out.covariance_budget(), out.covariance_matrix
    torch.testing.assert_close(budget.total, matrix, rtol=1e-5, atol=1e-5 * matrix.abs().max())
    for part in budget.values():
        least = torch.linalg.eigvalsh(part)[:, 0]
        assert (least >= -1e-9 * matrix.abs().max()).all()


@every_seed
@every_case
def test_parts_of_features_add_up_to_that_of_the_input(name, seed):
    out = output(name, seed)
    budget = out.budget()
    for number, x in enumerate(inputs(CASES[name], seed), start=1):
        source = "input" if number == 1 else f"input#{number}"
        parts = out.budget(source)
        assert parts.shape == (*out.mean.shape, *x.mean.shape[1:])
        assert (parts >= 0).all()
        total = parts.flatten(out.mean.dim()).sum(-1)
        torch.testing.assert_close(total, budget[source], rtol=1e-5, atol=0)


@every_seed
def test_correlated_features_add_up_too(seed):
    case = CASES["mlp"]
    net, (x,) = network(case, seed, weights=False, **QUIET), inputs(case, seed)
    root = 0.2 * torch.randn(B, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
    out = net(covary.Moments.of(x.mean, cov=root @ root.mT))
    parts = out.budget("input").sum(-1)
    torch.testing.assert_close(parts, out.variance, rtol=1e-5, atol=0)


def test_what_does_not_vary_has_no_budget():
    net = network(CASES["mlp"], 0, weights=False, **QUIET)
    with pytest.raises(ValueError, match="Nothing varies here"):
        net(torch.zeros(B, 5).double()).budget()


def smooth() -> nn.Module:
    """A network in which small sources hardly meet: each adds what it adds alone."""
    return nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.05), nn.Linear(16, 16), nn.Softplus(),
        nn.Linear(16, 3),
    )  # fmt: skip


# Sources alone: what convert takes, whether inputs have errors, whether weights vary.
ALONE: dict[str, tuple[dict[str, Any], float, bool]] = {
    "input": ({}, 0.05, False),
    "noise": ({"noise": {"1": 0.05, "4": 0.05}}, 0.0, False),
    "dropout": ({"dropout": True}, 0.0, False),
    "relative": ({"sources": {"3": Relative(0.05)}}, 0.0, False),
    "rounding": ({"sources": {"3": Rounding(0.1)}}, 0.0, False),
    "entering": ({"sources": {"3": GaussianNoise(0.05)}}, 0.0, False),
    "weights": ({}, 0.0, True),
}


def test_each_part_is_what_draws_of_that_source_alone_say():
    """Of all sources at once, each part, against 4,000 draws of a network with it alone."""
    case = Case(smooth, ((B, 5),), ("3.weight",))
    x = torch.randn(B, 5, generator=torch.Generator().manual_seed(0)).double()
    every = {"noise": {"1": 0.05, "4": 0.05}, "dropout": True, "sources": {"3": Relative(0.05)}}
    out = network(case, 0, **every)(covary.Moments.of(x, std=0.05))
    budget = out.budget()
    kinds = dict(budget.by_kind()) | {"relative": budget["noise at 3"]}
    kinds["noise"] = budget["noise at 1"] + budget["noise at 4"]
    for name in ("input", "noise", "dropout", "relative", "weights"):
        drawn = variance_of_draws(name, case, x)
        ratio = (kinds[name].sum() / drawn.sum()).item()
        assert 0.9 < ratio < 1.1, f"{name}: {ratio:.3f} of the variance of draws"


@pytest.mark.parametrize("name", ["rounding", "entering"])
def test_a_source_at_a_module_is_what_draws_say(name):
    case = Case(smooth, ((B, 5),))
    x = torch.randn(B, 5, generator=torch.Generator().manual_seed(0)).double()
    options, _, _ = ALONE[name]
    budget = network(case, 0, **QUIET | options)(x).budget()
    assert list(budget) == ["noise at 3"]
    ratio = (budget.total.sum() / variance_of_draws(name, case, x).sum()).item()
    assert 0.9 < ratio < 1.1


def variance_of_draws(name: str, case: Case, x: Tensor) -> Tensor:
    """(B, 3) variances of draws of a network with this source alone."""
    options, std, has_weights = ALONE[name]
    net = network(case, 0, weights=has_weights, **QUIET | options)
    many = x.repeat(4000, 1)
    given = covary.Moments.of(many, std=std) if std else many
    drawn = net.draw(given, generator=torch.Generator().manual_seed(1))
    return drawn.view(4000, len(x), -1).var(0)
