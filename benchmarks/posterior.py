"""What a Gaussian posterior of all weights knows on MNIST, beside methods measured before.

    python -m benchmarks.posterior              # all seeds: about an hour on one core
    python -m benchmarks.posterior 0            # or one of them

Of the paper's widths, two conventional ReLU networks are trained as ``covary compare`` trains them,
one of them with dropout. What was trained or measured before, in out/posterior, is not done again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import covary
from benchmarks import results, tables, tables_networks
from covary.compare import (
    CompareConfig,
    DropoutSamples,
    Members,
    Method,
    Prediction,
    by_average,
    by_expectation,
    by_points,
    laplace,
    without_masks,
)
from covary.compare.methods import rows_of
from covary.data import Dataset
from covary.files import read_json, read_tensors, write_json, write_tensors
from covary.models import plain
from covary.runs import DataConfig, costs
from covary.runs.config import Choices, RunConfig
from covary.runs.samples import load_data, validation_rows
from covary.runs.training import resolve
from covary.training import Checkpoint, ClassificationLoss, MetricsLog, TensorBatches, fit
from covary.uncertainty import scores

FOLDER = results.ROOT / "out" / "posterior"
SEEDS = (0, 1, 2)
OOD = ("notmnist", "fashion-mnist")
DATA = DataConfig(name="mnist")
SETTINGS = CompareConfig()
KINDS = ("plain", "dropout")
CHOSEN_BY = 2048  # held-out digits, the first so many, by which prior and temperature are chosen
POSTERIOR, OURS = "posterior", "posterior, trained with dropout"
Pair = tuple[Tensor, Tensor]


def trained(kind: str, seed: int, config: RunConfig, dataset: Dataset) -> nn.Sequential:
    """The conventional network of a seed, trained now if it is not there yet.

    Its kind is "plain", or "dropout" if it is trained with that.
    """
    from lightning_fabric import Fabric

    folder: Path = FOLDER / f"seed-{seed}" / kind
    path = folder / "model.safetensors"
    torch.manual_seed(seed)
    net = plain(config.model.build(), dropout=SETTINGS.dropout if kind == "dropout" else 0.0)
    assert isinstance(net, nn.Sequential)
    if path.exists():
        net.load_state_dict(read_tensors(path)[0])
        return net.eval()
    _, rows = validation_rows(len(dataset.x), config)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    fit(
        ClassificationLoss(net),
        TensorBatches(dataset.x[rows], dataset.y[rows], config.training.batch_size, seed=seed),
        config.training,
        fabric=Fabric(accelerator="cpu", devices=1),
        checkpoint=Checkpoint(folder / "checkpoint.safetensors"),
        resume=True,
        log=MetricsLog(folder / "metrics.jsonl", tensorboard=False),
    )
    write_tensors(path, net.state_dict())
    return net.eval()


def measured(seed: int) -> dict[str, Any]:
    """What each method finds on the test digits and on OOD images, of one seed."""
    path = FOLDER / f"seed-{seed}" / "measured.json"
    if path.exists():
        return dict(read_json(path))
    dataset, _ = load_data(DATA, seed=seed)
    config = resolve(DATA, dataset, Choices(seed=seed))
    held, rows = validation_rows(len(dataset.x), config)
    data, held_out = (dataset.x[rows], dataset.y[rows]), (dataset.x[held], dataset.y[held])
    methods, fits = methods_of(seed, config, dataset, data, held_out)
    ood = {name: load_data(DataConfig(name=name))[0].x_test for name in OOD}
    found: dict[str, Any] = {}
    for method in methods:
        others = {name: method.predict(x) for name, x in ood.items()}
        scored = rows_of(method.predict(dataset.x_test), dataset.y_test, others)
        # On digits by which no temperature was chosen.
        unseen = slice(CHOSEN_BY, None)
        known = rows_of(method.predict(held_out[0][unseen]), held_out[1][unseen], {})
        for score, row in scored.items():
            found[f"{method.name}: {score}"] = row | {"nll_held_out": known[score]["nll"]}
    result = {"rows": found, "fits": fits}
    write_json(path, result)
    return result


def methods_of(
    seed: int, config: RunConfig, dataset: Dataset, data: Pair, held_out: Pair
) -> tuple[list[Method], dict[str, Any]]:
    """The methods of both networks of a seed, and what was fitted for them."""
    net, dropped = (trained(kind, seed, config, dataset) for kind in KINDS)
    both = covary.convert(dropped, noise=0.0, dropout=True)
    head = laplace.fit_classifier(net, data[0], held_out)
    masks = DropoutSamples(dropped, SETTINGS.samples, seed=seed)
    methods = [
        Method("plain", "", Members([net]), by_average),
        Method("last-layer Laplace", "", head, by_expectation),
        Method("plain, trained with dropout", "", Members([dropped]), by_average),
        Method("MC dropout", "", masks, by_average),
        Method("dropout without masks", "", without_masks(dropped, data[0]), by_points),
    ]
    fits = {}
    for name, base, layers, rule in (
        (POSTERIOR, net, "all", by_posterior),
        (f"{POSTERIOR}, averaged", net, "all", by_points),
        (f"{OURS}, last layer", dropped, "last", by_points),
        (f"{OURS}, expected softmax", dropped, "all", by_expectation),
        (OURS, dropped, "all", by_points),
        (f"{OURS}, and dropout", both, "all", by_points),
    ):
        began = time.perf_counter()
        is_averaged = rule is by_points
        fitted = covary.posterior.fit(
            base,
            data,
            layers=layers,
            prior_precision="held-out",
            held_out=held_out,
            probabilities=scores.averaged_softmax if is_averaged else scores.expected_softmax,
        )
        fits[name] = {
            "prior precision": fitted.posterior.prior_precision,
            "temperature": fitted.posterior.temperature,
            "seconds": time.perf_counter() - began,
            "shares": fitted(dataset.x_test[:1000]).budget().average_shares(),
        }
        methods.append(Method(name, "", fitted, rule))
    return methods, fits


def by_posterior(net: nn.Module, x: Tensor) -> Prediction:
    """Classes by the expected softmax; two scores of the whole covariance, two of the budget."""
    out = net(x)
    budget = out.budget()
    first = list(budget)[-1]  # of the layer next to the input
    found = {
        "expected_max": scores.expected_max(out),
        "mutual_information": scores.mutual_information(out),
        "variance of the weights": out.variance.sum(-1),
        "variance of the first weights": budget[first].sum(-1),
    }
    return Prediction(found, scores.expected_softmax(out))


def costs_of(seed: int) -> dict[str, float]:
    """Seconds of a pass at batch 128 over those of the plain network, and over a sweep."""
    dataset, _ = load_data(DATA, seed=seed)
    config = resolve(DATA, dataset, Choices(seed=seed))
    net, dropped = (trained(kind, seed, config, dataset) for kind in KINDS)
    x = dataset.x_test[:128]
    fitted = covary.posterior.fit(net, (dataset.x[:2000], dataset.y[:2000]), prior_precision=1.0)
    noisy = covary.convert(net, noise=0.1)
    covary.track(noisy, dataset.x[:64].float())
    unmasked = without_masks(dropped, dataset.x[:2000])
    masks = DropoutSamples(dropped, SETTINGS.samples, seed=seed)
    with torch.no_grad():
        found = costs.fastest(
            {
                "plain": partial(net, x),
                "sweep without weights": lambda: noisy(x.float()).covariance_matrix,
                "covariance of the posterior": lambda: fitted(x).covariance_matrix,
                POSTERIOR: lambda: scores.expected_softmax(fitted(x)),
                f"{POSTERIOR}, averaged": lambda: scores.averaged_softmax(fitted(x)),
                "dropout without masks": lambda: scores.averaged_softmax(unmasked(x)),
                "MC dropout": lambda: masks(x).softmax(-1).mean(0),
            },
            range(8),
        )
    return {name: each / found["plain"] for name, each in found.items()}


def summary(every: Mapping[str, Any]) -> dict[str, Any]:
    """Averages and standard deviations over seeds."""
    first = next(iter(every.values()))["rows"]
    return {
        name: {
            metric: {
                "mean": float(np.mean([one["rows"][name][metric] for one in every.values()])),
                "stddev": _stddev([one["rows"][name][metric] for one in every.values()]),
            }
            for metric in row
        }
        for name, row in first.items()
    }


def _stddev(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


# A pass with weights of all layers takes at most so many times one without them.
MOST_TIMES_A_SWEEP = 3.0


def broken_promises(found: Mapping[str, Any]) -> list[str]:
    """What the project promises and these measurements do not keep."""
    rows = {
        name: {key: each["mean"] for key, each in row.items()}
        for name, row in found["summary"].items()
    }
    plainly, last = rows["plain: max_probability"], rows["last-layer Laplace: expected_max"]
    others = {
        f"{POSTERIOR}: expected_max": (plainly, last),
        f"{OURS}: max_probability": (plainly, last, rows["MC dropout: max_probability"]),
    }
    broken = []
    for name, rivals in others.items():
        ours = rows[name]
        if ours["nll"] > min(rival["nll"] for rival in rivals):
            broken.append(f"{name}: its NLL is no worse than that of the methods beside it")
        for ood in OOD:
            if ours[f"auroc_ood_{ood}"] < last[f"auroc_ood_{ood}"]:
                broken.append(f"{name}: it finds {ood} as well as last-layer Laplace")
        if ours["auroc_errors"] < plainly["auroc_errors"]:
            broken.append(f"{name}: it finds errors as well as max-softmax")
    cost = found["costs"]
    if cost["covariance of the posterior"] > MOST_TIMES_A_SWEEP * cost["sweep without weights"]:
        broken.append(f"a pass takes at most {MOST_TIMES_A_SWEEP:g} times one without weights")
    if cost["dropout without masks"] > cost["MC dropout"]:
        broken.append("dropout without masks costs no more than with them")
    return broken


def main() -> None:
    seeds = [int(each) for each in sys.argv[1:]] or list(SEEDS)
    for seed in seeds:
        measured(seed)
        print(f"seed {seed}: measured", flush=True)
    done = [seed for seed in SEEDS if (FOLDER / f"seed-{seed}" / "measured.json").exists()]
    every = {str(seed): measured(seed) for seed in done}
    found = {"seeds": every, "summary": summary(every), "costs": costs_of(done[0])}
    tables.publish(
        "posterior",
        "python -m benchmarks.posterior",
        0,
        found,
        shown=[tables_networks.posterior],
        broken=broken_promises(found),
    )


if __name__ == "__main__":
    main()
