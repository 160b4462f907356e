"""From pytest-benchmark's timings to ratios: prints tables, writes results/benchmarks/bench.json.

python -m benchmarks.summary out/bench.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import memory, tables

KINDS = ("plain", "diagonal", "shared", "tracked", "full", "literal")
# What the project promises of a training step on the paper's MNIST network.
MOST_OVER_PLAIN = {"shared": 4.0, "diagonal": 3.0, "tracked": 6.0}
LEAST_OVER_LITERAL = {"full": 15.0}
MOST_MEMORY_MB = {"full": 400.0}


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """Which of the promises above a measurement does not keep."""
    steps, memory_mb = measured["training step"], measured["peak memory above idle, MB"]
    broken = []
    for kind, most in MOST_OVER_PLAIN.items():
        if steps[kind]["over plain"] > most:
            broken.append(f"{kind} takes {steps[kind]['over plain']:.1f} plain steps, not {most}")
    for kind, least in LEAST_OVER_LITERAL.items():
        if steps[kind]["literal over it"] < least:
            faster = steps[kind]["literal over it"]
            broken.append(f"{kind} is {faster:.1f} times faster than literal, not {least}")
    for kind, most in MOST_MEMORY_MB.items():
        if memory_mb[kind] > most:
            broken.append(f"{kind} takes {memory_mb[kind]} MB above idle, not {most}")
    return broken


def ratios(timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Times over the plain network's in the same run.

    Of each the fastest round, which is the one that the rest of the machine disturbed least.
    """
    times: dict[str, dict[Any, Any]] = {"training step": {}, "width": {}, "batch": {}}
    for timing in timings:
        info, fastest = timing["extra_info"], timing["stats"]["min"]
        group = times[timing["group"]]
        if "column" in info:
            group.setdefault(str(info["row"]), {})[info["column"]] = fastest
        else:
            group[info["row"]] = fastest
    steps = times["training step"]
    measured: dict[str, Any] = {
        "training step": {
            kind: {
                "over plain": steps[kind] / steps["plain"],
                "literal over it": steps["literal"] / steps[kind],
            }
            for kind in KINDS
        }
    }
    for quantity in ("width", "batch"):
        measured[quantity] = {
            row: {
                kind: seconds / columns["plain"]
                for kind, seconds in columns.items()
                if kind != "plain"
            }
            for row, columns in times[quantity].items()
        }
    return measured


def main() -> None:
    raw = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    measured = ratios(raw["benchmarks"])
    measured["peak memory above idle, MB"] = {
        kind: round(memory.measure(kind), 1) for kind in KINDS
    }
    print("peak memory above the idle process, MB:", measured["peak memory above idle, MB"])
    by_group = [
        lambda group=group: (
            f"training step over the plain network's, by {group}\n\n{tables.growth(group)}"
        )
        for group in ("width", "batch")
    ]
    broken = broken_promises(measured)
    shown = [tables.speed, *by_group]
    tables.publish("bench", "make bench", 0, measured, shown=shown, broken=broken)


if __name__ == "__main__":
    main()
