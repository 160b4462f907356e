"""Seconds that a fit to a table takes, beside quantile boosting of the same rows, in one run.

    python -m benchmarks.tables_speed [--rows 1000 10000]

Friedman's first function, ten columns. Two threads, as many as the machine has at most; on a busy
machine use OMP_NUM_THREADS=1, and read the ratio.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

import torch
from sklearn.datasets import make_friedman1

from benchmarks import results, tables
from covary.compare.table_models import TABLE_MODELS
from covary.estimators import MomentRegressor
from covary.files import read_json, write_json

ROWS = (1_000, 10_000, 100_000)
SEED = 0
# Seconds that a fit takes at most, on two quiet cores.
MOST_SECONDS = {1_000: 4.0, 10_000: 20.0, 100_000: 120.0}
FOLDER = results.ROOT / "out" / "tables_speed"


def seconds(fit: Any) -> dict[str, float]:
    """Of the clock and of the processors."""
    clock, processors = time.perf_counter(), time.process_time()
    fit()
    return {
        "seconds": time.perf_counter() - clock,
        "processor seconds": time.process_time() - processors,
    }


def measured(rows: int) -> dict[str, Any]:
    """The numbers for so many rows, found in their file or measured and written there."""
    path = FOLDER / f"{rows}.json"
    if not path.exists():
        x, y = make_friedman1(rows, 10, noise=1.0, random_state=SEED)
        found = {
            "moment": seconds(lambda: MomentRegressor(random_state=SEED).fit(x, y)),
            "boosting": seconds(lambda: TABLE_MODELS["regression"]["boosting"].fit(x, y, SEED)),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load before": os.getloadavg()[0],
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        write_json(path, found)
        print(rows, found, flush=True)
    return read_json(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    # What is imported by the first fit is not its own.
    MomentRegressor("quick", epochs=1).fit(*make_friedman1(100, 10, random_state=SEED))
    every = {str(rows): measured(rows) for rows in parser.parse_args().rows}
    broken = [
        f"{rows} rows take {every[str(rows)]['moment']['seconds']:.1f} s, at most {most:g} promised"
        for rows, most in MOST_SECONDS.items()
        if str(rows) in every and every[str(rows)]["moment"]["seconds"] > most
    ]
    tables.publish(
        "tables_speed",
        "python -m benchmarks.tables_speed",
        SEED,
        {"rows": every},
        shown=[tables.TABLES["tables speed"]],
        broken=broken,
    )


if __name__ == "__main__":
    main()
