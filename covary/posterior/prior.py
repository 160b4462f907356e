"""The precision of the prior, by the marginal likelihood or by held-out data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.budget import kind_of
from covary.convert import Converted
from covary.covariance import Full
from covary.covariance.terms import WEIGHTS
from covary.moments import Moments
from covary.nn.fidelity import TrackingWarning
from covary.posterior.likelihood import Data, Task, inputs_of
from covary.progress import Steps
from covary.sources import UncertainWeights
from covary.tracking import track

# Precisions of a prior are looked for between these.
_PRECISIONS = 1e-8, 1e12
# On so many held-out samples, these factors of the prior and these temperatures are tried.
_HELD_OUT = 2048
FACTORS = tuple(10 ** (k / 2) for k in range(-8, 4))
_TEMPERATURES = tuple(10 ** (k / 4) for k in range(-20, 5))


@dataclass(frozen=True, eq=False)
class Found:
    """What the data say about the weights; a prior makes a posterior of it.

    Attributes:
        net: the network.
        weights: their bases.
        curvatures: (m, n) of each layer, in these bases.
        task: the likelihood.
        log_likelihood: of the training data.
        linearised: whether outputs are taken as linear in how weights vary.
    """

    net: Converted
    weights: Mapping[str, UncertainWeights]
    curvatures: Mapping[str, Tensor]
    task: Task
    log_likelihood: float
    linearised: bool

    def size(self, path: str) -> float:
        """The sum of squares of a layer's weights, and of its bias if that varies."""
        parameters = dict(self.net.plan.model.named_parameters())
        weight = parameters[path].detach().double()
        total = float(weight.square().sum())
        if self.curvatures[path].shape[1] > weight[0].numel():
            bias = parameters[path.removesuffix("weight") + "bias"]
            total += float(bias.detach().double().square().sum())
        return total

    def best_precisions(self) -> dict[str, float]:
        """Of each layer, the precision of the largest marginal likelihood (eq. 48)."""
        return {
            path: _most_likely(curvature, self.size(path))
            for path, curvature in self.curvatures.items()
        }

    def use(self, precisions: Mapping[str, float], temperature: float) -> None:
        """Give the network the posterior with these precisions of the prior."""
        total = self.log_likelihood
        weights = {}
        for path, curvature in self.curvatures.items():
            prior = precisions[path]
            precision = curvature + prior
            total += 0.5 * (
                curvature.numel() * math.log(prior)
                - prior * self.size(path)
                - float(precision.log().sum())
            )
            each = self.weights[path]
            variance = (temperature / precision).to(each.variance.dtype)
            weights[path] = replace(each, variance=variance)
        noise = self.task.noise
        if noise is not None:
            device = next(self.net.model.parameters()).device
            noise = noise.to(device).unsqueeze(self.task.axis)
        model = self.net.plan.model
        self.net.posterior.replace(
            weights,
            precisions,
            model,
            linearised=self.linearised,
            temperature=temperature,
            log_marginal=total,
            noise=noise,
        )


def _most_likely(curvature: Tensor, size: float) -> float:
    """The precision d where sum c / (d (c + d)) is the size of the weights; it falls with d."""
    low, high = map(math.log, _PRECISIONS)
    for _ in range(60):
        middle = math.exp((low + high) / 2)
        is_low = float((curvature / (curvature + middle)).sum()) > middle * size
        low, high = (math.log(middle), high) if is_low else (low, math.log(middle))
    return math.exp((low + high) / 2)


class Choice(NamedTuple):
    """A prior and a temperature, and how likely they make held-out data."""

    precisions: Mapping[str, float]
    temperature: float
    losses: Tensor  # (n,) negative log-likelihood of each sample


def by_held_out(
    found: Found,
    precisions: Mapping[str, float],
    factors: Sequence[float],
    data: Any,
    held_out: Any,
    steps: Steps,
) -> Choice:
    """The temperature that makes held-out data most likely, and these precisions times a factor.

    With the temperature, the likelihood hardly depends on the factor. Of all factors that held-out
    data cannot tell from the best (by the standard error of the difference), it is the smallest:
    what the training data do not determine is left open.
    """
    temperatures = _TEMPERATURES if found.linearised else (1.0,)
    choices = []
    for number, factor in enumerate(steps(factors, "prior")):
        chosen = {path: each * factor for path, each in precisions.items()}
        found.use(chosen, 1.0)
        if not number or not found.linearised:
            _track_quietly(found.net, data, samples=64)
        losses = _held_out_losses(found.net, held_out, found.task, temperatures)
        at = int(losses.mean(-1).argmin())
        choices.append(Choice(chosen, temperatures[at], losses[at]))
    best = min(choices, key=lambda choice: float(choice.losses.mean()))
    for choice in sorted(choices, key=lambda choice: sum(choice.precisions.values())):
        apart = choice.losses - best.losses
        if float(apart.mean()) <= float(apart.std()) / math.sqrt(len(apart)):
            return choice
    return best


@torch.no_grad()
def _held_out_losses(
    net: Converted, held_out: Any, task: Task, temperatures: Sequence[float]
) -> Tensor:
    """(temperatures, n) negative log-likelihood of the probabilities, or of the Gaussian."""
    found = []
    classify = task.noise is None
    for (args, named), target in Data(held_out, net, _HELD_OUT):
        out: Moments = net(*args, **named)
        target = task.checked(out.mean, target)
        parts = out.cov.budget(matrices=classify)
        weights = torch.stack([part for name, part in parts.items() if kind_of(name) == WEIGHTS])
        others = [part for name, part in parts.items() if kind_of(name) != WEIGHTS]
        rest = torch.stack(others).sum(0) if others else torch.zeros_like(weights[0])
        found.append(
            torch.stack(
                [
                    _losses(out.mean, rest + each * weights.sum(0), target, task)
                    for each in temperatures
                ]
            )
        )
    if not found:
        raise ValueError("held_out= has no data.")
    return torch.cat(found, 1)


def _losses(mean: Tensor, cov: Tensor, target: Tensor, task: Task) -> Tensor:
    """(B,) negative log-likelihood, of a covariance (B, K, K), or of variances (B, *event)."""
    if task.noise is None:
        p = task.probabilities(Moments(mean, Full(cov))).double().clamp(min=1e-300)
        return F.nll_loss(p.log(), target, reduction="none")
    error = (target - mean).double().square().flatten(1)
    var = cov.double().flatten(1)
    return 0.5 * (error / var + var.log()).sum(-1)


def _track_quietly(net: Converted, data: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        track(net, inputs_of(data), progress=False, **options)
