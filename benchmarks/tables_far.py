"""Error bars far from the data: how they grow, and whether rows are known to be off the data.

    python -m benchmarks.tables_far [--sets yacht sine]

Of each table of ``benchmarks.tables_accuracy``, test rows of the first split are moved off the
training data: one column after another, and all of them at once, to so many standard deviations
beyond the largest or below the least value of the training rows. A Gaussian process of the same
rows is moved along, to compare. Sets are kept in out/tables_far as soon as they are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import results, tables
from benchmarks.tables_accuracy import SEED, SETS, Floats, split_of
from covary.compare.table_models import TABLE_MODELS
from covary.estimators import MomentRegressor
from covary.files import read_json, write_json

FOLDER = results.ROOT / "out" / "tables_far"
# Standard deviations off the data, and how many times as large error bars have to be there.
TIMES = {3: 2.0, 10: 5.0, 100: 20.0}
LEAST_KNOWN, MOST_INSIDE = 0.99, 0.05
ROWS = 40  # test rows that are moved


def moved(x: Floats, rows: Floats, far: float) -> Iterator[Floats]:
    """The rows (n, d) so many standard deviations off the training inputs x, in each direction."""
    low, high, width = x.min(0), x.max(0), x.std(0)
    varying = np.flatnonzero(width > 0)
    for columns in (*varying.reshape(-1, 1), varying):
        for end, sign in ((high, 1), (low, -1)):
            there = rows.copy()
            there[:, columns] = (end + sign * far * width)[columns]
            yield there


def measured(name: str) -> dict[str, Any]:
    """The numbers of a set, found in their file or measured and written there."""
    path = FOLDER / f"{name.replace(' ', '-')}.json"
    if not path.exists():
        x, y, x_test, _ = split_of(name, 0)
        model = MomentRegressor(random_state=SEED).fit(x, y)
        process = TABLE_MODELS["regression"]["gp"].fit(x, y, SEED)
        deviations: dict[str, Callable[[Floats], Floats]] = {
            "moment": lambda rows: model.predict(rows, return_std=True)[1],
            "gp": lambda rows: np.asarray(process.distribution(rows).std()),
        }
        inside = {method: of(x_test).mean() for method, of in deviations.items()}
        found: dict[str, Any] = {
            "known off the data, inside": float((model.novelty(x_test) > 0).mean())
        }
        rows = x_test[:ROWS]
        for far in TIMES:
            there = np.concatenate(list(moved(x, rows, far)))
            found[str(far)] = {
                "known off the data": float((model.novelty(there) > 0).mean()),
                **{name: float(of(there).mean() / inside[name]) for name, of in deviations.items()},
            }
        write_json(path, found)
        print(name, found, flush=True)
    return read_json(path)


def broken_promises(every: dict[str, Any]) -> list[str]:
    """What the project promises and these measurements do not keep."""
    broken = []
    for name, found in every.items():
        if found["known off the data, inside"] > MOST_INSIDE:
            broken.append(
                f"{name}: {found['known off the data, inside']:.1%} inside are off the data"
            )
        for far, times in TIMES.items():
            if found[str(far)]["moment"] < times:
                broken.append(f"{name}, {far} off: {found[str(far)]['moment']:.1f} times as large")
            if found[str(far)]["known off the data"] < LEAST_KNOWN:
                broken.append(f"{name}, {far} off: not all are known")
    return broken


def main() -> None:
    tables.publish_sets(
        "tables_far", SETS, measured, broken_promises, seed=SEED, table="tables far", rows=ROWS
    )


if __name__ == "__main__":
    main()
