"""Sets that need no file: those that scikit-learn brings along, and those drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from covary.data.dataset import Array, Arrays, needed

QUADRANT_SAMPLES = 10_000
MOON_SAMPLES = 1_000


def _sklearn() -> Any:
    with needed("scikit-learn", "this set", "sklearn"):
        from sklearn import datasets
    return datasets


def digits(seed: int) -> Arrays:
    """Handwritten digits ``(n, 1, 8, 8)``; the halves are fixed and ignore the seed."""
    bunch = _sklearn().load_digits()
    # the pixels are counts from 0 to 16
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    return _divided(images, bunch.target, test_size=0.5, random_state=0, stratify=bunch.target)


def diabetes(seed: int) -> Arrays:
    """Ten measurements and the progression of the disease a year later; 25 % for testing."""
    bunch = _sklearn().load_diabetes(scaled=False)
    target = bunch.target[:, None].astype(np.float64)
    return _divided(bunch.data, target, test_size=0.25, random_state=seed)


def _divided(x: Array, y: Array, **how: Any) -> Arrays:
    from sklearn.model_selection import train_test_split

    x, x_test, y, y_test = train_test_split(x, y, **how)
    return Arrays(x, y, x_test, y_test)


def quadrants(seed: int) -> Arrays:
    """Points ``x ~ N(0, I)`` of the plane: A (0) if both coordinates have one sign, else B (1)."""
    x = np.random.default_rng(seed).standard_normal((2 * QUADRANT_SAMPLES, 2))
    return _halves(x, x[:, 0] * x[:, 1] < 0)


def two_moons(seed: int) -> Arrays:
    """Two interleaved half circles with normal noise of standard deviation 0.1."""
    return _halves(*_sklearn().make_moons(2 * MOON_SAMPLES, noise=0.1, random_state=seed))


def _halves(x: Array, y: Array) -> Arrays:
    """The first half for training, the second for testing."""
    middle, y = len(x) // 2, y.astype(np.int64)
    return Arrays(x[:middle], y[:middle], x[middle:], y[middle:])


MAKERS: dict[str, Callable[[int], Arrays]] = {
    "digits": digits,
    "diabetes": diabetes,
    "quadrants": quadrants,
    "two-moons": two_moons,
}
