"""Moments of the paper's MNIST networks, layer by layer, against simulations of the networks.

    python -m benchmarks.verification

ReLU and Heaviside, as ``benchmarks.uncertainty`` trains them (three hours of training if out/ has
none); then four test inputs, 65,536 draws of the steady state each, and Ornstein-Uhlenbeck networks
with layers that follow at once and with equal time constants.
"""

from __future__ import annotations

from typing import Any

from benchmarks import tables
from benchmarks.uncertainty import FOLDER, trained
from covary.runs import Run, verify

KEPT = ("activation", "noise", "inputs", "copies", "duration", "limit", "ou", "layers", "notes")


def networks() -> dict[str, Run]:
    relu = Run(FOLDER / "mnist" / "seed-0" / "mnn")
    return {
        "relu": relu if relu.model_path.exists() else trained("mnist", "relu"),
        "heaviside": trained("mnist", "heaviside", activation="heaviside"),
    }


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, run in networks().items():
        result = verify(run).to_json()
        found[name] = {key: result[key] for key in KEPT}
        print(name, *result["notes"], sep="\n", flush=True)
    tables.publish("verification", "python -m benchmarks.verification", 0, found)


if __name__ == "__main__":
    main()
