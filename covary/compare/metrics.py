"""What is measured of every method of a comparison: numbers from its predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from covary.attacks import fgsm
from covary.compare.methods import Classifier, Method, Prediction
from covary.uncertainty import metrics

Numbers = dict[str, float]
BATCH = 128
_PIXELS = 255.0


def classification_rows(
    test: Prediction,
    label: Tensor,
    ood: Mapping[str, Prediction],
    attacked: Prediction | None,
) -> dict[str, Numbers]:
    """By score: how right and calibrated the probabilities are, and what the score finds."""
    assert test.probabilities is not None
    probabilities, truth = test.probabilities.numpy(), label.numpy()
    wrong = probabilities.argmax(1) != truth
    same = {
        "accuracy": 1 - float(wrong.mean()),
        "nll": metrics.nll(probabilities, truth),
        "ece": metrics.ece(probabilities.max(1), ~wrong),
    }
    rows = {}
    for name, values in test.scores.items():
        score = values.numpy()
        row = same | {
            "auroc_errors": metrics.auroc(score[wrong], score[~wrong]),
            "aurc": metrics.aurc(score, wrong),
            **_ood(name, score, ood),
        }
        if attacked is not None:
            found, count = attacked.scores[name].numpy(), len(attacked.score)
            assert attacked.probabilities is not None
            right = attacked.probabilities.numpy().argmax(1) == truth[:count]
            row["attack_accuracy"] = float(right.mean())
            row["attack_awareness"] = metrics.auroc(found, score[:count])
        rows[name] = row
    return rows


def regression_rows(
    test: Prediction, target: Tensor, ood: Mapping[str, Prediction]
) -> dict[str, Numbers]:
    """By score (there is one): errors, likelihood and coverage in the target's own units."""
    assert test.mean is not None
    assert test.variance is not None
    mean, truth = test.mean.numpy(), target.double().numpy()
    gap, stddev = truth - mean, np.sqrt(test.variance.numpy())
    assert test.covariance is not None
    likelihood = metrics.gaussian_log_likelihood(mean, test.covariance.numpy(), truth)
    ranks = [
        metrics.rank_correlation(np.abs(errors), deviations)
        for errors, deviations in zip(gap.T, stddev.T, strict=True)
    ]
    same = {
        "rmse": math.sqrt(float((gap**2).mean())),
        "log_likelihood": float(likelihood.mean()),
        "coverage_95": metrics.interval_coverage(gap, stddev, 0.95),
        "spearman_error": float(np.mean(ranks)),
    }
    return {
        name: same
        | {
            "aurc": metrics.aurc(values.numpy(), (gap**2).mean(1)),
            **_ood(name, values.numpy(), ood),
        }
        for name, values in test.scores.items()
    }


def _ood(name: str, score: np.ndarray, ood: Mapping[str, Prediction]) -> Numbers:
    return {
        ood_key(part): metrics.auroc(found.scores[name].numpy(), score)
        for part, found in ood.items()
    }


def ood_key(part: str) -> str:
    """What the AUROC of an out-of-distribution set is called."""
    return f"auroc_ood_{part}"


def attacked_images(method: Method, x: Tensor, y: Tensor, epsilon: float) -> Tensor:
    """Images (n, C, H, W) of bytes moved along the gradient of what the method predicts.

    By ``epsilon`` of the pixels' range, within it; as floating point numbers in the units of bytes.
    """
    assert isinstance(method, Classifier)
    device = next(method.module.parameters()).device
    made = fgsm(
        method.logits,
        x.to(device).float(),
        y.to(device),
        epsilon * _PIXELS,
        bounds=(0.0, _PIXELS),
        batch_size=BATCH,
    )
    return made.cpu()


def predict_all(method: Method, parts: Mapping[str, Tensor]) -> dict[str, Prediction]:
    """What a method makes of several sets of inputs."""
    return {name: method.predict(x, batch_size=BATCH) for name, x in parts.items()}
