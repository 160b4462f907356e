"""The functions f_1 and f_2 of the LIF neuron (docs/theory.md, eq. (34)) and their integrals.

    f1(x) = e^{x^2} int_{-inf}^x e^{-u^2} du,          f1' = 1 + 2 x f1,     F1(x) = int_0^x f1,
    f2(x) = e^{x^2} int_{-inf}^x e^{-u^2} f1(u)^2 du,  f2' = 2 x f2 + f1^2,  F2(x) = int_{-inf}^x f2

For x -> -inf they decay like powers of 1/x, for x -> inf they grow like e^{x^2} and e^{2 x^2}. A
table of cubics has what is left when that is taken out, on a grid over the whole line; looking
it up costs less than any expansion in functions that torch has, and a gather is all it needs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial.polynomial import polyder, polyint, polyval
from numpy.typing import NDArray
from torch import Tensor

from covary.tracing import is_traced

Array = NDArray[np.float64]

# Where x < 0 the grid is uniform in s = REACH / (REACH - x), which ends at s = 0 for -inf; where
# x > 0 it is uniform in x, up to where a neuron is silent for all purposes (e^-100).
REACH = 2.0
_LAST = 10.0
_CELLS = 512  # of the negative half
_FINER = 0.25  # cells of the positive half are 1 / (_CELLS * _FINER) wide
_TOTAL = int(_CELLS * (1 + _FINER * _LAST)) + 1  # the last of which is where it ends
_FAR = 94  # cells on the far left, x < -8.8, where asymptotic series have all digits
_ORDER = 16  # of Taylor polynomials, exact to rounding within a cell


class Family(NamedTuple):
    """How a function is scaled: times e^{-growth x^2} if x > 0, over s^decay if x < 0."""

    growth: int
    decay: int


FAMILIES = {
    "F1": Family(1, 0),  # plus log(REACH - x) / 2, which is -log(s) / 2 but for a constant
    "f1": Family(1, 1),
    "df1": Family(1, 2),
    "ddf1": Family(1, 3),
    "F2": Family(2, 2),
    "f2": Family(2, 3),
    "df2": Family(2, 4),
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
    grid = above.clamp(max=_LAST).mul_(_CELLS * _FINER).add_(s, alpha=_CELLS)
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
    if is_traced() and _TABLES:
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
    x = _line(np.arange(_TOTAL) + points[:, None])
    far, near = _asymptotic(-x[:, :_FAR]), _solved(x[:, _FAR:])
    s = REACH / (REACH + np.maximum(-x, 0))
    to_powers = np.linalg.inv(np.vander(points, increasing=True))
    found = {}
    for name, (growth, decay) in FAMILIES.items():
        value = np.hstack([far[name], near[name]])
        if name == "F1":
            value = value - np.log(s) / 2
        found[name] = to_powers @ (value * np.exp(-growth * np.maximum(x, 0) ** 2) / s**decay)
    return found


def _line(cells: Array) -> Array:
    """Where on the line a number of cells from its left end is."""
    grid = cells / _CELLS
    return np.where(grid < 1, REACH - REACH / grid, (grid - 1) / _FINER)


def _asymptotic(y: Array) -> dict[str, Array]:
    """The functions at -y, y > 8, as series in 1/y^2 cut where their terms are smallest."""
    f1, f2 = np.zeros(24), np.zeros(24)
    for k in range(24):
        f1[k] = -f1[k - 1] * (2 * k - 1) / 2 if k else 0.5
        f2[k] = (f1[: k + 1] @ f1[k::-1] - (2 * k + 1) * f2[k - 1]) / 2
    n, t = np.arange(24), 1 / y**2
    return {
        # The constant makes F1(0) = 0; it is Euler's.
        "F1": -np.euler_gamma / 4 - np.log(2 * y) / 2 + t * polyval(t, f1[1:] * 0.5 / n[1:]),
        "f1": polyval(t, f1) / y,
        "df1": polyval(t, f1 * (2 * n + 1)) / y**2,
        "ddf1": polyval(t, f1 * (2 * n + 1) * (2 * n + 2)) / y**3,
        "F2": polyval(t, f2 / (2 * n + 2)) / y**2,
        "f2": polyval(t, f2) / y**3,
        "df2": polyval(t, f2 * (2 * n + 3)) / y**4,
    }


def _solved(x: Array) -> dict[str, Array]:
    """The functions at points (4, cells) of all other cells, by Taylor polynomials.

    They solve the equations of f1' and f2' from left to right: relative errors do not grow.
    """
    edges = _line(np.arange(_FAR, _TOTAL + 1.0))
    first = {name: float(value) for name, value in _asymptotic(-edges[0]).items()}
    series = []
    f1, f2 = first["f1"], first["f2"]
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        a, b = _taylor(low, f1, f2)
        series.append((a, b))
        f1, f2 = (sum(c * (high - low) ** n for n, c in enumerate(some)) for some in (a, b))
    f1_series, f2_series = np.array(series).transpose(1, 2, 0)  # (_ORDER, cells) each
    d = x - edges[:-1]

    def at(coefficients: Any) -> Array:
        return np.asarray(polyval(d, coefficients, tensor=False))

    def integral(coefficients: Array, start: float) -> Array:
        within = polyint(coefficients)
        steps: Any = polyval(np.diff(edges), within, tensor=False)
        return np.asarray(start + np.cumsum(steps) - steps + at(within))

    return {
        "F1": integral(f1_series, first["F1"]),
        "f1": at(f1_series),
        "df1": at(polyder(f1_series)),
        "ddf1": at(polyder(f1_series, 2)),
        "F2": integral(f2_series, first["F2"]),
        "f2": at(f2_series),
        "df2": at(polyder(f2_series)),
    }


def _taylor(x: float, f1: float, f2: float) -> tuple[list[float], list[float]]:
    """Coefficients of f1 and f2 around x by their equations, given their values there."""
    a, b = [f1], [f2]
    for n in range(_ORDER - 1):
        before_a, before_b = (a[n - 1], b[n - 1]) if n else (0.5, 0.0)  # 2 * 0.5: the 1 in f1'
        square = sum(a[i] * a[n - i] for i in range(n + 1))
        a.append((2 * x * a[n] + 2 * before_a) / (n + 1))
        b.append((2 * x * b[n] + 2 * before_b + square) / (n + 1))
    return a, b
