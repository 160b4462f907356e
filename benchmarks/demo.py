"""The demo on two kinds of network, for the table of docs/first-network.md and a picture.

python -m benchmarks.demo
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import results, tables

QUANTITIES = {
    "accuracy": "accuracy",
    "entropy_right": "entropy, right predictions",
    "entropy_wrong": "entropy, wrong predictions",
    "auroc_entropy": "AUROC of wrong against right: entropy",
    "auroc_max_softmax": "AUROC of wrong against right: max-softmax",
}


def covary(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "covary", *arguments], check=True)


def main() -> None:
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for activation in ("heaviside", "relu"):
            run = str(Path(folder) / activation)
            covary("train", "digits", "--activation", activation, "--out", run)
            covary("evaluate", run)
            test = json.loads((Path(run) / "evaluation.json").read_text())["parts"]["test"]
            measured[activation] = {words: test[key] for key, words in QUANTITIES.items()}
        covary("report", str(Path(folder) / "heaviside"))
        figure = Path(folder) / "heaviside" / "figures" / "entropy.png"
        shutil.copy(figure, results.FOLDER / "digits.png")
    tables.publish("digits", "python -m benchmarks.demo", 0, measured)


if __name__ == "__main__":
    main()
