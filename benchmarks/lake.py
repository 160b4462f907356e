"""Throughput of ``covary predict`` over many files: local, and Ray with one and two workers.

    OMP_NUM_THREADS=1 python -m benchmarks.lake

Each way takes its turn in a process of its own, three times, and medians of ratios within a turn
count. ``on_paper`` reckons from them what a large lake would cost.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import predicting, tables
from covary.serving import Predictor

SEED, TRAINING, FILES, ROWS, ROUNDS = 0, 4000, 24, 100_000, 3
WAYS = {"local": 0, "ray, 1 worker": 1, "ray, 2 workers": 2}
# In a process of its own; it prints the seconds from a loaded predictor to the last file.
_PROGRAM = """
import sys, time
from pathlib import Path
run, lake, out, workers = *sys.argv[1:4], int(sys.argv[4])
if workers:
    import ray
    ray.init("local", num_cpus=workers + 1, object_store_memory=2 * 10**8, include_dashboard=False,
             log_to_driver=False, logging_level="ERROR")
from covary.serving import FileOptions, Predictor, predict_files
predictor, start = Predictor.load(run), time.perf_counter()
predict_files(predictor, lake, Path(out), how=FileOptions(keep=("id",)),
              engine="ray" if workers else "local")
print(time.perf_counter() - start)
"""


def rate_at_work(out: Path, workers: int) -> float:
    """Rows per second after each worker's first file, by the times at which files were written."""
    times = sorted(path.stat().st_mtime for path in out.glob("*.parquet"))
    first = max(1, workers)
    return (len(times) - first) * ROWS / (times[-1] - times[first - 1])


def measure(folder: Path) -> dict[str, Any]:
    table = predicting.houses(TRAINING, SEED).drop(columns="kind")
    table.to_csv(folder / "houses.csv", index=False)
    train = ["train", "houses.csv", "--target", "price", "--epochs", "30", "--out", "run"]
    subprocess.run([sys.executable, "-m", "covary", *train], cwd=folder, check=True)
    Predictor.load(folder / "run")  # which fits it, once
    (folder / "lake").mkdir()
    for i in range(FILES):
        rows = predicting.houses(ROWS, SEED + 1 + i).drop(columns=["price", "kind"])
        rows.insert(0, "id", range(i * ROWS, (i + 1) * ROWS))
        rows.to_parquet(folder / "lake" / f"{i:03d}.parquet")
    turns: list[dict[str, dict[str, float]]] = []
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    for _ in range(ROUNDS):
        turn = {}
        for name, workers in WAYS.items():
            out = folder / "scored"
            program = [sys.executable, "-c", _PROGRAM, "run", "lake", str(out), str(workers)]
            load = os.getloadavg()[0]
            ran = subprocess.run(
                program, cwd=folder, env=environment, capture_output=True, text=True, check=True
            )
            seconds, rate = float(ran.stdout.split()[-1]), rate_at_work(out, workers)
            turn[name] = {"seconds": seconds, "rows per second": rate, "load before": load}
            shutil.rmtree(out)
        print(json.dumps(turn), flush=True)
        turns.append(turn)
    return {"files": FILES, "rows": FILES * ROWS, "cores": os.cpu_count(), "turns": turns}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder))
    command = "OMP_NUM_THREADS=1 python -m benchmarks.lake"
    tables.publish("lake", command, SEED, measured, shown=[tables.lake])


if __name__ == "__main__":
    main()
