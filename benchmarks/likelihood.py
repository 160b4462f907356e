"""Networks trained by the likelihood beside those trained on squared error, on a few tables.

    python -m benchmarks.likelihood [--sets sine yacht]

One network as ``covary train`` makes it, with either loss, and on squared error with the epochs,
batches and rate of the likelihood; calibrated on its held-out rows and not. And ``MomentRegressor``
with either loss, and with the variance that emerges alone. Tables and splits are those of
``benchmarks.tables_accuracy``, targets are raw, likelihoods in nats per row. Sets are kept in
out/likelihood as soon as they are measured.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from scipy.stats import norm

from benchmarks import results, tables
from benchmarks.tables_accuracy import METRICS, SEED, Split, split_of
from covary.data import Dataset
from covary.estimators import MomentRegressor
from covary.files import read_json, write_json
from covary.models import with_covariance
from covary.runs import Choices, DataConfig, Run, train
from covary.runs.samples import validation_rows
from covary.runs.training import resolve
from covary.training.objectives import LOSSES
from covary.uncertainty.calibration import fit_variance
from covary.uncertainty.metrics import of_distribution

FOLDER = results.ROOT / "out" / "likelihood"
SETS = ("sine", "yacht", "boston", "energy", "concrete")
SPLITS = 3
# On the sine, what a network that is trained by the likelihood is promised to reach.
LEAST_RANK, LEAST_LIKELIHOOD = 0.45, -0.1
RowsOf = Callable[[Split, int], Iterator[tuple[str, dict[str, float]]]]
ESTIMATORS: dict[str, dict[str, Any]] = {
    "regressor, mean": {},
    "regressor, likelihood": {"loss": "likelihood"},
    "regressor, likelihood, emergent": {"loss": "likelihood", "variance": "emergent"},
}


def network_rows(rows: Split, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """One network by each loss, as ``covary train`` makes it of a table of these training rows."""
    x, y, x_test, y_test = (torch.tensor(part) for part in rows)
    whole = Dataset("table", "regression", x, y[:, None], x_test, y_test[:, None])
    of_data = DataConfig(name="table")
    chosen = {loss: Choices(loss=loss, seed=seed) for loss in LOSSES}
    alike = vars(resolve(of_data, whole, chosen["likelihood"]).training)
    chosen["mean, trained alike"] = Choices(loss="mean", **alike)
    for loss, choices in chosen.items():
        config = resolve(of_data, whole, choices)
        with tempfile.TemporaryDirectory() as folder:
            run = Run(folder)
            began = time.perf_counter()
            train(config, whole, run)
            seconds = time.perf_counter() - began
            net = with_covariance(run.network(), "full").double().eval()
        held_out, _ = validation_rows(len(x), config)
        with torch.no_grad():
            found = net(x_test)
            better = fit_variance(net(x[held_out]), y[held_out, None])(found)
        for name, moments in ((loss, found), (f"{loss}, calibrated", better)):
            normal = norm(moments.mean[:, 0].numpy(), moments.stddev[:, 0].numpy())
            numbers = of_distribution(normal, rows[3])
            yield f"network, {name}", {**numbers, "fit_seconds": seconds}


def estimator_rows(rows: Split, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Ensembles by each loss, as the estimator makes them."""
    x, y, x_test, y_test = rows
    for name, settings in ESTIMATORS.items():
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            # Of networks alone: what neighbours know hides what they have learnt.
            model = MomentRegressor(random_state=seed, neighbours=0, **settings).fit(x, y)
        seconds = time.perf_counter() - began
        numbers = of_distribution(model.predict_distribution(x_test), y_test)
        yield name, {**numbers, "fit_seconds": seconds}


def measured(name: str) -> dict[str, dict[str, float]]:
    """By method, averages over the splits of a set."""
    return averages("networks", network_rows, name) | averages("estimators", estimator_rows, name)


def averages(group: str, rows_of: RowsOf, name: str) -> dict[str, dict[str, float]]:
    """Those of a group of methods, found in their file or measured and written there."""
    path = FOLDER / f"{name}-{group}.json"
    if not path.exists():
        every: dict[str, list[dict[str, float]]] = {}
        for split in range(SPLITS):
            for method, numbers in rows_of(split_of(name, split), SEED + split):
                every.setdefault(method, []).append(numbers)
                shown = ", ".join(f"{key} {numbers[key]:.3f}" for key in (*METRICS, "fit_seconds"))
                print(f"{name} {split} {method}: {shown}", flush=True)
        write_json(
            path,
            {
                method: {
                    key: statistics.fmean(row[key] for row in found)
                    for key in (*METRICS, "fit_seconds")
                }
                for method, found in every.items()
            },
        )
    found: dict[str, dict[str, float]] = read_json(path)
    return found


def broken_promises(every: dict[str, Any]) -> list[str]:
    """What the project promises and these measurements do not keep."""
    broken = []
    for name, found in every.items():
        row = found["network, likelihood"]
        if not all(math.isfinite(value) for value in row.values()):
            broken.append(f"{name}: not finite")
        if name == "sine" and row["spearman_error"] < LEAST_RANK:
            broken.append(f"sine: rank correlation {row['spearman_error']:.2f}")
        if name == "sine" and row["log_likelihood"] < LEAST_LIKELIHOOD:
            broken.append(f"sine: log-likelihood {row['log_likelihood']:.2f}")
    return broken


def main() -> None:
    tables.publish_sets(
        "likelihood", SETS, measured, broken_promises, seed=SEED, table="likelihood", splits=SPLITS
    )


if __name__ == "__main__":
    main()
