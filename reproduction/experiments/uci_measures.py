"""How log-likelihoods of regression sets are measured, by the paper's recipe and by ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from covary.models import mlp
from covary.moments import Moments
from covary.training import RegressionLoss, TensorBatches, TrainingConfig, fit
from reproduction import store
from reproduction.experiment import Measured, Part
from reproduction.experiments.uci_standardized import STANDARDISED, Standardized
from reproduction.experiments.uci_training import (
    EnsembleCalibration,
    EnsemblePrediction,
    Job,
    Split,
    calibrate,
    densities,
    epochs_of,
    predicted,
    rounding,
    train,
)
from reproduction.workshop import Workshop

# What the paper calls them -> how their covariances are stored.
FORMS = {"MNN": "full", "dMNN": "diagonal"}
# Of kept rows; goes up when there is something else in them.
_FORMAT = 2


def splits_of(settings: Mapping[str, Any], workshop: Workshop) -> list[Split]:
    """The splits that a part is about."""
    return [
        Split(
            settings["data"],
            index,
            targets=settings["targets"],
            data_dir=workshop.data_dir,
            limit=settings["limit"],
            waves=settings.get("waves", ()),
            scaling=settings.get("scaling", STANDARDISED),
        )
        for index in range(settings["splits"])
    ]


def seed_of(seed: int, split: Split, member: int = 0) -> int:
    """Decides the initial weights of a network and the order of its samples."""
    return 10_000 * seed + 100 * split.index + member


def kept(
    part: Part, name: str, workshop: Workshop, compute: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Rows of a part, computed before or now: a long part goes on where it was cut short."""
    label = f"{part.label}, {name}"
    known = Part(label, part.seed, {**part.settings, "rows": name, "format": _FORMAT})
    path = workshop.folder / "parts" / "uci-rows" / f"{store.slug(known)}.json"
    found = store.known_part(path, known)
    if found is None:
        about = {"label": label, "seed": part.seed, "settings": dict(known.settings)}
        began = time.perf_counter()
        found = {**about, "rows": compute()}
        found["seconds"] = round(time.perf_counter() - began, 1)
        store.save_part(path, found)
    else:
        workshop.reused.append(found["seconds"])
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def by_recipe(part: Part, activation: str, workshop: Workshop) -> list[dict[str, Any]]:
    """What networks by the paper's recipe give on each split.

    Each row has for MNN and dMNN the noise that does best on held-out training data, how well it
    does there and on the test part; and, for comparison, what every noise would have given there
    (with ``every`` among the settings also of networks that have seen the whole training part).
    With one hidden layer both are trained alike (see ``Stack``), so a network is trained once and
    its covariance stored in two ways.
    """
    return kept(
        part,
        activation,
        workshop,
        lambda: _by_recipe(part, activation, splits_of(part.settings, workshop)),
    )


def _by_recipe(part: Part, activation: str, splits: Sequence[Split]) -> list[dict[str, Any]]:
    settings = part.settings
    config = TrainingConfig(
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        lr=settings["lr"],
        weight_decay=0.0,
        optimizer="adam",
        schedule="constant",
    )

    def trained(jobs: Sequence[Job]) -> list[nn.Module]:
        return train(jobs, settings["hidden"], activation, config)

    noises = settings["noises"]
    held_out = [split.validation(settings["validation"], part.seed) for split in splits]
    known = [split.without(rows) for split, rows in zip(splits, held_out, strict=True)]
    jobs = [
        Job(some, (noise, 0.0), seed_of(part.seed, split))
        for split, some in zip(splits, known, strict=True)
        for noise in noises
    ]
    nets = iter(trained(jobs))
    table: list[dict[str, Any]] = []
    for split, rows in zip(splits, held_out, strict=True):
        line: dict[str, Any] = {form: {"tried": [], "tried on test": []} for form in FORMS}
        for _ in noises:
            net = next(nets)
            for form, covariance in FORMS.items():
                out = predicted(net, split.x[rows.held_out], covariance)
                score = densities(out, split.y[rows.held_out]).mean().item()
                line[form]["tried"].append(score)
                # Never looked at by any choice of ours.
                out = predicted(net, split.x_test, covariance)
                line[form]["tried on test"].append(densities(out, split.y_test).mean().item())
        for form in FORMS:
            best = max(line[form]["tried"])
            line[form] |= {"noise": noises[line[form]["tried"].index(best)], "held out": best}
        table.append(line)
    # Those that were chosen, or all, once more on the whole training part.
    wanted = [
        (index, noise)
        for index, line in enumerate(table)
        for noise in sorted(
            set(noises) if settings.get("every") else {line[form]["noise"] for form in FORMS}
        )
    ]
    whole = [split.whole() for split in splits]
    jobs = [
        Job(whole[index], (noise, 0.0), seed_of(part.seed, splits[index]))
        for index, noise in wanted
    ]
    final = dict(zip(wanted, trained(jobs), strict=True))
    for index, (split, line) in enumerate(zip(splits, table, strict=True)):
        for form, covariance in FORMS.items():
            scored = {
                noise: scores(
                    predicted(final[index, noise], split.x_test, covariance), split.y_test
                )
                for noise in noises
                if (index, noise) in final
            }
            line[form] |= scored[line[form]["noise"]]
            if settings.get("every"):
                on_test = [scored[noise]["log-likelihood"] for noise in noises]
                line[form]["tried on test, whole"] = on_test
    return table


def scores(out: Any, y: torch.Tensor) -> dict[str, float]:
    """What is said of predictions for a test part, on the scale of the target."""
    error = (out.mean - y)[:, 0]
    return {
        "log-likelihood": densities(out, y).mean().item(),
        "rmse": error.square().mean().sqrt().item(),
        "covered": (error.abs() < 1.6449 * out.variance[:, 0].sqrt()).double().mean().item(),
    }


def measure(part: Part, workshop: Workshop) -> Measured:
    """Networks by the paper's recipe, or by ours."""
    if "members" in part.settings:
        return measure_calibrated(part, workshop)
    return measure_recipe(part, workshop)


def measure_recipe(part: Part, workshop: Workshop) -> Measured:
    """The networks of the paper's table, and the one of them that held-out data ask for."""
    tables = {
        activation: by_recipe(part, activation, workshop)
        for activation in part.settings["activations"]
    }
    rows: dict[str, list[dict[str, Any]]] = {
        f"{form} {activation}": [line[form] for line in table]
        for activation, table in tables.items()
        for form in FORMS
    }
    # On each split the network whose held-out likelihood is highest.
    rows["best"] = [
        max(same, key=lambda line: line["held out"]) for same in zip(*rows.values(), strict=True)
    ]
    metrics = {name: _mean(lines, "log-likelihood") for name, lines in rows.items()}
    metrics["chosen by the test score"] = _peeked(rows, "tried on test")
    if part.settings.get("every"):
        metrics["chosen by the test score, whole"] = _peeked(rows, "tried on test, whole")
    if len(rows["best"]) > 1:
        by_split = [line["log-likelihood"] for line in rows["best"]]
        metrics["deviation over splits"] = statistics.stdev(by_split)
    for activation in tables:
        gap = metrics[f"MNN {activation}"] - metrics[f"dMNN {activation}"]
        metrics[f"gain of correlations, {activation}"] = gap
    return Measured(metrics, {name: columns(lines) for name, lines in rows.items()})


def _peeked(rows: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> float:
    """As the paper chose: the row and noise with the highest average over test parts."""
    return max(
        statistics.fmean(scored)
        for name, lines in rows.items()
        if name != "best"
        for scored in zip(*(line[key] for line in lines), strict=True)
    )


def measure_calibrated(part: Part, workshop: Workshop) -> Measured:
    """Ensembles by our recipe, their variances calibrated on held-out training data."""
    lines = []
    for split in splits_of(part.settings, workshop):
        compute = partial(_calibrated, part, split)
        lines += kept(part, f"split {split.index}", workshop, compute)
    rows = {name: [line[name] for line in lines] for name in lines[0]}
    metrics = {name: _mean(rows[name], "log-likelihood") for name in rows}
    metrics["covered by 90%"] = _mean(rows["calibrated"], "covered")
    if "without emergent variance" in rows:
        gain = metrics["calibrated"] - metrics["without emergent variance"]
        metrics["added by emergent variance"] = gain
    return Measured(metrics, {name: columns(same) for name, same in rows.items()})


def _calibrated(part: Part, split: Split) -> list[dict[str, Any]]:
    """What ensembles give on a split, a row: noise and calibration from what is held out.

    Held-out data come from cross-validation, and networks are then trained once more on all; or,
    where there is enough of them (``folds`` of 1), from a single part that networks never see.
    """
    settings, members = part.settings, range(part.settings["members"])
    if settings["folds"] > 1:
        parts = split.folds(settings["folds"], part.seed)
    else:
        parts = [split.validation(settings["validation"], part.seed)]

    def trained(samples: Sequence[Standardized], noises: Sequence[float]) -> list[nn.Module]:
        config = TrainingConfig(
            epochs=epochs_of(settings["steps"], len(samples[0].x), settings["batch_size"]),
            batch_size=settings["batch_size"],
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            optimizer="adamw",
            schedule="one-cycle",
        )
        layers = len(settings["hidden"]) + 1
        jobs = [
            Job(some, (noise,) * layers, seed_of(part.seed, split, member))
            for noise in noises
            for some in samples
            for member in members
        ]
        return train(jobs, settings["hidden"], settings["activation"], config)

    noises = settings["noises"]
    nets = trained([split.without(rows) for rows in parts], noises)
    target = torch.cat([split.y[rows.held_out] for rows in parts])
    tried: dict[float, dict[str, Any]] = {}
    for place, noise in enumerate(noises):
        own = iter(nets[place * len(parts) * len(members) :])
        # Fold by fold, and within each member by member.
        folds = [[next(own) for _ in members] for _ in parts]
        outs = [
            [predicted(net, split.x[rows.held_out]) for net in same]
            for rows, same in zip(parts, folds, strict=True)
        ]
        tried[noise] = {**_fitted(outs, target), "nets": folds[0]}
    noise = max(tried, key=lambda each: float(tried[each]["score"]))
    best = tried[noise]
    final = best["nets"] if len(parts) == 1 else trained([split.whole()], [noise])
    test = [predicted(net, split.x_test) for net in final]
    together, alone = EnsemblePrediction.of(test), EnsemblePrediction.of(test[:1])
    about = {"noise": noise, "held out": best["score"]}
    whole = {
        "calibrated": (best["together"](together), best["together"]._asdict()),
        "constant variance": (EnsembleCalibration(0.0, 0.0, best["error"])(together), {}),
        "one network": (best["alone"](alone), {}),
    }
    if settings.get("without"):
        found = best["without"]
        whole["without emergent variance"] = (found(together), found._asdict())
    return [
        {
            name: {**about, **scores(out, split.y_test), **more}
            for name, (out, more) in whole.items()
        }
    ]


def _fitted(outs: Sequence[Sequence[Moments]], target: torch.Tensor) -> dict[str, Any]:
    """Calibrations of an ensemble, and of its first network, by held-out predictions per fold."""
    together = EnsemblePrediction.joined([EnsemblePrediction.of(members) for members in outs])
    alone = EnsemblePrediction.joined([EnsemblePrediction.of(members[:1]) for members in outs])
    least = rounding(target)
    found = calibrate(together, target, least=least)
    return {
        "together": found,
        "alone": calibrate(alone, target, least=least),
        "without": calibrate(together.without_emergent(), target, least=least),
        "error": (target[:, 0] - together.mean).square().mean().item(),
        "score": densities(found(together), target).mean().item(),
    }


def measure_shared(part: Part, workshop: Workshop) -> Measured:
    """MNNs whose mini-batches share a covariance in training.

    Networks of one hidden layer are trained alike whether they share it or have their own, so the
    rows are those of networks that have their own. With ``check`` among the settings it is measured
    that this is so.
    """
    recipe = {key: value for key, value in part.settings.items() if key != "check"}
    whole = Part(part.label, part.seed, recipe)
    metrics: dict[str, float | None] = {}
    series: dict[str, Any] = {}
    for activation in recipe["activations"]:
        lines = [line["MNN"] for line in by_recipe(whole, activation, workshop)]
        name = f"MNN {activation}"
        metrics[name], series[name] = _mean(lines, "log-likelihood"), columns(lines)
        if "check" in part.settings:
            metrics |= _lost_by_sharing(part, activation, workshop)
    return Measured(metrics, series)


def _lost_by_sharing(part: Part, activation: str, workshop: Workshop) -> dict[str, float]:
    """How networks of the first split differ, by which covariance they are trained with.

    They are trained for a while by the library's own steps, with each of three covariances.
    """
    (first,) = splits_of({**part.settings, "splits": 1}, workshop)
    nets = {
        covariance: _by_library(part, first, activation, covariance)
        for covariance in ("full", "shared", "diagonal")
    }
    found = {
        covariance: scores(predicted(net, first.x_test), first.y_test)["log-likelihood"]
        for covariance, net in nets.items()
    }
    weights = {name: _weights(net) for name, net in nets.items()}
    largest = weights["full"].abs().max()
    return {f"lost by sharing, {activation}": found["full"] - found["shared"]} | {
        f"weights, {name} and full, {activation}": (
            (weights[name] - weights["full"]).abs().max() / largest
        ).item()
        for name in ("shared", "diagonal")
    }


def _by_library(part: Part, split: Split, activation: str, covariance: str) -> nn.Module:
    """A network trained for a while with a covariance stored like that, in double precision."""
    check, settings = part.settings["check"], part.settings
    known = split.whole()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(part.seed, split))
        widths = [split.x.shape[1], *settings["hidden"], 1]
        noise = [check["noise"], 0.0]
        net = mlp(widths, activation=activation, noise=noise, covariance=covariance).double()
    config = TrainingConfig(
        epochs=epochs_of(check["steps"], len(split.x), settings["batch_size"]),
        batch_size=settings["batch_size"],
        lr=settings["lr"],
        weight_decay=0.0,
    )
    batches = TensorBatches(
        known.x.double(), known.y.double(), settings["batch_size"], seed=part.seed
    )
    fit(RegressionLoss(net), batches, config)
    return nn.Sequential(known.standardize, *net.children(), *known.back).double().eval()


def _weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of a table as its columns, split by split."""
    return {key: [line[key] for line in lines] for key in lines[0]}


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.fmean(line[key] for line in lines)
