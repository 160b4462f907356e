"""The Dawson-like functions of the LIF neuron and their integrals, by table.

They are f_1, f_2, F_1 and F_2 in docs/theory.md, and g, h, G and H here:

    g(x) = e^{x^2} int_{-inf}^x e^{-u^2} du,        g' = 1 + 2 x g,      G(x) = int_0^x g,
    h(x) = e^{x^2} int_{-inf}^x e^{-u^2} g(u)^2 du, h' = 2 x h + g^2,    H(x) = int_{-inf}^x h.

For x -> -inf they decay like powers of 1/x, for x -> inf they grow like e^{x^2} and e^{2 x^2}. A
table of cubics holds what is left when that is taken out, on a grid over the whole line; looking
it up costs less than any expansion in functions that torch has, and a gather is all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

# Where x < 0 the grid is uniform in s = REACH / (REACH - x), which ends at s = 0 for -inf; where
# x > 0 it is uniform in x, up to where a neuron is silent for all purposes (e^-100).
REACH = 2.0
LAST = 10.0
_CELLS = 512  # of the negative half
_FINER = 0.25  # cells of the positive half are 1 / (_CELLS * _FINER) wide
_TOTAL = int(_CELLS * (1 + _FINER * LAST)) + 1  # the last of which is where it ends
_ASYMPTOTIC_BELOW = -9.0
_ORDER = 20  # of Taylor polynomials, on steps so short that they are exact to rounding
_STEPS_PER_UNIT = 32


class Family(NamedTuple):
    """How a function is scaled: times e^{-growth x^2} if x > 0, over s^decay if x < 0."""

    growth: int
    decay: int


FAMILIES = {
    "G": Family(1, 0),  # plus log(REACH - x) / 2, which is -log(s) / 2 but for a constant
    "g": Family(1, 1),
    "dg": Family(1, 2),
    "ddg": Family(1, 3),
    "H": Family(2, 2),
    "h": Family(2, 3),
    "dh": Family(2, 4),
}


class Place(NamedTuple):
    """Where arguments are in the tables, each of the arguments' shape."""

    below: Tensor  # min(x, 0)
    above: Tensor  # max(x, 0)
    s: Tensor  # 1 for x >= 0, to 0 for x -> -inf
    cell: Tensor
    within: Tensor  # 0 to 1

    def look_up(self, name: str) -> Tensor:
        """The function of this name, scaled as ``FAMILIES`` says.

        The scale of the decay is put back; that of the growth is left to whoever takes ratios.
        """
        flat = self.cell.reshape(-1)
        rows = _rows(name, self.within.dtype, self.within.device)
        c0, c1, c2, c3 = (row.index_select(0, flat).view_as(self.within) for row in rows)
        # In place: fresh memory for every step would take longer than the arithmetic.
        value = c0.addcmul_(c1.addcmul_(c2.addcmul_(c3, self.within), self.within), self.within)
        for _ in range(FAMILIES[name].decay):
            value.mul_(self.s)
        return value


def place(x: Tensor) -> Place:
    """Where these arguments are; what is looked up for NaN is NaN."""
    below, above = x.clamp(max=0), x.clamp(min=0)
    s = (1 - below / REACH).reciprocal_()
    # Negative arguments have no second term, positive ones s = 1.
    grid = above.clamp(max=LAST).mul_(_CELLS * _FINER).add_(s, alpha=_CELLS)
    cell = grid.floor()
    # NaN is in no cell, and stays in what is left of the grid.
    return Place(below, above, s, cell.nan_to_num(0.0).int(), grid.sub_(cell))


# Coefficients of the cubics, lowest power first, (4, _TOTAL) for each function, once made.
_TABLES: dict[str, Tensor] = {}


def prepare() -> None:
    """Make the tables, which takes a tenth of a second, unless they are there.

    To be done when an activation is made: a compiler would try to follow it.
    """
    if not _TABLES:
        with torch.inference_mode(False):  # a tensor of inference mode would be one for ever
            _TABLES.update({name: torch.from_numpy(rows) for name, rows in _cubics().items()})


def _rows(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling() and _TABLES:
        return _TABLES[name].to(device, dtype).unbind()
    return _kept_rows(name, dtype, device)


@cache
def _kept_rows(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    prepare()  # an activation that was unpickled was made elsewhere
    with torch.inference_mode(False):
        return _TABLES[name].to(device, dtype).unbind()


def _cubics() -> dict[str, Array]:
    """(4, _TOTAL) for each function: cubics through its values at Chebyshev's points of a cell."""
    points = (1 - np.cos(np.pi * (np.arange(4) + 0.5) / 4)) / 2
    grid = (np.arange(_TOTAL)[:, None] + points) / _CELLS
    x = np.where(grid < 1, REACH - REACH / grid, (grid - 1) / _FINER)
    to_powers = np.linalg.inv(np.vander(points, increasing=True))
    return {name: np.ascontiguousarray(to_powers @ values.T) for name, values in _scaled(x).items()}


def _scaled(x: Array) -> dict[str, Array]:
    """The functions at these points, scaled."""
    far = x < _ASYMPTOTIC_BELOW
    near = _solution()(np.where(far, 0.0, x))
    away = _asymptotic(np.where(far, -x, -_ASYMPTOTIC_BELOW))
    s = REACH / (REACH + np.maximum(-x, 0))
    found = {}
    for name, (growth, decay) in FAMILIES.items():
        value = np.where(far, away[name], near[name])
        if name == "G":
            value = value - np.log(s) / 2
        found[name] = value * np.exp(-growth * np.maximum(x, 0) ** 2) / s**decay
    return found


class _Solution(NamedTuple):
    """Taylor polynomials of g and h around points of a grid, that solve their equations."""

    start: float
    step: float
    g: Array  # (points, _ORDER)
    h: Array
    big_g: Array  # (points,) G at the points
    big_h: Array

    def __call__(self, x: Array) -> dict[str, Array]:
        """All the functions at x, anywhere between the ends of the grid."""
        at = np.clip(np.rint((x - self.start) / self.step).astype(int), 0, len(self.g) - 1)
        d = x - (self.start + at * self.step)
        g, dg, ddg, above_g = _series(self.g[at], d)
        h, dh, _, above_h = _series(self.h[at], d)
        return {
            "G": self.big_g[at] + above_g,
            "g": g,
            "dg": dg,
            "ddg": ddg,
            "H": self.big_h[at] + above_h,
            "h": h,
            "dh": dh,
        }


def _series(a: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """A Taylor polynomial (..., _ORDER) at d, its first two derivatives and its integral."""
    n = np.arange(a.shape[-1], dtype=np.float64)
    powers = d[..., None] ** n
    value = (a * powers).sum(-1)
    slope = (a * n)[..., 1:] * powers[..., :-1]
    bend = (a * n * (n - 1))[..., 2:] * powers[..., :-2]
    return value, slope.sum(-1), bend.sum(-1), (a / (n + 1) * powers).sum(-1) * d


@cache
def _solution() -> _Solution:
    """Solve for g and h from -12 upwards, where errors die out (x < 0) or grow as they do."""
    start, step = -12.0, 1 / _STEPS_PER_UNIT
    count = int((LAST + 0.5 - start) / step) + 1
    first = _asymptotic(np.array(-start))
    g, h = float(first["g"]), float(first["h"])
    big_g, big_h = [float(first["G"])], [float(first["H"])]
    rows_g, rows_h = [], []
    for i in range(count):
        a, b = _taylor(start + i * step, g, h)
        rows_g.append(a)
        rows_h.append(b)
        g, _, _, above_g = (float(value) for value in _series(np.array(a), np.array(step)))
        h, _, _, above_h = (float(value) for value in _series(np.array(b), np.array(step)))
        big_g.append(big_g[-1] + above_g)
        big_h.append(big_h[-1] + above_h)
    return _Solution(
        start, step, np.array(rows_g), np.array(rows_h), np.array(big_g[:-1]), np.array(big_h[:-1])
    )


def _taylor(x: float, g: float, h: float) -> tuple[list[float], list[float]]:
    """Coefficients of g and h around x by their equations, given their values there."""
    a, b = [g], [h]
    for n in range(_ORDER - 1):
        before_a, before_b = (a[n - 1], b[n - 1]) if n else (0.5, 0.0)  # 2 * 0.5: the 1 in g'
        square = sum(a[i] * a[n - i] for i in range(n + 1))
        a.append((2 * x * a[n] + 2 * before_a) / (n + 1))
        b.append((2 * x * b[n] + 2 * before_b + square) / (n + 1))
    return a, b


def _asymptotic(y: Array) -> dict[str, Array]:
    """The functions at -y, y >= 9, as series in 1/y^2 cut where their terms are smallest."""
    terms = 24
    g = [0.5]
    for k in range(1, terms):
        g.append(-g[-1] * (2 * k - 1) / 2)
    h: list[float] = []
    for k in range(terms):
        square = sum(g[i] * g[k - i] for i in range(k + 1))
        h.append((square - (2 * k + 1) * (h[-1] if h else 0.0)) / 2)
    n = np.arange(terms, dtype=np.float64)
    return {
        # The constant makes G(0) = 0; it is Euler's.
        "G": -np.euler_gamma / 4 - np.log(2 * y) / 2 + _inverse(g[1:], 0.5 / n[1:], y, 2),
        "g": _inverse(g, np.ones(terms), y, 1),
        "dg": _inverse(g, 2 * n + 1, y, 2),
        "ddg": _inverse(g, (2 * n + 1) * (2 * n + 2), y, 3),
        "H": _inverse(h, 1 / (2 * n + 2), y, 2),
        "h": _inverse(h, np.ones(terms), y, 3),
        "dh": _inverse(h, 2 * n + 3, y, 4),
    }


def _inverse(series: Sequence[float], factors: Array, y: Array, power: int) -> Array:
    """sum_k series_k factors_k y^(-2k - power), by Horner's rule."""
    total = np.zeros_like(y)
    for term in (np.array(series) * factors)[::-1]:
        total = total / y**2 + term
    return np.asarray(total / y**power)
