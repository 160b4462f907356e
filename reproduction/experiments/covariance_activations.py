"""Covariance of two units after an activation: the paper's first order, exact values, sampling."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from covary import activations
from reproduction.experiment import Claim, Experiment, Measured, Part, by_scale, seeds
from reproduction.workshop import Workshop

Floats = NDArray[np.float64]
NAMES = ("heaviside", "relu")
# Of the pairs that are drawn: means, and variances between which those are spread evenly.
_MEAN = 1.0
_VARIANCE = (0.2, 2.0)
_NODES = 32
_SHOWN = 100
# Samples in memory at a time.
_CHUNK = 100_000


class Pairs(NamedTuple):
    """Gaussian inputs of P pairs of units that all have one correlation."""

    mean: Floats  # (P, 2)
    stddev: Floats  # (P, 2)
    rho: float

    @property
    def z(self) -> Floats:
        """(P, 2) mean over standard deviation."""
        return self.mean / self.stddev


def drawn(count: int, rho: float, rng: np.random.Generator) -> Pairs:
    """Pairs with random means ~ N(0, 1) and random variances."""
    mean = _MEAN * rng.standard_normal((count, 2))
    return Pairs(mean, np.sqrt(rng.uniform(*_VARIANCE, (count, 2))), rho)


def first_order(name: str, pairs: Pairs) -> Floats:
    """(P,) the covariance activation of the paper: gain_i gain_j C_ij."""
    mean, var = torch.from_numpy(pairs.mean), torch.from_numpy(pairs.stddev**2)
    gain = activations.get(name)(mean, var).gain.numpy()
    found: Floats = (gain * pairs.stddev).prod(1) * pairs.rho
    return found


def exact(name: str, pairs: Pairs) -> Floats:
    """(P,) the covariance itself, of Heaviside or ReLU units.

    The derivative of the covariance of h(x_i) and h(x_j) with respect to their correlation r is
    s_i s_j E[h'(x_i) h'(x_j)] (Price). For the Heaviside step that is the bivariate normal density
    f(r) at (z_i, z_j), and for ReLU s_i s_j times its integral, so that from r = 0 on

        heaviside: integral of f(r) dr from 0 to rho,
        relu:      s_i s_j (rho Phi(z_i) Phi(z_j) + integral of (rho - r) f(r) dr).

    Integrands are smooth for |rho| < 1: Gauss-Legendre quadrature is exact to round-off where rho
    is not close to 1.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    r = pairs.rho * (nodes + 1) / 2
    weights = pairs.rho * weights / 2
    first, second = pairs.z[:, :1], pairs.z[:, 1:]
    squared = first**2 - 2 * r * first * second + second**2
    density = np.exp(-squared / (2 * (1 - r**2))) / (2 * math.pi * np.sqrt(1 - r**2))
    if name == "heaviside":
        found: Floats = density @ weights
        return found
    if name != "relu":
        raise ValueError(f"Exact covariances are known of {', '.join(NAMES)}, not of {name}.")
    below = torch.special.ndtr(torch.from_numpy(pairs.z)).numpy().prod(1)
    total = pairs.rho * below + density @ (weights * (pairs.rho - r))
    return np.asarray(pairs.stddev.prod(1) * total)


class Sampled(NamedTuple):
    """Monte Carlo, with its standard error; each (P,)."""

    covariance: Floats
    error: Floats


def sampled(pairs: Pairs, samples: int, rng: np.random.Generator) -> dict[str, Sampled]:
    """Covariances by sampling, of every activation.

    What the second unit would be without the correlation, all else being equal, is subtracted from
    it: its covariance with the first is 0, but not its noise, which at small correlations would be
    many times the covariance.
    """
    functions = {name: activations.get(name).function for name in NAMES}
    found = {name: Sampled(np.empty(len(pairs.mean)), np.empty(len(pairs.mean))) for name in NAMES}
    other = math.sqrt(1 - pairs.rho**2)
    for i, ((m, n), (s, t)) in enumerate(zip(pairs.mean, pairs.stddev, strict=True)):
        moments = {name: np.zeros(2) for name in NAMES}
        means = {name: _mean(name, m, s) for name in NAMES}
        for start in range(0, samples, _CHUNK):
            white = rng.standard_normal((2, min(_CHUNK, samples - start)))
            x, y, alone = (
                torch.from_numpy(values)
                for values in (
                    m + s * white[0],
                    n + t * (pairs.rho * white[0] + other * white[1]),
                    n + t * white[1],
                )
            )
            for name, function in functions.items():
                product = (function(x) - means[name]) * (function(y) - function(alone))
                moments[name] += [product.sum().item(), product.square().sum().item()]
        for name in NAMES:
            average, square = moments[name] / samples
            found[name].covariance[i] = average
            found[name].error[i] = math.sqrt(max(0.0, square - average**2) / samples)
    return found


def _mean(name: str, m: float, s: float) -> float:
    inputs = torch.tensor([[m]]), torch.tensor([[s * s]])
    return activations.get(name)(*(each.double() for each in inputs)).mean.item()


def measure(part: Part, _workshop: Workshop) -> Measured:
    """First order against exact covariances and against Monte Carlo.

    Settings: ``correlation``, ``pairs``, ``samples`` of each.
    """
    settings = part.settings
    rng = np.random.default_rng(part.seed)
    pairs = drawn(settings["pairs"], settings["correlation"], rng)
    monte_carlo = sampled(pairs, settings["samples"], rng)
    numbers: dict[str, float] = {}
    series: dict[str, Any] = {}
    for name in NAMES:
        analytic, true = first_order(name, pairs), exact(name, pairs)
        seen, error = monte_carlo[name]
        numbers |= {
            f"{name}_error": _relative(analytic, true),
            f"{name}_error_sampled": _relative(analytic, seen, noise=error),
            f"{name}_worst_error": float(np.abs(analytic / true - 1).max()),
            # About 1 if Monte Carlo is off from exact values by its own noise alone.
            f"{name}_deviation": float(np.linalg.norm(seen - true) / np.linalg.norm(error)),
            f"{name}_noise": float(np.linalg.norm(error) / np.linalg.norm(true)),
        }
        if part.seed == 0:  # one figure, of the first
            series[name] = {
                "analytic": analytic[:_SHOWN].tolist(),
                "exact": true[:_SHOWN].tolist(),
                "sampled": seen[:_SHOWN].tolist(),
                "error": error[:_SHOWN].tolist(),
            }
    return Measured(numbers, series)


def _relative(value: Floats, reference: Floats, *, noise: Floats | float = 0.0) -> float:
    """Norm of the difference over that of the reference, the noise of the latter taken out."""
    beyond = np.sum((value - reference) ** 2) - np.sum(np.square(noise))
    size = np.sum(reference**2) - np.sum(np.square(noise))
    return math.sqrt(max(0.0, beyond) / size) if size > 0 else math.nan


_CORRELATIONS = (0.01, 0.2)
_SIZES = {"smoke": (1, 8, 20_000), "quick": (2, 60, 200_000), "paper": (3, 200, 1_000_000)}


def _parts(scale: str) -> tuple[Part, ...]:
    count, pairs, samples = _SIZES[scale]
    return tuple(
        part
        for rho in _CORRELATIONS
        for part in seeds(f"c={rho:g}", count, correlation=rho, pairs=pairs, samples=samples)
    )


def _agreement(name: str, rho: float, reference: str) -> Claim:
    sampling = reference == "Monte Carlo"
    noisy = ", noise taken out" if sampling else ""
    # At the smaller correlation the noise of Monte Carlo is larger than what is left out.
    small = 0.02 if sampling else 0.01
    return Claim(
        says=f"The {_TITLES[name]} covariance activation is consistent with {reference} at a "
        f"correlation of {rho:g} (relative error{noisy}).",
        metric=f"{name}_error_sampled" if sampling else f"{name}_error",
        label=f"c={rho:g}",
        most=small if rho < 0.1 else 0.1,
        ours=not sampling,
        why="What the first order leaves out grows with the correlation: in proportion to z_i z_j "
        "for Heaviside, and most where both units are mostly off for ReLU.",
    )


_TITLES = {"heaviside": "Heaviside", "relu": "ReLU"}
EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="activations",
        about=(
            "Pairs of Gaussian inputs with random means ~ N(0, 1), variances between 0.2 and 2 and "
            "a correlation of 0.01 or 0.2; the paper does not say what its pairs are. The "
            "covariance of Heaviside and of ReLU units is computed to first order (the paper's "
            "covariance activation), exactly (by integrating Price's theorem) and by Monte Carlo. "
            "Relative errors are norms over all pairs; where Monte Carlo is the reference, its own "
            "noise is taken out, in quadrature."
        ),
        measure=measure,
        parts=by_scale(_parts),
        claims=tuple(
            _agreement(name, rho, reference)
            for reference in ("Monte Carlo", "the exact covariance")
            for rho in _CORRELATIONS
            for name in NAMES
        ),
    ),
)
