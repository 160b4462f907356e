"""What a trained network gets right, and how unsure it is of what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial

import numpy as np
import torch
from torch import nn

from covary.models import with_covariance
from covary.nn import Rescale
from covary.progress import Steps
from covary.runs import budget, distributions, predictions
from covary.runs.card import write_card
from covary.runs.directory import Run
from covary.runs.predictions import Predictions
from covary.runs.results import CalibrationResult, Evaluation, HeldOut, TrackedFidelity, sha256
from covary.runs.tracking import chosen, quietly
from covary.runs.uncertainty import known_or_fitted
from covary.uncertainty import metrics


def evaluate(
    run: Run,
    *,
    covariance: str | None = None,
    ood: Sequence[str] = (),
    seed: int = 0,
    progress: Steps | None = None,
) -> Evaluation:
    """Measure a run on its test data, and on out-of-distribution data where they are named.

    Every sample has a covariance of its own, however the network was trained. Calibration and the
    fitted score are those that held-out training data gave, fitted first if they were not; numbers
    without calibration are always there too. Calibrated numbers of a regression are those of the
    distributions that ``covary predict`` gives, with where they fail and which columns move them.
    The budget says what the variance of the output is made of, on some test inputs. What comes out
    is also written to the run's folder: numbers to ``evaluation.json``, and mean, variance, entropy
    and fitted score of every sample to ``predictions.npz``.

    Args:
        run: a trained run.
        covariance: ``"full"``, ``"tracked"`` or ``"diagonal"``. By default tracked, or full where
            tracked covariances are poor. If they were never compared with exact ones they are
            first, on training inputs, and the result is kept with the run's weights.
        ood: names of known sets whose test part the network was not made for, or tables with the
            columns of the run's table.
        seed: decides for which samples the layers' entropies are taken.
        progress: wraps the batches of each part, given its name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    run.check_replaceable(run.evaluation_path, run.predictions_path)
    model, classify, dataset = run.config.model, run.classifies, run.data
    net: nn.Module = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    others, notes = run.ood(ood, seed=seed)
    how = chosen(run, net, covariance, progress=progress is not None)
    net = with_covariance(net, how.covariance)
    with quietly():  # the notes have it
        held_out = known_or_fitted(run, net, how, progress=progress)
        measured = partial(
            predictions.measure, net, held_out=held_out, classify=classify, seed=seed
        )
        parts = {"test": measured(dataset.test_inputs, dataset.y_test, "test", progress=progress)}
        parts |= {name: measured(x, None, name, progress=progress) for name, x in others.items()}
        rows = None if classify else distributions.model_of(run, progress)
    if rows is not None:
        if rows.covariance != how.covariance:
            whose = f"distributions, as those of covary predict, have {rows.covariance} ones"
            notes.append(f"Numbers of the network have {how.covariance} covariances; {whose}.")
        parts = {
            name: distributions.added(part, rows, others.get(name, dataset.test_inputs))
            for name, part in parts.items()
        }
    test = parts["test"]
    made_of, why_not = budget.measure(run, net, test)
    results = {"test": classification_metrics(test) if classify else _regression(test, net)}
    results |= {name: _ood_metrics(parts[name], test) for name in others}
    predictions.write(run.predictions_path, parts)
    found = Evaluation(
        layers=tuple(predictions.layer_names(net)),
        classes=tuple(dataset.classes),
        features=tuple(dataset.features),
        targets=tuple(dataset.targets),
        image_shape=model.input_shape if model.is_image else None,
        covariance=how.covariance,
        fidelity=how.fidelity and TrackedFidelity(how.covariance, *how.fidelity[1:]),
        notes=(*notes, *how.notes, *held_out.notes, *why_not),
        parts=results,
        scores={name: _score_metrics(part, test) for name, part in parts.items()},
        calibration=_calibration(held_out, test)
        if rows is None
        else distributions.measured(run, rows, held_out, test, seed=seed),
        by_target={} if classify else _by_target(test, dataset.targets),
        separability=_separabilities(parts),
        budget=made_of,
        predictions_sha256=sha256(run.predictions_path),
        **run.about(started, seed),
    ).write(run.evaluation_path)
    write_card(run)
    return found


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


def _regression(part: Predictions, net: nn.Module) -> dict[str, float]:
    """Metrics of all targets; the likelihood also in standard deviations of training targets."""
    found = _of_targets(part, slice(None))
    scales = [layer.scale for layer in net.modules() if isinstance(layer, Rescale)]
    scale = torch.cat(scales).double().cpu().numpy()
    standardised = metrics.standardised_log_likelihood(found["log_likelihood"], scale)
    return found | {"log_likelihood_standardised": float(standardised)}


def _by_target(part: Predictions, targets: Sequence[str]) -> dict[str, dict[str, float]]:
    """The same for each of several targets, which have scales of their own."""
    if len(targets) < 2:
        return {}
    return {name: _of_targets(part, slice(i, i + 1)) for i, name in enumerate(targets)}


def _of_targets(part: Predictions, some: slice) -> dict[str, float]:
    """Errors, likelihood, and how many targets the intervals contain, on the targets' own scale."""
    assert part.covariance is not None
    assert part.target is not None
    found = metrics.of_moments(
        part.mean[:, some], part.covariance[:, some, some], part.target[:, some]
    )
    return {"samples": len(part), **found}


def _score_metrics(part: Predictions, test: Predictions) -> dict[str, dict[str, float]]:
    """By score: other inputs against those of the test set; of these, wrong against right.

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
    found = (metrics.auroc, metrics.aupr, metrics.fpr95)
    return {metric.__name__: metric(positive, negative) for metric in found}


def _calibration(held_out: HeldOut, test: Predictions) -> CalibrationResult | None:
    """What held-out data gave, and how good the test set's probabilities are with it."""
    if held_out.calibration is None:
        return None
    assert test.label is not None
    assert test.calibrated_probabilities is not None
    after = metrics.of_probabilities(test.calibrated_probabilities, test.label)
    numbers = vars(held_out.numbers())
    return CalibrationResult(**numbers, held_out_samples=held_out.samples, test=after)


def _ood_metrics(part: Predictions, test: Predictions) -> dict[str, float]:
    """How well doubt tells out-of-distribution inputs from those of the test set."""
    found = {
        "samples": len(part),
        "entropy": _average(part.entropy),
        "auroc_entropy": metrics.auroc(part.entropy, test.entropy),
    }
    if test.label is not None:
        found["auroc_max_softmax"] = metrics.auroc(part.doubt, test.doubt)
    return found


def _separabilities(parts: Mapping[str, Predictions]) -> dict[str, tuple[float, ...]]:
    """By layer: wrong predictions, and other inputs, against right ones (or all, if neither)."""
    test = parts["test"]
    groups = {name: part.layer_entropy for name, part in parts.items()}
    usual = groups.pop("test")
    if test.label is not None:
        groups = {"test": usual[~test.right], **groups}
        usual = usual[test.right]
    return {name: _by_layer(group, usual) for name, group in groups.items()}


def _by_layer(higher: np.ndarray, lower: np.ndarray) -> tuple[float, ...]:
    """Separability of entropies, layer by layer, over samples whose layers were measured."""
    groups = [each[~np.isnan(each).any(1)] for each in (higher, lower)]
    columns = zip(groups[0].T, groups[1].T, strict=True)
    return tuple(metrics.separability(a, b) for a, b in columns)


def _average(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else math.nan
