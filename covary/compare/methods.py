"""Methods: trained ways to predict, each of which gives a ``Prediction`` with scores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from covary.covariance import Diagonal
from covary.moments import Moments, mean_of
from covary.uncertainty import FittedScore, scores
from covary.uncertainty.calibration import LogitCalibration, fit_logits, fit_variance
from covary.uncertainty.features import FEATURES
from covary.uncertainty.fidelity import gathered

Score = Callable[[Moments], Tensor]
_BATCH = 128


@dataclass(frozen=True, eq=False)
class Prediction:
    """Of n inputs, on the CPU.

    Attributes:
        scores: (n,) each, by name: higher where the method is less sure. The first is its usual.
        probabilities: (n, K) of classes; classification alone.
        mean: (n, t) of targets; regression alone, as is the next.
        covariance: (n, t, t) of targets, in their units squared.
    """

    scores: Mapping[str, Tensor]
    probabilities: Tensor | None = None
    mean: Tensor | None = None
    covariance: Tensor | None = None

    @property
    def score(self) -> Tensor:
        """(n,) the method's usual score."""
        return next(iter(self.scores.values()))

    @property
    def variance(self) -> Tensor | None:
        """(n, t) of each target."""
        if self.covariance is None:
            return None
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """The predictions of several batches as one."""
        found: dict[str, Tensor | None] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            if field.name != "scores":
                found[field.name] = None if values[0] is None else torch.cat(values)
        joined = {name: torch.cat([p.scores[name] for p in parts]) for name in parts[0].scores}
        return cls(scores=joined, **found)

    def cpu(self) -> Prediction:
        """The same, where numpy can read it."""
        there = {
            field.name: value.cpu()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, scores={n: s.cpu() for n, s in self.scores.items()}, **there)


class Method(ABC):
    """A trained way to predict.

    Attributes:
        name: what it is called in results.
        description: what it does, in a sentence.
        module: the network or networks; decides the device.
    """

    def __init__(self, name: str, description: str, module: nn.Module) -> None:
        self.name, self.description, self.module = name, description, module.eval()

    @abstractmethod
    def infer(self, x: Tensor) -> Prediction:
        """One batch (B, ...), where the networks are."""

    @torch.no_grad()
    def predict(self, x: Tensor, *, batch_size: int = _BATCH) -> Prediction:
        """Any number of inputs (n, ...), batch by batch."""
        if len(x) == 0:
            raise ValueError(f"{self.name} got no inputs to predict.")
        device = next(self.module.parameters()).device
        return Prediction.joined(
            [self.infer(some.to(device)).cpu() for some in torch.split(x, batch_size)]
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Classifier(Method):
    """Classification; ``logits`` is what an attack follows the gradient of."""

    @abstractmethod
    def moments(self, x: Tensor) -> Moments:
        """Logits (B, K) with a covariance, which may be zero; differentiable."""

    def logits(self, x: Tensor) -> Tensor:
        """(B, K) of the prediction that the method makes."""
        return self.moments(x).mean


class MomentClassifier(Classifier):
    """Classes by the mean of a network that gives ``Moments``, and by scores of its moments.

    Args:
        name: what it is called in results.
        description: what it does.
        net: raw inputs (B, ...) -> Moments (B, K).
        scores: of the moments, by name; the first is the usual one.
        expected: whether probabilities are the softmax's expectation under the covariance, and not
            the softmax of the mean.
    """

    def __init__(
        self,
        name: str,
        description: str,
        net: nn.Module,
        *,
        scores: Mapping[str, Score],
        expected: bool = False,
    ) -> None:
        super().__init__(name, description, net)
        self._scores, self._expected = dict(scores), expected

    def moments(self, x: Tensor) -> Moments:
        """What the network gives."""
        found: Moments = self.module(x)
        return found

    def infer(self, x: Tensor) -> Prediction:
        """Probabilities (B, K) and the scores that were asked for."""
        moments = self.moments(x)
        probabilities = (
            scores.expected_softmax(moments)
            if self._expected
            else torch.softmax(moments.mean.double(), -1)
        )
        found = {name: score(moments) for name, score in self._scores.items()}
        return Prediction(found, probabilities=probabilities)


class AveragedClassifier(Classifier):
    """Classes by the average of the probabilities that several conventional networks give.

    Scores: ``max_probability``, one minus the largest average probability; and, of more than one
    network, ``mutual_information``, the entropy of the average less the average entropy.

    Args:
        name: what it is called in results.
        description: what it does.
        module: ``Members`` or ``DropoutSamples``: raw inputs (B, ...) -> logits (M, B, K).
    """

    def moments(self, x: Tensor) -> Moments:
        """Logarithms of the average probabilities, without variance."""
        return _certain(_average(torch.log_softmax(self.module(x).double(), -1)))

    def infer(self, x: Tensor) -> Prediction:
        """Probabilities (B, K) and both scores."""
        # In float64: confident probabilities would all be 1.
        each = torch.log_softmax(self.module(x).double(), -1)
        average = _average(each)
        found = {"max_probability": _all_but_the_largest(average.exp())}
        if len(each) > 1:
            found["mutual_information"] = _entropy(average) - _entropy(each).mean(0)
        return Prediction(found, probabilities=average.exp())


class GaussianRegressor(Method):
    """Targets by the moments of a network; the score is the entropy of the independent Gaussians.

    For one target that has the order of the standard deviation.
    """

    def infer(self, x: Tensor) -> Prediction:
        """Mean (B, t), covariance (B, t, t) and the score."""
        moments: Moments = self.module(x)
        variance = moments.variance.double()
        # A variance of 0 would be -inf, and no average of those is a number.
        score = 0.5 * variance.clamp(min=torch.finfo(variance.dtype).tiny).log().sum(-1)
        covariance = moments.covariance_matrix.double()
        return Prediction({"stddev": score}, mean=moments.mean.double(), covariance=covariance)


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
        return out if isinstance(out, Moments) else _certain(out.double())

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


def _certain(mean: Tensor) -> Moments:
    """(B, n) as moments without any variance."""
    return Moments(mean, Diagonal(torch.zeros_like(mean)))


def _all_but_the_largest(probabilities: Tensor) -> Tensor:
    """(B,) one minus the largest of (B, K), summed from the others: differences would round."""
    largest = probabilities.argmax(-1, keepdim=True)
    return probabilities.scatter(-1, largest, 0.0).sum(-1)


def _average(logs: Tensor) -> Tensor:
    """(B, K) logarithm of the average of probabilities (M, B, K), given by their logarithms."""
    return torch.logsumexp(logs, 0) - math.log(len(logs))


def _entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(-1)
