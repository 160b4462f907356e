"""The same methods after calibration on held-out data, and with scores that were fitted there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covary.baselines.prediction import (
    Classifier,
    GaussianRegressor,
    Method,
    Prediction,
    certain,
)
from covary.moments import Moments
from covary.uncertainty import FittedScore, scores
from covary.uncertainty.calibration import LogitCalibration, fit_logits, fit_variance
from covary.uncertainty.features import FEATURES, mean_of
from covary.uncertainty.fidelity import gathered

_BATCH = 128


class CalibratedClassifier(Classifier):
    """Probabilities by the expected softmax of calibrated logits; one minus the largest as score.

    Args:
        base: the method that is calibrated; shared.
        calibration: of its logits' moments.
    """

    def __init__(self, base: Classifier, calibration: LogitCalibration) -> None:
        fitted = "Temperature, and scale of the covariance, by held-out data."
        description = f"{base.description} {fitted}"
        super().__init__(f"{base.name}, calibrated", description, base.module)
        self._base, self.calibration = base, calibration

    def moments(self, x: Tensor) -> Moments:
        """The calibrated ones."""
        moments: Moments = self.calibration(self._base.moments(x))
        return moments

    def infer(self, x: Tensor) -> Prediction:
        """Probabilities (B, K) and the score."""
        moments = self.moments(x)
        found = {"expected_max": scores.expected_max(moments)}
        return Prediction(found, probabilities=scores.expected_softmax(moments))


class FittedClassifier(Classifier):
    """The softmax of a network's mean, and a score of all its layers that was fitted to it.

    Args:
        name: of the method that predicts alike.
        description: what that does.
        net: raw inputs (B, ...) -> Moments or logits (B, K).
        score: fitted to this network.
    """

    def __init__(self, name: str, description: str, net: nn.Module, score: FittedScore) -> None:
        description = f"{description} Score: density of its layers, fitted to held-out data."
        super().__init__(f"{name}, fitted", description, net)
        self._score = score

    def moments(self, x: Tensor) -> Moments:
        """What the network gives; logits have no variance."""
        out = self.module(x)
        return out if isinstance(out, Moments) else certain(out.double())

    def infer(self, x: Tensor) -> Prediction:
        """Probabilities (B, K) and the score, in one pass."""
        kind = FEATURES[self._score.features]
        with kind.watch(self.module) as seen:
            out = self.module(x)
        mean = mean_of(out).cpu()
        found = {"fitted": self._score.of(kind.of(seen, out).cpu(), mean)}
        return Prediction(found, probabilities=torch.softmax(mean.double(), -1))


@torch.no_grad()
def calibrated_classifier(method: Classifier, x: Tensor, y: Tensor) -> CalibratedClassifier:
    """A classifier calibrated on held-out inputs (n, ...) and labels (n,)."""
    moments = gathered([method.moments(some) for some in _batches(method, x)])
    return CalibratedClassifier(method, fit_logits(moments, y))


@torch.no_grad()
def calibrated_regressor(method: GaussianRegressor, x: Tensor, y: Tensor) -> GaussianRegressor:
    """A regressor whose variance is scaled, and added to, by held-out (n, ...) and (n, t)."""
    moments = gathered([method.module(some) for some in _batches(method, x)])
    calibration = fit_variance(moments, y)
    description = f"{method.description} Scale of the variance, and a constant, by held-out data."
    module = nn.Sequential(method.module, calibration.to(moments.mean.device))
    return GaussianRegressor(f"{method.name}, calibrated", description, module)


def _batches(method: Method, x: Tensor) -> list[Tensor]:
    device = next(method.module.parameters()).device
    return [some.to(device) for some in torch.split(x, _BATCH)]
