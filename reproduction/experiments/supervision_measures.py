"""How training with a supervised covariance (SMSC) is compared with training without (SMUC)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary import data
from covary.estimators.data import Fold
from covary.files import without_nan
from covary.models import mlp
from covary.moments import Moments
from covary.runs.costs import fastest, peak
from covary.training import (
    ClassificationLoss,
    GaussianLikelihood,
    RegressionLoss,
    TensorBatches,
    TrainingConfig,
    fit,
)
from covary.uncertainty import calibration, metrics, scores
from covary.uncertainty.agreement import gathered
from reproduction.experiment import Measured, Part
from reproduction.experiments.supervision import (
    ELBO,
    LIKELIHOOD,
    LOSSES,
    NUMBERS,
    SMUC,
    SQUARED,
    SUPERVISED,
    TRACE,
)
from reproduction.experiments.supervision_losses import (
    ClassificationBound,
    SupervisedStack,
    TraceLoss,
    regression_loss,
)
from reproduction.experiments.uci_measures import columns, kept, seed_of, splits_of
from reproduction.experiments.uci_measures import scores as scores_of_targets
from reproduction.experiments.uci_standardized import Standardized
from reproduction.experiments.uci_training import Job, Split, Stack, densities, predicted, train
from reproduction.workshop import Workshop

# Images at a time, where nothing is trained.
_BATCH = 250
# Steps of which the peak of memory is taken: the second has all that an optimiser keeps.
_STEPS = 2
_HALF_OF_THE_RANGE = 127.5


def measure(part: Part, workshop: Workshop) -> Measured:
    """Numbers of a regression set, of images, or of the costs of a step."""
    if "splits" in part.settings:
        return measure_regression(part, workshop)
    return measure_costs(part) if "rounds" in part.settings else measure_images(part, workshop)


def measure_regression(part: Part, workshop: Workshop) -> Measured:
    """Networks trained by each loss on the same splits, each with its own noise and rate."""
    tables = {
        loss: kept(part, loss, workshop, partial(_regression, part, loss, workshop))
        for loss in (SMUC, *SUPERVISED)
    }
    series = {loss: columns(table) for loss, table in tables.items()}
    found: dict[str, float | None] = {}
    for loss, table in tables.items():
        for key in ("log-likelihood", "calibrated", "rmse", "rank"):
            found[f"{key}, {loss}"] = statistics.fmean(row[key] for row in table)
        ratios = [own["rmse"] / row["rmse"] for own, row in zip(tables[SMUC], table, strict=True)]
        found[f"rmse of SMUC over {loss}"] = statistics.fmean(ratios)
    return Measured(found, series)


def _regression(part: Part, loss: str, workshop: Workshop) -> list[dict[str, Any]]:
    """For each split the noise and rate with the highest held-out likelihood, and what they give.

    Chosen networks are then trained once more on the whole training part. ``calibrated`` is their
    likelihood with the variance a C + b, the two numbers fitted to what was held out before.
    """
    settings = part.settings
    splits = splits_of(settings, workshop)
    held_out = [split.validation(settings["validation"], part.seed) for split in splits]
    known = [split.without(rows) for split, rows in zip(splits, held_out, strict=True)]
    seeds = [seed_of(part.seed, split) for split in splits]
    tries = [_Try(*each) for each in itertools.product(settings["noises"], settings["rates"])]
    nets = _trained(known, seeds, itertools.product(range(len(splits)), tries), loss, settings)
    chosen: list[_Held] = []
    lines: list[dict[str, Any]] = []
    for index, (split, fold) in enumerate(zip(splits, held_out, strict=True)):
        found = [_held_out(nets[index, each], each, split, fold) for each in tries]
        chosen.append(max(found, key=lambda each: each.likelihood))
        tried = [each.likelihood for each in found]
        lines.append({**chosen[-1].about(), "tried": tried})
    wanted = [(index, each.tried) for index, each in enumerate(chosen)]
    final = _trained([split.whole() for split in splits], seeds, wanted, loss, settings)
    return [
        line | _on_test(final[index, best.tried], split, best, split.y[fold.held_out])
        for index, (line, best, split, fold) in enumerate(
            zip(lines, chosen, splits, held_out, strict=True)
        )
    ]


class _Try(NamedTuple):
    """What is chosen on held-out data."""

    noise: float
    rate: float


class _Held(NamedTuple):
    """A network on data that it has not seen: its log-likelihood and its outputs."""

    tried: _Try
    likelihood: float
    out: Moments

    def about(self) -> dict[str, float]:
        """What was chosen, and why."""
        return {**self.tried._asdict(), "held out": self.likelihood}


def _held_out(net: nn.Module, tried: _Try, split: Split, fold: Fold) -> _Held:
    out = predicted(net, split.x[fold.held_out])
    return _Held(tried, densities(out, split.y[fold.held_out]).mean().item(), out)


def _on_test(net: nn.Module, split: Split, best: _Held, target: Tensor) -> dict[str, float]:
    """Numbers of the test part; calibrated by the outputs for held-out targets (n, 1)."""
    out = predicted(net, split.x_test)
    better = calibration.fit_variance(best.out, target)(out)
    error = (out.mean - split.y_test)[:, 0].abs()
    return {
        **scores_of_targets(out, split.y_test),
        "calibrated": densities(better, split.y_test).mean().item(),
        "rank": metrics.rank_correlation(error.numpy(), out.stddev[:, 0].numpy()),
    }


def _trained(
    known: Sequence[Standardized],
    seeds: Sequence[int],
    wanted: Iterable[tuple[int, _Try]],
    loss: str,
    settings: Mapping[str, Any],
) -> dict[tuple[int, _Try], nn.Module]:
    """Networks by the split that they learn, and by noise and rate; those of a rate together."""
    stacked: Callable[[Sequence[nn.Module], str], Stack] = Stack
    if loss != SMUC:
        stacked = partial(SupervisedStack, loss=loss, samples=len(known[0].x))
    nets: dict[tuple[int, _Try], nn.Module] = {}
    places = list(wanted)
    for rate in settings["rates"]:
        same = [(index, tried) for index, tried in places if tried.rate == rate]
        jobs = [Job(known[index], (tried.noise, 0.0), seeds[index]) for index, tried in same]
        config = TrainingConfig(
            epochs=settings["epochs"],
            batch_size=settings["batch_size"],
            lr=rate,
            weight_decay=0.0,
        )
        found = train(jobs, settings["hidden"], settings["activation"], config, stacked)
        nets |= dict(zip(same, found, strict=True))
    return nets


class Images(NamedTuple):
    """Images (n, pixels) from -1 to 1 and labels (n,): to train on, held out, test; and others."""

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    x_test: Tensor
    y_test: Tensor
    foreign: Tensor

    @classmethod
    def load(cls, settings: Mapping[str, Any], data_dir: str | None) -> Images:
        """The first images of the training part, those after them, and test images."""

        def pixels(x: Tensor) -> Tensor:
            return x.flatten(1).float() / _HALF_OF_THE_RANGE - 1

        own = data.load(settings["data"], data_dir=data_dir)
        count, end = settings["samples"], settings["samples"] + settings["held_out"]
        most = settings["test"]
        other = data.load(settings["foreign"], data_dir=data_dir).x_test[:most]
        return cls(
            pixels(own.x[:count]),
            own.y[:count],
            pixels(own.x[count:end]),
            own.y[count:end],
            pixels(own.x_test[:most]),
            own.y_test[:most],
            pixels(other),
        )


def measure_images(part: Part, workshop: Workshop) -> Measured:
    """Classifiers trained by each loss, each with its own noise and rate, of several seeds."""
    images = Images.load(part.settings, workshop.data_dir)
    tables = {
        loss: kept(part, loss, workshop, partial(_images, part, loss, images)) for loss in LOSSES
    }
    found: dict[str, float | None] = {}
    for loss, table in tables.items():
        for key in NUMBERS:
            values = [row[key] for row in table]
            # Of a classifier that is never right, or never wrong, some are not defined.
            found[f"{key}, {loss}"] = None if None in values else statistics.fmean(values)
    return Measured(found, {loss: columns(table) for loss, table in tables.items()})


def _images(part: Part, loss: str, images: Images) -> list[dict[str, Any]]:
    """A row for each seed; noise and rate are those with which the first is likeliest held out."""
    settings = part.settings
    tries = list(itertools.product(settings["noises"], settings["rates"]))
    first = [classifier(loss, images, each, settings, 0) for each in tries]
    fitted = [_calibrated(net, images) for net in first]
    best = max(range(len(tries)), key=lambda place: fitted[place][1])
    about = {
        "noise": tries[best][0],
        "rate": tries[best][1],
        "tried": [likelihood for _, likelihood in fitted],
    }
    rows = []
    for seed in range(settings["seeds"]):
        net = first[best] if seed == 0 else classifier(loss, images, tries[best], settings, seed)
        layer, held_out = fitted[best] if seed == 0 else _calibrated(net, images)
        row = {**about, "held out": held_out, **_numbers(net, layer, images)}
        rows.append(without_nan(row))
    return rows


def classifier(
    loss: str,
    images: Images,
    chosen: tuple[float, float],
    settings: Mapping[str, Any],
    seed: int,
) -> nn.Module:
    """A network of this loss, noise and learning rate, trained."""
    noise, rate = chosen
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = mlp(settings["widths"], activation=settings["activation"], noise=noise)
    classes = settings["widths"][-1]
    config = TrainingConfig(
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        lr=rate,
        weight_decay=settings["weight_decay"],
        schedule=settings["schedule"],
    )
    target = targets(loss, images.y, classes)
    batches = TensorBatches(images.x, target, settings["batch_size"], seed=seed)
    fit(classification_loss(loss, net, len(images.x)), batches, config)
    return net.eval()


def targets(loss: str, labels: Tensor, classes: int) -> Tensor:
    """Labels (n,) as the loss takes them: as they are, or as vectors (n, classes) of 0 and 1."""
    of_vectors = loss in (SQUARED, TRACE, LIKELIHOOD)
    return F.one_hot(labels.long(), classes).float() if of_vectors else labels.long()


def classification_loss(name: str, net: nn.Module, samples: int) -> nn.Module:
    """The loss of this name of a network with a mean for each class."""
    if name == ELBO:
        return ClassificationBound(net, samples)
    of_name: dict[str, Callable[[nn.Module], nn.Module]] = {
        SMUC: ClassificationLoss,
        SQUARED: RegressionLoss,
        TRACE: TraceLoss,
        LIKELIHOOD: GaussianLikelihood,
    }
    return of_name[name](net)


@torch.no_grad()
def _outputs(net: nn.Module, x: Tensor) -> Moments:
    return gathered([net(some) for some in torch.split(x, _BATCH)])


def _calibrated(net: nn.Module, images: Images) -> tuple[nn.Module, float]:
    """What makes held-out labels likeliest: temperature and scale; and how likely that is.

    So that a mean that was trained to be 0 or 1 can be compared with logits.
    """
    out = _outputs(net, images.x_held_out)
    layer = calibration.fit_logits(out, images.y_held_out)
    return layer, _log_likelihood(layer(out), images.y_held_out)


def _log_likelihood(out: Moments, labels: Tensor) -> float:
    return -metrics.nll(scores.expected_softmax(out).numpy(), labels.numpy())


def _numbers(net: nn.Module, layer: nn.Module, images: Images) -> dict[str, float]:
    """Numbers of test images; entropy is that of the output, as the paper has it."""
    out, label = _outputs(net, images.x_test), images.y_test
    wrong = (out.mean.argmax(-1) != label).numpy()
    own = out.entropy().double().numpy()
    other = _outputs(net, images.foreign).entropy().double().numpy()
    doubt = scores.max_softmax(out).double().numpy()
    return {
        "accuracy": 100 * float(1 - wrong.mean()),
        "log-likelihood": _log_likelihood(layer(out), label),
        "separability": metrics.separability(own[wrong], own[~wrong]),
        "auroc errors": metrics.auroc(own[wrong], own[~wrong]),
        "auroc errors, max-softmax": metrics.auroc(doubt[wrong], doubt[~wrong]),
        "auroc foreign": metrics.auroc(other, own[~wrong]),
    }


def measure_costs(part: Part) -> Measured:
    """Time and memory of a training step of a network with full covariances, by loss.

    Settings: ``widths``, ``activation``, ``noise``, ``batch_size``, and ``rounds`` in which all
    take turns.
    """
    settings = part.settings
    losses = (SMUC, *SUPERVISED)
    steps = {loss: step_of(loss, settings, settings["batch_size"]) for loss in losses}
    for step in steps.values():
        step()
    seconds = fastest(steps, range(settings["rounds"]))
    del steps
    memory = {loss: _memory(loss, settings) for loss in losses}
    found: dict[str, float | None] = {}
    for loss in losses:
        own, known = memory[SMUC], memory[loss]
        found[f"time of {loss}"] = seconds[loss] / seconds[SMUC]
        found[f"memory of {loss}"] = known / own if own and known else None
    about = {"threads": torch.get_num_threads(), "seconds": seconds, "megabytes": memory}
    return Measured(found, about)


def step_of(loss: str, settings: Mapping[str, Any], batch: int) -> Callable[[], None]:
    """A training step by this loss: forward, backward, update; on made-up data."""
    widths = settings["widths"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, widths[0], generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = mlp(widths, activation=settings["activation"], noise=settings["noise"])
    if widths[-1] == 1:
        y = torch.randn(batch, 1, generator=generator)
        objective = RegressionLoss(net) if loss == SMUC else regression_loss(loss, net, batch)
    else:
        y = targets(loss, torch.arange(batch) % widths[-1], widths[-1])
        objective = classification_loss(loss, net, batch)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        value, _ = objective(x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _memory(loss: str, settings: Mapping[str, Any]) -> float | None:
    """Megabytes of a step above the idle process, in a fresh one where nothing raised the peak."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(above_idle, loss, dict(settings), torch.get_num_threads()).result()


def above_idle(loss: str, settings: Mapping[str, Any], threads: int) -> float | None:
    """What ``_memory`` asks a fresh process for."""
    torch.set_num_threads(threads)
    # What torch loads when it first computes is not for the loss to answer for.
    step_of(loss, settings, 2)()
    step = step_of(loss, settings, settings["batch_size"])
    idle = peak()
    for _ in range(_STEPS):
        step()
    most = peak()
    return None if idle is None or most is None else most - idle
