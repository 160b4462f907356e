"""What a classifier's entropy knows through training and from layer to layer (four panels)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import with_covariance
from covary.recording import record
from covary.runs import Run
from covary.runs.predictions import layer_names, some_of_each
from covary.runs.samples import load_data
from covary.uncertainty import metrics, scores
from reproduction.experiment import Measured, Part
from reproduction.experiments.statistics import groups, line, shares
from reproduction.workshop import Workshop

_BATCH = 128
Arrays = dict[str, np.ndarray]


def measure(part: Part, workshop: Workshop) -> Measured:
    """Accuracy and entropy after epochs whose weights were kept; entropies of layers at the end.

    Settings: ``network``; ``covariance`` of evaluation; ``samples`` whose hidden layers' entropies
    are taken (half of them wrong, if there are so many), since wide layers are dear.
    """
    found = watched(part.settings, part.seed, workshop)
    return Measured(found["metrics"], found["series"])


def measure_correlations(part: Part, workshop: Workshop) -> Measured:
    """The same of two networks, with correlations between units and without.

    Settings: those of ``measure``, by ``with`` and ``without``.
    """
    found = {
        name: watched(part.settings[name], part.seed, workshop) for name in ("with", "without")
    }
    series = {name: each["series"] for name, each in found.items()}
    numbers = {
        f"{key}_{name}": each["metrics"][key]
        for name, each in found.items()
        for key in ("accuracy", "separability", "auroc_entropy")
    }
    return Measured({**numbers, **drops(series)}, series)


def drops(series: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By how much numbers are lower ``without`` correlations than ``with`` them; NaN if undefined.

    Of accuracy at the end and on average over the epochs; of separability at the output (of all
    test samples), in the last hidden layer, and on average over the layers (of some samples).
    """

    def drop(key: str) -> np.ndarray:
        # None, where a number is not defined, becomes NaN.
        pair = [np.array(series[name][key], dtype=float) for name in ("with", "without")]
        return np.asarray(pair[0] - pair[1])

    accuracy, by_layer = drop("accuracy"), drop("separability_by_layer")
    return {
        "accuracy_drop": float(accuracy[-1]),
        "accuracy_drop_on_the_way": float(accuracy.mean()),
        "separability_drop": float(drop("separability")[-1]),
        "separability_drop_last_hidden": float(by_layer[-2]),
        "separability_drop_of_layers": float(by_layer.mean()),
    }


def watched(settings: Mapping[str, Any], seed: int, workshop: Workshop) -> dict[str, Any]:
    """Metrics and series of a network through its training, trained first if it is not."""
    run = workshop.trained(settings["network"], seed)
    found: dict[str, Any] = workshop.remembered(
        run,
        "through-training",
        {key: value for key, value in settings.items() if key != "network"},
        lambda: _through_training(run, settings, seed, workshop),
    )
    return found


def _through_training(
    run: Run, settings: Mapping[str, Any], seed: int, workshop: Workshop
) -> dict[str, Any]:
    config = run.config
    dataset, _ = load_data(config.data, data_dir=workshop.data_dir, seed=config.training.seed)
    x, y = dataset.x_test, dataset.y_test.numpy()
    epochs = settings["epochs"]
    curves: dict[str, list[Any]] = {}
    for epoch in workshop.progress(epochs, "through training"):
        net = with_covariance(run.network(epoch=epoch), settings["covariance"])
        found = outputs(net, x)
        for key, value in _of_epoch(found, found["mean"].argmax(1) != y).items():
            curves.setdefault(key, []).append(value)
    wrong = found["mean"].argmax(1) != y
    rows = some_of_each(wrong, settings["samples"], seed)
    by_layer = layer_entropies(net, x[rows])
    separability = {
        name: metrics.separability(values[wrong[rows]], values[~wrong[rows]])
        for name, values in by_layer.items()
    }
    fit = line(curves["accuracy"], curves["separability"])
    levels = list(separability.values())
    return {
        "metrics": {
            "accuracy": curves["accuracy"][-1],
            "entropy_right": curves["entropy_right"][-1][0],
            "entropy_wrong": curves["entropy_wrong"][-1][0],
            "entropy_gap": _gap(found["entropy"], wrong),
            "entropy_gap_last_hidden": _gap(found["hidden_entropy"], wrong),
            "separability": curves["separability"][-1],
            "separability_by_layers": levels[-1],
            "separability_rise": levels[-1] - levels[0],
            "separability_rank": metrics.rank_correlation(list(range(len(levels))), levels),
            "r_squared": fit.r_squared,
            "r_squared_if_positive": fit.r_squared if fit.correlation > 0 else -fit.r_squared,
            "correlation": fit.correlation,
            "auroc_entropy": metrics.auroc(found["entropy"][wrong], found["entropy"][~wrong]),
            "auroc_max_softmax": metrics.auroc(found["doubt"][wrong], found["doubt"][~wrong]),
        },
        "series": {
            "epochs": list(epochs),
            **curves,
            "layers": list(separability),
            "separability_by_layer": levels,
            "fit": [fit.slope, fit.intercept],
            "last_two": {
                name: shares(found[key], wrong)
                for name, key in (("last hidden layer", "hidden_entropy"), ("output", "entropy"))
            },
        },
    }


def _gap(values: np.ndarray, wrong: np.ndarray) -> float:
    """How much higher values of wrong predictions are on average; NaN if there are none."""
    right, bad = (_finite(each) for each in groups(values, wrong))
    return float(bad.mean() - right.mean()) if right.size and bad.size else math.nan


def _of_epoch(found: Arrays, wrong: np.ndarray) -> dict[str, Any]:
    right, bad = groups(found["entropy"], wrong)
    return {
        "accuracy": float(1 - wrong.mean()),
        "entropy_right": _mean_and_deviation(right),
        "entropy_wrong": _mean_and_deviation(bad),
        "separability": metrics.separability(bad, right),
    }


def _mean_and_deviation(values: np.ndarray) -> list[float | None]:
    finite = _finite(values)
    return [float(finite.mean()), float(finite.std())] if finite.size else [None, None]


def _finite(values: np.ndarray) -> np.ndarray:
    return np.asarray(values[np.isfinite(values)])


@torch.no_grad()
def outputs(net: nn.Module, x: Tensor) -> Arrays:
    """Of every input: mean (n, classes), entropy of the output and of the last hidden layer (n,).

    And ``doubt`` and ``softmax_entropy`` (n,), which see the mean alone.
    """
    hidden = layer_names(net)[-2]
    collected: dict[str, list[np.ndarray]] = {}
    for some in torch.split(x, _BATCH):
        with record(net) as layers:
            out = net(some)
        found = {
            "mean": out.mean,
            "entropy": out.entropy(),
            "hidden_entropy": layers[hidden].entropy(),
            "doubt": scores.max_softmax(out),
            "softmax_entropy": scores.softmax_entropy(out),
        }
        for key, value in found.items():
            collected.setdefault(key, []).append(value.double().numpy())
    return {key: np.concatenate(values) for key, values in collected.items()}


@torch.no_grad()
def layer_entropies(net: nn.Module, x: Tensor) -> Arrays:
    """The entropy (n,) of every activation and of the output, by layer."""
    names: Sequence[str] = layer_names(net)
    collected: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for some in torch.split(x, _BATCH):
        with record(net) as layers:
            net(some)
        for name in names:
            collected[name].append(layers[name].entropy().double().numpy())
    return {name: np.concatenate(values) for name, values in collected.items()}
