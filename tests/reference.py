"""Brute force: what covary computes cleverly, computed stupidly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import torch
from torch import Tensor, nn

import covary

Number = Any  # mpmath has no types


def step(x: Number) -> Number:
    return mp.mpf(1) if x >= 0 else mp.mpf(0)


def relu(x: Number) -> Number:
    return max(x, mp.mpf(0))


def leaky(slope: float) -> Callable[[Number], Number]:
    exact = mp.mpf(slope)
    return lambda x: x if x > 0 else exact * x


def gelu(x: Number) -> Number:
    return x * mp.ncdf(x)


def gelu_tanh(x: Number) -> Number:
    return x / (1 + mp.exp(-mp.sqrt(8 / mp.pi) * (x + mp.mpf("0.044715") * x**3)))


def gelu_tanh_slope(x: Number) -> Number:
    s = 1 / (1 + mp.exp(-mp.sqrt(8 / mp.pi) * (x + mp.mpf("0.044715") * x**3)))
    return s + x * s * (1 - s) * mp.sqrt(8 / mp.pi) * (1 + 3 * mp.mpf("0.044715") * x * x)


def clamp(low: float, high: float) -> Callable[[Number], Number]:
    return lambda x: min(max(x, mp.mpf(low)), mp.mpf(high))


def inside(low: float, high: float) -> Callable[[Number], Number]:
    return lambda x: mp.mpf(1) if low < x < high else mp.mpf(0)


def outside(x: Number) -> Number:
    return mp.mpf(1) if abs(x) > 0.5 else mp.mpf(0)


Entry = tuple[Callable[[Number], Number], Callable[[Number], Number], list[float]]


def elu(scale: float | str, alpha: float | str, rate: float) -> Entry:
    with mp.workdps(30):
        c, a, r = mp.mpf(scale), mp.mpf(alpha), mp.mpf(rate)
    return (
        lambda x: c * (x if x > 0 else a * mp.expm1(r * x)),
        lambda x: c * (mp.mpf(1) if x > 0 else a * r * mp.exp(r * x)),
        [0],
    )


# h, its derivative, and the points where either is not smooth
FUNCTIONS: dict[str, Entry] = {
    "heaviside": (step, lambda x: mp.mpf(0), [0]),
    "relu": (relu, step, [0]),
    "identity": (lambda x: x, lambda x: mp.mpf(1), []),
    "leaky_relu": (leaky(0.01), lambda x: mp.mpf(1) if x > 0 else mp.mpf(0.01), [0]),
    "leaky_relu_half": (leaky(0.5), lambda x: mp.mpf(1) if x > 0 else mp.mpf(0.5), [0]),
    "gelu": (gelu, lambda x: mp.ncdf(x) + x * mp.npdf(x), []),
    "probit": (mp.ncdf, mp.npdf, []),
    "erf": (mp.erf, lambda x: 2 / mp.sqrt(mp.pi) * mp.exp(-x * x), []),
    "tanh": (mp.tanh, lambda x: mp.sech(x) ** 2, []),
    "sigmoid": (
        lambda x: 1 / (1 + mp.exp(-x)),
        lambda x: mp.exp(-x) / (1 + mp.exp(-x)) ** 2,
        [],
    ),
    "silu": (
        lambda x: x / (1 + mp.exp(-x)),
        lambda x: (1 + mp.exp(-x) * (1 + x)) / (1 + mp.exp(-x)) ** 2,
        [],
    ),
    "softplus": (lambda x: mp.log1p(mp.exp(x)), lambda x: 1 / (1 + mp.exp(-x)), []),
    "softplus_sharp": (
        lambda x: mp.log1p(mp.exp(2 * x)) / 2,
        lambda x: 1 / (1 + mp.exp(-2 * x)),
        [],
    ),
    "mish": (
        lambda x: x * mp.tanh(mp.log1p(mp.exp(x))),
        lambda x: (
            mp.tanh(mp.log1p(mp.exp(x))) + x * mp.sech(mp.log1p(mp.exp(x))) ** 2 / (1 + mp.exp(-x))
        ),
        [],
    ),
    "logsigmoid": (lambda x: -mp.log1p(mp.exp(-x)), lambda x: 1 / (1 + mp.exp(x)), []),
    "gelu_tanh": (gelu_tanh, gelu_tanh_slope, []),
    "tanhshrink": (lambda x: x - mp.tanh(x), lambda x: mp.tanh(x) ** 2, []),
    "softsign": (lambda x: x / (1 + abs(x)), lambda x: 1 / (1 + abs(x)) ** 2, [0]),
    "relu6": (clamp(0, 6), inside(0, 6), [0, 6]),
    "hardtanh": (clamp(-1, 1), inside(-1, 1), [-1, 1]),
    "hardtanh_low": (clamp(-2, 0.5), inside(-2, 0.5), [-2, 0.5]),
    "hardsigmoid": (
        lambda x: clamp(0, 6)(x + 3) / 6,
        lambda x: inside(-3, 3)(x) / 6,
        [-3, 3],
    ),
    "hardswish": (
        lambda x: x * clamp(0, 6)(x + 3) / 6,
        lambda x: step(x - 3) + inside(-3, 3)(x) * (2 * x + 3) / 6,
        [-3, 3],
    ),
    "hardshrink": (lambda x: x * outside(x), outside, [-0.5, 0.5]),
    "softshrink": (lambda x: x - clamp(-0.5, 0.5)(x), outside, [-0.5, 0.5]),
    "threshold": (lambda x: x if x > 0.5 else mp.mpf(-0.25), lambda x: step(x - 0.5), [0.5]),
    "elu": elu(1, 1, 1),
    "elu_quarter": elu(1, 0.25, 1),
    "celu_half": elu(1, 0.5, 2),
    "selu": elu("1.0507009873554804934193349852946", "1.6732632423543772848170429916717", 1),
    "sin": (mp.sin, mp.cos, []),
    "cos": (mp.cos, lambda x: -mp.sin(x), []),
    "abs": (abs, mp.sign, [0]),
    "exp": (mp.exp, mp.exp, []),
    "expm1": (mp.expm1, mp.exp, []),
    "square": (lambda x: x * x, lambda x: 2 * x, []),
    "cube": (lambda x: x**3, lambda x: 3 * x * x, []),
    "sqrt": (mp.sqrt, lambda x: 1 / (2 * mp.sqrt(x)), []),
    "log": (mp.log, lambda x: 1 / x, []),
    "log1p": (mp.log1p, lambda x: 1 / (1 + x), []),
    "reciprocal": (lambda x: 1 / x, lambda x: -1 / x**2, []),
    "rsqrt": (lambda x: 1 / mp.sqrt(x), lambda x: -(x ** mp.mpf(-1.5)) / 2, []),
    "power_1.5": (lambda x: x ** mp.mpf(1.5), lambda x: 1.5 * mp.sqrt(x), []),
}

# Where a function jumps, and by how much: what its derivative does not see.
JUMPS = {
    "heaviside": {0.0: 1.0},
    "hardshrink": {-0.5: 0.5, 0.5: 0.5},
    "threshold": {0.5: 0.75},
}


def closed_form(name: str, mu: float, var: float) -> tuple[Number, Number, Number]:
    """Mean, variance and gain with 50 digits to spare, from the textbook formulas."""
    h, slope, _ = FUNCTIONS[name]
    with mp.workdps(50):
        if var == 0:
            at = mp.mpf(mu)
            gain = mp.mpf(0) if name == "relu" and mu == 0 else slope(at)
            return h(at), mp.mpf(0), gain
    with mp.workdps(120):  # what E[h^2] - E[h]^2 and the tails cancel is far less than 70 digits
        m, v = mp.mpf(mu), mp.mpf(var)
        s = mp.sqrt(v)
        below, above, density = mp.ncdf(-m / s), mp.ncdf(m / s), mp.npdf(m / s)
        if name == "identity":
            return m, v, mp.mpf(1)
        if name == "heaviside":
            return above, above * below, density / s
        if name == "relu" or name.startswith("leaky"):
            a = {"relu": mp.mpf(0), "leaky_relu": mp.mpf(0.01), "leaky_relu_half": mp.mpf(0.5)}[
                name
            ]
            first_above, first_below = m * above + s * density, m * below - s * density
            second_above = (m * m + v) * above + m * s * density
            second_below = (m * m + v) * below - m * s * density
            mean = first_above + a * first_below
            return mean, second_above + a * a * second_below - mean**2, above + a * below
        if name == "probit":
            return probit(m, v)
        if name == "erf":
            mean, variance, gain = probit(mp.sqrt(2) * m, 2 * v)
            return 2 * mean - 1, 4 * variance, 2 * mp.sqrt(2) * gain
        if name == "gelu":
            w = mp.sqrt(1 + v)
            u = m / w
            cdf, density = mp.ncdf(u), mp.npdf(u)
            mean = m * cdf + v / w * density
            # E[x^2 Phi^2] by Stein's lemma; x under Phi(x) phi(x) N(x; m, v) is Gaussian again
            squared = probit(m, v)[1] + cdf**2  # E[Phi^2]
            m2, v2, c = m / (1 + v), v / (1 + v), density / w
            k = m2 / mp.sqrt(1 + v2)
            mixed = c * mp.ncdf(k)  # E[Phi phi]
            mixed_x = c * (m2 * mp.ncdf(k) + v2 / mp.sqrt(1 + v2) * mp.npdf(k))  # E[x Phi phi]
            second = m * (m * squared + 2 * v * mixed) + v * (squared + 2 * mixed_x)
            return mean, second - mean**2, cdf + u * density / (1 + v)
        raise KeyError(name)


def probit(m: Number, v: Number) -> tuple[Number, Number, Number]:
    """Mean, variance and gain of Phi(x): Var = Phi(u) Phi(-u) - 2 T(u, 1 / sqrt(1 + 2 v))."""
    u = m / mp.sqrt(1 + v)
    b = 1 / mp.sqrt(1 + 2 * v)
    owen = mp.quad(lambda t: mp.exp(-(u * u) * (1 + t * t) / 2) / (1 + t * t), [0, b / 2, b])
    variance = mp.ncdf(u) * mp.ncdf(-u) - owen / mp.pi
    return mp.ncdf(u), variance, mp.npdf(u) / mp.sqrt(1 + v)


def integrated(name: str, mu: float, var: float, dps: int = 20) -> tuple[Number, Number, Number]:
    """Mean, variance and gain by adaptive integration of the definitions over x ~ N(mu, var)."""
    h, slope, kinks = FUNCTIONS[name]
    if var == 0:
        return closed_form(name, mu, var)
    with mp.workdps(dps):
        m, s = mp.mpf(mu), mp.sqrt(mp.mpf(var))
        # Split where the density or the function changes fast.
        edges = {m + k * s for k in (-14, -9, -6, -3, -1, 0, 1, 3, 6, 9, 14)}
        edges |= {mp.mpf(x) for x in (*kinks, -14, -9, -6, -4, -2, -1, 0, 1, 2, 4, 6, 9, 14)}
        low, high = m - 16 * s, m + 16 * s
        edges = {low, high, *(edge for edge in edges if low < edge < high)}
        path = sorted(edges)

        def expect(f: Callable[[Number], Number]) -> Number:
            return mp.quad(lambda x: f(x) * mp.npdf(x, m, s), path)

        mean = expect(h)
        jumps = sum(jump * mp.npdf(at, m, s) for at, jump in JUMPS.get(name, {}).items())
        return mean, expect(lambda x: (h(x) - mean) ** 2), expect(slope) + jumps


def size_of_terms(name: str, mu: float, var: float) -> tuple[Number, Number]:
    """For mean and gain, the sizes of the two terms that cancel where they change sign."""
    with mp.workdps(50):
        m, v = mp.mpf(mu), mp.mpf(var)
        w = mp.sqrt(1 + v) if name == "gelu" else mp.sqrt(v)
        u, a = m / w, mp.mpf(0.01)
        if name == "gelu":
            mean = abs(m) * mp.ncdf(u) + v / w * mp.npdf(u)
            return mean, mp.ncdf(u) + abs(u) * mp.npdf(u) / (1 + v)
        return a * abs(m) + m * mp.ncdf(u) + w * mp.npdf(u), a + mp.ncdf(u)


def pair_covariance(
    name: str, mu: tuple[float, float], var: tuple[float, float], rho: float
) -> float:
    """Cov(h(x), h(y)) for a Gaussian pair of correlation rho, by integration over x of E[.|x]."""
    h = FUNCTIONS[name][0]
    with mp.workdps(20):
        (m, n), (s, t) = mu, (mp.sqrt(var[0]), mp.sqrt(var[1]))

        def integrand(x: Number) -> Number:
            given_x = closed_form(name, n + rho * t / s * (x - m), float(t * t * (1 - rho**2)))[0]
            return h(x) * given_x * mp.npdf(x, m, s)

        both = mp.quad(integrand, sorted({m - 12 * s, m - 3 * s, mp.mpf(0), m + 3 * s, m + 12 * s}))
        return float(both - closed_form(name, m, var[0])[0] * closed_form(name, n, var[1])[0])


def steady_state(
    net: nn.Sequential, x: Tensor, samples: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean (n,) and covariance (n, n) of the stochastic network's output for one input (n_in,).

    Samples the network of the paper's eq. (multi_network) layer by layer, in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    value = x.double().expand(samples, -1)
    for layer in net:
        if isinstance(layer, (covary.nn.Lift, covary.nn.Noise)):
            white = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value = value + layer.noise * white
        elif isinstance(layer, covary.nn.Linear):
            bias = None if layer.bias is None else layer.bias.double()
            value = nn.functional.linear(value, layer.weight.double(), bias)
        elif isinstance(layer, covary.nn.Activation):
            value = layer.activation.function(value)
        else:
            raise TypeError(f"no stochastic counterpart of {layer}")
    return value.mean(0), torch.cov(value.T)


def errors_against_sampling(
    net: nn.Sequential, inputs: Tensor, samples: int = 200_000
) -> tuple[list[float], list[float]]:
    """Relative errors (Frobenius norm) of output mean and covariance, for each input (n_in,)."""
    means, covs = [], []
    with torch.no_grad():
        out = net(inputs)
        for i in range(len(inputs)):
            mean, cov = steady_state(net, inputs[i], samples)
            means.append(((out.mean[i] - mean).norm() / mean.norm()).item())
            covs.append(((out.covariance_matrix[i] - cov).norm() / cov.norm()).item())
    return means, covs
