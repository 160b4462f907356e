"""Derivatives of moment activations, above all where a mean is exactly 0.

Closed forms are written with |mu| and relu(mu), whose derivatives at 0 are a matter of convention;
what is made of them is smooth for var > 0, and so must be its derivatives.
"""

from __future__ import annotations

import mpmath as mp
import pytest
import torch
from torch import Tensor, nn

import covary
from tests import cases, reference

# Where the mean is exactly 0, of either sign, next to it, and where mu / sigma underflows to 0.
MEANS = [0.0, -0.0, 1e-320, -1e-320, 1e-9, -1e-9, 0.3, -0.7, 1.0, -3.0]
VARIANCES = [1e-4, 0.3, 1.0, 9.0]


def points(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """All pairs of these, (1, N) each, that take gradients."""
    mu, var = torch.cartesian_prod(
        torch.tensor(MEANS, dtype=dtype), torch.tensor(VARIANCES, dtype=dtype)
    ).unbind(1)
    return mu[None].clone().requires_grad_(), var[None].clone().requires_grad_()


def derivatives(name: str, mu: Tensor, var: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of mean, variance and gain, each by mu and by var, by automatic differentiation."""
    out = cases.SMOOTHED[name](mu, var)
    found = []
    for value in out:
        grads = torch.autograd.grad(
            value.sum(), (mu, var), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        found.append((grads[0], grads[1]))
    return found


def central_difference(f, x: Tensor, step: Tensor) -> Tensor:
    """The derivative of an elementwise f, up to step^4."""
    near, far = f(x + step) - f(x - step), f(x + 2 * step) - f(x - 2 * step)
    return (8 * near - far) / (12 * step)


@pytest.mark.parametrize("name", cases.SMOOTHED)
def test_derivatives_are_those_of_central_differences(name):
    mu, var = points()
    found = derivatives(name, mu, var)
    mu, var = mu.detach(), var.detach()
    activation = cases.SMOOTHED[name]
    for i, quantity in enumerate(("mean", "variance", "gain")):
        by_mu = central_difference(lambda m: activation(m, var)[i], mu, 2e-3 * var.sqrt())  # noqa: B023
        by_var = central_difference(lambda v: activation(mu, v)[i], var, 2e-3 * var.clamp(max=1))  # noqa: B023
        for wrt, value, expected, scale in (
            ("mu", found[i][0], by_mu, var.sqrt()),
            ("var", found[i][1], by_var, var.clamp(max=1)),
        ):
            # Differences of values that are right to 1e-15, and of those alone, have that error.
            size = torch.maximum(
                activation(mu, var)[i].abs(), torch.ones_like(var) if i == 2 else var
            )
            rounding = 1e-12 * size / scale
            error = (value - expected).abs() - rounding
            limit = 1e-8 * expected.abs() + 1e-10
            assert (error <= limit).all(), f"{quantity} by {wrt} of {name}: {error.max()}"


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "leaky_relu_half", "heaviside", "gelu"])
@pytest.mark.parametrize("var", [0.3, 4.0])
def test_derivatives_at_zero_have_full_accuracy(name, var):
    """Against differences in 120-digit arithmetic, in float64 and in float32."""
    with mp.workdps(60):
        step = mp.mpf(10) ** -12

        def difference(i: int, dmu: int, dvar: int) -> float:
            above = reference.closed_form(name, dmu * step, mp.mpf(var) + dvar * step)[i]
            under = reference.closed_form(name, -dmu * step, mp.mpf(var) - dvar * step)[i]
            return float((above - under) / (2 * step))

        expected = torch.tensor(
            [[difference(i, 1, 0), difference(i, 0, 1)] for i in range(3)], dtype=torch.float64
        )
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for zero in (0.0, -0.0):
            mu = torch.tensor([[zero]], dtype=dtype, requires_grad=True)
            at = torch.tensor([[var]], dtype=dtype, requires_grad=True)
            found = torch.tensor(derivatives(name, mu, at), dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", cases.SMOOTHED)
def test_second_derivatives_at_zero(name):
    mu = torch.tensor([[0.0, -0.0, 0.4]], dtype=torch.float64, requires_grad=True)
    var = torch.tensor([[0.5, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    activation = cases.SMOOTHED[name]
    assert torch.autograd.gradcheck(activation, (mu, var))
    assert torch.autograd.gradgradcheck(activation, (mu, var))


@pytest.mark.parametrize("name", ["relu", "heaviside", "gelu", "probit", "leaky_relu"])
def test_zero_weights_get_the_gradient_of_the_smooth_function(name):
    """With zero weights and biases, and zero inputs, every mean in the network is exactly 0."""
    net = covary.mlp([3, 3, 2], activation=name, covariance="full", noise=0.4).double()
    parameters = [torch.zeros_like(p).requires_grad_() for p in net.parameters()]
    # Else the variance does not depend on the first weight at all, to first order.
    parameters[0].data.fill_(0.3)
    parameters[2].data.fill_(0.5)
    names = [name for name, _ in net.named_parameters()]
    x = torch.zeros(1, 3, dtype=torch.float64)

    def outputs(*values: Tensor) -> tuple[Tensor, Tensor]:
        with covary.supervise_covariance():
            out = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))
            return out.mean, out.covariance_matrix

    assert torch.autograd.gradcheck(outputs, parameters)
    (by_bias,) = torch.autograd.grad(outputs(*parameters)[0].sum(), parameters[1])
    assert (by_bias.abs() > 1e-3).all()
    zeros = [torch.zeros_like(p).requires_grad_() for p in parameters]
    assert torch.autograd.gradcheck(outputs, zeros)


def test_batch_norm_at_initialisation_passes_gradients_on():
    """A batch of equal inputs is normalised to means of exactly 0."""
    net = covary.mlp([4, 8, 2], activation="relu", batch_norm=True, noise=0.3).double()
    x = torch.ones(4, 4, dtype=torch.float64)  # a mean over 4 has no rounding error
    with covary.supervise_covariance():
        out = net(x)
    out.mean.sum().backward()
    norm = next(layer for layer in net if isinstance(layer, covary.nn.BatchNorm1d))
    weight = net.get_submodule("linear2").get_parameter("weight")
    # The slope of the mean at 0 is 1/2 whatever the variance is.
    torch.testing.assert_close(norm.bias.grad, 4 * 0.5 * weight.sum(0))


def test_second_derivative_of_smuc_at_zero():
    """SMUC computes the gain again where a second derivative is asked for: phi(0) / sigma."""
    layers = nn.Sequential(covary.nn.Lift(0.5), covary.nn.Activation("relu"))
    x = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layers(x).mean.sum(), x, create_graph=True)
    torch.testing.assert_close(slope, torch.full_like(x, 0.5))
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    expected = float(mp.npdf(0) / mp.mpf(0.5))
    torch.testing.assert_close(curvature, torch.full_like(x, expected))


@pytest.mark.parametrize("name", cases.SMOOTHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_at_zero_are_finite_as_the_variance_vanishes(name, dtype):
    var = torch.tensor([[0.0, 1e-44, 1e-36, 1e-30, 1e-12, 1e-4]], dtype=dtype, requires_grad=True)
    mu = torch.zeros_like(var).requires_grad_()
    out = cases.SMOOTHED[name](mu, var)
    assert not torch.stack(out).isnan().any()
    for gradient in torch.autograd.grad((out.mean + out.variance).sum(), (mu, var)):
        assert not gradient.isnan().any()
