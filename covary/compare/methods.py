"""Methods: trained ways to predict; what they predict, with scores; and numbers of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary.covariance import Diagonal
from covary.moments import Moments, mean_of
from covary.uncertainty import FittedScore, metrics, scores
from covary.uncertainty.agreement import gathered
from covary.uncertainty.calibration import fit_logits, fit_variance
from covary.uncertainty.fitted import FEATURES

BATCH = 128
# Numbers of predictions that every method has, whatever its scores are.
CLASSIFICATION = ("accuracy", "nll", "ece")
REGRESSION = ("rmse", "log_likelihood", "crps", "coverage_90", "width_90", "spearman_error")


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a method predicts for n inputs.

    Attributes:
        scores: (n,) each, by name: higher where the method is less sure. The first is its usual.
        probabilities: (n, K) of classes; classification alone.
        mean: (n, t) of targets; regression alone, as is the next.
        covariance: (n, t, t) of targets, on their own scale.
        distributions: of each of the t targets, n rows; none where they are Gaussian.
    """

    scores: Mapping[str, Tensor]
    probabilities: Tensor | None = None
    mean: Tensor | None = None
    covariance: Tensor | None = None
    distributions: tuple[metrics.Distribution, ...] = ()

    @property
    def score(self) -> Tensor:
        """(n,) the method's usual score."""
        return next(iter(self.scores.values()))

    @property
    def variance(self) -> Tensor | None:
        """(n, t) of each target."""
        return None if self.covariance is None else self.covariance.diagonal(dim1=-2, dim2=-1)

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """The predictions of several batches as one, on the CPU."""
        names = ("probabilities", "mean", "covariance")
        there = [name for name in names if getattr(parts[0], name) is not None]
        whole: dict[str, Any] = {
            name: torch.cat([getattr(p, name).cpu() for p in parts]) for name in there
        }
        scores = {
            name: torch.cat([p.scores[name].cpu() for p in parts]) for name in parts[0].scores
        }
        return cls(scores, **whole)


Rule = Callable[[nn.Module, Tensor], Prediction]


@dataclass(frozen=True, eq=False)
class Method:
    """A trained way to predict.

    Attributes:
        name: what it is called in results.
        description: what it does, in a sentence.
        module: the network or networks, raw inputs (B, ...) -> Moments (B, n), logits (B, K), or
            logits (M, B, K) of ``Members`` or ``DropoutSamples``; put into evaluation mode.
        rule: module and a batch -> prediction: ``by_mean``, ``by_expectation``, ``by_average``,
            ``by_points``, ``by_density`` or ``by_targets``.
    """

    name: str
    description: str
    module: nn.Module
    rule: Rule
    extra_seconds: float = 0.0  # of fitting, beyond those of its group

    def __post_init__(self) -> None:
        self.module.eval()

    def infer(self, x: Tensor) -> Prediction:
        """One batch (B, ...), where the networks are."""
        return self.rule(self.module, x)

    def moments(self, x: Tensor) -> Moments:
        """Moments of logits or targets; for several networks, of the log of their average."""
        out = self.module(x)
        if isinstance(out, Moments):
            return out
        _, average = _logarithms(out if out.dim() > 2 else out[None])
        return Moments(average, Diagonal(torch.zeros_like(average)))

    def logits(self, x: Tensor) -> Tensor:
        """(B, K) of the classes: what an attack follows the gradient of."""
        return self.moments(x).mean

    def batches(self, x: Tensor, size: int = BATCH) -> list[Tensor]:
        """Inputs (n, ...) batch by batch, where the networks are."""
        device = next(self.module.parameters()).device
        return [some.to(device) for some in torch.split(x, size)]

    @torch.no_grad()
    def predict(self, x: Tensor, *, batch_size: int = BATCH) -> Prediction:
        """Any number of inputs (n, ...), batch by batch."""
        if len(x) == 0:
            raise ValueError(f"{self.name} got no inputs to predict.")
        return Prediction.joined([self.infer(some) for some in self.batches(x, batch_size)])


def by_mean(net: nn.Module, x: Tensor) -> Prediction:
    """Classes by the softmax of the mean; scores are ``entropy`` and ``max_softmax``."""
    out: Moments = net(x)
    found = {"entropy": scores.entropy(out), "max_softmax": scores.max_softmax(out)}
    return Prediction(found, out.mean.double().softmax(-1))


def by_expectation(net: nn.Module, x: Tensor) -> Prediction:
    """Classes by the expected softmax under the covariance; the score is ``expected_max``."""
    out: Moments = net(x)
    return Prediction({"expected_max": scores.expected_max(out)}, scores.expected_softmax(out))


def by_average(draws: Callable[[Tensor], Tensor], x: Tensor) -> Prediction:
    """Classes by the average of the probabilities that several conventional networks give.

    Scores: ``max_probability``, one minus the largest average probability; and, of more than one
    network, ``mutual_information``, the entropy of the average less the average entropy.
    """
    each, average = _logarithms(draws(x))
    found = {"max_probability": scores.doubt(average.exp())}
    if len(each) > 1:
        found["mutual_information"] = _entropy(average) - _entropy(each).mean(0)
    return Prediction(found, average.exp())


def by_points(net: Callable[[Tensor], Moments], x: Tensor) -> Prediction:
    """Classes by the softmax averaged over points that stand for the Gaussian of the moments.

    Scores are those of ``by_average``, with points in place of networks.
    """
    return by_average(lambda some: scores.points(net(some)), x)


def by_density(net: nn.Module, x: Tensor, *, score: FittedScore) -> Prediction:
    """Classes by the softmax of the mean; the score is one of all layers, ``fitted`` to the net.

    It takes one pass. The network gives Moments or logits (B, K).
    """
    features, out = FEATURES[score.features](net, x)
    mean = mean_of(out).cpu()
    return Prediction({"fitted": score.of(features.cpu(), mean)}, mean.double().softmax(-1))


def by_targets(net: nn.Module, x: Tensor) -> Prediction:
    """Targets by the moments of a network; the score is the entropy of the independent Gaussians.

    For one target that has the order of the standard deviation.
    """
    out: Moments = net(x)
    score, covariance = _spread(out.variance.double()), out.covariance_matrix.double()
    return Prediction({"stddev": score}, mean=out.mean.double(), covariance=covariance)


def _spread(variance: Tensor) -> Tensor:
    """(n,) the logarithm of the standard deviations of t targets, (n, t), added up."""
    # A variance of 0 would be -inf, and no average of those is a number.
    return 0.5 * variance.clamp(min=torch.finfo(variance.dtype).tiny).log().sum(-1)


@dataclass(frozen=True, eq=False)
class TableMethod:
    """Models of a table, one for each target, as a way to predict.

    Attributes:
        name: what it is called in results.
        description: what it does, in a sentence.
        models: fitted ones of ``table_models``, for t targets, or one for classes.
        classes: how many; 0 in regression.
    """

    name: str
    description: str
    models: Sequence[Any]
    classes: int
    extra_seconds: float = 0.0  # of fitting, beyond those of its group

    def predict(self, x: Tensor) -> Prediction:
        """Any number of inputs (n, d)."""
        rows = x.cpu().double().numpy()
        if self.classes:
            chances = np.zeros((len(rows), self.classes))
            known = self.models[0].probabilities(rows)
            chances[:, : known.shape[1]] = known
            found = torch.from_numpy(chances)
            return Prediction({"max_probability": scores.doubt(found)}, found)
        each = tuple(model.distribution(rows) for model in self.models)
        mean = torch.from_numpy(np.stack([one.mean() for one in each], 1))
        variance = torch.from_numpy(np.stack([one.std() for one in each], 1)).square()
        return Prediction(
            {"stddev": _spread(variance)},
            mean=mean,
            covariance=torch.diag_embed(variance),
            distributions=each,
        )

    infer = predict  # a batch is nothing else to it


class Calibrated(nn.Module):
    """(B, ...) -> the moments of a method, calibrated."""

    def __init__(self, method: Method, calibration: nn.Module) -> None:
        super().__init__()
        self.base, self.calibration, self.moments = method.module, calibration, method.moments

    def forward(self, x: Tensor) -> Moments:
        """The method's moments through the calibration."""
        found: Moments = self.calibration(self.moments(x))
        return found


@torch.no_grad()
def calibrated(method: Method, x: Tensor, y: Tensor) -> Method:
    """The method calibrated on held-out inputs (n, ...) and their labels (n,) or targets (n, t)."""
    moments = gathered([method.moments(some) for some in method.batches(x)])
    if y.is_floating_point():
        what, rule = "Scale of the variance, and a constant", by_targets
        net = Calibrated(method, fit_variance(moments, y))
    else:
        what, rule = "Temperature, and scale of the covariance", by_expectation
        net = Calibrated(method, fit_logits(moments, y))
    description = f"{method.description} {what}, by held-out data."
    return Method(f"{method.name}, calibrated", description, net, rule)


def rows_of(
    test: Prediction,
    truth: Tensor,
    ood: Mapping[str, Prediction],
    attacked: Prediction | None = None,
) -> dict[str, dict[str, float]]:
    """By score: how good predictions of labels or targets are, and what the score finds.

    Errors, likelihood and coverage of targets are on their own scale; ``attacked`` are predictions
    of the first test images, attacked.
    """
    true = truth.numpy()
    if test.probabilities is not None:
        loss = _wrong(test, true)
        every = metrics.of_probabilities(test.probabilities.numpy(), true)
        same = {key: every[key] for key in CLASSIFICATION}
    else:
        assert test.mean is not None
        assert test.covariance is not None
        known = test.mean.numpy(), test.covariance.numpy(), true.astype(np.float64)
        loss = ((known[2] - known[0]) ** 2).mean(1)
        every = metrics.of_moments(*known)
        every["log_likelihood"] = float(metrics.gaussian_log_likelihood(*known).mean())
        every |= metrics.of_distributions(test.distributions, known[2])
        same = {key: every[key] for key in REGRESSION}
    rows = {}
    for name, values in test.scores.items():
        score, row = values.numpy(), dict(same)
        if test.probabilities is not None:
            row["auroc_errors"] = metrics.auroc(score[loss], score[~loss])
        row["aurc"] = metrics.aurc(score, loss)
        for part, found in ood.items():
            row[ood_key(part)] = metrics.auroc(found.scores[name].numpy(), score)
        if attacked is not None:
            count = len(attacked.score)
            row["attack_accuracy"] = float((~_wrong(attacked, true[:count])).mean())
            row["attack_awareness"] = metrics.auroc(attacked.scores[name].numpy(), score[:count])
        rows[name] = row
    return rows


def _wrong(predicted: Prediction, labels: np.ndarray) -> np.ndarray:
    assert predicted.probabilities is not None
    found: np.ndarray = predicted.probabilities.numpy().argmax(1) != labels
    return found


def ood_key(part: str) -> str:
    """What the AUROC of an out-of-distribution set is called."""
    return f"auroc_ood_{part}"


def _logarithms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the probabilities of logits (M, B, K), and of their average (B, K)."""
    # In float64: confident probabilities would all be 1.
    each = torch.log_softmax(logits.double(), -1)
    return each, torch.logsumexp(each, 0) - math.log(len(each))


def _entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(-1)
