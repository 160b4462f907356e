"""What a trained network gets right, and how unsure it is of what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone

import numpy as np
import torch
from torch import nn

from covary.models import with_covariance
from covary.nn import Rescale
from covary.runs import predictions
from covary.runs.directory import Run, environment
from covary.runs.held_out import HeldOut
from covary.runs.measuring import Progress, layer_names, measure
from covary.runs.predictions import Predictions
from covary.runs.results import CalibrationResult, Evaluation, TrackedFidelity, sha256
from covary.runs.tracking import chosen, quietly
from covary.runs.uncertainty import known_or_fitted
from covary.uncertainty import metrics


def evaluate(
    run: Run,
    *,
    covariance: str | None = None,
    exact_width: int | None = None,
    ood: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a run on its test data, and on out-of-distribution data where they are named.

    Every sample has a covariance of its own, however the network was trained. Calibration and the
    fitted score are those that held-out training data gave, fitted first if they were not; numbers
    without calibration are always there too. What comes out is also written to the run's folder:
    numbers to ``evaluation.json``, and mean, variance, entropy and fitted score of every sample to
    ``predictions.npz``.

    Args:
        run: a trained run.
        covariance: ``"full"``, ``"tracked"`` or ``"diagonal"``. By default tracked, or full where
            tracked covariances are poor. If they were never compared with exact ones they are
            first, on training inputs, and the result is kept with the run's weights.
        exact_width: for tracked covariances; by default that of the run.
        ood: names of known sets whose test part the network was not made for, or tables with the
            columns of the run's table.
        seed: decides for which samples the layers' entropies are taken.
        progress: wraps the batches of each part, given its name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    run.check_replaceable(run.evaluation_path, run.predictions_path)
    config, classify, dataset = run.config, run.classifies, run.data
    net: nn.Module = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    foreign, notes = run.foreign(ood, seed=seed)
    how = chosen(run, net, covariance, exact_width, progress=progress is not None)
    net = with_covariance(net, how.covariance, exact_width=how.exact_width)
    with quietly():  # the notes have it
        held_out = known_or_fitted(run, net, how, progress=progress)
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
    test = parts["test"]
    results = {"test": classification_metrics(test) if classify else _regression(test, net)}
    results |= {name: foreign_metrics(parts[name], test) for name in foreign}
    predictions.write(run.predictions_path, parts)
    return Evaluation(
        task=config.model.task,  # type: ignore[arg-type]
        dataset=config.data.name,
        layers=tuple(layer_names(net)),
        classes=tuple(dataset.classes),
        features=tuple(dataset.features),
        targets=tuple(dataset.targets),
        image_shape=config.model.input_shape if config.model.is_image else None,
        covariance=how.covariance,
        exact_width=how.exact_width,
        fidelity=None if how.fidelity is None else TrackedFidelity(*how.fidelity),
        weights=run.weights,
        notes=(*notes, *how.notes, *held_out.notes),
        parts=results,
        scores={name: _score_metrics(part, test) for name, part in parts.items()},
        calibration=_calibration(held_out, test, net),
        by_target={} if classify else _by_target(test, dataset.targets),
        separability=_separabilities(parts, classify=classify),
        predictions_sha256=sha256(run.predictions_path),
        **environment(started, seed=seed),
    ).write(run.evaluation_path)


def classification_metrics(part: Predictions) -> dict[str, float]:
    """Accuracy, calibration, and how well doubt finds errors, beside what max-softmax does."""
    assert part.label is not None
    entropy, doubt, wrong = part.entropy, part.doubt, ~part.right
    return {
        "samples": len(part),
        **metrics.of_probabilities(part.probability, part.label),
        "entropy_right": _average(entropy[~wrong]),
        "entropy_wrong": _average(entropy[wrong]),
        "auroc_entropy": metrics.auroc(entropy[wrong], entropy[~wrong]),
        "auroc_max_softmax": metrics.auroc(doubt[wrong], doubt[~wrong]),
        "aurc_entropy": metrics.aurc(entropy, wrong),
        "aurc_max_softmax": metrics.aurc(doubt, wrong),
    }


def regression_metrics(
    mean: np.ndarray, covariance: np.ndarray, target: np.ndarray
) -> dict[str, float]:
    """Errors, likelihood, and how many targets the intervals hold, in the target's own units.

    Args:
        mean: (n, t).
        covariance: (n, t, t).
        target: (n, t).
    """
    return {"samples": len(mean), **metrics.of_moments(mean, covariance, target)}


def _regression(part: Predictions, net: nn.Module, *, calibrated: bool = False) -> dict[str, float]:
    """Metrics of the test set, as the network has it or calibrated."""
    mean, covariance = part.mean, part.covariance
    if calibrated:
        assert part.calibrated_mean is not None
        mean, covariance = part.calibrated_mean, part.calibrated_covariance
    assert covariance is not None
    assert part.target is not None
    found = regression_metrics(mean, covariance, part.target)
    return found | {"log_likelihood_standardised": _standardised(found, net)}


def _standardised(found: dict[str, float], net: nn.Module) -> float:
    """The log-likelihood in standard deviations of the training targets, as units."""
    scales = [layer.scale for layer in net.modules() if isinstance(layer, Rescale)]
    scale = torch.cat(scales).double().cpu().numpy()
    return float(metrics.standardised_log_likelihood(found["log_likelihood"], scale))


def _score_metrics(part: Predictions, test: Predictions) -> dict[str, dict[str, float]]:
    """By score: foreign inputs against those of the test set; of these, wrong against right.

    In regression, where nothing is right or wrong: the rank correlation with the size of errors.
    """
    found = {}
    for name, score in part.scores.items():
        if part is not test:
            row = _told_apart(score, test.scores[name])
        elif test.label is not None:
            wrong = ~test.right
            row = _told_apart(score[wrong], score[~wrong]) | {"aurc": metrics.aurc(score, wrong)}
        else:
            size = np.linalg.norm(test.error, axis=1)
            row = {"spearman_error": metrics.rank_correlation(score, size)}
        found[name] = row
    return found


def _told_apart(positive: np.ndarray, negative: np.ndarray) -> dict[str, float]:
    return {
        "auroc": metrics.auroc(positive, negative),
        "aupr": metrics.aupr(positive, negative),
        "fpr95": metrics.fpr95(positive, negative),
    }


def _calibration(held_out: HeldOut, test: Predictions, net: nn.Module) -> CalibrationResult | None:
    """What held-out data gave, and how good the test set's numbers are with it."""
    if held_out.calibration is None:
        return None
    if test.label is not None:
        assert test.calibrated_probabilities is not None
        after = metrics.of_probabilities(test.calibrated_probabilities, test.label)
    else:
        after = _regression(test, net, calibrated=True)
    return CalibrationResult(
        **held_out.calibration.to_dict(),
        noise=held_out.noise,
        held_out_samples=held_out.samples,
        test=after,
    )


def _by_target(part: Predictions, targets: Sequence[str]) -> dict[str, dict[str, float]]:
    """The same for each of several targets, which have units of their own."""
    if len(targets) < 2:
        return {}
    assert part.covariance is not None
    assert part.target is not None
    found = {}
    for i, name in enumerate(targets):
        one = slice(i, i + 1)
        found[name] = regression_metrics(
            part.mean[:, one], part.covariance[:, one, one], part.target[:, one]
        )
    return found


def foreign_metrics(part: Predictions, test: Predictions) -> dict[str, float]:
    """How well doubt tells foreign inputs from those of the test set."""
    found = {
        "samples": len(part),
        "entropy": _average(part.entropy),
        "auroc_entropy": metrics.auroc(part.entropy, test.entropy),
    }
    if test.label is not None:
        found["auroc_max_softmax"] = metrics.auroc(part.doubt, test.doubt)
    return found


def _separabilities(
    parts: dict[str, Predictions], *, classify: bool
) -> dict[str, tuple[float, ...]]:
    """By layer: wrong predictions, and foreign inputs, against right ones (or all, if neither)."""
    test = parts["test"]
    usual = test.layer_entropy
    found = {}
    if classify:
        found["test"] = _by_layer(usual[~test.right], usual[test.right])
        usual = usual[test.right]
    foreign = {name: part for name, part in parts.items() if name != "test"}
    return found | {name: _by_layer(part.layer_entropy, usual) for name, part in foreign.items()}


def _by_layer(higher: np.ndarray, lower: np.ndarray) -> tuple[float, ...]:
    """Of the samples whose layers were looked at, which have numbers."""
    groups = [each[~np.isnan(each).any(1)] for each in (higher, lower)]
    columns = zip(groups[0].T, groups[1].T, strict=True)
    return tuple(metrics.separability(a, b) for a, b in columns)


def _average(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else math.nan
