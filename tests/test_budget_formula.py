"""Budgets: parts of a variance against the formula written out, and against each source alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import covary
from covary.sources import GaussianNoise, Relative, Rounding

B, N, HIDDEN = 3, 4, 30


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2)).double().eval()


def inputs(count: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(512, N, dtype=torch.float64, generator=generator)[:count]


def tracked(std: float | torch.Tensor | None = None, **options) -> covary.Moments:
    """Outputs for the first inputs, with variances measured on all of them."""
    net = covary.convert(network(), variances="propagated", **options)
    x = inputs(512) if std is None else covary.Moments.of(inputs(512), std=std)
    covary.track(net, x, samples=512, progress=False)
    return net(x[:B])


def test_shares_in_the_excess_are_those_of_equation_41():
    """One hidden layer: the sources before it are errors of the input and noise of the layer."""
    model, x, std = network(), inputs(), torch.tensor([0.5, 0.1, 0.8, 0.3]).double()
    found = tracked(std, noise={"": 0.4, "input": 0.0}).budget()
    first, last = model[0].weight, model[2].weight
    arriving = first.square() @ std.square()  # (HIDDEN,) of the input; the noise adds 0.16
    _, variance, gain = covary.activations.get("relu")(model[0](x), arriving + 0.16)
    excess = variance - gain.square() * (arriving + 0.16)
    own = gain[:, None] * last[None]  # (B, 2, HIDDEN) rows before the nonlinearity
    rest = last.square() * excess[:, None]
    direct = ((own @ first) * std).square().sum(-1)
    share = (rest * (arriving / (arriving + 0.16))).sum(-1)
    # The direct part is exact but for what draws know of variances; signs know shares roughly.
    expected = direct + share
    assert (share / expected).max() > 0.02, "there is something to be shared out"
    torch.testing.assert_close(found["input"], expected.detach(), rtol=0.05, atol=0)
    noise = (0.16 * own.square() + rest * (0.16 / (arriving + 0.16))[None, None]).sum(-1)
    torch.testing.assert_close(found["noise at 1"], noise.detach(), rtol=0.05, atol=0)


@pytest.mark.parametrize("size", [0.005, 0.3])
def test_parts_are_close_to_what_each_source_gives_alone(size):
    """Little variance: nonlinearities add little, unless a kink is near. More: sources mix."""
    sources = {
        "input": {"sources": {"input": Relative(size)}},
        "noise at 0": {"sources": {"0": [GaussianNoise(size), Rounding(size)]}},
        "noise at 1": {"sources": {"1": GaussianNoise(size)}},
    }
    every = {path: source for each in sources.values() for path, source in each["sources"].items()}
    whole = tracked(noise=0.0, sources=every)
    found = whole.budget()
    torch.testing.assert_close(found.total, whole.variance)
    for name, source in sources.items():
        alone = tracked(noise=0.0, **source).variance
        torch.testing.assert_close(found[name], alone, rtol=0.1 if size < 0.1 else 0.35, atol=0)


def test_parts_are_close_to_draws_of_each_source_alone():
    x = covary.Moments.of(inputs(), std=0.05)
    generator = torch.Generator().manual_seed(1)
    quiet = covary.convert(network(), noise=0.0)
    loud = covary.convert(network(), noise={"": 0.05, "input": 0.0})
    found = tracked(0.05, noise={"": 0.05, "input": 0.0}).budget()
    for net, given, name in ((quiet, x, "input"), (loud, x.mean, "noise at 1")):
        drawn = torch.stack([net.draw(given, generator=generator) for _ in range(4000)])
        torch.testing.assert_close(found[name], drawn.var(0), rtol=0.1, atol=0)


def test_parts_of_a_difference_and_of_a_covariance_add_up():
    out = tracked(0.2, noise=0.1)
    rows = torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(out.budget(rows=rows).total, out.project(rows).variance)
    parts = out.covariance_budget()
    torch.testing.assert_close(parts.total, out.covariance_matrix)
    for part in parts.values():
        assert (torch.linalg.eigvalsh(part) >= -1e-9).all()


class Squares(nn.Module):
    """Products of a value and itself, with either sign, beside a nonlinearity of another input."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a * -a + b.relu(), a * (2 * a) + b.relu()], 1)


def test_both_factors_of_a_product_have_half_of_its_excess():
    """Correlated factors neither cancel nor count twice."""
    zeros = torch.zeros(400, 1, dtype=torch.float64)
    a, b = covary.Moments.of(zeros + 0.1, std=0.5), covary.Moments.of(zeros, std=1.0)
    net = covary.convert(Squares().eval(), noise=0.0, variances="propagated")
    covary.track(net, (a, b), samples=400, progress=False)
    found = net(a, b).budget()
    squared = 4 * 0.01 * 0.25 + 2 * 0.25**2  # the variance of the square of a
    expected = torch.tensor([[squared, 4 * squared]], dtype=torch.float64).expand(400, 2)
    torch.testing.assert_close(found["input"], expected, rtol=0.2, atol=0)
    relu = torch.full((400, 2), 0.5 - 0.5 / torch.pi, dtype=torch.float64)
    torch.testing.assert_close(found["input#2"], relu, rtol=0.2, atol=0)
