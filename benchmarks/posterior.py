"""What a Gaussian posterior of all weights knows on MNIST, beside methods measured before.

    python -m benchmarks.posterior              # all seeds: about an hour on one core
    python -m benchmarks.posterior 0            # or one of them

Of the paper's widths, a conventional ReLU network is trained as ``covary compare`` trains it. What
was trained or measured before, in out/posterior, is not done again.
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
from covary.compare import Members, Method, Prediction, by_average, by_expectation, laplace
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


def trained(seed: int, config: RunConfig, dataset: Dataset) -> nn.Sequential:
    """The conventional network of a seed, trained now if it is not there yet."""
    from lightning_fabric import Fabric

    folder: Path = FOLDER / f"seed-{seed}"
    path = folder / "model.safetensors"
    torch.manual_seed(seed)
    net = plain(config.model.build())
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
    net = trained(seed, config, dataset)
    held, rows = validation_rows(len(dataset.x), config)
    held_out = dataset.x[held], dataset.y[held]
    began = time.perf_counter()
    fitted = covary.posterior.fit(
        net, (dataset.x[rows], dataset.y[rows]), prior_precision="held-out", held_out=held_out
    )
    seconds = time.perf_counter() - began
    head = laplace.fit_classifier(net, dataset.x[rows], held_out)
    methods = [
        Method("plain", "", Members([net]), by_average),
        Method("last-layer Laplace", "", head, by_expectation),
        Method("posterior", "", fitted, by_posterior),
    ]
    ood = {name: load_data(DataConfig(name=name))[0].x_test for name in OOD}
    found: dict[str, Any] = {}
    for method in methods:
        others = {name: method.predict(x) for name, x in ood.items()}
        scored = rows_of(method.predict(dataset.x_test), dataset.y_test, others)
        found |= {f"{method.name}: {score}": row for score, row in scored.items()}
    known = fitted.posterior
    result = {
        "rows": found,
        "prior precision": known.prior_precision,
        "temperature": known.temperature,
        "seconds of the fit": seconds,
        "shares": fitted(dataset.x_test[:1000]).budget().average_shares(),
    }
    write_json(path, result)
    return result


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
    net = trained(seed, resolve(DATA, dataset, Choices(seed=seed)), dataset)
    x = dataset.x_test[:128]
    fitted = covary.posterior.fit(net, (dataset.x[:2000], dataset.y[:2000]), prior_precision=1.0)
    noisy = covary.convert(net, noise=0.1)
    covary.track(noisy, dataset.x[:64].float())
    with torch.no_grad():
        found = costs.fastest(
            {
                "plain": partial(net, x),
                "sweep without weights": lambda: noisy(x.float()).covariance_matrix,
                "posterior": lambda: fitted(x).covariance_matrix,
                "expected softmax": lambda: scores.expected_softmax(fitted(x)),
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
    plainly, last, ours = (
        rows[name]
        for name in (
            "plain: max_probability",
            "last-layer Laplace: expected_max",
            "posterior: expected_max",
        )
    )
    broken = []
    if ours["nll"] > min(plainly["nll"], last["nll"]):
        broken.append(
            "its NLL is no worse than that of the plain network and of last-layer Laplace"
        )
    for name in OOD:
        if ours[f"auroc_ood_{name}"] < last[f"auroc_ood_{name}"]:
            broken.append(f"it finds {name} as well as last-layer Laplace")
    if ours["auroc_errors"] < plainly["auroc_errors"]:
        broken.append("it finds errors as well as max-softmax")
    cost = found["costs"]
    if cost["posterior"] > MOST_TIMES_A_SWEEP * cost["sweep without weights"]:
        broken.append(f"a pass takes at most {MOST_TIMES_A_SWEEP:g} times one without weights")
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
