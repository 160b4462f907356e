"""What large jobs would cost, reckoned from measured ratios and from assumptions that are said."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.results import load

# Not measured here: whoever knows better numbers for his machines puts them in.
WORKERS = 64  # cores that predict
CORE_PRICE, GPU_PRICE = 0.05, 2.0  # dollars for an hour
# A forward pass of ResNet-50 on 224 x 224 pixels is 4.1e9 multiplications with as many additions.
FLOP_OF_RESNET50 = 8.2e9
FLOP_OF_A_CORE = 5e10  # in a second, in float32
IMAGES_OF_A_GPU = 2000  # plain passes of ResNet-50 in a second, in float32
ROWS, IMAGES = 10**9, 10**8
DRAWS = 30  # passes of whoever samples instead


def ratio(measured: dict[str, Any], quantity: str, way: str, over: str = "local") -> float:
    """The median over turns of a way's quantity over that of another one."""
    turns = measured["turns"]
    return statistics.median(turn[way][quantity] / turn[over][quantity] for turn in turns)


def rows() -> list[dict[str, Any]]:
    """Hours and dollars of 10^9 rows of a table, by task and format of what is written."""
    rate = ratio(load("lake"), "rows per second", "ray, 2 workers", "ray, 1 worker")
    share = min(1.0, rate / 2)  # of each worker that is left when there are more of them
    measured = load("predicting")
    most = max(row["rows"] for row in measured)
    found = []
    for row in measured:
        if row["rows"] == most and row["format"] != "jsonl":
            hours = ROWS / row["rows per second"] / 3600
            found.append(
                {
                    "task": row["task"],
                    "format": row["format"],
                    "rows per second": row["rows per second"],
                    "core hours": hours,
                    "minutes on all workers": 60 * hours / (WORKERS * share),
                    "dollars": CORE_PRICE * hours / share,
                }
            )
    return found


def images() -> list[dict[str, Any]]:
    """Hours and dollars of 10^8 images through a converted ResNet-50, by what is asked for."""
    passes = load("converted")["over plain"]["1 thread"][load("converted")["chosen"]]
    asked = {"the plain network": 1.0, **passes, f"{DRAWS} draws": float(DRAWS)}
    asked.pop("ten rows by autograd")
    asked.pop("one draw")
    return [
        {
            "what": what,
            "passes": count,
            "core hours": IMAGES * count * FLOP_OF_RESNET50 / FLOP_OF_A_CORE / 3600,
            "gpu hours": IMAGES * count / IMAGES_OF_A_GPU / 3600,
            "dollars": GPU_PRICE * IMAGES * count / IMAGES_OF_A_GPU / 3600,
        }
        for what, count in asked.items()
    ]
