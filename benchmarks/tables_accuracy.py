"""A moment regressor beside models that one would fit to a table instead, on 14 tables.

    python -m benchmarks.tables_accuracy [--sets yacht sine] [--methods boosting gp]

Eight UCI sets by the first 5 of their published splits, and six others by 5 random ones, 80% for
training. All methods are as they come: what they choose, they choose by training rows. Targets
are raw, likelihoods in nats per row. Each set, split and method is kept in out/tables_accuracy as
soon as it is measured, and not measured again; remove its file to do so. Methods that --methods
leaves out keep the numbers that are stored.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import results, tables
from covary import data
from covary.compare.table_models import TABLE_MODELS, TableRegressor
from covary.estimators import MomentRegressor
from covary.files import read_json, write_json
from covary.uncertainty.metrics import Distribution, of_distribution, rank_correlation

Floats = NDArray[np.float64]
Split = tuple[Floats, Floats, Floats, Floats]  # inputs and targets, and the same for testing
FOLDER = results.ROOT / "out" / "tables_accuracy"
SPLITS, SEED, ROWS = 5, 0, 1500
LIBRARIES = ("scikit-learn", "ngboost")
METRICS = ("log_likelihood", "crps", "rmse", "coverage_90", "width_90", "spearman_error")


class MomentFitted:
    """The regressor of the library as it comes, as the other models are."""

    def __init__(self, x: Floats, y: Floats, seed: int) -> None:
        self._model = MomentRegressor(random_state=seed).fit(x, y)

    def distribution(self, x: Floats) -> Distribution:
        found: Distribution = self._model.predict_distribution(x)
        return found


METHODS: Mapping[str, Callable[[Floats, Floats, int], TableRegressor]] = {
    "moment": MomentFitted,
    **{name: model.fit for name, model in TABLE_MODELS["regression"].items()},
}


NOISES = {"friedman1": 1.0, "friedman2": 125.0, "friedman3": 0.1}


def friedman(kind: str, noise: float) -> tuple[Floats, Floats]:
    from sklearn import datasets

    x, y = getattr(datasets, f"make_{kind}")(ROWS, noise=noise, random_state=SEED + 1)
    return x, y


def diabetes() -> tuple[Floats, Floats]:
    from sklearn import datasets

    x, y = datasets.load_diabetes(return_X_y=True)
    return x, y


def sine() -> tuple[Floats, Floats]:
    """Noise of 0.1 on the left and of 0.5 on the right."""
    random = np.random.default_rng(SEED)
    x = random.uniform(-3, 3, (ROWS, 1))
    noise = np.where(x[:, 0] < 0, 0.1, 0.5)
    return x, np.sin(2 * x[:, 0]) + noise * random.standard_normal(ROWS)


def two_branches() -> tuple[Floats, Floats]:
    """A curve or its negative, at random: two modes, and a mean where no target is."""
    random = np.random.default_rng(SEED)
    x = random.uniform(-3, 3, (ROWS, 1))
    sign = random.choice([-1.0, 1.0], ROWS)
    curve = 1.5 + np.sin(2 * x[:, 0])
    return x, sign * curve + 0.1 * random.standard_normal(ROWS)


# By size of the training part, so that most numbers are there early.
MADE: Mapping[str, Callable[[], tuple[Floats, Floats]]] = {
    "diabetes": diabetes,
    "sine": sine,
    "two branches": two_branches,
    **{kind: partial(friedman, kind, noise) for kind, noise in NOISES.items()},
}
PUBLISHED = {
    "yacht": "yacht",
    "boston": "boston-housing",
    "energy": "energy",
    "concrete": "concrete",
    "wine": "wine-quality-red",
    "kin8nm": "kin8nm",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
}
SETS = (*list(PUBLISHED)[:4], *MADE, *list(PUBLISHED)[4:])


def order_of(split: int, rows: int) -> list[NDArray[np.int64]]:
    """Which rows of a made set are for training, and which for testing."""
    order = np.random.default_rng((SEED, split)).permutation(rows)
    return np.split(order, [round(0.8 * rows)])


def split_of(name: str, split: int) -> Split:
    """A set's training and test rows."""
    if name in PUBLISHED:
        found = data.load(PUBLISHED[name], split=split)
        x, x_test = found.x.numpy(), found.x_test.numpy()
        return x, found.y.numpy()[:, 0], x_test, found.y_test.numpy()[:, 0]
    x, y = MADE[name]()
    train, test = order_of(split, len(x))
    return x[train], y[train], x[test], y[test]


def rank_if_known(name: str, split: int, mean: Floats, y: Floats) -> float:
    """Rank correlation of errors and standard deviations that know noise and own error exactly.

    Of Friedman's functions, of which both are known: no error bar of these means finds more.
    """
    without_noise = friedman(name, 0.0)[1]
    own = mean - without_noise[order_of(split, len(without_noise))[1]]
    known = np.hypot(own, NOISES[name])
    return rank_correlation(known, np.abs(y - mean))


def measured(name: str, split: int, method: str) -> dict[str, Any]:
    """A method's numbers for a split, found in their file or measured and written there."""
    path = FOLDER / f"{name.replace(' ', '-')}-{split}-{method}.json"
    if not path.exists():
        x, y, x_test, y_test = split_of(name, split)
        began = time.perf_counter()
        model = METHODS[method](x, y, SEED + split)
        fitted = time.perf_counter()
        distribution = model.distribution(x_test)
        predicted = time.perf_counter()
        numbers = of_distribution(distribution, y_test)
        found = {key: numbers[key] for key in METRICS}
        # Of targets over their standard deviation: what can be averaged over sets.
        found["log_likelihood_standardised"] = found["log_likelihood"] + math.log(y.std())
        if name in NOISES:
            found["spearman_known"] = rank_if_known(name, split, distribution.mean(), y_test)
        found |= {"fit_seconds": fitted - began, "predict_seconds": predicted - fitted}
        write_json(path, {"rows": len(y), "test_rows": len(y_test), **found})
        shown = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
        print(f"{name} {split} {method}: {shown}", flush=True)
    return read_json(path)


def summary(name: str, method: str) -> dict[str, Any] | None:
    """Averages over the splits of a set, with standard errors; None if some are missing."""
    paths = [FOLDER / f"{name.replace(' ', '-')}-{split}-{method}.json" for split in range(SPLITS)]
    if not all(path.exists() for path in paths):
        return None
    rows = [measured(name, split, method) for split in range(SPLITS)]
    found = {}
    for key in rows[0]:
        values = [row[key] for row in rows if row[key] is not None]
        if values:
            found[key] = statistics.fmean(values)
        if len(values) > 1 and key not in ("rows", "test_rows"):
            found[f"{key}_error"] = statistics.stdev(values) / math.sqrt(len(values))
    return found


# How often the moment regressor is to be at least as likely as the best other, by how many nats it
# may be behind, and how much lower its rank correlation may be; coverage on tables of so many rows.
MOST_SETS, MOST_BEHIND, MOST_BELOW = 10, 0.1, 0.05
COVERAGE, ROWS_FOR_COVERAGE = (0.87, 0.93), 1000


def broken_promises(every: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """What the project promises and these measurements do not keep."""
    broken, best, ranks = [], 0, 0
    for name, found in every.items():
        if "moment" not in found:
            broken.append(f"{name} was not measured")
            continue
        ours, *others = found["moment"], *(row for key, row in found.items() if key != "moment")
        behind = max(row["log_likelihood"] for row in others) - ours["log_likelihood"]
        below = max(row.get("spearman_error", 0) for row in others) - ours["spearman_error"]
        best, ranks = best + (behind <= 0), ranks + (below <= MOST_BELOW)
        if behind > MOST_BEHIND:
            broken.append(f"{name}: {behind:.2f} nats behind the best other")
        low, high = COVERAGE
        if ours["rows"] >= ROWS_FOR_COVERAGE and not low <= ours["coverage_90"] <= high:
            broken.append(f"{name}: 90% intervals hold {ours['coverage_90']:.1%}")
    if best < MOST_SETS:
        broken.append(f"likeliest on {best} of {len(every)} sets, {MOST_SETS} promised")
    if ranks < MOST_SETS:
        broken.append(f"rank correlation near the best on {ranks}, {MOST_SETS} promised")
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    chosen = parser.parse_args()
    for split in range(SPLITS):
        for name in chosen.sets:
            for method in chosen.methods:
                measured(name, split, method)
    stored = results.load("tables_accuracy")["sets"]
    every = {
        name: each
        for name in SETS
        if (each := {
            method: found
            for method in METHODS
            if (found := summary(name, method) or stored.get(name, {}).get(method))
        })
    }  # fmt: skip
    tables.publish(
        "tables_accuracy",
        "python -m benchmarks.tables_accuracy",
        SEED,
        {"splits": SPLITS, **{name: version(name) for name in LIBRARIES}, "sets": every},
        shown=[tables.TABLES[f"tables {each}"] for each in ("likelihood", "coverage", "rank")],
        broken=broken_promises(every),
    )


if __name__ == "__main__":
    main()
