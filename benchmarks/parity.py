"""Networks trained with tracked covariance beside the same trained with full covariance.

    python -m benchmarks.parity            # all of them: an hour and a half on two cores
    python -m benchmarks.parity tracked    # only those with tracked covariance: minutes

The paper's MNIST network, from the same seeds. Finished runs in out/tracked are not trained again,
broken ones go on where they stopped. Both are evaluated with exact covariances.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from benchmarks import results, tables
from covary import runs
from covary.data import Dataset
from covary.runs import Choices, DataConfig, Run
from covary.runs.samples import load_data
from covary.runs.training import resolve
from covary.training import terminal_or_lines
from covary.uncertainty import metrics

FOLDER = results.ROOT / "out" / "tracked"
ACTIVATIONS = ("relu", "heaviside")
SEEDS = (0, 1)
EPOCHS = 10
# What the project promises: accuracy in points, separability relative to that of full covariance.
MOST_POINTS_LOST = 0.3
MOST_SEPARABILITY_LOST = 0.1


def path_of(activation: str, covariance: str, seed: int) -> Run:
    return Run(FOLDER / f"{activation}-{covariance}-{seed}")


def trained(activation: str, covariance: str, seed: int, dataset: Dataset) -> Run:
    """The run, trained now if it is not there yet."""
    run = path_of(activation, covariance, seed)
    if not run.model_path.exists():
        chosen = Choices(
            activation=activation,
            covariance=covariance,
            noise=(0.2,),
            epochs=EPOCHS,
            schedule="cosine",  # the noise of the last steps must not decide
            seed=seed,
        )
        config = resolve(DataConfig(name="mnist"), dataset, chosen)
        print(f"training {run.path.relative_to(results.ROOT)}", flush=True)
        runs.train(config, dataset, run, existing="resume", display=terminal_or_lines(Console()))
    return run


def evaluated(run: Run) -> dict[str, Any]:
    """Accuracy, and how far entropies of wrong predictions are from those of right ones."""
    config = run.config
    evaluation = runs.evaluate(run, covariance="full")
    assert run.predictions is not None
    test = run.predictions["test"]
    entropy, wrong = test.entropy, ~test.right
    return {
        "activation": config.model.activation,
        "covariance": config.model.covariance,
        "seed": config.training.seed,
        "epochs": config.training.epochs,
        "accuracy": evaluation.parts["test"]["accuracy"],
        "separability of errors": metrics.separability(entropy[wrong], entropy[~wrong]),
        "separability of errors by layer": evaluation.separability["test"],
    }


def broken_promises(rows: list[dict[str, Any]]) -> list[str]:
    """Where training with tracked covariance ends elsewhere than with full covariance."""
    broken = []
    for full, tracked in pairs(rows):
        name = f"{full['activation']}, seed {full['seed']}"
        points = 100 * abs(full["accuracy"] - tracked["accuracy"])
        if points > MOST_POINTS_LOST:
            broken.append(f"{name}: accuracies are {points:.2f} points apart")
        ratio = tracked["separability of errors"] / full["separability of errors"]
        if abs(ratio - 1) > MOST_SEPARABILITY_LOST:
            broken.append(f"{name}: separability is {ratio:.2f} times that of full covariance")
    return broken


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Full and tracked, of the same activation and seed."""
    found = {(row["activation"], row["seed"], row["covariance"]): row for row in rows}
    return [
        (row, found[activation, seed, "tracked"])
        for (activation, seed, covariance), row in found.items()
        if covariance == "full" and (activation, seed, "tracked") in found
    ]


def main() -> None:
    covariances = sys.argv[1:] or ["tracked", "full"]
    todo = [(a, c, seed) for seed in SEEDS for c in covariances for a in ACTIVATIONS]
    finished = []
    for activation, covariance, seed in todo:
        dataset, _ = load_data(DataConfig(name="mnist"), seed=seed)
        finished.append(trained(activation, covariance, seed, dataset))
    if set(covariances) != {"tracked", "full"}:
        return
    rows = [evaluated(run) for run in finished]
    command, broken = "python -m benchmarks.parity", broken_promises(rows)
    tables.publish("parity", command, None, rows, shown=[tables.parity], broken=broken)


if __name__ == "__main__":
    main()
