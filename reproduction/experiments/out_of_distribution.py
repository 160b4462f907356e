"""Out-of-distribution (OOD) inputs: how far entropy and two scores of the softmax tell them apart.

Settings and stored results call them ``foreign``: renaming that would make them other results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from covary import data
from covary.models import with_covariance
from covary.runs import Run
from covary.runs.samples import load_data
from covary.uncertainty import metrics
from reproduction.experiment import Measured, Part
from reproduction.experiments.classifiers import Arrays, outputs
from reproduction.experiments.statistics import TWO_SIDED, deviation_by_shares, histograms
from reproduction.workshop import Workshop

# The paper's three indicators, each higher where the network is less sure: entropy of the output's
# covariance, one minus the largest softmax probability, entropy of the softmax.
INDICATORS = {"entropy": "entropy", "msp": "doubt", "se": "softmax_entropy"}
# Which group is expected to be less certain than which.
PAIRS = {
    "wrong_right": ("wrong", "right"),
    "foreign_right": ("foreign", "right"),
    "foreign_wrong": ("foreign", "wrong"),
}


def measure(part: Part, workshop: Workshop) -> Measured:
    """Distributions, separabilities and AUROC of right, wrong and OOD inputs.

    Settings: ``network``, ``covariance`` of evaluation, ``foreign`` (the OOD set), ``samples`` of
    it at most.
    """
    settings = part.settings
    run = workshop.trained(settings["network"], part.seed)
    found = workshop.remembered(
        run,
        f"foreign-{settings['foreign']}",
        {key: value for key, value in settings.items() if key != "network"},
        lambda: _told_apart(run, settings, workshop),
    )
    return Measured(found["metrics"], found["series"])


def _told_apart(run: Run, settings: Mapping[str, Any], workshop: Workshop) -> dict[str, Any]:
    config = run.config
    dataset, _ = load_data(config.data, data_dir=workshop.data_dir, seed=config.training.seed)
    ood = data.load(settings["foreign"], data_dir=workshop.data_dir).x_test
    if settings["samples"]:
        ood = ood[: settings["samples"]]
    net = with_covariance(run.network(), settings["covariance"])
    test, other = outputs(net, dataset.x_test), outputs(net, ood)
    wrong = test["mean"].argmax(1) != dataset.y_test.numpy()
    by_indicator = {name: _groups(test, other, wrong, key) for name, key in INDICATORS.items()}
    numbers: dict[str, float] = {"accuracy": float(1 - wrong.mean())}
    for name, groups in by_indicator.items():
        for pair, (higher, lower) in PAIRS.items():
            numbers[f"separability_{pair}_{name}"] = metrics.separability(
                groups[higher], groups[lower]
            )
            numbers[f"auroc_{pair}_{name}"] = metrics.auroc(groups[higher], groups[lower])
    return {
        "metrics": numbers,
        "series": {
            "samples": {name: len(each) for name, each in by_indicator["entropy"].items()},
            "histograms": {name: histograms(each) for name, each in by_indicator.items()},
        },
    }


def _groups(test: Arrays, other: Arrays, wrong: np.ndarray, key: str) -> Arrays:
    return {"right": test[key][~wrong], "wrong": test[key][wrong], "foreign": other[key]}


def derived(part: Mapping[str, Any], _settings: Mapping[str, Any]) -> dict[str, float]:
    """The noise of each separability, by the histograms of the two groups."""
    series, found = part["series"], {}
    for name, histogram in series["histograms"].items():
        for pair, groups in PAIRS.items():
            sizes = (series["samples"][groups[0]], series["samples"][groups[1]])
            shares = [histogram["shares"][group] for group in groups]
            found[f"separability_{pair}_{name}_noise"] = TWO_SIDED * deviation_by_shares(
                histogram["edges"], shares[0], shares[1], sizes
            )
    return found
