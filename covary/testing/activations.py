"""The contract of a moment activation: moments of h(x) for x ~ N(mu, var), at any mu and var."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.testing import assert_close

from covary.activations import MomentActivation
from covary.testing.contract import Contract

_MEANS = [0, 1e-4, 0.03, 0.3, 0.77, 1, 1.5, 2.2, 3, 4, 5, 6.3, 8, 10, 12, 20, 35, 50]
_SIGMAS = [1e-6, 1e-4, 5e-4, 1e-2, 0.1, 0.2, 0.5, 1, 2, 3.3, 5, 8, 10, 30, 100, 1e3]
_DTYPES = (torch.float32, torch.float64)


class ActivationContract(Contract):
    """Moments against integration and against each other, in float32 and float64.

    For activations that are the moments of a function h of any input that grows no faster than
    linearly; not for spiking neurons.

    Attributes:
        cases: name -> the moment activation.
        huge: means that must give neither NaN nor infinity, at variances up to 1e6.
    """

    cases: ClassVar[Mapping[str, MomentActivation]] = {}
    huge: ClassVar[Sequence[float]] = (-1e20, -1e10, -1e4, 1e4, 1e10, 1e20)

    def gain_tolerance(self, name: str) -> float:
        """Relative error of the gain as the derivative of the mean, in float64."""
        return 1e-6

    def slope_error(self, name: str, dtype: torch.dtype) -> float:
        """Absolute error of the slope."""
        return torch.finfo(dtype).eps

    def lost(self, name: str, mu: Tensor, var: Tensor) -> Tensor:
        """What rounding may take from the standard deviation."""
        return 8 * torch.finfo(mu.dtype).eps * self.cases[name].function(mu).abs() + 1e-15

    def test_moments_are_the_integrals_they_claim_to_be(self, name: str) -> None:
        """Sums over 48,000 points know none of the formulas; jumps cost them a few 1e-4."""
        activation = self.cases[name]
        y = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
        weight = torch.exp(-(y**2) / 2) * (24 / 48_000) / math.sqrt(2 * math.pi)
        for mu, var in ((-1.3, 0.49), (-0.2, 4.0), (0.4, 1.0), (3.0, 0.01)):
            out = activation(*(torch.tensor([[x]], dtype=torch.float64) for x in (mu, var)))
            h = activation.function(mu + math.sqrt(var) * y)
            mean = (weight * h).sum()
            variance = (weight * (h - mean) ** 2).sum()
            gain = (weight * (h - mean) * y).sum() / math.sqrt(var)
            for found, expected in zip(out, (mean, variance, gain), strict=True):
                assert_close(found, expected.expand(1, 1), rtol=1e-3, atol=2e-4)

    def test_gain_is_the_slope_of_the_mean(self, name: str) -> None:
        mu, var = grid(requires_grad=True)
        out = self.cases[name](mu, var)
        (slope,) = torch.autograd.grad(out.mean.sum(), mu)
        assert_close(slope, out.gain, rtol=self.gain_tolerance(name), atol=1e-12)

    def test_variance_exceeds_linear_response(self, name: str) -> None:
        """docs/theory.md, eq. (7): why activated covariances are positive semidefinite."""
        for dtype, tolerance in zip(_DTYPES, (1e-4, 1e-11), strict=True):
            mu, var = (value[None].to(dtype) for value in wide_grid())
            out = self.cases[name](mu, var)
            assert (out.variance >= 0).all()
            response = out.gain.abs() * var.sqrt() * (1 - tolerance)
            assert (out.variance.sqrt() >= response - self.lost(name, mu, var)).all()

    def test_respond_is_the_same(self, name: str) -> None:
        """Mean and gain, and an excess that is never negative."""
        mu, var = grid()
        out = self.cases[name](mu, var)
        with torch.no_grad():
            found = self.cases[name].respond(mu, var)
        assert_close(found.mean, out.mean, rtol=1e-7, atol=1e-9)
        assert_close(found.gain, out.gain, rtol=1e-7, atol=1e-9)
        assert (found.excess >= 0).all()
        assert_close(found.excess, out.variance - out.gain**2 * var, rtol=1e-6, atol=1e-9)

    def test_without_variance_it_is_the_function(self, name: str) -> None:
        """Exactly h(mu), 0 and h'(mu)."""
        activation = self.cases[name]
        for dtype in _DTYPES:
            means = [[-50.0, -1.0, -1e-3, 0.0, 1e-3, 0.7, 50.0]]
            mu = torch.tensor(means, dtype=dtype, requires_grad=True)
            out = activation(mu, torch.zeros_like(mu))
            plain = activation.function(mu)
            assert torch.equal(out.mean, plain)
            assert torch.equal(out.variance, torch.zeros_like(mu))
            assert torch.equal(out.gain, activation.slope(mu))
            if plain.requires_grad:
                (slope,) = torch.autograd.grad(plain.sum(), mu)
                assert_close(out.gain, slope, rtol=2e-5, atol=self.slope_error(name, dtype))

    def test_huge_inputs_give_no_nan(self, name: str) -> None:
        for dtype in _DTYPES if self.huge else ():
            mu, var = _pairs(self.huge, [0.0, 1.0, 1e6], dtype)
            out = self.cases[name](mu, var)
            assert all(torch.isfinite(value).all() for value in out)
            for gradient in torch.autograd.grad(torch.stack(out).sum(), (mu, var)):
                assert torch.isfinite(gradient).all()

    def test_gradients_are_numbers_however_small_the_variance(self, name: str) -> None:
        """Gradients of mean, variance and gain^2 var; a gain itself may reach 1 / sigma."""
        variances = [0.0, 1e-40, 1e-36, 1e-30, 1e-20, 1e-9, 1.0, 1e6]
        for dtype in _DTYPES:
            mu, var = _pairs([-50.0, -1.0, 0.0, 1.0, 50.0], variances, dtype)
            out = self.cases[name](mu, var)
            used = out.mean + out.variance + out.gain * out.gain.detach() * var.detach()
            for gradient in torch.autograd.grad(used.sum(), (mu, var)):
                assert not gradient.isnan().any()

    def test_one_variance_for_the_batch_broadcasts(self, name: str) -> None:
        mu, var = torch.randn(5, 3), torch.rand(1, 3)
        both = (self.cases[name](mu, each) for each in (var, var.expand(5, 3)))
        for shared, expanded in zip(*both, strict=True):
            assert shared.shape == (5, 3)
            assert_close(shared, expanded)


def grid(*, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Moderate mu and var > 0, float64, (1, N) each."""
    means, variances = [-3.0, -1.1, -0.2, 0.3, 0.9, 2.5], [0.01, 0.3, 1.0, 4.0]
    mu, var = _pairs(means, variances, torch.float64)
    return mu.detach().requires_grad_(requires_grad), var.detach().requires_grad_(requires_grad)


def wide_grid(every: int = 1) -> tuple[Tensor, Tensor]:
    """mu in [-50, 50] and sigma in [1e-6, 1e3], with 0: float64 tensors of float32 numbers, (N,).

    All pairs, or every so many of them (a step that does not divide the rows).
    """
    means = torch.tensor(sorted({sign * mean for mean in _MEANS for sign in (-1, 1)}))
    variances = torch.tensor([0.0, *(sigma**2 for sigma in _SIGMAS)])
    # mu / sigma = 1e5, where E[x^2] - E[x]^2 is nothing but rounding error in float32
    pairs = torch.cat([torch.cartesian_prod(means, variances), torch.tensor([[50.0, 2.5e-7]])])
    mu, var = pairs[::every].double().unbind(1)
    return mu, var


def _pairs(
    means: Sequence[float], variances: Sequence[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """All pairs, (1, N) each, that take gradients."""
    mu, var = torch.cartesian_prod(
        torch.tensor(means, dtype=dtype), torch.tensor(variances, dtype=dtype)
    ).unbind(1)
    return mu[None].clone().requires_grad_(), var[None].clone().requires_grad_()
