"""Brute force for the LIF neuron, to 30 digits: integrals, and the equations that g and h solve."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mpmath as mp
from scipy import integrate, special

from covary.activations import LIF

Number = Any
_DPS = 30
_ORDER = 32
_START, _STEP = -30, mp.mpf(1) / 16


class Functions(NamedTuple):
    G: Number
    g: Number
    H: Number
    h: Number


def _taylor(x: Number, g_x: Number, h_x: Number) -> tuple[list[Number], list[Number]]:
    a, b = [g_x], [h_x]
    for n in range(_ORDER):
        square = mp.fsum(a[i] * a[n - i] for i in range(n + 1))
        a.append(((n == 0) + 2 * x * a[n] + (2 * a[n - 1] if n else 0)) / (n + 1))
        b.append((square + 2 * x * b[n] + (2 * b[n - 1] if n else 0)) / (n + 1))
    return a, b


def _far(x: Number) -> Functions:
    """Series in 1/x^2 for x <= -30, where its terms fall below 1e-100."""
    y, terms = -x, 60
    a = [mp.mpf(1) / 2]
    for k in range(1, terms):
        a.append(-a[-1] * (2 * k - 1) / 2)
    b: list[Number] = []
    for k in range(terms):
        square = mp.fsum(a[i] * a[k - i] for i in range(k + 1))
        b.append((square - (2 * k + 1) * (b[-1] if b else 0)) / 2)
    return Functions(
        -mp.euler / 4
        - mp.log(2 * y) / 2
        + mp.fsum(a[k] / (2 * k * y ** (2 * k)) for k in range(1, terms)),
        mp.fsum(a[k] / y ** (2 * k + 1) for k in range(terms)),
        mp.fsum(b[k] / ((2 * k + 2) * y ** (2 * k + 2)) for k in range(terms)),
        mp.fsum(b[k] / y ** (2 * k + 3) for k in range(terms)),
    )


@cache
def _grid() -> list[tuple[Functions, list[Number], list[Number]]]:
    """Solutions along a grid from -30 to 12, upwards: the way in which errors do not grow."""
    with mp.workdps(_DPS):
        now = _far(mp.mpf(_START))
        rows = []
        for i in range(int(42 / _STEP) + 1):
            a, b = _taylor(_START + i * _STEP, now.g, now.h)
            rows.append((now, a, b))
            now = _at(now, a, b, _STEP)
        return rows


def _at(start: Functions, a: list[Number], b: list[Number], d: Number) -> Functions:
    return Functions(
        start.G + mp.fsum(c * d ** (n + 1) / (n + 1) for n, c in enumerate(a)),
        mp.fsum(c * d**n for n, c in enumerate(a)),
        start.H + mp.fsum(c * d ** (n + 1) / (n + 1) for n, c in enumerate(b)),
        mp.fsum(c * d**n for n, c in enumerate(b)),
    )


def functions(x: Number) -> Functions:
    """G (but for a constant, the same for all), g, H and h at x <= 12."""
    with mp.workdps(_DPS):
        if x <= _START:
            return _far(mp.mpf(x))
        i = int(mp.nint((mp.mpf(x) - _START) / _STEP))
        start, a, b = _grid()[i]
        return _at(start, a, b, mp.mpf(x) - (_START + i * _STEP))


class Moments(NamedTuple):
    mean: Number
    variance: Number
    gain: Number


def moments(mu: Number, var: Number, neuron: LIF) -> Moments:
    """The paper's eqs. (mu_lif) to (cov_lif), for upper ends up to 12."""
    with mp.workdps(_DPS):
        mu, var, leak = mp.mpf(mu), mp.mpf(var), mp.mpf(neuron.leak)
        per_noise = 1 / mp.sqrt(leak * var)
        upper = functions((neuron.v_th * leak - mu) * per_noise)
        lower = functions((neuron.v_res * leak - mu) * per_noise)
        mean = 1 / (neuron.t_ref + 2 / leak * (upper.G - lower.G))
        variance = 8 / leak**2 * mean**3 * (upper.H - lower.H)
        gain = mean**2 * 2 / leak * per_noise * (upper.g - lower.g)
        return Moments(mean, variance, gain)


def integrated(mu: float, var: float, neuron: LIF) -> tuple[float, float]:
    """Mean and variance by integrals of integrals, in float64: independent of the above."""

    def g(x: float) -> float:
        return float(special.erfcx(-x)) * math.sqrt(math.pi) / 2

    def h(x: float) -> float:  # over u = x - v
        return quad(lambda v: math.exp(2 * x * v - v * v) * g(x - v) ** 2, 0, 40)

    def quad(function: Callable[[float], float], low: float, high: float) -> float:
        return float(integrate.quad(function, low, high, epsabs=0, epsrel=1e-12, limit=200)[0])

    noise = math.sqrt(neuron.leak * var)
    ends = (neuron.v_res * neuron.leak - mu) / noise, (neuron.v_th * neuron.leak - mu) / noise
    mean = 1 / (neuron.t_ref + 2 / neuron.leak * quad(g, *ends))
    return mean, 8 / neuron.leak**2 * mean**3 * quad(h, *ends)


def derivative(name: str, by: str, mu: float, var: float, neuron: LIF) -> Number:
    """Of mean, variance or gain by mu or var, from differences of 30 digits."""

    def value(x: Number) -> Number:
        return getattr(moments(x if by == "mu" else mu, x if by == "var" else var, neuron), name)

    with mp.workdps(_DPS):
        step = mp.mpf(10) ** -7 * (mp.sqrt(var) if by == "mu" else mp.mpf(var))
        at = mp.mpf(mu if by == "mu" else var)
        return (value(at + step) - value(at - step)) / (2 * step)
