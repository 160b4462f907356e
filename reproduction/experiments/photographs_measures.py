"""How well scores of a network tell errors and foreign photographs apart, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary import data
from covary.convert import convert
from covary.covariance import Full
from covary.models import plain, with_covariance
from covary.moments import Moments, mean_of
from covary.nn.protocol import plain_of
from covary.runs import DataConfig
from covary.runs.costs import fastest
from covary.runs.samples import load_data, validation_rows
from covary.runs.tracking import quietly
from covary.tracking import track
from covary.training.batches import shuffled
from covary.uncertainty import metrics, scores
from covary.uncertainty.fitted import FittedScore, features_of, fit_features, log_margin
from reproduction.experiment import Measured, Part
from reproduction.experiments import residual
from reproduction.experiments.corruptions import corrupted
from reproduction.experiments.detectors import (
    NearestFeatures,
    VirtualLogit,
    energy,
    generalised_entropy,
)
from reproduction.workshop import Workshop

_BATCH = 100
# Images of a pass that is timed, and rounds in which all passes take turns.
_TIMED, _ROUNDS = 128, 5
# Of the margin beside what else is known, as in the fitted score of the library.
_MARGIN_WEIGHT = 2.0
# NearestFeatures among held-out samples, of which there are fewer than training samples.
_FEW_NEIGHBOURS = 10
_MEGABYTE = 1e6
# Training images that variances of a converted network are measured on.
_TRACKED = 256

Seen = dict[str, Tensor]


class NetworkForms(NamedTuple):
    """A trained network in the forms that scores ask for.

    Attributes:
        net: gives the logits that decide, or Moments whose mean they are.
        with_moments: gives Moments.
        conventional: the network without noise and covariance, to compare costs with.
        inputs: bytes (B, C, H, W) as all of them take them.
        kinds: of features that a fitted score can have of ``net``.
    """

    net: nn.Module
    with_moments: nn.Module
    conventional: nn.Module
    inputs: Callable[[Tensor], Tensor]
    kinds: tuple[str, ...]

    @property
    def readout(self) -> nn.Module:
        """The last linear layer."""
        return [each for each in self.net.modules() if isinstance(plain_of(each), nn.Linear)][-1]


class Photographs(NamedTuple):
    """Bytes (n, C, H, W), and labels (n,) where there are any."""

    trained_on: Tensor
    held_out: Tensor
    held_out_labels: Tensor
    test: Tensor
    labels: Tensor
    foreign: Tensor


# What a network shows of a batch, by what has to run for it.


def _of_mean(subject: NetworkForms, x: Tensor) -> Seen:
    kept: list[Tensor] = []

    def keep(_layer: nn.Module, taken: tuple[Any, ...]) -> None:
        kept.append(mean_of(taken[0]))

    handle = subject.readout.register_forward_pre_hook(keep)
    try:
        logits = mean_of(subject.net(x))
    finally:
        handle.remove()
    return {"logits": logits.double(), "features": kept[-1]}


def _of_moments(subject: NetworkForms, x: Tensor) -> Seen:
    out = subject.with_moments(x)
    return {"mean": out.mean, "matrix": out.covariance_matrix.expand(*out.mean.shape, -1)}


def _of_layers(kind: str, subject: NetworkForms, x: Tensor) -> Seen:
    values, mean = features_of(kind, subject.net, [x])
    return {f"{kind} layers": values, f"{kind} mean": mean}


_LOOKS: dict[str, Callable[[NetworkForms, Tensor], Seen]] = {
    "mean": _of_mean,
    "covariance": _of_moments,
    "plain": lambda subject, x: _of_layers("plain", subject, x),
    "moments": lambda subject, x: _of_layers("moments", subject, x),
}


@torch.no_grad()
def look(subject: NetworkForms, images: Tensor, looks: Iterable[str]) -> Seen:
    """What a network shows of bytes (n, C, H, W), as tensors (n, ...) by name."""
    wanted = list(looks)
    found: dict[str, list[Tensor]] = {}
    for some in torch.split(images, _BATCH):
        x = subject.inputs(some)
        for each in wanted:
            for name, value in _LOOKS[each](subject, x).items():
                found.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in found.items()}


@dataclass(frozen=True)
class Fits:
    """All that scores have learnt: from training images, and from held-out ones.

    Attributes:
        neighbours, virtual: of penultimate features of training images.
        fitted: the library's fitted score, by its kind of features.
        near: neighbours of a sample's features of all layers among held-out ones.
        usual: average and deviation over held-out images, of what is added up.
    """

    neighbours: NearestFeatures
    virtual: VirtualLogit
    fitted: Mapping[str, FittedScore]
    near: Tensor
    usual: Mapping[str, tuple[float, float]]

    def standardised(self, name: str, value: Tensor) -> Tensor:
        """Minus the average over held-out images, over the deviation."""
        mean, deviation = self.usual[name]
        return (value - mean) / deviation


class Detector(NamedTuple):
    """One number per image, higher where the network is less sure.

    Attributes:
        title: for a reader.
        look: what has to run.
        of: computes it from what the network shows.
        keeps: what is kept for it besides the network.
    """

    title: str
    look: str
    of: Callable[[Fits, Seen], Tensor]
    keeps: Callable[[Fits], Sequence[Tensor]] = lambda _fits: ()


def _moments(seen: Seen) -> Moments:
    return Moments(seen["mean"], Full(seen["matrix"]))


def _fitted(kind: str) -> Callable[[Fits, Seen], Tensor]:
    return lambda fits, seen: fits.fitted[kind].of(seen[f"{kind} layers"], seen[f"{kind} mean"])


def _density(fits: Fits, seen: Seen) -> Tensor:
    return fits.fitted["plain"].surprise(seen["plain layers"], seen["plain mean"])


def _in_layers(fits: Fits, seen: Seen) -> Tensor:
    score = fits.fitted["plain"]
    values = (seen["plain layers"] - score.center) / score.spread
    distances = torch.cdist(values, fits.near)
    return distances.topk(min(_FEW_NEIGHBOURS, len(fits.near)), -1, largest=False).values[:, -1]


# What may be added to a margin, by name.
_PARTS: dict[str, Callable[[Fits, Seen], Tensor]] = {
    "neighbours": lambda fits, seen: fits.neighbours.distance(seen["features"]),
    "rest": lambda fits, seen: fits.virtual.norm(seen["features"]),
    "layers": _in_layers,
}


def _with_margin(part: str, logits: str = "logits") -> Callable[[Fits, Seen], Tensor]:
    def score(fits: Fits, seen: Seen) -> Tensor:
        margin = fits.standardised("margin", log_margin(seen[logits]))
        return fits.standardised(part, _PARTS[part](fits, seen)) - _MARGIN_WEIGHT * margin

    return score


def _kept_of_fitted(kind: str) -> Callable[[Fits], Sequence[Tensor]]:
    return lambda fits: list(fits.fitted[kind].state_dict().values())


def _kept_of_neighbours(fits: Fits) -> Sequence[Tensor]:
    return (fits.neighbours.bank,)


def _kept_of_virtual(fits: Fits) -> Sequence[Tensor]:
    return fits.virtual.origin, fits.virtual.rest


def _kept_of_layers(fits: Fits) -> Sequence[Tensor]:
    return fits.near, fits.fitted["plain"].center, fits.fitted["plain"].spread


# In the order of tables: the library's, those of others, and forms that a fitted score could have.
SCORES: dict[str, Detector] = {
    "entropy": Detector("entropy", "covariance", lambda _, seen: _moments(seen).entropy().double()),
    "expected_max": Detector(
        "expected max", "covariance", lambda _, seen: scores.expected_max(_moments(seen))
    ),
    "fitted": Detector("fitted score", "moments", _fitted("moments"), _kept_of_fitted("moments")),
    "fitted_plain": Detector(
        "fitted score, plain", "plain", _fitted("plain"), _kept_of_fitted("plain")
    ),
    "max_softmax": Detector(
        "max-softmax", "mean", lambda _, seen: scores.doubt(seen["logits"].softmax(-1))
    ),
    "energy": Detector("energy", "mean", lambda _, seen: energy(seen["logits"])),
    "gen": Detector("GEN", "mean", lambda _, seen: generalised_entropy(seen["logits"])),
    "knn": Detector("KNN", "mean", _PARTS["neighbours"], _kept_of_neighbours),
    "vim": Detector(
        "ViM",
        "mean",
        lambda fits, seen: fits.virtual.score(seen["features"], seen["logits"]),
        _kept_of_virtual,
    ),
    "density": Detector(
        "density of layers, no margin", "plain", _density, _kept_of_fitted("plain")
    ),
    "layers_margin": Detector(
        "KNN of layers, margin", "plain", _with_margin("layers", "plain mean"), _kept_of_layers
    ),
    "knn_margin": Detector("KNN, margin", "mean", _with_margin("neighbours"), _kept_of_neighbours),
    "rest_margin": Detector(
        "ViM's residual, margin", "mean", _with_margin("rest"), _kept_of_virtual
    ),
}


def names_of(subject: NetworkForms) -> list[str]:
    """The scores that a network can have."""
    return [
        name
        for name, score in SCORES.items()
        if score.look in ("mean", "covariance", *subject.kinds)
    ]


def looks_of(subject: NetworkForms) -> list[str]:
    """What has to run for all of them, and for the class that is predicted."""
    return list(dict.fromkeys(["mean", *(SCORES[name].look for name in names_of(subject))]))


@torch.no_grad()
def fit(subject: NetworkForms, training: Seen, held_out: Seen, k: int) -> Fits:
    """Fit all that scores need.

    Args:
        subject: the network.
        training: what it shows of the images that it was trained on: logits and features.
        held_out: what it shows of others of that kind, all looks of it.
        k: which neighbour of training features counts.
    """
    readout = plain_of(subject.readout)
    assert isinstance(readout, nn.Linear)
    features, logits = training["features"], training["logits"]
    fitted = {
        kind: fit_features(
            held_out[f"{kind} layers"],
            held_out[f"{kind} mean"],
            classes=logits.shape[-1],
            features=kind,
        )
        for kind in subject.kinds
    }
    score = fitted["plain"]
    fits = Fits(
        NearestFeatures.of(features, k),
        VirtualLogit.of(features, logits, readout.weight, readout.bias, features.shape[-1] // 2),
        fitted,
        (held_out["plain layers"] - score.center) / score.spread,
        {},
    )
    parts = {name: part(fits, held_out) for name, part in _PARTS.items()}
    parts["margin"] = log_margin(held_out["logits"])
    usual = {
        name: (value.mean().item(), value.std(correction=0).item()) for name, value in parts.items()
    }
    return Fits(fits.neighbours, fits.virtual, fitted, fits.near, usual)


@torch.no_grad()
def scored(names: Iterable[str], fits: Fits, seen: Seen) -> dict[str, np.ndarray]:
    """(n,) by score."""
    return {name: SCORES[name].of(fits, seen).double().numpy() for name in names}


def measure(part: Part, workshop: Workshop) -> Measured:
    """AUROC and FPR at 95% of every score, for errors and foreign images; time and memory.

    Settings: ``network``, or ``residual`` for one of plain torch; ``foreign``, the OOD set;
    ``samples`` of it at most, and ``corrupted`` held-out images of each kind (0: all); ``k``, the
    neighbour that counts.
    """
    settings, (subject, images) = part.settings, _subject(part, workshop)
    names, looks = names_of(subject), looks_of(subject)
    training = look(subject, images.trained_on, ["mean"])
    held_out = look(subject, images.held_out, looks)
    half = len(images.held_out) // 2
    errors, by_corruption = _of_corrupted(
        subject,
        fit(
            subject, training, {key: value[:half] for key, value in held_out.items()}, settings["k"]
        ),
        {key: value[half:] for key, value in held_out.items()},
        images.held_out[half:][: settings["corrupted"] or None],
        images.held_out_labels[half:],
        part.seed,
    )
    fits = fit(subject, training, held_out, settings["k"])
    test, foreign = (look(subject, each, looks) for each in (images.test, images.foreign))
    wrong = _wrong(test, images.labels)
    found = told_apart(scored(names, fits, test), scored(names, fits, foreign), wrong)
    of_corrupted = {name: fmean(each.values()) for name, each in by_corruption.items()}
    numbers: dict[str, float | None] = {
        "accuracy": 100 * float(1 - wrong.mean()),
        **found,
        **{f"auroc corrupted, {name}": value for name, value in of_corrupted.items()},
        **{f"auroc held-out errors, {name}": value for name, value in errors.items()},
        **choice(of_corrupted, found),
        **_costs(subject, fits, images.test, names),
    }
    series = {
        "scores": names,
        "corruptions": by_corruption,
        "chosen": max(of_corrupted, key=lambda name: of_corrupted[name]),
        "best": max(names, key=lambda name: found[f"auroc foreign, {name}"]),
        "samples": {
            "trained on": len(images.trained_on),
            "held out": len(images.held_out),
            "test": len(images.test),
            "wrong": int(wrong.sum()),
            "foreign": len(images.foreign),
        },
        "features": test["features"].shape[-1],
        "threads": torch.get_num_threads(),
    }
    return Measured(numbers, series)


def _wrong(seen: Seen, labels: Tensor) -> np.ndarray:
    return (seen["logits"].argmax(-1) != labels).numpy()


def told_apart(
    test: Mapping[str, np.ndarray], foreign: Mapping[str, np.ndarray], wrong: np.ndarray
) -> dict[str, float]:
    """AUROC and FPR at 95% of each score: wrong against right, foreign against all test images."""
    found = {}
    for name, values in test.items():
        for pair, positive, negative in (
            ("errors", values[wrong], values[~wrong]),
            ("foreign", foreign[name], values),
        ):
            found[f"auroc {pair}, {name}"] = metrics.auroc(positive, negative)
            found[f"fpr95 {pair}, {name}"] = metrics.fpr95(positive, negative)
    return found


def choice(of_corrupted: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """What the score that tells corrupted images best is worth on foreign ones, and the best."""
    foreign = {name: found[f"auroc foreign, {name}"] for name in of_corrupted}
    chosen = max(of_corrupted, key=lambda name: of_corrupted[name])
    return {
        "auroc foreign, chosen": foreign[chosen],
        "auroc errors, chosen": found[f"auroc errors, {chosen}"],
        "auroc foreign, best": max(foreign.values()),
        "rank of corrupted and foreign": metrics.rank_correlation(
            list(of_corrupted.values()), list(foreign.values())
        ),
    }


def _of_corrupted(
    subject: NetworkForms, fits: Fits, held_out: Seen, images: Tensor, labels: Tensor, seed: int
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """AUROC of errors among clean held-out images; of corrupted against clean ones, by kind."""
    names, looks = names_of(subject), looks_of(subject)
    clean, wrong = scored(names, fits, held_out), _wrong(held_out, labels)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for kind, changed in corrupted(images, seed).items():
        strange = scored(names, fits, look(subject, changed, looks))
        for name in names:
            found[name][kind] = metrics.auroc(strange[name], clean[name])
    return {name: metrics.auroc(clean[name][wrong], clean[name][~wrong]) for name in names}, found


def _costs(
    subject: NetworkForms, fits: Fits, images: Tensor, names: Sequence[str]
) -> dict[str, float | None]:
    """Time of each score, a pass included, over that of the conventional pass; megabytes kept."""
    batch = images[:_TIMED]
    x = subject.inputs(batch)

    def of(name: str) -> Callable[[], object]:
        score = SCORES[name]
        return lambda: score.of(fits, _LOOKS[score.look](subject, x))

    with torch.no_grad():
        passes = {"": lambda: subject.conventional(x), **{name: of(name) for name in names}}
        seconds = fastest(passes, range(_ROUNDS))
    of_moments = _megabytes(subject.with_moments.state_dict().values())
    of_moments -= _megabytes(subject.net.state_dict().values())
    found: dict[str, float | None] = {"milliseconds per image": 1e3 * seconds[""] / len(batch)}
    for name in names:
        own = _megabytes(SCORES[name].keeps(fits))
        more = of_moments if SCORES[name].look == "covariance" else 0.0
        found[f"time, {name}"] = seconds[name] / seconds[""]
        found[f"megabytes, {name}"] = own + max(0.0, more)
    return found


def _megabytes(tensors: Iterable[Tensor]) -> float:
    return sum((each.numel() * each.element_size() for each in tensors), 0) / _MEGABYTE


def _subject(part: Part, workshop: Workshop) -> tuple[NetworkForms, Photographs]:
    settings = part.settings
    make = _of_plain_torch if "residual" in settings else _of_run
    subject, dataset, held_out, rows = make(part, workshop)
    foreign = data.load(settings["foreign"], data_dir=workshop.data_dir).x_test
    # The same ones whatever the seed.
    foreign = foreign[shuffled(len(foreign), 0, 0)[: settings["samples"] or None]]
    images = Photographs(
        dataset.x[rows],
        dataset.x[held_out],
        dataset.y[held_out],
        dataset.x_test,
        dataset.y_test,
        foreign,
    )
    return subject, images


def _of_run(part: Part, workshop: Workshop) -> tuple[NetworkForms, data.Dataset, Tensor, Tensor]:
    """A mixed network."""
    run = workshop.trained(part.settings["network"], part.seed)
    dataset, _ = load_data(run.config.data, data_dir=workshop.data_dir, seed=part.seed)
    held_out, rows = validation_rows(len(dataset.x), run.config)
    net = with_covariance(run.network(), "full").eval()
    conventional = plain(net).eval()
    return (
        NetworkForms(net, net, conventional, lambda images: images, ("plain", "moments")),
        dataset,
        held_out,
        rows,
    )


def _of_plain_torch(
    part: Part, workshop: Workshop
) -> tuple[NetworkForms, data.Dataset, Tensor, Tensor]:
    """The residual network, and what ``covary.convert`` makes of it."""
    network = part.settings["residual"]
    chosen = network["settings"]
    config = DataConfig(name=network["data"], limit=chosen["limit"])
    dataset, _ = load_data(config, data_dir=workshop.data_dir)
    net = residual.trained(network, part.seed, dataset, workshop)
    held_out, rows = residual.held_out_rows(len(dataset.x), chosen, part.seed)
    with_moments = convert(net, noise=part.settings["noise"])
    with quietly():
        few = rows[shuffled(len(rows), part.seed, 2**31 + 1)[:_TRACKED]]
        track(with_moments, residual.inputs(dataset.x[few]), progress=False)
    return (
        NetworkForms(net, with_moments, net, residual.inputs, ("plain",)),
        dataset,
        held_out,
        rows,
    )
