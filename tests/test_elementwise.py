"""The moment activations that models of all kinds need: against integration, and against torch."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import mpmath as mp
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import covary
from covary import activations
from tests import cases, reference

CLOSED = cases.PIECEWISE | cases.EXPONENTIAL | cases.WAVES | cases.GROWING
NEW = CLOSED | {name: cases.QUADRATURE[name] for name in cases.QUADRATURE}
# Errors of mean, variance and gain; the mean's relative to max(|mean|, sigma)
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-9}


def errors(found, expected, sigma: float) -> list[float]:
    scales = [max(abs(expected[0]), mp.mpf(sigma)), *(abs(value) for value in expected[1:])]
    values = [mp.mpf(value.item()) for value in found]
    return [
        float(abs(value - true) / scale) if scale > 1e-12 else 0.0
        for value, true, scale in zip(values, expected, scales, strict=True)
    ]


def moments(activation, mu: float, var: float, dtype: torch.dtype):
    return activation(torch.tensor([[mu]], dtype=dtype), torch.tensor([[var]], dtype=dtype))


# In and next to kinks, in between, and far off. All are float32 numbers, so are the variances.
POINTS = [
    (mu, var)
    for var in (2.0**-26, 2.0**-16, 0.25, 9.0)
    for mu in (-10.0, -3.0, -0.5 - 2.0**-10, 2.0**-9, 1.0, 6.0)
]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("var", sorted({var for _, var in POINTS}))
def test_moments_are_accurate(name, var):
    for mu in sorted({mu for mu, _ in POINTS}):
        expected = reference.integrated(name, mu, var)
        if name in cases.QUADRATURE and abs(expected[1]) < 1e-3 * var:
            continue  # all but constant: errors are those of rounding its values
        for dtype, limit in LIMITS.items():
            found = moments(NEW[name], mu, var, dtype)
            each = zip(found._fields, errors(found, expected, var**0.5), strict=True)
            for quantity, error in each:
                where = f"{quantity} of {name} at mu={mu}, var={var} in {dtype}"
                assert error < limit, f"{where}: relative error {error}, true values {expected}"


@pytest.mark.parametrize("name", cases.POSITIVE)
@pytest.mark.parametrize("mu", [0.001, 0.5, 7.0])
@pytest.mark.parametrize("ratio", [1e-4, 0.01, 0.1])
def test_functions_of_positive_numbers(name, mu, ratio):
    """Integrated from mu - 9 sigma on, as nothing else has any probability."""
    centre = mu + 1 if name == "log1p" else mu
    mu = float(torch.tensor(mu))
    var = float(torch.tensor((centre * ratio) ** 2))
    h, slope, _ = reference.FUNCTIONS[name]
    with mp.workdps(25):
        m, s = mp.mpf(mu), mp.sqrt(mp.mpf(var))
        path = [m + k * s for k in (-9, -6, -3, 0, 3, 6, 9)]

        def expect(f):
            return mp.quad(lambda x: f(x) * mp.npdf(x, m, s), path)

        mean = expect(h)
        expected = mean, expect(lambda x: (h(x) - mean) ** 2), expect(slope)
        size = abs(slope(m)) * s  # of what h(x) varies by
    for dtype, limit in LIMITS.items():
        found = moments(cases.POSITIVE[name], mu, var, dtype)
        assert max(errors(found, expected, float(size))) < 3 * limit


@pytest.mark.parametrize("name", cases.POSITIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_positive_numbers_are_finite_for_any_variance(name, dtype):
    mu, var = torch.cartesian_prod(
        torch.tensor([1e-6, 1e-3, 1.0, 1e3], dtype=dtype),
        torch.tensor([0.0, 1e-30, 1e-12, 1e-4, 1.0, 1e4], dtype=dtype),
    ).unbind(1)
    mu, var = mu[None].clone().requires_grad_(), var[None].clone().requires_grad_()
    out = cases.POSITIVE[name](mu, var)
    assert all(value.isfinite().all() for value in out)
    excess = out.variance - out.gain.square() * var
    assert (excess >= -1e-5 * out.variance).all()
    for gradient in torch.autograd.grad(sum(value.sum() for value in out), (mu, var)):
        assert not gradient.isnan().any()


def test_outside_their_domain_functions_give_what_torch_gives():
    mu, var = torch.tensor([[-1.0, 0.0]]), torch.full((1, 2), 0.01)
    assert activations.get("sqrt")(mu, var).mean.isnan().tolist() == [[True, False]]
    assert activations.get("log")(mu, var).mean[0, 0].isnan()
    assert activations.get("log")(mu, var).mean[0, 1] == -math.inf
    assert activations.get("reciprocal")(mu, var).mean[0, 1] == math.inf
    # but a reciprocal is an odd function
    above, below = (activations.get("reciprocal")(sign * mu[:, :1], var[:, :1]) for sign in (1, -1))
    assert above.mean == -below.mean
    assert above.gain == below.gain
    assert above.variance == below.variance


TORCH = {
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh_low": partial(F.hardtanh, min_val=-2.0, max_val=0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": partial(F.threshold, threshold=0.5, value=-0.25),
    "elu": F.elu,
    "elu_quarter": partial(F.elu, alpha=0.25),
    "celu_half": partial(F.celu, alpha=0.5),
    "selu": F.selu,
    "softplus_sharp": partial(F.softplus, beta=2.0, threshold=30.0),
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "square": torch.square,
    "cube": partial(torch.pow, exponent=3),
    "sqrt": torch.sqrt,
    "log": torch.log,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "power_1.5": partial(torch.pow, exponent=1.5),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_and_slopes_are_those_of_torch(name, dtype):
    """At kinks, too, where the slope is a matter of convention."""
    x = torch.tensor([-6.0, -3.0, -2.0, -1.0, -0.5, -0.25, -0.0, 0.0, 0.3, 0.5, 1.0, 3.0, 6.0, 7.5])
    if name in cases.POSITIVE:
        x = x[x > 0]
    x = x.to(dtype).requires_grad_()
    activation = (NEW | cases.POSITIVE)[name]
    plain = TORCH[name](x)
    torch.testing.assert_close(activation.function(x), plain, rtol=2e-6, atol=1e-7)
    (slope,) = torch.autograd.grad(plain.sum(), x)
    out = activation(x[None], torch.zeros(1, 1, dtype=dtype))
    assert torch.equal(out.mean[0], activation.function(x))
    torch.testing.assert_close(out.gain[0], slope, rtol=2e-6, atol=2e-7)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(cases.ACTIVATIONS | cases.GROWING)),
    st.floats(-15, 15),
    st.floats(-4, 0.5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_no_variance_is_less_than_linear_response(name, mu, log_sigma, dtype):
    """docs/theory.md, eq. (7)."""
    activation = (cases.ACTIVATIONS | cases.GROWING)[name]
    var = 10 ** (2 * log_sigma)
    out = moments(activation, mu, var, dtype)
    eps = torch.finfo(dtype).eps
    excess = (out.variance - out.gain.square() * torch.tensor(var, dtype=dtype)).item()
    # Rounding of variances; of values that quadrature sums; and torch's softplus jumps by 2e-9.
    size = abs(activation.function(torch.tensor(mu, dtype=dtype)).item()) + abs(mu)
    values = (8 * eps * size + 1e-7 * ("softplus" in name)) if name in cases.QUADRATURE else 0.0
    sigma = out.variance.item() ** 0.5
    assert excess >= -(16 * eps * out.variance.item() + 2 * values * sigma + values**2 + 1e-30)


@pytest.mark.parametrize("name", [*cases.ACTIVATIONS, *cases.GROWING, *cases.POSITIVE])
@pytest.mark.parametrize("rows", [1, 6])
def test_any_rank_and_a_variance_for_all_samples(name, rows):
    """Feature maps (B, C, H, W), large enough to go node by node and block by block."""
    activation = (cases.ACTIVATIONS | cases.GROWING | cases.POSITIVE)[name]
    torch.manual_seed(0)
    mu, var = torch.rand(6, 4, 30, 30) + 0.5, 0.01 + 0.1 * torch.rand(rows, 4, 30, 30)
    maps = activation(mu, var)
    for value in maps:
        assert value.shape == mu.shape
        assert value.dtype == torch.float32
    flat = activation(mu[:, 0, :2, 0], var[:, 0, :2, 0])
    for value, expected in zip(maps, flat, strict=True):
        torch.testing.assert_close(value[:, 0, :2, 0], expected, rtol=1e-5, atol=1e-6)
    alone = activation(mu[0, 0, 0, 0], var[0, 0, 0, 0])
    for value, expected in zip(maps, alone, strict=True):
        torch.testing.assert_close(value[0, 0, 0, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-1.0, 1.0), (0.0, 0.01)])
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_the_quick_response_of_a_clamp_is_its_moments(bounds, rows, dtype):
    """Images whose channels are last in memory, of which one is larger than a block."""
    torch.manual_seed(0)
    activation = activations.hardtanh(*bounds)
    mu = 5 * torch.randn(3, 20, 40, 41, dtype=dtype)
    mu = mu.to(memory_format=torch.channels_last)
    var = 1e-6 + 30 * torch.rand(rows, 20, 40, 41, dtype=dtype) ** 6
    mean, gain, excess = activation.respond(mu, var)
    exact = activation(mu.double(), var.double())
    sigma, limit = var.double().sqrt(), 100 * torch.finfo(dtype).eps
    assert ((mean - exact.mean).abs() / torch.maximum(sigma, mu.abs())).max() < limit
    assert (gain - exact.gain).abs().max() < limit
    expected = exact.variance - exact.gain**2 * var.double()
    assert ((excess - expected).abs() / var).max() < limit
    assert mean.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["relu6", "hardswish", "elu", "softsign", "mish", "sqrt"])
def test_vmap(name):
    mu, var = torch.rand(3, 5, 4) + 0.5, torch.rand(3, 1, 4) + 0.01
    activation = activations.get(name)
    stacked = torch.func.vmap(activation)(mu, var)
    for value, expected in zip(stacked, activation(mu, var), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", ["relu6", "hardshrink", "elu", "softsign", "mish", "sqrt"])
def test_compile_in_one_graph(name):
    activation = activations.get(name)
    mu, var = torch.rand(3, 4) + 0.5, torch.rand(1, 4) + 0.01
    compiled = torch.compile(lambda *args: activation(*args), backend="aot_eager", fullgraph=True)
    for value, expected in zip(compiled(mu, var), activation(mu, var), strict=True):
        torch.testing.assert_close(value, expected)
    meta = activation(mu.to("meta"), var.to("meta"))
    assert {value.device.type for value in meta} == {"meta"}


def test_leaky_relu_with_a_slope_per_channel():
    slopes = torch.tensor([0.25, -0.1, 1.5])
    mu, var = torch.randn(5, 3, 2, 2), torch.rand(1, 3, 2, 2)
    activation = activations.leaky_relu(slopes.reshape(3, 1, 1))
    out = activation(mu, var)
    for channel, slope in enumerate(slopes.tolist()):
        expected = activations.leaky_relu(slope)(mu[:, channel], var[:, channel])
        for value, one in zip(out, expected, strict=True):
            torch.testing.assert_close(value[:, channel], one)
    torch.testing.assert_close(activation.function(mu), F.prelu(mu, slopes))
    plain = activation(mu, torch.zeros(1, 3, 2, 2))
    torch.testing.assert_close(plain.mean, F.prelu(mu, slopes))
    again = pickle.loads(pickle.dumps(activation))
    assert torch.equal(again(mu, var).variance, out.variance)
    assert repr(activation) == "leaky_relu(slopes (3, 1, 1))"


@pytest.mark.parametrize(
    "make",
    [
        partial(activations.hardtanh, -2.0, 2.0),
        partial(activations.elu, 0.5),
        partial(activations.celu, 0.5),
        partial(activations.softplus, 2.0, 10.0),
        partial(activations.threshold, 0.1, 0.2),
        partial(activations.hardshrink, 0.3),
        partial(activations.softshrink, 0.3),
        partial(activations.power, 2.5),
        partial(activations.power, 3),
        partial(activations.leaky_relu, 0.3),
    ],
)
def test_equal_parameters_give_the_same_object_which_pickles(make):
    activation = make()
    assert make() is activation
    assert copy.deepcopy(activation) is activation
    again = pickle.loads(pickle.dumps(activation))
    mu, var = torch.rand(2, 3) + 0.5, torch.rand(1, 3) / 10
    for value, expected in zip(again(mu, var), activation(mu, var), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", [*activations.names(), *activations.functions()])
def test_every_name_gives_an_activation_of_that_name(name):
    found = activations.get(name)
    assert repr(found).startswith(name)
    pickle.dumps(found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(activations.hardtanh, 1.0, 1.0), "min_val < max_val, got 1.0 and 1.0"),
        (partial(activations.hardtanh, 0.0, math.inf), "finite bounds"),
        (partial(activations.elu, 0.0), "elu needs a finite alpha > 0, got 0.0"),
        (partial(activations.celu, -1.0), "celu needs a finite alpha > 0, got -1.0"),
        (partial(activations.softplus, 0.0), "finite beta > 0, got 0.0"),
        (partial(activations.softshrink, -1.0), "finite lambd >= 0, got -1.0"),
        (partial(activations.threshold, math.nan, 0.0), "finite numbers, got nan and 0.0"),
        (partial(activations.power, math.inf), "finite exponent, got inf"),
        (lambda: activations.get(activations.elu), r"did you mean elu\(\), called"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("exponent", [0, 1, 2, 4])
def test_whole_powers_are_exact(exponent):
    mu, var = cases.grid()
    out = activations.power(exponent)(mu, var)
    m, v = mu, var
    mean = {0: m**0, 1: m, 2: m**2 + v, 4: m**4 + 6 * m**2 * v + 3 * v**2}[exponent]
    gain = {0: 0 * m, 1: m**0, 2: 2 * m, 4: 4 * m**3 + 12 * m * v}[exponent]
    torch.testing.assert_close(out.mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.gain, gain, rtol=1e-11, atol=1e-11)


def _step_and_bend(x: Tensor) -> Tensor:
    return torch.where(x > 1, 2.0, F.relu(x))


def test_quadrature_that_is_told_of_kinks_and_jumps_is_accurate():
    relu = activations.quadrature(F.relu, kinks=[0.0])
    own = activations.quadrature(_step_and_bend, kinks=[1.0, 0.0], smooth=False)
    # A hardtanh and, above 1, a step
    for shape in ((1, 24), (500, 24)):
        mu, var = (value.expand(shape) for value in cases.grid())
        for value, expected in zip(relu(mu, var), activations.get("relu")(mu, var), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
        out = own(mu, var)
        bend, jump = (
            activations.hardtanh(0.0, 1.0)(mu, var),
            activations.get("heaviside")(mu - 1, var),
        )
        torch.testing.assert_close(out.mean, bend.mean + jump.mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out.gain, bend.gain + jump.gain, rtol=1e-9, atol=1e-11)


def test_a_network_of_them_is_described_by_its_moments():
    """A network with new activations in it, against a million samples."""
    torch.manual_seed(0)
    net = covary.mlp([4, 24, 24, 3], activation="hardswish", noise=0.3).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    means, covs = reference.errors_against_sampling(net, x)
    assert max(means) < 0.02
    assert max(covs) < 0.1
