"""What a trained network gets right, and how unsure it is of what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch import nn

from covary.models import with_covariance
from covary.nn import Rescale
from covary.runs.config import check_covariance
from covary.runs.directory import Run, environment, weights_digest
from covary.runs.measuring import SCORE, Arrays, Progress, layer_names, measure
from covary.runs.samples import foreign_inputs, load_data
from covary.runs.tracking import known_or_measured, quietly, summary
from covary.runs.uncertainty import HeldOut, known_or_fitted
from covary.training.log import without_nan
from covary.uncertainty import metrics

# Large, or of no use to whoever draws: not kept for every sample.
_NOT_KEPT = ("covariance", "calibrated_covariance")


def evaluate(
    run: Run,
    *,
    covariance: str | None = None,
    exact_width: int | None = None,
    ood: Sequence[str] = (),
    data_dir: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a run on its test data, and on foreign data where they are named.

    Every sample has a covariance of its own, however the network was trained. Calibration and the
    fitted score are those that held-out training data gave, fitted first if they were not; numbers
    without calibration are always there too. What comes out is also written to the run's folder:
    numbers to ``evaluation.json``, and mean, variance, entropy and fitted score of every sample to
    ``predictions.npz``.

    Args:
        run: a trained run.
        covariance: ``"full"``, ``"tracked"`` or ``"diagonal"``; tracked by default if it was so in
            training, else full. If tracked covariances were never compared with exact ones they
            are first, on training inputs, and the result is kept with the run's weights.
        exact_width: for tracked covariances; by default that of the run.
        ood: names of known sets whose test part is foreign to the network, or tables with the
            columns of the run's table.
        data_dir: where data are looked for first.
        seed: decides for which samples the layers' entropies are taken.
        progress: wraps the batches of each part, given its name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    config = run.config()
    covariance = check_covariance(covariance, exact_width, config.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = run.network().to(device)
    dataset, _ = load_data(config.data, data_dir=data_dir, seed=config.training.seed)
    foreign, notes = foreign_inputs(run, dataset, ood, data_dir=data_dir, seed=seed)
    width = None
    if covariance == "tracked":
        asked = config.model.exact_width if exact_width is None else exact_width
        known, news = known_or_measured(run, net, dataset, progress=progress is not None)
        width = known.width(asked)
        notes += [*news, summary(known, asked)]
    net = with_covariance(net, covariance, exact_width=width)
    classify = config.model.task == "classification"
    with quietly():  # the notes have it
        held_out = known_or_fitted(
            run, net, dataset, covariance=covariance, exact_width=width, progress=progress
        )
        notes += held_out.notes
        parts = {
            name: measure(
                net,
                x,
                dataset.y_test if name == "test" else None,
                name,
                held_out=held_out,
                classify=classify,
                seed=seed,
                progress=progress,
            )
            for name, x in {"test": dataset.x_test, **foreign}.items()
        }
    summarise = classification_metrics if classify else regression_metrics
    results: dict[str, Any] = {"test": summarise(parts["test"])}
    if not classify:
        results["test"]["log_likelihood_standardised"] = _standardised(results["test"], net)
    for name, arrays in parts.items():
        if name != "test":
            results[name] = foreign_metrics(arrays, parts["test"], classify=classify)
    evaluation = {
        "task": config.model.task,
        "dataset": config.data.name,
        "layers": layer_names(net),
        "classes": list(dataset.classes),
        "features": list(dataset.features),
        "targets": list(dataset.targets),
        "image_shape": list(config.model.input_shape) if config.model.is_image else None,
        "covariance": covariance,
        "exact_width": width,
        "weights": weights_digest(net),
        "notes": notes,
        "parts": results,
        "scores": {name: _score_metrics(arrays, parts["test"]) for name, arrays in parts.items()},
        "calibration": _calibration(held_out, parts["test"], net, classify=classify),
        "by_target": {} if classify else _by_target(parts["test"], dataset.targets),
        "separability": _separabilities(parts, classify=classify),
        **environment(started, seed=seed),
    }
    _write_predictions(run, parts)
    plain: dict[str, Any] = without_nan(evaluation)
    run.write_json(run.evaluation_path.name, plain)
    return plain


def _write_predictions(run: Run, parts: dict[str, Arrays]) -> None:
    arrays: dict[str, Any] = {
        f"{part}/{key}": value
        for part, found in parts.items()
        for key, value in found.items()
        if key not in _NOT_KEPT and not key.startswith(SCORE)
    } | {
        f"{part}/fitted": found[SCORE + "fitted"]
        for part, found in parts.items()
        if SCORE + "fitted" in found
    }
    run.write_arrays(run.predictions_path.name, arrays)


def classification_metrics(arrays: Arrays) -> dict[str, float]:
    """Accuracy, calibration, and how well doubt finds errors, beside what max-softmax does."""
    probabilities, label, entropy = _softmax(arrays["mean"]), arrays["label"], arrays["entropy"]
    wrong = probabilities.argmax(1) != label
    doubt = arrays[SCORE + "max_softmax"]
    return {
        "samples": len(label),
        **metrics.of_probabilities(probabilities, label),
        "entropy_right": _average(entropy[~wrong]),
        "entropy_wrong": _average(entropy[wrong]),
        "auroc_entropy": metrics.auroc(entropy[wrong], entropy[~wrong]),
        "auroc_max_softmax": metrics.auroc(doubt[wrong], doubt[~wrong]),
        "aurc_entropy": metrics.aurc(entropy, wrong),
        "aurc_max_softmax": metrics.aurc(doubt, wrong),
    }


def regression_metrics(arrays: Arrays, *, before: str = "") -> dict[str, float]:
    """Errors, likelihood, and how many targets the intervals hold, in the target's own units.

    Of the moments whose names begin with ``before``.
    """
    mean, covariance = arrays[f"{before}mean"], arrays[f"{before}covariance"]
    return {
        "samples": len(mean),
        **metrics.of_moments(mean, covariance, arrays["target"]),
    }


def _standardised(found: dict[str, float], net: nn.Module) -> float:
    """The log-likelihood in standard deviations of the training targets, as units."""
    scales = [layer.scale for layer in net.modules() if isinstance(layer, Rescale)]
    scale = torch.cat(scales).double().cpu().numpy()
    return float(metrics.standardised_log_likelihood(found["log_likelihood"], scale))


def _score_metrics(arrays: Arrays, test: Arrays) -> dict[str, dict[str, float]]:
    """By score: foreign inputs against those of the test set; of these, wrong against right.

    In regression, where nothing is right or wrong: the rank correlation with the size of errors.
    """
    found = {}
    for key in (key for key in arrays if key.startswith(SCORE)):
        score, usual = arrays[key], test[key]
        if arrays is not test:
            row = _told_apart(score, usual)
        elif "label" in test:
            wrong = test["mean"].argmax(1) != test["label"]
            row = _told_apart(score[wrong], score[~wrong]) | {"aurc": metrics.aurc(score, wrong)}
        else:
            size = np.linalg.norm(test["target"] - test["mean"], axis=1)
            row = {"spearman_error": metrics.rank_correlation(score, size)}
        found[key.removeprefix(SCORE)] = row
    return found


def _told_apart(positive: np.ndarray, negative: np.ndarray) -> dict[str, float]:
    return {
        "auroc": metrics.auroc(positive, negative),
        "aupr": metrics.aupr(positive, negative),
        "fpr95": metrics.fpr95(positive, negative),
    }


def _calibration(
    held_out: HeldOut, test: Arrays, net: nn.Module, *, classify: bool
) -> dict[str, Any] | None:
    """What held-out data gave, and how good the test set's numbers are with it."""
    if held_out.calibration is None:
        return None
    if classify:
        after = metrics.of_probabilities(test["calibrated_probabilities"], test["label"])
    else:
        after = regression_metrics(test, before="calibrated_")
        after["log_likelihood_standardised"] = _standardised(after, net)
    noise = None if held_out.noise is None else list(held_out.noise)
    about = {"held_out_samples": held_out.samples, "noise": noise, "test": after}
    return held_out.calibration.to_dict() | about


def _by_target(arrays: Arrays, targets: Sequence[str]) -> dict[str, dict[str, float]]:
    """The same for each of several targets, which have units of their own."""
    if len(targets) < 2:
        return {}
    found = {}
    for i, name in enumerate(targets):
        one = {key: arrays[key][:, i : i + 1] for key in ("target", "mean", "variance")}
        one["covariance"] = arrays["covariance"][:, i : i + 1, i : i + 1]
        found[name] = regression_metrics(one)
    return found


def foreign_metrics(arrays: Arrays, test: Arrays, *, classify: bool) -> dict[str, float]:
    """How well doubt tells foreign inputs from those of the test set."""
    found = {
        "samples": len(arrays["mean"]),
        "entropy": _average(arrays["entropy"]),
        "auroc_entropy": metrics.auroc(arrays["entropy"], test["entropy"]),
    }
    if classify:
        doubt, usual = arrays[SCORE + "max_softmax"], test[SCORE + "max_softmax"]
        found["auroc_max_softmax"] = metrics.auroc(doubt, usual)
    return found


def _separabilities(parts: dict[str, Arrays], *, classify: bool) -> dict[str, list[float]]:
    """By layer: wrong predictions, and foreign inputs, against right ones (or all, if neither)."""
    test = parts["test"]
    usual = test["layer_entropy"]
    found = {}
    if classify:
        wrong = test["mean"].argmax(1) != test["label"]
        found["test"] = _by_layer(usual[wrong], usual[~wrong])
        usual = usual[~wrong]
    foreign = {name: part for name, part in parts.items() if name != "test"}
    return found | {name: _by_layer(part["layer_entropy"], usual) for name, part in foreign.items()}


def _by_layer(higher: np.ndarray, lower: np.ndarray) -> list[float]:
    """Of the samples whose layers were looked at, which have numbers."""
    groups = [each[~np.isnan(each).any(1)] for each in (higher, lower)]
    return [metrics.separability(a, b) for a, b in zip(groups[0].T, groups[1].T, strict=True)]


def _softmax(mean: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.as_tensor(mean).double(), -1).numpy()


def _average(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else math.nan
