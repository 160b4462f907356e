"""Predictive distributions: what may be observed, one distribution for each row and target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# Steps to a quantile at most, as many as halvings of an interval would take; mostly a handful.
_STEPS = 60
# A step of so many scales, or of so much of the value, is the last.
_NEAR, _ROUND_OFF = 1e-12, 4e-16
# Quantiles of less have this one's: scipy's of Student's t end there.
_LEAST_LEVEL = 1e-30
# For covariances: points of all components and of each, polynomials, and numbers at a time.
_POINTS, _LEAST_POINTS, _POLYNOMIALS, _NUMBERS = 256, 32, 60, 2**21
# How far from 0 and 1 probabilities stay before they become normal scores.
_LEAST_PROBABILITY = 1e-12
_BY_ROW = ("weights", "locations", "scales")


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    """A mixture of Student's t distributions for each of n rows and t targets.

    One component is a Student's t, or a normal distribution where ``df`` is infinite. Methods are
    those of scipy's frozen distributions; probabilities of several targets are one by one, and
    their joint density takes ``correlation`` as a Gaussian copula.

    Attributes:
        weights: (n, t, k) of the components, which add up to 1.
        locations: (n, t, k) their centres.
        scales: (n, t, k) their scales: the standard deviation, of a normal distribution.
        df: (t,) degrees of freedom, above 2; infinite for normal distributions.
        correlation: (n, t, t) or (t, t) of the targets.
        is_one_target: whether a single target's arrays are (n,) and not (n, 1).
    """

    weights: Floats
    locations: Floats
    scales: Floats
    df: Floats
    correlation: Floats
    is_one_target: bool = True

    def __repr__(self) -> str:
        n, t, k = self.weights.shape
        sizes = f"{n} rows", f"{t} target{'s' * (t != 1)}", f"{k} component{'s' * (k != 1)}"
        return f"Predictive({', '.join(sizes)}, df={np.round(self.df, 1).tolist()})"

    @classmethod
    def normal(cls, mean: Floats, cov: Floats, *, is_one_target: bool = True) -> Predictive:
        """Normal distributions of means (n, t) and covariances (n, t, t)."""
        std = np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
        safe = np.where(std > 0, std, 1.0)
        correlation = cov / (safe[:, :, None] * safe[:, None, :])
        df = np.full(mean.shape[1], np.inf)
        ones = np.ones((*mean.shape, 1))
        return cls(ones, mean[..., None], std[..., None], df, correlation, is_one_target)

    @classmethod
    def joined(cls, parts: Sequence[Predictive]) -> Predictive:
        """The distributions of several batches of rows as one."""
        by_row = _BY_ROW if parts[0].correlation.ndim == 2 else (*_BY_ROW, "correlation")
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(each, name) for each in parts]) for name in by_row
        }
        return replace(parts[0], **arrays)

    def of_target(self, column: int) -> Predictive:
        """The distributions of one of the targets, alone."""
        own: dict[str, Any] = {
            name: getattr(self, name)[:, column : column + 1] for name in _BY_ROW
        }
        df, one = self.df[column : column + 1], np.ones((1, 1))
        return replace(self, **own, df=df, correlation=one, is_one_target=True)

    def mean(self) -> Floats:
        """(n,) or (n, t) averages."""
        return self._out((self.weights * self.locations).sum(-1))

    def var(self) -> Floats:
        """(n,) or (n, t) variances."""
        return self._out(self._var())

    def std(self) -> Floats:
        """(n,) or (n, t) standard deviations."""
        return self._out(np.sqrt(self._var()))

    def cov(self) -> Floats:
        """(n, t, t) covariances of the targets, as draws have them.

        ``correlation`` is that of normal scores, and of normal distributions the targets' own. Of
        others the targets' own is nearer to 0: of two Student's t with 3 degrees of freedom 0.53
        in place of 0.6, of two mixtures of two far modes 0.46. It is found to within 0.003, or 0.01
        between modes that are far apart and correlated by more than 0.95.
        """
        n, t, k = self.weights.shape
        var = self._var()
        if t == 1 or (k == 1 and np.isinf(self.df).all()):
            std = np.sqrt(var)
            return cast(Floats, self.correlation * (std[:, :, None] * std[:, None, :]))
        given = np.broadcast_to(self.correlation, (n, t, t))
        size = max(1, _NUMBERS // (max(_POINTS, _LEAST_POINTS * k) * t * k))
        found = np.concatenate(
            [
                _covariances(self._coefficients(slice(start, start + size)), given[start:][:size])
                for start in range(0, max(1, n), size)
            ]
        )
        found[:, range(t), range(t)] = var
        return cast(Floats, found)

    def _coefficients(self, rows: slice) -> Floats:
        """(60, n, t) of quantiles as functions of normal scores z, by Hermite's polynomials.

        Of the polynomial k that is the average of g'(z) times the one before it, by sqrt(k). Where
        g is the quantile function, g'(z) dz is dx: an integral over values x, whose points are as
        close to each other as the components are narrow, and which no gap between modes disturbs.
        """
        n, t, k = self.weights[rows].shape
        count = max(_LEAST_POINTS, _POINTS // k)
        reach = np.where(np.isinf(self.df), 2.8, 12.0)[:, None]
        points = np.sinh(reach * np.linspace(-1, 1, count))[None, :, None, None]
        locations, scales = (each[rows][:, :, None] for each in (self.locations, self.scales))
        x = np.sort((locations[..., None] + scales[..., None] * points).reshape(n, t, -1))
        gap, df = (x[..., None] - locations) / scales, self.df[:, None, None]
        below, above = (
            (self.weights[rows][:, :, None] * _unit_cdf(sign * gap, df)).sum(-1) for sign in (1, -1)
        )
        score = _normal_score(np.minimum(below, above))
        score = np.where(below < above, score, -score)
        share = np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi) * np.gradient(x, axis=-1)
        before, polynomial, found = np.zeros_like(x), np.ones_like(x), []
        for degree in range(1, _POLYNOMIALS + 1):  # normalised ones, by their recursion
            found.append((share * polynomial).sum(-1) / math.sqrt(degree))
            following = (score * polynomial - math.sqrt(degree - 1) * before) / math.sqrt(degree)
            before, polynomial = polynomial, following
        # No more than the variance, whatever the points have missed.
        most = np.sqrt(self._var()[rows] / np.square(found).sum(0))
        return cast(Floats, np.stack(found) * np.minimum(most, 1.0))

    def logpdf(self, y: ArrayLike) -> Floats:
        """(n,) logarithms of the density of targets y (n,) or (n, t), all targets together."""
        values = self._in(y)
        each = self._log_density(values)
        found = each.sum(-1)
        if each.shape[1] > 1:
            found = found + _log_copula(self._cdf(values), self.correlation)
        return cast(Floats, found)

    def pdf(self, y: ArrayLike) -> Floats:
        """(n,) densities of targets."""
        return cast(Floats, np.exp(self.logpdf(y)))

    def cdf(self, y: ArrayLike) -> Floats:
        """(n,) or (n, t) probabilities of at most y, which is a number or (n,) or (n, t)."""
        return self._out(self._cdf(self._in(y)))

    def ppf(self, q: ArrayLike) -> Floats:
        """(n,) or (n, t) quantiles at probabilities q: a number, or (n,) or (n, t).

        They are infinite at 0 and 1.
        """
        level = self._in(q)
        if not ((level >= 0) & (level <= 1)).all():
            raise ValueError("Quantiles need probabilities from 0 to 1.")
        inside = np.clip(level, _LEAST_LEVEL, 1 - np.finfo(np.float64).epsneg)
        found = np.where(level > 0, self._ppf(inside), -np.inf)
        return self._out(np.where(level < 1, found, np.inf))

    def interval(self, confidence: float) -> tuple[Floats, Floats]:
        """Ends of the central intervals that hold this share of the probability."""
        if not 0 < confidence < 1:
            raise ValueError(f"The level of an interval is between 0 and 1, got {confidence}.")
        tail = (1 - confidence) / 2
        return self.ppf(tail), self.ppf(1 - tail)

    def rvs(self, size: int = 1, random_state: Any = None) -> Floats:
        """(size, n) or (size, n, t) draws."""
        random = np.random.default_rng(random_state)
        n, t, _ = self.weights.shape
        # Normal scores with the correlation of the targets, then their own distributions.
        factor = np.linalg.cholesky(_positive(np.broadcast_to(self.correlation, (n, t, t))))
        normal = np.einsum("nij,snj->sni", factor, random.standard_normal((size, n, t)))
        level = np.clip(_normal_cdf(normal), _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
        draws = self._ppf(level)
        return draws[..., 0] if self.is_one_target else draws

    def placed(
        self, mean: Floats, unit: Floats, doubt: Floats, *, is_one_target: bool
    ) -> Predictive:
        """Distributions around 0 as such around means (n, t), in units (t,), as much wider.

        ``doubt`` (n, 1) is added to variances, in squared units: the shape stays as it is.
        """
        factor = (unit * np.sqrt(1 + doubt / self._var()))[..., None]
        locations = mean[..., None] + factor * self.locations
        scales = factor * self.scales
        return Predictive(self.weights, locations, scales, self.df, self.correlation, is_one_target)

    def conformal_interval(self, level: float, far: Floats) -> tuple[Floats, Floats]:
        """Ends of the intervals that would have held this share of held-out rows.

        Args:
            level: the share.
            far: (rows, t) how far the level of each held-out row was from 1/2, in order. Of few
                rows the ends may be infinite.
        """
        if not 0 < level < 1:
            raise ValueError(f"The level of an interval is between 0 and 1, got {level}.")
        n, t = far.shape
        place = math.ceil((n + 1) * level)
        most = far[place - 1] if place <= n else np.full(t, 0.5)
        inside = np.minimum(most, 0.5 - 1e-9)
        infinite = np.where(most >= 0.5, np.inf, 0.0)
        shape = (len(self.weights), t)
        low, high = (
            self._out(self._ppf(np.broadcast_to(0.5 + sign * inside, shape)) + sign * infinite)
            for sign in (-1, 1)
        )
        return low, high

    def _var(self) -> Floats:
        mean = (self.weights * self.locations).sum(-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            spread = np.where(np.isinf(self.df), 1.0, self.df / (self.df - 2))
        own = self.scales**2 * spread[:, None]
        return cast(Floats, (self.weights * (own + (self.locations - mean) ** 2)).sum(-1))

    def _log_density(self, y: Floats) -> Floats:
        """(n, t) of each target."""
        gap = (y[..., None] - self.locations) / self.scales
        log = _unit_log_density(gap, self.df[:, None]) - np.log(self.scales)
        top = log.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)  # of what is infinitely far
        with np.errstate(divide="ignore"):
            return cast(Floats, np.log((self.weights * np.exp(log - top)).sum(-1)) + top[..., 0])

    def _cdf(self, y: Floats) -> Floats:
        gap = (y[..., None] - self.locations) / self.scales
        return cast(Floats, (self.weights * _unit_cdf(gap, self.df[:, None])).sum(-1))

    def _ppf(self, level: Floats) -> Floats:
        """Quantiles at probabilities (..., n, t)."""
        unit = _unit_ppf(level, self.df)[..., None]
        each = self.locations + self.scales * unit
        # The quantile of a mixture lies between the least and the largest of its components.
        low, high = each.min(-1), each.max(-1)
        found = (low + high) / 2
        for _ in range(_STEPS if each.shape[-1] > 1 else 0):
            # Newton's step, or where that leaves the interval, its middle.
            above = self._cdf(found) - level
            low, high = np.where(above < 0, found, low), np.where(above < 0, high, found)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                step = found - above / np.exp(self._log_density(found))
            middle = (low + high) / 2
            better = np.where((step >= low) & (step <= high), step, middle)
            moved, found = np.abs(better - found), better
            if (moved <= _NEAR * self.scales.min(-1) + _ROUND_OFF * np.abs(found)).all():
                break
        return cast(Floats, found)

    def _in(self, values: ArrayLike) -> Floats:
        """A number, (n,) or (n, t) as (n, t)."""
        n, t, _ = self.weights.shape
        array = np.asarray(values, dtype=np.float64)
        if array.ndim == 1 and t == 1:
            array = array[:, None]
        if array.ndim and array.shape != (n, t):
            raise ValueError(
                f"Distributions of {n} rows and {t} targets take values of shape ({n}, {t})"
                f"{f' or ({n},)' if t == 1 else ''}, or one number; got {array.shape}."
            )
        return np.broadcast_to(array, (n, t))

    def _out(self, values: Floats) -> Floats:
        return values[:, 0] if self.is_one_target else values


def _covariances(coefficients: Floats, correlation: Floats) -> Floats:
    """(n, t, t) of targets, from coefficients (k, n, t) and the correlation of normal scores.

    What two functions of correlated normal numbers have in common is the sum of a_k b_k rho^k over
    their coefficients (Mehler), in which every term is positive semidefinite.
    """
    found, power = np.zeros_like(correlation), np.ones_like(correlation)
    for each in coefficients:
        power = power * correlation
        found += power * (each[:, :, None] * each[:, None, :])
    return found


def _normal_score(level: Floats) -> Floats:
    from scipy.special import ndtri

    return cast(Floats, ndtri(np.maximum(level, 1e-300)))


def _normal_cdf(x: Floats) -> Floats:
    from scipy.special import ndtr

    return cast(Floats, ndtr(x))


def _unit_cdf(x: Floats, df: Floats) -> Floats:
    from scipy.special import ndtr, stdtr

    return _by_kind(x, df, ndtr, stdtr)


def _unit_ppf(level: Floats, df: Floats) -> Floats:
    from scipy.special import ndtri, stdtrit

    return _by_kind(level, df, ndtri, stdtrit)


def _by_kind(x: Floats, df: Floats, normal: Any, student: Any) -> Floats:
    """A function of normal distributions where ``df`` is infinite, and of Student's t elsewhere."""
    is_normal = np.isinf(df)
    if is_normal.all():  # Student's t takes ten times as long
        return cast(Floats, normal(x))
    found = student(np.where(is_normal, 3.0, df), x)
    return cast(Floats, np.where(is_normal, normal(x), found) if is_normal.any() else found)


def _unit_log_density(x: Floats, df: Floats) -> Floats:
    from scipy.special import gammaln

    finite = np.where(np.isinf(df), 3.0, df)
    peak = gammaln((finite + 1) / 2) - gammaln(finite / 2) - 0.5 * np.log(finite * np.pi)
    student = peak - (finite + 1) / 2 * np.log1p(x**2 / finite)
    return np.where(np.isinf(df), -0.5 * (x**2 + math.log(2 * math.pi)), student)


def _log_copula(levels: Floats, correlation: Floats) -> Floats:
    """(n,) log density of the Gaussian copula at probabilities (n, t)."""
    from scipy.special import ndtri

    scores = ndtri(np.clip(levels, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY))
    n, t = levels.shape
    matrix = _positive(np.broadcast_to(correlation, (n, t, t)))
    white = np.linalg.solve(matrix, scores[..., None])[..., 0]
    return cast(Floats, -0.5 * (np.linalg.slogdet(matrix)[1] + (scores * (white - scores)).sum(-1)))


def _positive(correlation: Floats) -> Floats:
    """Correlations (n, t, t) that have an inverse, however close to singular they were."""
    t = correlation.shape[-1]
    return (correlation + 1e-9 * np.eye(t)) / (1 + 1e-9)
