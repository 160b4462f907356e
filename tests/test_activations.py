"""Moment activations against 50-digit references, integration, and what holds for any of them."""

from __future__ import annotations

import copy
import math
import pickle

import mpmath as mp
import pytest
import torch

import covary
from covary import activations
from covary.testing import ActivationContract
from tests import cases, reference

# (relative error where the value is 1e-8 or more, and where it is less)
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-11, 1e-11)}
# mpmath needs seconds for the integrals in these; the slow test takes every point for them, too.
EXPENSIVE = {"gelu", "probit", "erf"}


def assert_matches_reference(name: str, every: int) -> None:
    mu, var = cases.wide_grid(every)
    expected = [
        reference.closed_form(name, float(m), float(v)) for m, v in zip(mu, var, strict=True)
    ]
    for dtype, (tolerance, tail_tolerance) in TOLERANCES.items():
        out = cases.CLOSED_FORM[name](mu[None].to(dtype), var[None].to(dtype))
        assert all(torch.isfinite(value).all() for value in out)
        assert (out.variance >= 0).all()
        for quantity, values in zip(out._fields, out, strict=True):
            for i, value in enumerate(values[0].tolist()):
                true = expected[i][out._fields.index(quantity)]
                if abs(true) < 1e-30:
                    continue
                error = float(abs((mp.mpf(value) - true) / true))
                limit = tolerance if abs(true) >= 1e-8 else tail_tolerance
                where = f"{quantity} at mu={float(mu[i])}, var={float(var[i])} in {dtype}"
                assert error < limit, f"{where}: relative error {error}, true value {float(true)}"


@pytest.mark.parametrize("name", cases.CLOSED_FORM)
def test_closed_form_has_full_relative_accuracy(name):
    assert_matches_reference(name, every=5 if name in EXPENSIVE else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPENSIVE))
def test_closed_form_has_full_relative_accuracy_at_every_point(name):
    assert_matches_reference(name, every=1)


@pytest.mark.parametrize("name", cases.ACTIVATIONS)
@pytest.mark.parametrize(("mu", "var"), [(-1.3, 0.49), (0.4, 1.0), (0.02, 0.01)])
def test_moments_are_the_integrals_they_claim_to_be(name, mu, var):
    """Integration of the definitions knows none of the formulas that code and references use."""
    out = cases.ACTIVATIONS[name](
        torch.tensor([[mu]], dtype=torch.float64), torch.tensor([[var]], dtype=torch.float64)
    )
    mean, variance, gain = reference.integrated(name, mu, var)
    expected = [[[float(value)]] for value in (mean, variance, gain)]
    tolerance = 1e-9 if name in cases.QUADRATURE else 1e-10
    torch.testing.assert_close(
        torch.stack(out), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=1e-15
    )


class TestActivation(ActivationContract):
    cases = cases.ACTIVATIONS

    def gain_tolerance(self, name):
        return 1e-9 if name in cases.CLOSED_FORM else 1e-6

    def slope_error(self, name, dtype):
        # torch has 1 - (1 - tanh^2) for that of tanhshrink
        return torch.finfo(dtype).eps if name == "tanhshrink" else 1e-12

    def lost(self, name, mu, var):
        # What quadrature sums are values of h, each with its rounding error; and where torch goes
        # over to the identity, at 20, its softplus jumps by 2e-9.
        rounding = torch.finfo(mu.dtype).eps if name in cases.QUADRATURE else 0.0
        jump = 2e-9 if name == "softplus" else 0.0
        size = cases.ACTIVATIONS[name].function(mu).abs()
        if name == "tanhshrink":  # a difference of two of the size of x
            size = mu.abs() + 5 * var.sqrt()
        return 8 * rounding * size + jump + 1e-15


@pytest.mark.parametrize(
    ("name", "mu", "quantity"),
    [("gelu", -0.86637, 0), ("gelu", -1.68545, 1), ("leaky_relu", -1.7225, 0)],
)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_next_to_a_zero_the_error_is_small_relative_to_the_terms_that_cancel(
    name, mu, quantity, dtype
):
    mu = torch.tensor([[mu]]).to(dtype)
    out = cases.CLOSED_FORM[name](mu, torch.ones_like(mu))
    mean, _, gain = reference.closed_form(name, mu.item(), 1.0)
    found, true = ((out.mean, mean), (out.gain, gain))[quantity]
    terms = reference.size_of_terms(name, mu.item(), 1.0)[quantity]
    assert abs(true) < 1e-2 * terms, "not next to a zero"
    assert abs(found.item() - true) < TOLERANCES[dtype][0] * terms


@pytest.mark.parametrize("name", cases.QUADRATURE)
def test_quadrature_of_huge_means_and_variances_never_gives_nan(name):
    mu, var = torch.cartesian_prod(
        torch.tensor([s * 10.0**p for p in (0, 5, 10, 19, 26, 30) for s in (-1, 1)]),
        torch.tensor([1e-30, 1e-4, 1.0, 1e6, 1e30, 1e36]),
    ).unbind(1)
    out = cases.QUADRATURE[name](mu[None], var[None])
    assert all(torch.isfinite(value).all() for value in out)
    # Where mu swallows sigma, h is as linear as it gets: its variance and gain are those of h'(mu).
    far = ((mu.abs() > 1e4) & (var.sqrt() < 1e-9 * mu.abs()))[None]
    slope = cases.QUADRATURE[name].slope(mu[None])
    torch.testing.assert_close(out.gain[far], slope[far])
    torch.testing.assert_close(out.variance[far], (slope.square() * var)[far])


def _cube(x):
    return x * x * x


def test_what_overflows_is_infinite():
    mu, var = torch.tensor([[-1e30, 1e10, 1e30]]), torch.full((1, 3), 1e20)
    out = activations.quadrature(_cube)(mu, var)
    assert out.variance.tolist() == [[math.inf] * 3]
    assert not out.mean.isnan().any()
    assert not out.gain.isnan().any()


@pytest.mark.parametrize("name", cases.QUADRATURE)
@pytest.mark.parametrize("sigma", [1e-4, 1e-3, 1e-2, 0.05])
def test_quadrature_keeps_its_digits_at_small_variance(name, sigma):
    """In float32, where nodes and values next to mu = 10 have few digits left to differ in."""
    means = [-4.0, -1.0, 0.0, 0.5, 3.0, 10.0]
    mu, var = torch.tensor([means]), torch.full((1, len(means)), sigma**2)
    fine = cases.QUADRATURE[name](mu.double(), var.double())
    for quantity, value, expected in zip(
        fine._fields, cases.QUADRATURE[name](mu, var), fine, strict=True
    ):
        rtol = 2e-4 if quantity == "variance" else 1e-5
        atol = 1e-6 * sigma if quantity == "mean" else 1e-12
        torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", cases.QUADRATURE)
def test_node_by_node_is_the_same_as_all_at_once(name):
    mu, var = torch.randn(30, 300, dtype=torch.float64), torch.rand(1, 300, dtype=torch.float64)
    whole = cases.QUADRATURE[name](mu, var)
    rows = [cases.QUADRATURE[name](row[None], var) for row in mu]
    for quantity, value in zip(whole._fields, whole, strict=True):
        parts = torch.cat([getattr(row, quantity) for row in rows])
        torch.testing.assert_close(value, parts, rtol=1e-12, atol=1e-14)


def test_quadrature_is_exact_for_polynomials():
    mu, var = cases.grid()
    square = activations.quadrature(torch.square)(mu, var)
    torch.testing.assert_close(square.mean, mu**2 + var)
    torch.testing.assert_close(square.variance, 4 * mu**2 * var + 2 * var**2)
    torch.testing.assert_close(square.gain, 2 * mu)


def test_quadrature_sees_the_gain_of_a_jump_only_without_derivative():
    mu, var = torch.tensor([[0.3]]), torch.tensor([[1.0]])
    exact = activations.get("heaviside")(mu, var)
    step = activations.get("heaviside").function
    by_stein = activations.quadrature(step, smooth=False, nodes=128)(mu, var)
    torch.testing.assert_close(by_stein.gain, exact.gain, rtol=0.05, atol=0)
    torch.testing.assert_close(by_stein.mean, exact.mean, rtol=0.05, atol=0)


def test_quadrature_finds_the_derivative_itself():
    mu, var = cases.grid()
    automatic = activations.quadrature(torch.tanh)(mu, var)
    given = activations.quadrature(torch.tanh, derivative=activations.get("tanh").slope)(mu, var)
    torch.testing.assert_close(automatic.gain, given.gain)


def test_quadrature_keeps_float32_digits_at_small_variance():
    mu, var = torch.tensor([[0.5]]), torch.tensor([[1e-10]])
    out = activations.get("tanh")(mu, var)
    slope = 1 - math.tanh(0.5) ** 2
    torch.testing.assert_close(out.gain, torch.tensor([[slope]]))
    torch.testing.assert_close(out.variance, torch.tensor([[slope**2 * 1e-10]]), rtol=0.02, atol=0)


@pytest.mark.parametrize("unknown", ["swishy", ["swishy"]])
def test_unknown_name_lists_what_exists(unknown):
    with pytest.raises(ValueError, match=r"swishy'\]?; known are .*gelu.*tanh.*quadrature\(h\)"):
        activations.get(unknown)


def test_get_returns_an_activation_as_it_is():
    own = activations.quadrature(torch.sin)
    assert activations.get(own) is own
    assert repr(own) == "quadrature(sin)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 1}, "2 to 300 nodes, got 1"),
        ({"nodes": 400}, "2 to 300 nodes, got 400"),
        ({"smooth": False, "derivative": torch.cos}, "one or the other"),
    ],
)
def test_quadrature_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        activations.quadrature(torch.sin, **arguments)


def test_quadrature_refuses_what_is_no_function_or_has_parameters():
    with pytest.raises(TypeError, match="a function of one tensor, got 'tanh'"):
        activations.quadrature("tanh")
    with pytest.raises(ValueError, match="hide the parameters"):
        activations.quadrature(torch.nn.PReLU())


def test_leaky_relu_refuses_an_infinite_slope():
    with pytest.raises(ValueError, match="finite slope, got inf"):
        activations.leaky_relu(math.inf)


def test_an_activation_of_functions_of_a_module_pickles():
    own = activations.quadrature(_cube, name="cube")
    again = pickle.loads(pickle.dumps(own))
    for value, expected in zip(again(*cases.grid()), own(*cases.grid()), strict=True):
        assert torch.equal(value, expected)


def test_an_activation_of_lambdas_says_why_it_does_not_pickle():
    own = activations.quadrature(lambda x: x * x, name="mine")
    net = covary.mlp([3, 4, 2], activation=own)
    with pytest.raises(pickle.PicklingError, match=r"mine .*<lambda>.*`def` at the top level"):
        pickle.dumps(net)
    x = torch.randn(2, 3)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x).covariance_matrix, net(x).covariance_matrix)
    assert copy.copy(own) is copy.deepcopy(own) is own
