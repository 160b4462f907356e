"""One contract for every way of storing a covariance: agree with the dense matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import covary
from covary import covariance, linalg
from covary.covariance import (
    Covariance,
    Diagonal,
    Full,
    LowRank,
    Selection,
    Shared,
    Tracked,
    register_value,
)
from covary.moments import Moments
from covary.testing import CovarianceContract
from covary.testing.covariances import diagonal, gate, rand

B, N, M = 5, 4, 3


def psd(batch: int) -> Tensor:
    root = torch.randn(batch, N, N, dtype=torch.float64)
    return root @ root.mT


def zero() -> Tensor:
    return torch.zeros(1, 1, dtype=torch.float64)


def exactly(cov: Covariance) -> Covariance:
    """The same, with the diagonal as the variances that activations take."""
    return replace(cov, estimate=cov.variance) if isinstance(cov, Tracked) else cov


def recipe(n: int = N, exact_width: int = 0) -> Tracked:
    """Where one starts, for n units."""
    start = covariance.start("tracked", Full.independent(rand(1, 1), n))
    assert isinstance(start, Tracked)
    return replace(start, exact_width=exact_width)


def weighted(exact_width: int = 0) -> Tracked:
    """One weight on 6 inputs, so that units share noise."""
    return recipe(6, exact_width).linear(torch.randn(N, 6, dtype=torch.float64))


def gated(cov: Tracked, batch: int = B) -> Tracked:
    gain = rand(batch, N)
    return cov.gate(gain, gain**2 * cov.estimate + rand(batch, N))


def deep(exact_width: int = 0) -> Covariance:
    """Two weights, with activation and noise between them."""
    before = gated(weighted(exact_width)).add_noise(0.1)
    return exactly(before.linear(torch.randn(N, N, dtype=torch.float64)))


# name -> a covariance with batch dimension 1 or B
CASES = {
    "isotropic": lambda: Full.independent(rand(1, 1), N),
    "independent, one": lambda: Full(None, rand(1, N)),
    "independent": lambda: Full(None, rand(B, N)),
    "diagonal, one": lambda: Diagonal(rand(1, N)),
    "diagonal": lambda: Diagonal(rand(B, N)),
    "full, one": lambda: Full(psd(1)),
    "full": lambda: Full(psd(B)),
    "full, noise added": lambda: Full(psd(B), rand(1, 1)),
    "gated, one": lambda: Full(psd(1), rand(1, N), gain=rand(1, N)),
    "gated, one matrix": lambda: Full(psd(1), rand(B, N), gain=rand(B, N)),
    "gated": lambda: Full(psd(B), rand(B, N), gain=rand(B, N)),
    "low rank, one": lambda: LowRank(rand(1, N, N)),
    "low rank": lambda: LowRank(rand(B, N, N)),
    "low rank, added": lambda: LowRank(rand(1, N, 2), rand(B, N)),
    "shared isotropic": lambda: Shared(Full.independent(rand(1, 1), N)),
    "shared full": lambda: Shared(Full(psd(1), rand(1, 1))),
    "shared gated": lambda: Shared(Full(psd(1), rand(1, N), gain=rand(1, N))),
    "tracked, start": recipe,
    "tracked, noise added": lambda: recipe().add_noise(0.2),
    "tracked, one weight": weighted,
    "tracked, gated, one": lambda: gated(weighted(), batch=1),
    "tracked, gated": lambda: gated(weighted()),
    "tracked, formed, one": lambda: weighted(exact_width=N),
    "tracked, formed": lambda: deep(exact_width=N),
    "tracked, formed and gated": lambda: gated(weighted(exact_width=N)),
    "tracked, deep": deep,
    "tracked, scaled": lambda: deep().scale(rand(B, N)).add_noise(0.3),
}


class TestCovariance(CovarianceContract):
    cases = CASES

    def after_linear(self, cov, matrix):
        # the approximation that this class stands for
        return torch.diag_embed(diagonal(matrix)) if isinstance(cov, Diagonal) else matrix

    def exact(self, cov):
        return exactly(cov)

    def rows(self, cov):
        return 1 if isinstance(cov, Shared) else B


def is_stored_as_variances(name: str) -> bool:
    """Whether ``variance`` of this case is the very tensor that is stored."""
    return any(word in name for word in ("isotropic", "independent", "diagonal"))


@pytest.mark.parametrize("name", [name for name in CASES if not is_stored_as_variances(name)])
def test_changing_variances_in_place_changes_nothing_else(name):
    torch.manual_seed(0)
    cov = CASES[name]()
    matrix, variance = cov.dense(), cov.variance
    kept = variance.clone()
    variance.mul_(3)
    torch.testing.assert_close(cov.variance, kept, rtol=1e-12, atol=0)
    assert torch.equal(cov.dense(), matrix)


def test_no_negative_variance_comes_out_of_cancellation():
    torch.manual_seed(0)
    root = torch.randn(50, 1, 3).expand(50, 2, 3) + 1e-5 * torch.randn(50, 2, 3)
    cov = Full(root @ root.mT, torch.zeros(1, 1)).linear(torch.tensor([[30.0, -30.0]]))
    assert (cov.matrix < 0).any(), "the case this test is about"
    assert (cov.variance >= 0).all()
    assert (cov.dense().diagonal(dim1=1, dim2=2) >= 0).all()
    activated = cov.gate(torch.ones(50, 1), torch.zeros(50, 1))
    assert (activated.variance >= 0).all()


def cancelled() -> Full:
    """In float32, the variance of a difference of units that are almost equal."""
    torch.manual_seed(0)
    root = torch.randn(50, 1, 3).expand(50, 2, 3) + 1e-5 * torch.randn(50, 2, 3)
    cov = Full(root @ root.mT).linear(torch.tensor([[30.0, -30.0]]))
    assert cov.matrix is not None
    assert (cov.matrix < 0).any(), "the case these tests are about"
    return cov


@pytest.mark.parametrize("factor", [torch.ones(1, 1), torch.full((50, 1), 2.0)], ids=["1", "B"])
def test_no_negative_variance_is_left_behind_a_scale(factor):
    for cov in (cancelled().scale(factor), cancelled().scale(factor).scale(factor)):
        assert (cov.variance >= 0).all()
        assert (diagonal(cov.dense()) >= 0).all()
        torch.testing.assert_close(diagonal(cov.dense()), cov.variance)
        torch.testing.assert_close(cov.add_noise(0.1).variance, cov.variance + 0.1)


@pytest.mark.parametrize(
    "layer",
    [
        covary.nn.BatchNorm1d(1).eval(),
        covary.nn.Rescale(torch.zeros(1), torch.ones(1)),
        covary.nn.Dropout(0.3).train(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_scale_leave_no_nan_where_weights_cancel(layer):
    out = layer(Moments(torch.ones(50, 1), cancelled()))
    assert not out.stddev.isnan().any()
    assert not out.entropy().isnan().any()


def test_no_negative_variance_comes_out_of_a_sweep():
    torch.manual_seed(0)
    root = torch.randn(50, 1, 3).expand(50, 2, 3) + 1e-5 * torch.randn(50, 2, 3)
    formed = Full(root @ root.mT, torch.zeros(1, 1))
    weight = torch.tensor([[30.0, -30.0]])
    assert (formed.quadratic(weight[None]) < 0).any(), "the case this test is about"
    cov = Tracked(formed, None, None, None, formed.variance).linear(weight)
    assert (cov.variance >= 0).all()
    assert (cov.variance_of(torch.tensor([0])) >= 0).all()
    assert (cov.gate(torch.ones(50, 1), torch.zeros(50, 1)).variance >= 0).all()


@pytest.mark.parametrize("name", CASES)
def test_many_samples_in_chunks_are_as_all_at_once(monkeypatch, name):
    torch.manual_seed(0)
    cov = CASES[name]()
    weight = torch.randn(M, N, dtype=torch.float64)
    at_once = cov.linear(weight).dense()
    monkeypatch.setattr(linalg, "_CHUNK_ELEMENTS", {"cpu": 2 * weight.numel()})
    monkeypatch.setattr(linalg, "_BLOCK", 3)
    torch.testing.assert_close(cov.linear(weight).dense(), at_once)
    with torch.no_grad():
        torch.testing.assert_close(cov.linear(weight).dense(), at_once)


def test_shared_takes_the_average_of_what_masks_make():
    torch.manual_seed(0)
    cov = Shared(Full(psd(1)))
    mask = (rand(B, N) > 0.5).double() * 2
    expected = gate(cov.dense().expand(B, N, N), mask).mean(0, keepdim=True)
    torch.testing.assert_close(cov.scale(mask).dense(), expected)


def test_unknown_name_lists_what_exists():
    with pytest.raises(ValueError, match="'fulll'; known are full, diagonal, shared, tracked"):
        covariance.start("fulll", Full.independent(zero(), N))


def test_full_needs_a_matrix_or_variances():
    with pytest.raises(TypeError, match="Full needs a matrix"):
        Full(None)


@register_value
@dataclass(frozen=True, eq=False, repr=False)
class Doubled(Covariance):
    """One from outside of the library: a full covariance, whose noise counts twice."""

    full: Covariance

    @classmethod
    def of(cls, inputs: Covariance) -> Doubled:
        return cls(Full(None, 2 * inputs.variance))

    @property
    def variance(self) -> Tensor:
        return self.full.variance

    def dense(self) -> Tensor:
        return self.full.dense()

    def linear(self, weight: Tensor) -> Doubled:
        return Doubled(self.full.linear(weight))

    def add_noise(self, var: float) -> Doubled:
        return Doubled(self.full.add_noise(2 * var))

    def gate(self, gain: Tensor, variance: Tensor) -> Doubled:
        return Doubled(self.full.gate(gain, variance))

    def scale(self, factor: Tensor) -> Doubled:
        return Doubled(self.full.scale(factor))

    def select(self, samples: Selection) -> Doubled:
        return Doubled(self.full.select(samples))


def test_a_network_may_hold_its_covariance_in_a_class_of_ones_own():
    torch.manual_seed(0)
    net = covary.mlp([6, 5, 4, 3], noise=0.3)
    x, rows = torch.randn(B, 6), torch.randn(2, 3)
    expected = covary.with_noise(net, 0.3 * 2**0.5)(x)
    for doubled in (
        covary.with_covariance(net, Doubled),
        nn.Sequential(covary.nn.Lift(0.3, Doubled), *list(net)[1:]),
    ):
        assert "covariance=Doubled" in repr(doubled)
        out = doubled(x)
        assert isinstance(out.cov, Doubled)
        torch.testing.assert_close(out.covariance_matrix, expected.covariance_matrix)
        torch.testing.assert_close(out.project(rows).variance, expected.project(rows).variance)
        torch.testing.assert_close(out[1:3].entropy(), expected.entropy()[1:3])


def test_classes_with_a_name_are_known_by_it():
    assert covary.nn.Lift(0.3, Tracked).covariance == "tracked"
    assert covary.mlp([4, 3, 2], covariance=Full)[0].covariance == "full"


@pytest.mark.parametrize("kind", [nn.Linear, Full(torch.eye(2)[None]), 3])
def test_what_is_no_covariance_is_refused(kind):
    with pytest.raises(ValueError, match=r"known are full, .* and subclasses of covary"):
        covary.nn.Lift(0.3, kind)
