"""LIF networks on MNIST: what they know, and whether the spiking networks behind them agree.

    python -m benchmarks.spiking

The paper's network, three seeds, with the noise that makes neurons fire by chance, and one with the
text's 0.2, with which they fire by the clock: accuracy, entropy of right and wrong predictions,
separability by layer, then spikes of 8 test inputs and decisions on 500. What was trained or
measured before, in out/spiking, is not done again. About half an hour on two cores.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import results, tables
from covary.runs import Choices, DataConfig, Run, evaluate, train, verify
from covary.runs.samples import load_data
from covary.runs.training import resolve
from covary.training import terminal_or_lines

FOLDER = results.ROOT / "out" / "spiking"
FOREIGN = ("notmnist",)
NETWORKS: dict[str, dict[str, Any]] = {
    **{f"seed-{seed}": {"seed": seed} for seed in range(3)},
    "regular": {"noise": (0.2,)},
}
BY_CHANCE = [name for name in NETWORKS if name.startswith("seed-")]
SCORES = ("entropy", "max_softmax")
KEPT = ("inputs", "copies", "duration", "window", "dt", "layers", "decisions", "entropy")
SAMPLES = 8
DECISIONS = 500
LEAST_ACCURACY = 0.97
MOST_RATE_ERROR = 0.05
MOST_LOST_BY_SPIKING = 0.02


def trained(name: str) -> Run:
    """The run, trained now if it is not there yet."""
    run = Run(FOLDER / name)
    if not run.model_path.exists():
        data = DataConfig(name="mnist")
        dataset, _ = load_data(data, data_dir=None, seed=0)
        config = resolve(data, dataset, Choices(activation="lif", **NETWORKS[name]))
        display = terminal_or_lines(Console())
        train(config, dataset, run, existing="resume", display=display)
    return run


def evaluated(run: Run) -> dict[str, Any]:
    """Its evaluation, made now if there is none of its weights."""
    found = run.evaluation
    if found is None or not (run.is_current(found) and set(FOREIGN) <= set(found.parts)):
        found = evaluate(run, ood=FOREIGN, covariance="full")
    return found.to_json()


def simulated(run: Run) -> dict[str, Any]:
    """Its spikes, simulated now if nobody did."""
    found = run.spikes
    wanted = found is not None and len(found.inputs) == SAMPLES and found.decisions is not None
    if found is None or not (wanted and run.is_current(found)):
        return verify(run, samples=SAMPLES, decisions=DECISIONS).to_json()
    return found.to_json()


def measured(name: str) -> dict[str, Any]:
    run = trained(name)
    evaluation, spikes = evaluated(run), simulated(run)
    test = evaluation["parts"]["test"]
    found = {
        "noise": run.config.model.noise,
        "epochs": run.config.training.epochs,
        "accuracy": test["accuracy"],
        "entropy": {key: test[f"entropy_{key}"] for key in ("right", "wrong")},
        "layers": evaluation["layers"],
        "separability": evaluation["separability"]["test"],
        "auroc": {
            part: {score: evaluation["scores"][part][score]["auroc"] for score in SCORES}
            for part in ("test", *FOREIGN)
        },
        "spikes": {key: spikes[key] for key in KEPT},
        "commit": evaluation["git_commit"],
    }
    print(name, json.dumps(found)[:600], flush=True)
    return found


def broken_promises(found: dict[str, Any]) -> list[str]:
    """What the project promises and these measurements do not keep."""
    broken = []
    for name in BY_CHANCE:
        one = found[name]
        if one["accuracy"] < LEAST_ACCURACY:
            broken.append(f"{name}: accuracy {one['accuracy']:.4f}")
        if one["entropy"]["wrong"] <= one["entropy"]["right"]:
            broken.append(f"{name}: entropy of wrong predictions is not above that of right ones")
        if any(np.diff(one["separability"]) <= 0):
            broken.append(f"{name}: separability does not rise with the layer")
        for layer in one["spikes"]["layers"]:
            error = layer["errors"]["rate"]["value"]
            if error > MOST_RATE_ERROR:
                broken.append(f"{name}, {layer['name']}: rates are {error:.1%} off")
        decided = one["spikes"]["decisions"]
        if decided["moments"] - decided["accuracy"][-1] > MOST_LOST_BY_SPIKING:
            broken.append(f"{name}: spikes cost {decided['moments'] - decided['accuracy'][-1]:.3f}")
    return broken


def main() -> None:
    found = {name: measured(name) for name in NETWORKS}
    broken = broken_promises(found)
    tables.publish("spiking", "python -m benchmarks.spiking", 0, found, broken=broken)


if __name__ == "__main__":
    main()
