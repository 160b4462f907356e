"""Fit the ratio of polynomials in covary/activations/normal.py, and say how good it is.

    python -m benchmarks.fit_tail_ratio

Weighted least squares of P - f Q, reweighted towards the largest relative error (Lawson's
method), against values of f = second / (2 first) to 40 digits.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np

FAR = 16.0
DEGREES = (4, 5)
POINTS = 600


def ratio(a: float) -> float:
    """The ratio g2 / g1 of docs/theory.md, eq. (9)."""
    with mp.workdps(120):
        x = mp.mpf(a)
        g0 = mp.sqrt(mp.pi / 2) * mp.exp(x * x / 2) * mp.erfc(x / mp.sqrt(2))
        g1 = 1 - x * g0
        return float((g0 - x * g1) / (2 * g1))


def fit() -> tuple[np.ndarray, np.ndarray, float]:
    """Coefficients of P and Q, lowest power first, and the largest relative error."""
    # Chebyshev points of (a - 2.5) / (a + 2.5), so that they crowd where the ratio bends
    last = (FAR - 2.5) / (FAR + 2.5)
    t = (np.cos(np.linspace(0, np.pi, POINTS)) + 1) / 2 * (last + 1) - 1
    a = 2.5 * (1 + t) / (1 - t)
    f = np.array([ratio(x) for x in a])
    above, below = DEGREES
    powers = np.vander(a, max(DEGREES) + 1, increasing=True)
    weights, q_values = np.ones_like(a), np.ones_like(a)
    best: tuple[np.ndarray, np.ndarray, float] | None = None
    for _ in range(200):
        scale = np.sqrt(weights) / (f * q_values)
        p_columns = powers[:, : above + 1] * scale[:, None]
        q_columns = -powers[:, 1 : below + 1] * (f * scale)[:, None]
        columns = np.concatenate([p_columns, q_columns], axis=1)
        norms = np.linalg.norm(columns, axis=0)
        solution = np.linalg.lstsq(columns / norms, f * scale, rcond=1e-15)[0] / norms
        p, q = solution[: above + 1], np.concatenate([[1.0], solution[above + 1 :]])
        q_values = powers[:, : below + 1] @ q
        errors = np.abs(powers[:, : above + 1] @ p / (f * q_values) - 1)
        if best is None or errors.max() < best[2]:
            best = p, q, float(errors.max())
        weights *= errors / errors.max() + 1e-3
        weights /= weights.sum()
    assert best is not None
    return best


if __name__ == "__main__":
    numerator, denominator, worst = fit()
    print("numerator", *numerator.tolist(), sep="\n  ")
    print("denominator", *denominator.tolist(), sep="\n  ")
    print(f"largest relative error on [0, {FAR:g}]: {worst:.2e}")
