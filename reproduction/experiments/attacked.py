"""Attacks on a Heaviside network, on the same without its first noises, and on a plain one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covary.runs import AttackConfig, Run, attack_run
from covary.runs.attack import DEFENDED, TRAINED
from reproduction.experiment import Measured, Part
from reproduction.workshop import Workshop

# Of box plots, the quantiles that a box and its whiskers show.
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def measure(part: Part, workshop: Workshop) -> Measured:
    """Accuracy and entropy against epsilon, for FGSM and for the attack that transfers.

    Settings: ``network`` (Heaviside) and, if there is one, ``plain`` (ReLU without noise);
    ``epsilons`` in parts of the range of a pixel, ``samples`` of the test set; and ``clip``:
    whether pixels are kept in their range (they are if it does not say).
    """
    settings = part.settings
    names = [name for name in ("network", "plain") if name in settings]
    runs = {name: workshop.trained(settings[name], part.seed) for name in names}
    about = {key: settings[key] for key in ("epsilons", "samples", "clip") if key in settings}
    found = {
        name: workshop.remembered(
            run,
            "fgsm",
            about,
            lambda run=run: _attacked(run, settings, workshop),  # type: ignore[misc]
        )
        for name, run in runs.items()
    }
    own = found["network"]
    lines = {
        "heaviside mnn": own["accuracy"][f"fgsm/{TRAINED}"],
        "without first noises": own["accuracy"][f"fgsm/{DEFENDED}"],
        "without first noises, transferred": own["accuracy"][f"transfer-fgsm/{DEFENDED}"],
    }
    beside = {}
    if "plain" in found:
        lines = {"relu ann": found["plain"]["accuracy"][f"fgsm/{TRAINED}"]} | lines
        first, *_, last = lines["relu ann"]
        beside = {"accuracy_ann": first, "accuracy_ann_attacked": last}
    boxes = own["entropy"]
    medians = [math.nan if box[2] is None else box[2] for box in boxes]
    return Measured(
        {
            "accuracy": lines["heaviside mnn"][0],
            "accuracy_attacked": lines["heaviside mnn"][-1],
            "accuracy_defended": lines["without first noises"][0],
            "drop_of_defence": lines["heaviside mnn"][0] - lines["without first noises"][0],
            "accuracy_defended_attacked": min(lines["without first noises"]),
            "change_under_attack": max(lines["without first noises"])
            - min(lines["without first noises"]),
            "accuracy_defended_transferred": lines["without first noises, transferred"][-1],
            "entropy_rise": max(medians[1:]) - medians[0],
            "entropy_rise_at_last": medians[-1] - medians[0],
            **beside,
        },
        {
            "epsilons": list(settings["epsilons"]),
            "accuracy": lines,
            "entropy": boxes,
            "quantiles": list(_QUANTILES),
            "samples": own["samples"],
        },
    )


def _attacked(run: Run, settings: Mapping[str, Any], workshop: Workshop) -> dict[str, Any]:
    result = attack_run(
        run,
        AttackConfig(
            epsilons=settings["epsilons"],
            attacks=("fgsm",),
            samples=settings["samples"],
            clip=settings.get("clip", True),
            covariance="full" if run.config.model.covariance != "diagonal" else "diagonal",
        ),
        progress=workshop.progress,
    )
    accuracy: dict[str, list[float]] = {}
    for row in result.rows:
        accuracy.setdefault(f"{row.attack}/{row.network}", []).append(row.accuracy)
    entropies = [result.arrays[row.key] for row in result.of("fgsm", TRAINED)]
    return {
        "accuracy": accuracy,
        "entropy": [_box(values) for values in entropies],
        "samples": result.samples,
    }


def _box(values: np.ndarray) -> Sequence[float | None]:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return [None] * len(_QUANTILES)
    quantiles: list[float] = np.quantile(finite, _QUANTILES).tolist()
    return quantiles
