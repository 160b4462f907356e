"""What the project promises about speed, measured here and now on small inputs.

Promises are measured with care by ``make bench`` and stored; a stored number does not notice code
that has become slow. So each has a quick measurement beside it, in passes of the plain network,
never in seconds: medians of passes that take turns, the best of several such rounds, and twice what
is promised as the limit. Time is that of the processor, not of the clock on the wall, because the
machine may do other things, which interrupt a long pass and not a short one.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from scipy.special import dawsn
from torch import Tensor, nn

import covary
from benchmarks import (
    converted,
    lif,
    replicas,
    residual_cnn,
    sampling_cost,
    steps,
    summary,
    tracked,
    training,
)
from covary.compare.networks import DropoutSamples
from covary.data import Dataset
from covary.models import plain
from covary.nn.fidelity import TrackingWarning
from covary.training import TrainingConfig, fit
from covary.training.config import make_optimizer
from covary.training.replicas import ReplicaLoss

SLACK = 2.0
ROUNDS, TURNS = 6, 7
BATCH = 128
IMAGES = 128


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As promises are measured: how well small operations run in parallel is another matter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # nobody trained these weights
        yield
    torch.set_num_threads(threads)


def over_plain(plain: Callable[[], Any], way: Callable[[], Any], limit: float) -> float:
    """Time of ``way`` over that of ``plain``: the best of some rounds, or the first within limit.

    What disturbs a round makes its ratio larger or smaller, and what is slow is slow in all rounds.
    """
    best = float("inf")
    for _ in range(ROUNDS):
        seconds: dict[Callable[[], Any], list[float]] = {plain: [], way: []}
        for _ in range(TURNS):
            for one_pass, found in seconds.items():
                one_pass()  # so that what it needs is in the cache
                before = time.process_time()
                one_pass()
                found.append(time.process_time() - before)
        best = min(best, statistics.median(seconds[way]) / statistics.median(seconds[plain]))
        if best <= limit:
            break
    return best


def network(kind: str) -> nn.Module:
    """The paper's widths, with random weights."""
    torch.manual_seed(0)
    return covary.mlp(steps.WIDTHS, noise=steps.NOISE, covariance=kind).eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return steps.batch_of(BATCH, steps.WIDTHS[0])[0]


# name -> a pass, and what is promised of it in passes of the plain network
FORWARD: dict[str, tuple[str, Callable[[covary.Moments], Tensor], float]] = {
    "tracked": ("tracked", lambda out: out.covariance_matrix, tracked.MOST_OVER_PLAIN["relu"]),
    "one projected row": (
        "tracked",
        lambda out: tracked.lead(out).variance,
        tracked.MOST_FOR_ONE_ROW["relu"],
    ),
}


@pytest.mark.parametrize("name", FORWARD)
@torch.no_grad()
def test_a_forward_pass(name, x):
    kind, looked_at, promised = FORWARD[name]
    net, ordinary = network(kind), steps.plain(steps.WIDTHS).eval()
    limit = SLACK * promised
    assert over_plain(lambda: ordinary(x), lambda: looked_at(net(x)), limit) <= limit


@pytest.mark.parametrize("kind", sampling_cost.MOST_OVER_SAMPLING)
@torch.no_grad()
def test_a_forward_pass_costs_no_more_than_some_samples(kind, x):
    net = network(kind)
    dropped = plain(net, dropout=sampling_cost.DROPOUT)
    samples = DropoutSamples(dropped, sampling_cost.AGAINST[kind])
    limit = SLACK * sampling_cost.MOST_OVER_SAMPLING[kind]
    assert over_plain(lambda: samples(x), lambda: net(x).covariance_matrix, limit) <= limit


@pytest.mark.parametrize("kind", summary.MOST_OVER_PLAIN)
def test_a_training_step(kind):
    ways = {
        each: steps.training_step(
            steps.build(each, steps.WIDTHS), *steps.batch_of(BATCH, steps.WIDTHS[0])
        )
        for each in ("plain", kind)
    }
    limit = SLACK * summary.MOST_OVER_PLAIN[kind]
    assert over_plain(ways["plain"], ways[kind], limit) <= limit


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(IMAGES, 1, 28, 28, generator=torch.Generator().manual_seed(0))


CONVERTED: dict[str, Callable[[covary.Moments], Tensor]] = {
    converted.ONE_ROW: lambda out: tracked.lead(out).variance,
    converted.TEN_ROWS: lambda out: out.covariance_matrix,
}


@pytest.mark.parametrize("way", CONVERTED)
@torch.no_grad()
def test_a_converted_network(way, images):
    model = residual_cnn.build()
    net = converted.converted(model, images, converted.NOISE, "averaged")
    limit = SLACK * converted.MOST_PASSES[way]
    assert over_plain(lambda: model(images), lambda: CONVERTED[way](net(images)), limit) <= limit


def step_of(objective: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Forward, backward and update of an objective on one batch."""
    optimizer = make_optimizer(TrainingConfig(), objective)

    def step() -> None:
        loss, _ = objective(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_step_of_replicas():
    """In steps of one of them: so many fewer than there are replicas are promised."""
    count, generator = replicas.SPLITS, torch.Generator().manual_seed(0)
    x, y = (torch.randn(BATCH, count, n, generator=generator).double() for n in (6, 1))
    data = [Dataset("", "regression", *[x[:, i], y[:, i]] * 2) for i in range(count)]
    alone, *_ = replicas.objectives(data)
    together = step_of(ReplicaLoss(replicas.objectives(data)), (x, y))
    for _ in range(10):
        together()  # which are recorded then
    limit = SLACK * count / replicas.LEAST_TIMES_FASTER
    assert over_plain(step_of(alone, (x[:, 0], y[:, 0])), together, limit) <= limit


def test_what_the_training_loop_adds():
    """An epoch in time of its bare steps, on batches that are there already."""
    objective, batches = training.objective("shared"), training.batches(10)
    ready = [step_of(objective, batch) for batch in batches.epoch(0)]

    def bare() -> None:
        objective.train()
        for step in ready:
            step()

    fabric = Fabric(accelerator="cpu", devices=1)
    limit = 1 + SLACK * training.MOST_OVERHEAD
    looped = partial(fit, training.objective("shared"), batches, TrainingConfig(epochs=1))
    assert over_plain(bare, lambda: looped(fabric=fabric), limit) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inputs", lif.RANGES)
def test_moments_of_spiking_neurons(inputs, dtype):
    random = np.random.default_rng(0)
    mu, sigma = (random.uniform(*ends, lif.ELEMENTS) for ends in lif.RANGES[inputs])
    given = torch.tensor(mu, dtype=dtype), torch.tensor(sigma**2, dtype=dtype)
    neurons, ratio = covary.activations.lif(), mu / sigma
    limit = SLACK * lif.MOST_OVER_DAWSON
    assert over_plain(lambda: dawsn(ratio), lambda: neurons(*given), limit) <= limit
