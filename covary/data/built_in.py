"""Sets that need no file: those that scikit-learn brings along, and those drawn from a seed.

To add one, write the function that makes its arrays from a seed, and add it to ``ENTRIES``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from covary.data.dataset import needed
from covary.data.entry import Array, Arrays, Entry

QUADRANT_SAMPLES = 10_000
MOON_SAMPLES = 1_000


def digits(seed: int) -> Arrays:
    """Handwritten digits ``(n, 1, 8, 8)``; the halves are fixed and ignore the seed."""
    with needed("scikit-learn", "the set of digits", "sklearn"):
        from sklearn.datasets import load_digits

    bunch = load_digits()
    # the pixels are counts from 0 to 16
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    return _divided(images, bunch.target, test_size=0.5, random_state=0, stratify=bunch.target)


def diabetes(seed: int) -> Arrays:
    """Ten measurements and the progression of the disease a year later; 25 % for testing."""
    with needed("scikit-learn", "the diabetes set", "sklearn"):
        from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
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
    with needed("scikit-learn", "the set of two moons", "sklearn"):
        from sklearn.datasets import make_moons

    return _halves(*make_moons(2 * MOON_SAMPLES, noise=0.1, random_state=seed))


def _halves(x: Array, y: Array) -> Arrays:
    """The first half for training, the second for testing."""
    middle, y = len(x) // 2, y.astype(np.int64)
    return Arrays(x[:middle], y[:middle], x[middle:], y[middle:])


ENTRIES = (
    Entry(
        "digits",
        "Handwritten digits of scikit-learn",
        "classification",
        "898 + 899 grey images, 8 x 8",
        licence="BSD 3-Clause (scikit-learn); CC BY 4.0 (UCI)",
        source="https://archive.ics.uci.edu/dataset/80",
        classes=tuple("0123456789"),
        make=digits,
    ),
    Entry(
        "diabetes",
        "Progression of diabetes, of scikit-learn",
        "regression",
        "331 + 111 rows of 10",
        licence="BSD 3-Clause (scikit-learn)",
        source="https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        features=("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"),
        targets=("progression",),
        make=diabetes,
    ),
    Entry(
        "quadrants",
        "Normal points in the plane, told apart by the signs of their coordinates",
        "classification",
        "10000 + 10000 rows of 2",
        classes=("A", "B"),
        features=("x1", "x2"),
        make=quadrants,
    ),
    Entry(
        "two-moons",
        "Two interleaved half circles with noise",
        "classification",
        "1000 + 1000 rows of 2",
        classes=("upper", "lower"),
        features=("x1", "x2"),
        make=two_moons,
    ),
)
