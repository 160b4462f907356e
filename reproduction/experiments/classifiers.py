"""What a classifier's entropy knows through training and from layer to layer (four panels)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from reproduction.experiments import statistics
from reproduction.experiments.statistics import TWO_SIDED, groups, line, shares
from reproduction.workshop import Workshop

_BATCH = 128
# Test images of MNIST and of CIFAR-10: of results that do not say how many there were.
_TESTED = 10_000
Arrays = dict[str, np.ndarray]


def measure(part: Part, workshop: Workshop) -> Measured:
    """Accuracy and entropy after epochs whose weights were kept; entropies of layers at the end.

    Settings: ``network``; ``covariance`` of evaluation; ``samples`` whose hidden layers' entropies
    are taken (half of them wrong, if there are so many), since wide layers are dear. Of an ordinary
    network, whose settings have ``plain`` alone, there is its accuracy.
    """
    if "plain" in part.settings:
        return _plain(part, workshop)
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


def _plain(part: Part, workshop: Workshop) -> Measured:
    """Accuracy of an ordinary network on the test samples."""
    run = workshop.trained(part.settings["plain"], part.seed)
    config = run.config
    dataset, _ = load_data(config.data, data_dir=workshop.data_dir, seed=config.training.seed)
    net = run.network()
    with torch.no_grad():
        predicted = torch.cat(
            [net(some).mean.argmax(1) for some in torch.split(dataset.x_test, _BATCH)]
        )
    return Measured({"accuracy_plain": float((predicted == dataset.y_test).double().mean())}, {})


class Errors(NamedTuple):
    """Separabilities of the layers, and how far they may be off by chance.

    Attributes:
        levels: (layers,) separabilities, NaN where they are not defined.
        covariance: (layers, layers) of their errors.
        estimated: whether it is only what the sizes of the two groups give: results from before it
            was measured have no other. Layers are then taken as independent, so that differences
            between them have more noise than they should.
    """

    levels: np.ndarray
    covariance: np.ndarray
    estimated: bool

    @classmethod
    def of(cls, series: Mapping[str, Any], settings: Mapping[str, Any]) -> Errors:
        """As results have them, or estimated."""
        levels = np.array(series["separability_by_layer"], dtype=float)
        if "separability_covariance" in series:
            return cls(levels, np.array(series["separability_covariance"], dtype=float), False)
        wrong = min(_wrong(series), settings["samples"] // 2)
        sizes = wrong, settings["samples"] - wrong
        deviations = [statistics.deviation_by_sizes(level, sizes) for level in levels]
        return cls(levels, np.diag(np.square(deviations)), True)

    def falls(self) -> float:
        """In how many pairs the later layer has less, beyond noise; NaN of fewer than two."""
        known = np.isfinite(self.levels) & np.isfinite(self.covariance.diagonal())
        if known.sum() < 2:
            return math.nan
        return statistics.falls(self.levels[known].tolist(), self.covariance[known][:, known])

    def deviation(self) -> float:
        """The standard deviation of the average over layers: the largest there is if estimated."""
        if self.estimated:
            return float(np.sqrt(self.covariance.diagonal()).mean())
        return math.sqrt(max(0.0, float(self.covariance.mean())))


def _wrong(series: Mapping[str, Any]) -> int:
    """How many test samples a network has wrong at the end."""
    share: float = 1 - series["accuracy"][-1]
    tested: int = series.get("tested", _TESTED)
    return round(share * tested)


def derived(part: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    """Pairs of layers in the wrong order, and the noise of what claims compare."""
    series, found = part["series"], part["metrics"]
    if "separability_by_layer" not in series:  # of an ordinary network
        return {}
    errors = Errors.of(series, settings)
    rise = statistics.deviation_of_difference(errors.covariance, -1, 0)
    points = sum(value is not None for value in series["separability"])
    correlation = math.nan if found["correlation"] is None else found["correlation"]
    low, high = statistics.correlation_interval(correlation, points)
    squared = found["r_squared_if_positive"]
    return {
        "layers_fallen": errors.falls(),
        "layers_fallen_estimated": float(errors.estimated),
        "separability_rise_noise": TWO_SIDED * rise,
        "separability_rise_estimated": float(errors.estimated),
        "correlation_noise": correlation - low,
        "r_squared_if_positive_noise": high * abs(high) - (squared or 0.0),
    }


def derived_drops(part: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    """The noise of what is lower without correlations; that of accuracy from epoch to epoch."""
    pair = [part["series"][name] for name in ("with", "without")]
    errors = [Errors.of(part["series"][name], settings[name]) for name in ("with", "without")]
    hidden = [math.sqrt(each.covariance[-2, -2]) for each in errors]
    accuracy = np.subtract(*(np.array(each["accuracy"], dtype=float) for each in pair))
    along = accuracy.std(ddof=1) / math.sqrt(len(accuracy)) if len(accuracy) > 1 else math.nan
    estimated = float(any(each.estimated for each in errors))
    layers = ("separability_drop_of_layers", "separability_drop_last_hidden")
    return {
        "separability_drop_noise": TWO_SIDED * math.hypot(*map(_output_deviation, pair)),
        "separability_drop_of_layers_noise": TWO_SIDED
        * math.hypot(*(each.deviation() for each in errors)),
        "separability_drop_last_hidden_noise": TWO_SIDED * math.hypot(*hidden),
        "accuracy_drop_on_the_way_noise": TWO_SIDED * float(along),
        **{f"{name}_estimated": estimated for name in layers},
    }


def _output_deviation(series: Mapping[str, Any]) -> float:
    """Of the separability at the output, over all test samples."""
    found, wrong = series["last_two"]["output"], _wrong(series)
    sizes = wrong, series.get("tested", _TESTED) - wrong
    shares = found["shares"]
    return statistics.deviation_by_shares(found["edges"], shares["wrong"], shares["right"], sizes)


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
    spreads = statistics.resampled_separabilities(
        np.stack(list(by_layer.values()), 1), wrong[rows], seed=seed
    )
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
            "tested": len(y),
            "layers": list(separability),
            "separability_by_layer": levels,
            "separability_covariance": spreads.tolist(),
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
