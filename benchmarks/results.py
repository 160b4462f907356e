"""Measurements as files: results/benchmarks/<name>.json with what is needed to make them again."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy
import torch

import covary

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "benchmarks"


def save(name: str, command: str, seed: int | None, measured: Any) -> Path:
    """Write a measurement with its command, seed, versions and commit."""
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--", "covary", "reproduction", "benchmarks", "tests"):
        commit += " with changes"
    record = {
        "command": command,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "versions": {
            "covary": covary.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__.split("+")[0],
            "numpy": numpy.__version__,
        },
        "machine": {
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "measured": measured,
    }
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def load(name: str) -> Any:
    """What was measured, without the rest of the record."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["measured"]
