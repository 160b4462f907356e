"""How far the uncertainty of trained networks can be trusted, beside what people use today.

    python -m benchmarks.uncertainty            # all: some hours on two cores
    python -m benchmarks.uncertainty mnist      # or heaviside, or fashion

``mnist``: the paper's ReLU network and everything it is compared with, three seeds, with notMNIST
and Fashion-MNIST as foreign data. ``heaviside``: the paper's Heaviside network under attack.
``fashion``: a mixed network (convolutions, then moments) on Fashion-MNIST, with MNIST and notMNIST
as foreign data. What was trained or measured before, in out/uncertainty, is not done again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import results, tables
from covary.compare import compare
from covary.runs import Choices, DataConfig, Run, evaluate, train
from covary.runs.attack import DEFENDED, TRAINED, AttackConfig, attack_run
from covary.runs.samples import load_data
from covary.runs.training import resolve
from covary.training import terminal_or_lines

FOLDER = results.ROOT / "out" / "uncertainty"
SEEDS = (0, 1, 2)
MNIST_FOREIGN = ("notmnist", "fashion-mnist")
FASHION_FOREIGN = ("mnist", "notmnist")
MOST_LOST_BY_DEFENCE = 0.01


def trained(name: str, folder: str, **chosen: Any) -> Run:
    """The run, trained now if it is not there yet."""
    run = Run(FOLDER / folder)
    if not run.model_path.exists():
        data = DataConfig(name=name)
        dataset, _ = load_data(data)
        display = terminal_or_lines(Console())
        config = resolve(data, dataset, Choices(**chosen))
        train(config, dataset, run, existing="resume", display=display)
    return run


def evaluated(run: Run, ood: Sequence[str]) -> dict[str, Any]:
    """The run's evaluation, made now if there is none of its weights and these foreign data."""
    found = run.evaluation
    if found is None or not (run.is_current(found) and set(ood) <= set(found.parts)):
        found = evaluate(run, ood=ood, covariance="full")
    return found.to_json()


def of_seeds(evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Averages and standard deviations over seeds of what the pages show."""

    def summary(values: Sequence[float]) -> dict[str, float]:
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return {"mean": float(np.mean(values)), "stddev": spread}

    first = evaluations[0]
    return {
        "layers": first["layers"],
        "held out": first["calibration"]["held_out_samples"],
        "accuracy": summary([each["parts"]["test"]["accuracy"] for each in evaluations]),
        "separability": {
            part: [
                summary([each["separability"][part][layer] for each in evaluations])
                for layer in range(len(first["layers"]))
            ]
            for part in first["separability"]
        },
        "auroc": {
            part: {
                score: summary([each["scores"][part][score]["auroc"] for each in evaluations])
                for score in rows
            }
            for part, rows in first["scores"].items()
        },
        "calibration": {
            key: {
                "before": summary([each["parts"]["test"][key] for each in evaluations]),
                "after": summary([each["calibration"]["test"][key] for each in evaluations]),
            }
            for key in ("nll", "brier", "ece", "adaptive_ece")
        },
        "commits": sorted({str(each["git_commit"]) for each in evaluations}),
    }


def mnist() -> dict[str, Any]:
    folder = FOLDER / "mnist"
    found = compare(
        DataConfig(name="mnist"),
        out=folder,
        ood=MNIST_FOREIGN,
        seeds=SEEDS,
        covariance="full",  # as the stored table says
        existing="resume",
        say=lambda sentence: print(sentence, flush=True),
    ).to_json()
    runs = [Run(folder / f"seed-{seed}" / "mnn") for seed in SEEDS]
    evaluations = [evaluated(run, MNIST_FOREIGN) for run in runs]
    kept = ("dataset", "ood", "seeds", "config", "settings", "rows", "notes", "command")
    return {"compare": {key: found[key] for key in kept}, "evaluation": of_seeds(evaluations)}


def fashion() -> dict[str, Any]:
    run = trained("fashion-mnist", "fashion", trunk="lenet", epochs=20)
    return {"evaluation": of_seeds([evaluated(run, FASHION_FOREIGN)])}


def heaviside() -> dict[str, Any]:
    run = trained("mnist", "heaviside", activation="heaviside")
    return {
        "evaluation": of_seeds([evaluated(run, MNIST_FOREIGN)]),
        "attack": attacked(run, "all attacks"),
        "attack, whole test set": attacked(run, "fgsm", attacks=("fgsm",), samples=10_000),
    }


def attacked(run: Run, name: str, **settings: Any) -> dict[str, Any]:
    """What ``covary attack`` finds; kept, since it takes a while."""
    path = FOLDER / f"{run.path.name}-{name.replace(' ', '-')}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if found.get("weights") != run.weights:
        found = attack_run(run, AttackConfig(**settings)).to_json()
        path.write_text(json.dumps(found), encoding="utf-8")
    kept = ("samples", "epsilons", "epsilon_scale", "pgd", "square", "networks", "rows", "verdict")
    return {key: found[key] for key in kept}


PARTS = {"mnist": mnist, "fashion": fashion, "heaviside": heaviside}


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """What the project promises and these measurements do not keep."""
    broken = []
    evaluation = measured["mnist"]["evaluation"]
    auroc = {
        part: {score: value["mean"] for score, value in rows.items()}
        for part, rows in evaluation["auroc"].items()
    }
    if evaluation["accuracy"]["mean"] < 0.978:
        broken.append(f"accuracy {evaluation['accuracy']['mean']:.4f}")
    if evaluation["separability"]["test"][-1]["mean"] < 0.8:
        broken.append("separability of errors at the output")
    if auroc["notmnist"]["entropy"] <= auroc["notmnist"]["max_softmax"]:
        broken.append("entropy finds letters less well than max-softmax")
    for part, least in (("test", 0.97), ("notmnist", 0.95), ("fashion-mnist", 0.93)):
        if auroc[part]["fitted"] < least:
            broken.append(f"fitted score, {part}: {auroc[part]['fitted']:.4f}")
    if "heaviside" in measured:
        broken += _broken_by_attacks(measured["heaviside"]["attack, whole test set"]["rows"])
    return broken


def _broken_by_attacks(rows: Sequence[dict[str, Any]]) -> list[str]:
    def accuracies(network: str) -> dict[float, float]:
        return {
            row["epsilon"]: row["accuracy"]
            for row in rows
            if row["network"] == network and row["attack"] == "fgsm"
        }

    clean, defended = accuracies(TRAINED)[0.0], accuracies(DEFENDED)
    broken = []
    if clean < 0.97:
        broken.append(f"accuracy of the Heaviside network {clean:.4f}")
    if clean - defended[0.0] > MOST_LOST_BY_DEFENCE:
        broken.append(f"the defence costs {clean - defended[0.0]:.4f}")
    if len(set(defended.values())) > 1:
        broken.append("FGSM moves the defended network")
    return broken


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    path = results.FOLDER / "uncertainty.json"
    measured = results.load("uncertainty") if path.exists() else {}
    for name in wanted:
        measured[name] = PARTS[name]()
        results.save("uncertainty", "python -m benchmarks.uncertainty", 0, measured)
    tables.main()
    for sentence in broken_promises(measured) if "mnist" in measured else []:
        print(f"not kept: {sentence}")


if __name__ == "__main__":
    main()
