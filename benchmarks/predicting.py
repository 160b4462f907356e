"""Rows per second and memory of ``covary predict``, from file to file, in processes of their own.

python -m benchmarks.predicting
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import tables
from covary.serving import Predictor

SEED, TRAINING = 0, 4000
# Rows of the tables; of the largest, csv to csv alone.
ROWS, MOST_ROWS, MOST_MB = (100_000, 1_000_000), 5_000_000, 2000
TARGETS = {"regression": "price", "classification": "kind"}
FORMATS = ("csv", "parquet", "jsonl")
# Runs in a process of its own: what the command does, and what it took.
_PROGRAM = """
import json, sys, time
from pathlib import Path
from covary.runs.costs import peak
from covary.serving import Predictor, predict_table
run, source, out = sys.argv[1:]
predictor = Predictor.load(run)
idle, start = peak(), time.perf_counter()
predict_table(predictor, source, Path(out))
print(json.dumps([time.perf_counter() - start, idle, peak()]))
"""


def houses(rows: int, seed: int) -> pd.DataFrame:
    """Eight columns, one of them of texts, and a target of each kind."""
    random = np.random.default_rng(seed)
    found = pd.DataFrame(
        {
            "income": np.exp(random.normal(10, 0.5, rows)),
            "rooms": random.integers(1, 9, rows),
            "age": random.uniform(0, 100, rows),
            "latitude": random.uniform(32, 42, rows),
            "longitude": random.uniform(-124, -114, rows),
            "city": random.choice(["Oslo", "Bonn", "Rome"], rows),
            "distance": random.exponential(5, rows),
            "area": random.normal(100, 20, rows),
        }
    )
    mean = found["income"] / 500 + 10 * found["rooms"] + 20 * (found["city"] == "Oslo")
    found["price"] = mean + random.standard_normal(rows) * (2 + found["age"] / 20)
    found["kind"] = np.select([found["price"] > 140, found["price"] > 90], ["high", "mid"], "low")
    return found


def differing(predictor: Predictor, rows: pd.DataFrame, written: Path) -> int:
    """Of how many rows a csv file of predictions says something else than the predictor itself."""
    found = pd.DataFrame(predictor(rows)).fillna("")
    in_file = pd.read_csv(written, usecols=list(found), float_precision="round_trip")[list(found)]
    return int((found != in_file.fillna("").astype(found.dtypes)).any(axis=1).sum())


def measure(folder: Path) -> list[dict[str, Any]]:
    table = houses(TRAINING, SEED)
    new = houses(MOST_ROWS, SEED + 1).drop(columns=list(TARGETS.values()))
    sources = {rows: folder / f"{rows}.csv" for rows in (*ROWS, MOST_ROWS)}
    for rows, path in sources.items():
        new[:rows].to_csv(path, index=False)
    found = []
    for task, target in TARGETS.items():
        others = [name for name in TARGETS.values() if name != target]
        table.drop(columns=others).to_csv(folder / f"{task}.csv", index=False)
        train = ["train", f"{task}.csv", "--target", target, "--epochs", "30", "--out", task]
        subprocess.run([sys.executable, "-m", "covary", *train], cwd=folder, check=True)
        Predictor.load(folder / task)  # which fits it, once
        for form in FORMATS:
            for rows, path in sources.items():
                if rows == MOST_ROWS and (task, form) != ("regression", "csv"):
                    continue
                out = folder / f"{task}-{rows}-{time.time_ns()}.{form}"
                command = [sys.executable, "-c", _PROGRAM, str(folder / task), str(path), str(out)]
                ran = subprocess.run(command, capture_output=True, text=True, check=True)
                seconds, idle, most = json.loads(ran.stdout)
                row = {"task": task, "format": form, "rows": rows, "seconds": seconds}
                row |= {"rows per second": rows / seconds, "idle MB": idle, "peak MB": most}
                if form == "csv":
                    row["differing"] = differing(Predictor.load(folder / task), new[:rows], out)
                found.append(row)
                print(row, flush=True)
                out.unlink()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder))
    broken = [f"{row['rows']:,} rows take {row['peak MB']:.0f} MB" for row in measured
              if row["peak MB"] > MOST_MB]  # fmt: skip
    broken += [f"{row['differing']:,} of {row['rows']:,} rows differ from those of Predictor"
               for row in measured if row.get("differing")]  # fmt: skip
    tables.publish(
        "predicting",
        "python -m benchmarks.predicting",
        SEED,
        measured,
        shown=[tables.predicting],
        broken=broken,
    )


if __name__ == "__main__":
    main()
