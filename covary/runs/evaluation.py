"""What a trained network gets right, and how unsure it is of what."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary import data
from covary.data import DataError, Dataset
from covary.models import with_covariance
from covary.moments import Moments
from covary.nn import Activation, Linear
from covary.recording import record
from covary.runs.config import DataConfig
from covary.runs.directory import Run, environment, weights_digest
from covary.runs.training import load_data
from covary.training.checkpoint import write_atomically
from covary.training.log import without_nan
from covary.uncertainty import metrics, scores

Arrays = dict[str, np.ndarray]
Progress = Callable[[Sequence[Any], str], Iterator[Any]]
_BATCH = 128
# The entropy of a wide hidden layer takes its eigenvalues: for so many samples, not for all.
LAYER_SAMPLES = 500
# Inputs that the report shows, of each of four kinds.
_GALLERY = 12


def evaluate(
    run: Run,
    *,
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
        ood: names of known sets whose test part is foreign to the network, or tables with the
            columns of the run's table.
        data_dir: where data are looked for first.
        seed: decides for which samples the layers' entropies are taken.
        progress: wraps the batches of each part, given its name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    config = run.config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = with_covariance(run.network(), "full").to(device)
    dataset, _ = load_data(config.data, data_dir=data_dir, seed=config.training.seed)
    parts = {"test": _measure(net, dataset.x_test, dataset.y_test, "test", seed, progress)}
    notes = []
    for name in ood:
        # Two tables may have one name, in two folders.
        short = [Path(other).name for other in ood].count(Path(name).name) == 1
        label = Path(name).name if short else name
        if label in parts:
            raise DataError(f"{label} was named twice, or has the name of another part.")
        foreign = _foreign(run, dataset, name, data_dir, seed)
        notes += [f"{label}: {note}" for note in foreign.notes]
        parts[label] = _measure(net, foreign.x_test, None, label, seed, progress)
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
        "covariance": "full",
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


def _write_predictions(run: Run, parts: dict[str, Arrays]) -> None:
    arrays: dict[str, Any] = {
        f"{part}/{key}": value
        for part, found in parts.items()
        for key, value in found.items()
        if key != "covariance"  # of all outputs of all samples: large, and not drawn
    }
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_atomically(run.predictions_path, packed.getvalue())


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


def _foreign(run: Run, dataset: Dataset, name: str, data_dir: str | None, seed: int) -> Dataset:
    config = run.config().data
    if DataConfig(name=name).is_table:
        schema = run.schema()
        if schema is None:
            raise DataError(f"{name} is a table, and {dataset.name} is none: they do not compare.")
        path, encoding, delimiter = Path(name), config.encoding, config.delimiter or None
        return data.read_table(path, schema=schema, encoding=encoding, delimiter=delimiter)[0]
    foreign = data.load(name, data_dir=data_dir, seed=seed)
    if foreign.x_test.shape[1:] != dataset.x_test.shape[1:]:
        shapes = [tuple(some.x_test.shape[1:]) for some in (foreign, dataset)]
        raise DataError(
            f"{name} has inputs of shape {shapes[0]}, the network takes {shapes[1]}. Foreign data "
            "must have the same shape (mnist, fashion-mnist, notmnist; or cifar10, cifar100, svhn)."
        )
    return foreign


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
