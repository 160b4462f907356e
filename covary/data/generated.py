"""Sets that need no file: those that scikit-learn brings along, and those drawn from a seed."""

from __future__ import annotations

import numpy as np
import torch

from covary.data.dataset import Dataset, needed

QUADRANT_SAMPLES = 10_000
MOON_SAMPLES = 1_000


def digits(seed: int) -> Dataset:
    """Handwritten digits ``(n, 1, 8, 8)``; the halves are fixed and ignore the seed."""
    with needed("scikit-learn", "the set of digits", "sklearn"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    bunch = load_digits()
    # the pixels are counts from 0 to 16
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    x, x_test, y, y_test = train_test_split(
        images, bunch.target, test_size=0.5, random_state=0, stratify=bunch.target
    )
    return Dataset(
        name="digits",
        task="classification",
        x=torch.as_tensor(x),
        y=torch.as_tensor(y),
        x_test=torch.as_tensor(x_test),
        y_test=torch.as_tensor(y_test),
        classes=tuple("0123456789"),
        source="scikit-learn",
    )


def diabetes(seed: int) -> Dataset:
    """Ten measurements and the progression of the disease a year later; 25 % for testing."""
    with needed("scikit-learn", "the diabetes set", "sklearn"):
        from sklearn.datasets import load_diabetes
        from sklearn.model_selection import train_test_split

    bunch = load_diabetes(scaled=False)
    target = bunch.target[:, None].astype(np.float64)
    x, x_test, y, y_test = train_test_split(bunch.data, target, test_size=0.25, random_state=seed)
    return Dataset(
        name="diabetes",
        task="regression",
        x=torch.as_tensor(x),
        y=torch.as_tensor(y),
        x_test=torch.as_tensor(x_test),
        y_test=torch.as_tensor(y_test),
        features=tuple(bunch.feature_names),
        targets=("progression",),
        source="scikit-learn",
    )


def quadrants(seed: int) -> Dataset:
    """Points ``x ~ N(0, I)`` of the plane: A (0) if both coordinates have one sign, else B (1)."""
    x = np.random.default_rng(seed).standard_normal((2 * QUADRANT_SAMPLES, 2))
    y = (x[:, 0] * x[:, 1] < 0).astype(np.int64)
    return _halves("quadrants", x, y, classes=("A", "B"))


def two_moons(seed: int) -> Dataset:
    """Two interleaved half circles with normal noise of standard deviation 0.1."""
    with needed("scikit-learn", "the set of two moons", "sklearn"):
        from sklearn.datasets import make_moons

    x, y = make_moons(2 * MOON_SAMPLES, noise=0.1, random_state=seed)
    return _halves("two-moons", x, y.astype(np.int64), classes=("upper", "lower"))


def _halves(name: str, x: np.ndarray, y: np.ndarray, *, classes: tuple[str, ...]) -> Dataset:
    """The first half for training, the second for testing."""
    middle = len(x) // 2
    return Dataset(
        name=name,
        task="classification",
        x=torch.as_tensor(x[:middle]),
        y=torch.as_tensor(y[:middle]),
        x_test=torch.as_tensor(x[middle:]),
        y_test=torch.as_tensor(y[middle:]),
        classes=classes,
        features=("x1", "x2"),
        source="generated from the seed",
    )
