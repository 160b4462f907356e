"""Regression on the published splits of small UCI sets: many small networks, trained at once.

A step of ``covary.training.replicas`` is general; what is here is one kind of network with its
step written out, in a third of the time. SMUC makes that short: variances are constants to the
gradient, so the gradient of a moment network is that of a conventional one with the gain in place
of the slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from covary import activations, data
from covary.covariance import Full
from covary.estimators.data import Fold, cross_validation
from covary.models import mlp, noise_of, with_covariance
from covary.moments import Moments
from covary.nn import Linear
from covary.training import TrainingConfig, fit
from covary.training.replicas import ReplicaBatches
from covary.uncertainty.agreement import gathered
from reproduction.experiments.uci_standardized import STANDARDISED, Standardized

# Networks are trained so many at once that a layer of all has this many numbers: with more they
# fall out of the cache, with less a step is all overhead. And never more than so many networks.
_NUMBERS_IN_A_STEP = 2**18
_MOST_AT_ONCE = 60
# Numbers in the covariances of samples that are predicted at a time.
_NUMBERS_AT_A_TIME = 2**21
# Logarithm of a density of 0, as of a target off a mean of variance 0. Averages stay numbers, for
# which files have a word.
_LEAST = -1e100


class _ReluMean(torch.autograd.Function):
    """E[relu(x)] for x ~ N(mu, sigma^2); sigma is a constant to the gradient."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, sigma: Tensor) -> Tensor:
        z = mu / sigma
        gain = torch.special.ndtr(z)
        ctx.save_for_backward(gain)
        density = z.square_().mul_(-0.5).exp_()
        return torch.addcmul(mu * gain, density, sigma / math.sqrt(2 * math.pi))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gain,) = ctx.saved_tensors
        return grad * gain, None


class _HeavisideMean(torch.autograd.Function):
    """P(x > 0) for x ~ N(mu, sigma^2); sigma is a constant to the gradient."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, sigma: Tensor) -> Tensor:
        z = mu / sigma
        mean: Tensor = torch.special.ndtr(z)
        density = z.square_().mul_(-0.5).exp_()
        ctx.save_for_backward(density.mul_(1 / (sigma * math.sqrt(2 * math.pi))))
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gain,) = ctx.saved_tensors
        return grad * gain, None


_MEANS = {"relu": _ReluMean, "heaviside": _HeavisideMean}


class Stack(nn.Module):
    """The squared errors of R networks as one objective for ``covary.training.fit``.

    It trains as ``ReplicaLoss`` of their ``RegressionLoss`` does, with covariances that
    mini-batches share. With one hidden layer that is no restriction: the covariance before its
    activation is sigma^2 W W^T for every sample, and its variances are the same with or without
    the rest of it.

    Args:
        nets: made by ``covary.mlp`` with ``"relu"`` or ``"heaviside"``, alike but for weights and
            noise, which has to be more than 0 at the input.
        activation: which of these it is.
    """

    statistic = "mae"

    def __init__(self, nets: Sequence[nn.Module], activation: str) -> None:
        super().__init__()
        torch.empty(31 * 2**20, dtype=torch.uint8)  # so that freed memory is kept, as for replicas
        self.templates = list(nets)
        self.moments = activations.get(activation)
        self.mean = _MEANS[activation]
        layers = [_linear(net) for net in nets]
        # (R, in, out) and (R, 1, out)
        self.weights = nn.ParameterList(
            [torch.stack([w.weight.detach().T for w in each]) for each in zip(*layers, strict=True)]
        )
        self.biases = nn.ParameterList(
            [
                torch.stack([cast(Tensor, w.bias).detach()[None] for w in each])
                for each in zip(*layers, strict=True)
            ]
        )
        variances = torch.tensor([noise_of(net) for net in nets]).square()
        self.register_buffer("noises", variances.T[..., None, None])  # (layers, R, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the networks' mean squared errors, and mean absolute error; of (B, R, ...)."""
        gap = self.means(x.transpose(0, 1)) - y.transpose(0, 1)
        loss = gap.square().mean((1, 2)).sum()
        return loss, gap.detach().abs().mean()

    def means(self, x: Tensor) -> Tensor:
        """(R, B, t) the means of the outputs for inputs (R, B, d)."""
        noises = cast(Tensor, self.noises)
        matrix: Tensor | None = None  # covariance (R, n, n) of a layer's inputs; None as sigma^2 I
        mean = x
        *hidden, last = range(len(self.weights))
        for layer in hidden:
            weight, follows = self.weights[layer], layer != hidden[-1]
            mean = torch.baddbmm(self.biases[layer], mean, weight)
            with torch.no_grad():
                if matrix is None and not follows:
                    var = noises[0] * weight.square().sum(1, keepdim=True)
                else:
                    spread = noises[0] * weight if matrix is None else matrix @ weight
                    if follows:
                        matrix = weight.transpose(1, 2) @ spread
                        var = matrix.diagonal(dim1=1, dim2=2)[:, None]
                    else:
                        var = (weight * spread).sum(1, keepdim=True)
                var = var + noises[layer + 1]
                if follows:
                    assert matrix is not None
                    shared = self.moments(mean.mean(1, keepdim=True), var)
                    matrix = matrix * shared.gain * shared.gain.transpose(1, 2)
                    matrix.diagonal(dim1=1, dim2=2).copy_(shared.variance[:, 0])
            mean = self.mean.apply(mean, var.sqrt())  # type: ignore[no-untyped-call]
        return torch.baddbmm(self.biases[last], mean, self.weights[last])

    def unstack(self) -> list[nn.Module]:
        """The networks one by one, with the weights they have now."""
        for index, net in enumerate(self.templates):
            for layer, weight, bias in zip(_linear(net), self.weights, self.biases, strict=True):
                with torch.no_grad():
                    layer.weight.copy_(weight[index].T)
                    cast(Tensor, layer.bias).copy_(bias[index, 0])
        return self.templates


def _linear(net: nn.Module) -> list[Linear]:
    return [each for each in net.children() if isinstance(each, Linear)]


class Job(NamedTuple):
    """A network to train: on what, with which noise, in which order."""

    data: Standardized
    noise: float | tuple[float, ...]  # for all layers, or for each
    seed: int


def batches_of(jobs: Sequence[Job], batch_size: int) -> ReplicaBatches:
    """Batches for networks that are trained together, each in an order of its own."""
    # Data that several networks have in common are there once.
    sources = list({id(job.data): job.data for job in jobs}.values())
    place = {id(source): index for index, source in enumerate(sources)}
    samples = len(sources[0].x)
    return ReplicaBatches(
        torch.cat([source.x for source in sources]),
        torch.cat([source.y for source in sources]),
        torch.stack([torch.arange(samples) + place[id(job.data)] * samples for job in jobs]),
        batch_size,
        seeds=[job.seed for job in jobs],
    )


def train(
    jobs: Sequence[Job],
    hidden: Sequence[int],
    activation: str,
    config: TrainingConfig,
    stacked: Callable[[Sequence[nn.Module], str], Stack] = Stack,
) -> list[nn.Module]:
    """Networks of raw inputs and targets for jobs on equally many samples, some at a time.

    ``stacked`` makes one objective of networks and the name of their activation.
    """
    nets: list[nn.Module] = []
    # As many in each group as there can be, rather than a small one at the end.
    at_once = _NUMBERS_IN_A_STEP // (config.batch_size * max(hidden))
    groups = -(-len(jobs) // max(1, min(at_once, _MOST_AT_ONCE)))
    for group in range(groups):
        nets += _train(jobs[group::groups], hidden, activation, config, stacked)
    # Back into the order of the jobs.
    order = [index for group in range(groups) for index in range(group, len(jobs), groups)]
    return [net for _, net in sorted(zip(order, nets, strict=True), key=lambda pair: pair[0])]


def _train(
    jobs: Sequence[Job],
    hidden: Sequence[int],
    activation: str,
    config: TrainingConfig,
    stacked: Callable[[Sequence[nn.Module], str], Stack],
) -> list[nn.Module]:
    nets = []
    for job in jobs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            widths = [job.data.x.shape[1], *hidden, job.data.y.shape[1]]
            nets.append(mlp(widths, activation=activation, noise=job.noise))
    stack = stacked(nets, activation)
    batches = batches_of(jobs, config.batch_size)
    fit(stack, batches, config)
    return [
        nn.Sequential(job.data.standardize, *net.children(), *job.data.back).double().eval()
        for job, net in zip(jobs, stack.unstack(), strict=True)
    ]


def epochs_of(steps: int, samples: int, batch_size: int) -> int:
    """How many epochs come nearest to so many steps, 1 at least."""
    return max(1, round(steps / math.ceil(samples / batch_size)))


def predicted(net: nn.Module, x: Tensor, covariance: str = "full") -> Moments:
    """What a network says of inputs (n, d), with covariances stored like that."""
    twin = with_covariance(net, covariance)
    widest = max(layer.weight.shape[0] for layer in _linear(net))
    size = max(1, _NUMBERS_AT_A_TIME // widest**2)
    with torch.no_grad():
        return gathered([twin(some) for some in torch.split(x, size)])


def densities(out: Moments, y: Tensor) -> Tensor:
    """(n,) log-density of each target (n, 1) under the Gaussian that is predicted for it."""
    var = out.variance[:, 0]
    found = -0.5 * ((y - out.mean)[:, 0].square() / var + (2 * math.pi * var).log())
    return torch.where(var > 0, found, _LEAST).clamp(min=_LEAST)


# How targets may be transformed before anything else; log-likelihoods are of what comes out.
TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda y: y,
    "log": torch.log,
    "log1p": torch.log1p,
}


def with_waves(x: Tensor, training: Tensor, waves: Sequence[float]) -> Tensor:
    """(n, d (1 + 2 waves)) inputs and their waves, over the training part's deviations."""
    if not waves:
        return x
    scale = training.std(0, correction=0)
    z = (x - training.mean(0)) / torch.where(scale > 0, scale, 1.0)
    return torch.cat([x, *(wave(f * z) for f in waves for wave in (torch.sin, torch.cos))], dim=1)


class Split:
    """A published split of a set: what is trained on, what is held out of that, and the test part.

    Args:
        name: of the set.
        index: of the split.
        targets: ``"raw"``, ``"log"`` (log y) or ``"log1p"`` (log(1 + y)).
        data_dir: where data are looked for first.
        limit: train on so many samples at most; 0 for all.
        waves: of every standardised input z, add sin(f z) and cos(f z) for these f. Networks learn
            what varies slowly first; with waves they learn what varies fast as well.
        scaling: of the samples that networks are trained on; see ``Standardized``.
    """

    def __init__(
        self,
        name: str,
        index: int,
        *,
        targets: str,
        data_dir: str | None,
        limit: int = 0,
        waves: Sequence[float] = (),
        scaling: str = STANDARDISED,
    ) -> None:
        self.index, self.scaling = index, scaling
        found = data.load(name, split=index, data_dir=data_dir)
        change = TARGETS[targets]
        size = limit or len(found.x)
        x = found.x[:size]
        self.x, self.x_test = (with_waves(each, x, waves) for each in (x, found.x_test))
        self.y, self.y_test = change(found.y[:size]), change(found.y_test)

    def whole(self) -> Standardized:
        """All of the training part."""
        return Standardized(self.x, self.y, self.scaling)

    def without(self, rows: Fold) -> Standardized:
        """The training part without what is held out; scaled by the rest alone."""
        return Standardized(self.x[rows.training], self.y[rows.training], self.scaling)

    def validation(self, share: float, seed: int) -> Fold:
        """A share of the training part held out."""
        held_out = round(share * len(self.x))
        rows = np.arange(len(self.x))
        return Fold(*train_test_split(rows, test_size=held_out, random_state=seed))

    def folds(self, count: int, seed: int) -> list[Fold]:
        """Every sample of the training part held out once."""
        return cross_validation(len(self.x), count, seed, None)


class EnsembleCalibration(NamedTuple):
    """variance -> own * (mean of the members' variances) + spread * (variance of means) + rest."""

    own: float
    spread: float
    rest: float

    def __call__(self, out: EnsemblePrediction) -> Moments:
        """The moments of an ensemble, calibrated."""
        var = self.own * out.variance + self.spread * out.spread + self.rest
        matrix = var[:, None, None]
        return Moments(out.mean[:, None], Full(matrix, added=matrix.new_zeros(1, 1)))


class EnsemblePrediction(NamedTuple):
    """What an ensemble says of n samples of one target: (n,) each."""

    mean: Tensor
    variance: Tensor  # average of what the members have emerge
    spread: Tensor  # variance of the members' means

    @classmethod
    def of(cls, members: Sequence[Moments]) -> EnsemblePrediction:
        """Of one network or several."""
        means = torch.stack([member.mean[:, 0] for member in members])
        variances = torch.stack([member.variance[:, 0] for member in members])
        return cls(means.mean(0), variances.mean(0), means.var(0, correction=0))

    @classmethod
    def joined(cls, some: Sequence[EnsemblePrediction]) -> EnsemblePrediction:
        """One after another, such as folds."""
        return cls(*(torch.cat(same) for same in zip(*some, strict=True)))

    def without_emergent(self) -> EnsemblePrediction:
        """The same with members that are sure of themselves: variances of 0."""
        return self._replace(variance=torch.zeros_like(self.variance))


def rounding(y: Tensor) -> float:
    """What variance rounding leaves of targets (n, 1): gap^2 / 12 of the least gap between two.

    Where targets are whole numbers, and rows occur twice, a network may hit some of them exactly. A
    Gaussian that narrows down to such targets has whatever density one likes, and says nothing.
    """
    gaps = y.flatten().sort().values.diff()
    gaps = gaps[gaps > 0]
    return gaps.min().item() ** 2 / 12 if len(gaps) else 0.0


def calibrate(out: EnsemblePrediction, y: Tensor, *, least: float = 0.0) -> EnsembleCalibration:
    """The calibration under which held-out targets (n, 1) are most likely.

    In the manner of ``covary.uncertainty.calibration.fit_variance``, with a scale of its own for
    the spread of the members' means, since the two need not be in the same proportion to errors.

    Args:
        out: predictions for what was held out.
        y: its targets.
        least: what ``rest`` has to be at least, such as ``rounding(y)``.
    """
    error = y[:, 0] - out.mean
    mean_square = error.square().mean()
    parts = torch.stack([out.variance, out.spread, mean_square.expand(len(error))])
    level = parts.mean(1, keepdim=True)
    # What there is none of stays 0.
    shares = parts / torch.where(level > 0, level, 1.0)
    squared = error.square() / mean_square
    floor = least / mean_square.item() + 1e-8

    def loss(logs: Tensor) -> Tensor:
        var = logs.exp() @ shares + floor
        return 0.5 * (squared / var + var.log()).mean()

    best, lowest = torch.zeros(3, dtype=torch.float64), math.inf
    starts = ([-1.1, -1.1, -1.1], [0.0, -6.0, -6.0], [-6.0, 0.0, -6.0], [-6.0, -6.0, 0.0])
    for start in starts:
        place = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([place], max_iter=100, line_search_fn="strong_wolfe")

        def closure(place: Tensor = place, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = loss(place.clamp(-18, 18))
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        found = place.detach().clamp(-18, 18)
        value = loss(found).item()
        if value < lowest:
            best, lowest = found, value
    scales = (best.exp() * mean_square / torch.where(level > 0, level, mean_square)[:, 0]).tolist()
    # What there is none of has no scale, such as the spread of a single network.
    own, spread = (scales[place] if level[place] > 0 else 0.0 for place in (0, 1))
    return EnsembleCalibration(own, spread, (scales[2] + floor) * mean_square.item())
