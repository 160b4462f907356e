"""What a trained network gets right, and how unsure it is of what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import with_covariance
from covary.moments import Moments
from covary.nn import Activation, Linear
from covary.recording import record
from covary.runs.config import ModelConfig
from covary.runs.directory import Run, environment, weights_digest
from covary.runs.samples import foreign_inputs, load_data
from covary.runs.tracking import known_or_measured, quietly, summary
from covary.training.log import without_nan
from covary.uncertainty import metrics, scores

Arrays = dict[str, np.ndarray]
Progress = Callable[[Sequence[Any], str], Iterator[Any]]
# Not "shared": samples would depend on their neighbours.
PER_SAMPLE = ("full", "tracked", "diagonal")
_BATCH = 128
# The entropy of a wide hidden layer takes its eigenvalues: for so many samples, not for all.
LAYER_SAMPLES = 500
# Inputs that the report shows, of each of four kinds.
_GALLERY = 12


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

    Every sample has a covariance of its own, however the network was trained. What comes out is
    also written to the run's folder: numbers to ``evaluation.json``, and mean, variance and entropy
    of every sample to ``predictions.npz``.

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
    net: nn.Module = run.network().to(device)
    dataset, _ = load_data(config.data, data_dir=data_dir, seed=config.training.seed)
    foreign, notes = foreign_inputs(run, dataset, ood, data_dir=data_dir, seed=seed)
    width = None
    if covariance == "tracked":
        asked = config.model.exact_width if exact_width is None else exact_width
        known, news = known_or_measured(run, net, dataset, progress=progress is not None)
        width = known.width(asked)
        notes += [*news, summary(known, asked)]
    net = with_covariance(net, covariance, exact_width=width)
    with quietly():  # the notes have it
        parts = {"test": _measure(net, dataset.x_test, dataset.y_test, "test", seed, progress)}
        for name, x in foreign.items():
            parts[name] = _measure(net, x, None, name, seed, progress)
    classify = config.model.task == "classification"
    summarise = classification_metrics if classify else regression_metrics
    results: dict[str, Any] = {"test": summarise(parts["test"])}
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
        "by_target": {} if classify else _by_target(parts["test"], dataset.targets),
        "separability": _separabilities(parts, classify=classify),
        **environment(started, seed=seed),
    }
    _write_predictions(run, parts)
    plain: dict[str, Any] = without_nan(evaluation)
    run.write_json(run.evaluation_path.name, plain)
    return plain


def check_covariance(covariance: str | None, exact_width: int | None, model: ModelConfig) -> str:
    """How to hold the covariance in evaluation, if it can be held so."""
    if covariance is None:
        covariance = "tracked" if model.covariance == "tracked" else "full"
    if covariance not in PER_SAMPLE:
        raise ValueError(
            f"Evaluation gives each sample a covariance of its own: {', '.join(PER_SAMPLE)}; got "
            f"{covariance!r}."
        )
    if exact_width is not None and covariance != "tracked":
        raise ValueError(f"exact_width is for tracked covariances, not for {covariance} ones.")
    return covariance


def _write_predictions(run: Run, parts: dict[str, Arrays]) -> None:
    arrays: dict[str, Any] = {
        f"{part}/{key}": value
        for part, found in parts.items()
        for key, value in found.items()
        if key != "covariance"  # of all outputs of all samples: large, and not drawn
    }
    run.write_arrays(run.predictions_path.name, arrays)


def layer_names(net: nn.Module) -> list[str]:
    """The layers that entropies are taken of: every activation, and the output."""
    activations = [name for name, layer in net.named_modules() if isinstance(layer, Activation)]
    linears = [name for name, layer in net.named_modules() if isinstance(layer, Linear)]
    return [*activations, linears[-1]]


def classification_metrics(arrays: Arrays) -> dict[str, float]:
    """Accuracy, calibration, and how well doubt finds errors, beside what max-softmax does."""
    probabilities, label, entropy = _softmax(arrays["mean"]), arrays["label"], arrays["entropy"]
    wrong = probabilities.argmax(1) != label
    doubt = _max_softmax(arrays)
    return {
        "samples": len(label),
        "accuracy": 1 - float(wrong.mean()),
        "nll": metrics.nll(probabilities, label),
        "brier": metrics.brier(probabilities, label),
        "ece": metrics.ece(probabilities.max(1), ~wrong),
        "entropy_right": _average(entropy[~wrong]),
        "entropy_wrong": _average(entropy[wrong]),
        "auroc_entropy": metrics.auroc(entropy[wrong], entropy[~wrong]),
        "auroc_max_softmax": metrics.auroc(doubt[wrong], doubt[~wrong]),
        "aurc_entropy": metrics.aurc(entropy, wrong),
        "aurc_max_softmax": metrics.aurc(doubt, wrong),
    }


def regression_metrics(arrays: Arrays) -> dict[str, float]:
    """Errors, likelihood, and how many targets the intervals hold, in the target's own units."""
    gap = arrays["target"] - arrays["mean"]
    stddev = np.sqrt(arrays["variance"].astype(np.float64))
    likelihood = metrics.gaussian_log_likelihood(
        arrays["mean"], arrays["covariance"], arrays["target"]
    )
    coverages = {
        f"coverage_{level}": metrics.interval_coverage(gap, stddev, level / 100)
        for level in (50, 90, 95)
    }
    correlations = [
        metrics.rank_correlation(np.abs(errors), deviations)
        for errors, deviations in zip(gap.T, stddev.T, strict=True)
    ]
    return {
        "samples": len(gap),
        "rmse": math.sqrt(float((gap**2).mean())),
        "mae": float(np.abs(gap).mean()),
        "log_likelihood": float(likelihood.mean()),
        **coverages,
        "width_90": float((2 * metrics.normal_quantile(0.9) * stddev).mean()),
        "spearman_error": _average(np.array(correlations)),
    }


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
        found["auroc_max_softmax"] = metrics.auroc(_max_softmax(arrays), _max_softmax(test))
    return found


@torch.no_grad()
def _measure(
    net: nn.Module, x: Tensor, y: Tensor | None, name: str, seed: int, progress: Progress | None
) -> Arrays:
    """Mean, variance and entropy of every sample, and the layers' entropies of some."""
    device = next(net.parameters()).device
    collected: dict[str, list[np.ndarray]] = {}
    batches = torch.split(torch.arange(len(x)), _BATCH)
    for rows in progress(batches, name) if progress else batches:
        out: Moments = net(x[rows].to(device))
        found = {"mean": out.mean, "variance": out.variance, "entropy": out.entropy()}
        if y is not None and y.is_floating_point():
            found["covariance"] = out.covariance_matrix
        for key, value in found.items():
            collected.setdefault(key, []).append(value.cpu().numpy())
    arrays = {key: np.concatenate(values) for key, values in collected.items()}
    wrong = np.zeros(len(x), dtype=bool)
    if y is not None:
        arrays["target" if y.is_floating_point() else "label"] = y.numpy()
        if not y.is_floating_point():
            wrong = arrays["mean"].argmax(1) != arrays["label"]
    rows = _some_of_each(wrong, LAYER_SAMPLES, seed)
    arrays["layer_entropy"] = np.full((len(x), len(layer_names(net))), np.nan, dtype=np.float32)
    chunks = np.array_split(rows, max(1, len(rows) // _BATCH))
    for some in progress(chunks, f"{name}, by layer") if progress else chunks:
        with record(net) as layers:
            net(x[some].to(device))
        entropies = [layers[layer].entropy().cpu().numpy() for layer in layer_names(net)]
        arrays["layer_entropy"][some] = np.stack(entropies, 1)
    gallery = _gallery(arrays["entropy"], wrong)
    return arrays | {"input": x[gallery].numpy(), "input_index": gallery}


def _some_of_each(wrong: np.ndarray, count: int, seed: int) -> np.ndarray:
    """(k,) rows to look at closely: half of them wrong predictions if there are so many."""
    order = np.random.default_rng(seed).permutation(len(wrong))
    few = order[wrong[order]][: count // 2]
    rest = order[~wrong[order]][: count - len(few)]
    return np.sort(np.concatenate([few, rest]))


def _gallery(entropy: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Rows of the least and most certain samples, of the surest wrong and least sure right ones."""
    order = np.argsort(entropy, kind="stable")
    right_order, wrong_order = order[~wrong[order]], order[wrong[order]]
    chosen = [
        order[:_GALLERY],
        order[-_GALLERY:],
        wrong_order[:_GALLERY],
        right_order[-_GALLERY:],
    ]
    return np.unique(np.concatenate(chosen))


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
    return [metrics.separability(a, b) for a, b in zip(higher.T, lower.T, strict=True)]


def _softmax(mean: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.as_tensor(mean).double(), -1).numpy()


def _max_softmax(arrays: Arrays) -> np.ndarray:
    return scores.max_softmax(torch.as_tensor(arrays["mean"])).numpy()


def _average(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else math.nan
