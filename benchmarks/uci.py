"""Calibrated regression on the published 20 splits of small UCI sets.

    python -m benchmarks.uci [--sets energy yacht] [--recipes default]

Targets are raw, log-likelihoods (nats per sample) on their original scale. What is chosen (the
noise) and what is fitted (scale and offset of the variance) comes from cross-validation within each
training split; the test part is looked at once, by networks trained on the whole training split:

- uncalibrated: one network, the noise under which its own variances do best;
- constant: one network and its average squared error as the variance of all, the noise under which
  that does best. What calibration would give without any covariance (scale 0);
- calibrated: one network, scale * variance + offset;
- ensemble constant, ensemble calibrated: the same for several networks, the spread of their means
  added to the variance; at the noise chosen for one of them.

Splits are trained together, folds, noises and members included. Each set and recipe is kept in
out/uci as soon as it is done, so the script goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import covary
from benchmarks import results
from covary import data
from covary.estimators.data import cross_validation
from covary.moments import Moments
from covary.training import RegressionLoss, TrainingConfig, fit
from covary.training.replicas import ReplicaLoss
from covary.uncertainty.agreement import gathered
from covary.uncertainty.calibration import combined, fit_variance
from covary.uncertainty.metrics import interval_coverage
from reproduction.experiments.uci_standardized import Standardized
from reproduction.experiments.uci_training import Job, batches_of

SETS = ("energy", "concrete", "yacht", "boston-housing")
SPLITS = 20
FOLDS = 5
CACHE = results.ROOT / "out" / "uci"
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How networks are made and trained. AdamW, the learning rate at its highest."""

    activation: str = "relu"
    hidden: tuple[int, ...] = (50, 50)
    noises: tuple[float, ...] = (0.05, 0.1)
    steps: int = 3000
    batch_size: int = 32
    lr: float = 1e-2
    schedule: str = "one-cycle"
    weight_decay: float = 0.03
    members: int = 1


RECIPES = {
    "default": Recipe(members=5),
    "one layer": Recipe(hidden=(50,)),
    "one layer, heaviside": Recipe(activation="heaviside", hidden=(50,), noises=(0.2, 0.4)),
    "heaviside": Recipe(activation="heaviside", noises=(0.1, 0.2)),
    "gelu": Recipe(activation="gelu", noises=(0.05, 0.1)),
    "more noise": Recipe(noises=(0.2, 0.4)),
    "constant rate": Recipe(schedule="constant", lr=1e-3),
    "weight decay 0.3": Recipe(weight_decay=0.3),
    "1000 steps": Recipe(steps=1000),
}


def train(jobs: Sequence[Job], recipe: Recipe) -> list[nn.Module]:
    """Networks of raw inputs and targets, trained together."""
    objectives = []
    for job in jobs:
        torch.manual_seed(job.seed)
        widths = [job.data.x.shape[1], *recipe.hidden, job.data.y.shape[1]]
        net = covary.mlp(widths, activation=recipe.activation, noise=job.noise, covariance="shared")
        objectives.append(RegressionLoss(net))
    loss = ReplicaLoss(objectives)
    batches = batches_of(jobs, recipe.batch_size)
    config = TrainingConfig(
        epochs=max(1, round(recipe.steps / len(batches))),
        batch_size=recipe.batch_size,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        optimizer="adamw",
        schedule=recipe.schedule,
    )
    fit(loss, batches, config)
    nets: list[nn.Module] = []
    for job, objective in zip(jobs, loss.unstack(), strict=True):
        layers = getattr(objective, "net").children()  # noqa: B009
        whole = nn.Sequential(job.data.standardize, *layers, *job.data.back)
        nets.append(covary.with_covariance(whole, "full").double().eval())
    return nets


def predicted(net: nn.Module, x: Tensor) -> Moments:
    with torch.no_grad():
        return gathered([net(x)])


def densities(out: Moments, y: Tensor) -> Tensor:
    return torch.distributions.Normal(out.mean, out.stddev).log_prob(y)


def measured(out: Moments, y: Tensor) -> dict[str, float]:
    """What is reported of predictions for the test part, on the scale of the target."""
    error = (out.mean - y).abs().numpy()
    return {
        "log-likelihood": densities(out, y).mean().item(),
        "rmse": math.sqrt(np.square(error).mean()),
        "coverage of 90%": interval_coverage(error, out.stddev.numpy(), 0.9),
    }


def constant(out: Moments, error: Tensor) -> Moments:
    """The same means with the average squared error as the variance of all."""
    matrix = torch.diag(error.square().mean(0)).expand(len(out.mean), -1, -1)
    return Moments(out.mean, covary.covariance.Full(matrix, added=matrix.new_zeros(1, 1)))


def as_kind(kind: str, out: Moments, error: Tensor, calibration: nn.Module) -> Moments:
    """Predictions of one network as they are reported, by what is known of held-out samples."""
    if kind == "constant":
        return constant(out, error)
    return cast(Moments, calibration(out)) if kind == "calibrated" else out


class Split:
    """A published split: its folds, what is known of held-out samples, and the test part."""

    def __init__(self, name: str, index: int) -> None:
        self.index = index
        found = data.load(name, split=index)
        self.x, self.y = found.x, found.y
        self.x_test, self.y_test = found.x_test, found.y_test
        self.parts = cross_validation(len(self.x), FOLDS, SEED, None)
        self.folds = [Standardized(self.x[rows], self.y[rows]) for rows, _ in self.parts]
        self.everything = Standardized(self.x, self.y)
        self.target = torch.cat([self.y[rows] for _, rows in self.parts])

    def fold_jobs(self, noise: float, member: int) -> list[Job]:
        return [Job(fold, noise, self.seed(member)) for fold in self.folds]

    def seed(self, member: int) -> int:
        return SEED + 100 * self.index + member

    def held_out(self, nets: Sequence[nn.Module]) -> Moments:
        """What the networks of the folds say of what they have not seen, fold after fold."""
        pairs = zip(nets, self.parts, strict=True)
        return gathered([predicted(net, self.x[part.held_out]) for net, part in pairs])


def held_out(choices: Sequence[tuple[Split, float, int]], recipe: Recipe) -> list[Moments]:
    """For each split, noise and member what the networks of the folds say of held-out samples."""
    jobs = [job for split, noise, member in choices for job in split.fold_jobs(noise, member)]
    nets = train(jobs, recipe)
    groups = [nets[start : start + FOLDS] for start in range(0, len(nets), FOLDS)]
    return [split.held_out(group) for (split, _, _), group in zip(choices, groups, strict=True)]


def singles(name: str, recipe: Recipe) -> list[dict[str, Any]]:
    """A row of results for each split, of single networks."""
    splits = [Split(name, index) for index in range(SPLITS)]
    choices = [(split, noise, 0) for split in splits for noise in recipe.noises]
    known = dict(zip(choices, held_out(choices, recipe), strict=True))
    nets = train([Job(s.everything, noise, s.seed(0)) for s, noise, _ in choices], recipe)
    final = dict(zip(choices, nets, strict=True))
    rows = []
    for split in splits:
        outs = {noise: known[split, noise, 0] for noise in recipe.noises}
        errors = {noise: split.target - out.mean for noise, out in outs.items()}
        fits = {noise: fit_variance(out, split.target) for noise, out in outs.items()}
        row: dict[str, Any] = {"split": split.index}
        for kind in ("uncalibrated", "constant", "calibrated"):
            scores = {
                noise: densities(as_kind(kind, out, errors[noise], fits[noise]), split.target)
                .mean()
                .item()
                for noise, out in outs.items()
            }
            noise = max(scores, key=scores.__getitem__)
            own = predicted(final[split, noise, 0], split.x_test)
            out = as_kind(kind, own, errors[noise], fits[noise])
            row[kind] = {
                "noise": noise,
                "cross-validated": scores[noise],
                **measured(out, split.y_test),
                **(_numbers(fits[noise]) if kind == "calibrated" else {}),
            }
        rows.append(row)
    return rows


def ensembles(name: str, recipe: Recipe, noises: Sequence[float]) -> list[dict[str, Any]]:
    """A row of results for each split, of ensembles at the noise chosen for one network."""
    splits = [Split(name, index) for index in range(SPLITS)]
    members = range(recipe.members)
    choices = [
        (split, noise, member)
        for split, noise in zip(splits, noises, strict=True)
        for member in members
    ]
    known = held_out(choices, recipe)
    nets = train([Job(s.everything, noise, s.seed(member)) for s, noise, member in choices], recipe)
    rows = []
    for place, (split, noise) in enumerate(zip(splits, noises, strict=True)):
        own = slice(place * recipe.members, (place + 1) * recipe.members)
        together = combined(known[own])
        out = combined([predicted(net, split.x_test) for net in nets[own]])
        error, calibration = split.target - together.mean, fit_variance(together, split.target)
        kinds = {
            "ensemble constant": (constant(together, error), constant(out, error)),
            "ensemble calibrated": (calibration(together), calibration(out)),
        }
        row: dict[str, Any] = {"split": split.index}
        for kind, (fitted, test) in kinds.items():
            row[kind] = {
                "noise": noise,
                "cross-validated": densities(fitted, split.target).mean().item(),
                **measured(test, split.y_test),
            }
        row["ensemble calibrated"] |= _numbers(calibration)
        rows.append(row)
    return rows


def _numbers(calibration: Any) -> dict[str, float]:
    (offset,) = calibration.offset.tolist()
    return {"scale": calibration.scale.item(), "offset": offset}


def cached(name: str, recipe_name: str, kind: str, *, only_known: bool = False) -> Any:
    """The rows of a set, a recipe and ``"singles"`` or ``"ensembles"``; None if not known."""
    recipe = RECIPES[recipe_name]
    says = json.loads(json.dumps({**asdict(recipe), "folds": FOLDS, "seed": SEED}))
    if kind == "singles":
        del says["members"]
    path = CACHE / f"{name}_{recipe_name.replace(' ', '-')}_{kind}.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["recipe"] == says:
            return found
    if only_known:
        return None
    began = time.process_time()
    if kind == "singles":
        rows = singles(name, recipe)
    else:
        known = cached(name, recipe_name, "singles")["rows"]
        rows = ensembles(name, recipe, [row["calibrated"]["noise"] for row in known])
    found = {"recipe": says, "seconds": round(time.process_time() - began, 1), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(path)
    return found


def summary(name: str, recipe_name: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Averages over splits for each kind of prediction, with the standard error."""
    table = []
    for kind in [key for key in rows[0] if key != "split"]:
        line: dict[str, Any] = {"dataset": name, "recipe": recipe_name, "kind": kind}
        for quantity in ("log-likelihood", "rmse", "coverage of 90%", "cross-validated"):
            values = [row[kind][quantity] for row in rows]
            line[quantity] = round(statistics.fmean(values), 4)
            if quantity == "log-likelihood":
                line["standard error"] = round(statistics.stdev(values) / math.sqrt(len(values)), 4)
                line["by split"] = [round(value, 4) for value in values]
        line["noises"] = [row[kind]["noise"] for row in rows]
        table.append(line)
    return table


def collected() -> dict[str, Any]:
    """All that is known of the recipes as they are now."""
    table, seconds = [], {}
    for name in SETS:
        for recipe_name in RECIPES:
            for kind in ("singles", "ensembles"):
                found = cached(name, recipe_name, kind, only_known=True)
                if found:
                    table += summary(name, recipe_name, found["rows"])
                    seconds[f"{name} {recipe_name} {kind}"] = found["seconds"]
    recipes = {name: {**asdict(recipe), "folds": FOLDS} for name, recipe in RECIPES.items()}
    return {
        "scale": "nats per sample, targets as published (raw)",
        "splits": SPLITS,
        "recipes": recipes,
        "table": table,
        "processor seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    work = [
        (name, recipe, kind)
        for kind in ("singles", "ensembles")
        for recipe in chosen.recipes
        for name in chosen.sets
        if kind == "singles" or RECIPES[recipe].members > 1
    ]
    for name, recipe, kind in work:
        found = cached(name, recipe, kind)
        print(f"{name}, {recipe}, {kind}: {found['seconds']} s", flush=True)
        for line in summary(name, recipe, found["rows"]):
            print(
                f"  {line['kind']:20} {line['log-likelihood']:8.3f} +- {line['standard error']:.3f}"
                f"  rmse {line['rmse']:.3f}  90% covers {line['coverage of 90%']:.3f}",
                flush=True,
            )
        path = results.save("uci_calibrated", "python -m benchmarks.uci", SEED, collected())
        print(f"saved {path.relative_to(results.ROOT)}", flush=True)


if __name__ == "__main__":
    main()
