"""How much each way of storing a covariance agrees with exact ones, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from covary.covariance import exact_units
from covary.inputs import in_batches
from covary.models import plain, with_covariance
from covary.moments import Moments
from covary.progress import Steps
from covary.runs import costs
from covary.runs.directory import Run
from covary.runs.results import FidelityResult, PartAgreement, Representation
from covary.runs.tracking import known_or_measured, quietly
from covary.stochastic.statistics import unshown
from covary.uncertainty.agreement import agreement, gathered

# Of which the fastest counts.
_ROUNDS = 8


@quietly()
def measure_fidelity(
    run: Run,
    *,
    ood: Sequence[str] = (),
    samples: int = 1000,
    batch_size: int = 128,
    seed: int = 0,
    progress: Steps | None = None,
) -> FidelityResult:
    """Compare the ways to store a run's covariance with exact ones, on test and OOD inputs.

    Numbers are also written to ``fidelity.json`` in the run's folder, entropies of every sample to
    ``fidelity.npz``. If tracked covariances were never measured they are first, on training inputs,
    and the result is kept with the run's weights.

    Args:
        run: a trained run.
        ood: out-of-distribution data, as in ``evaluate``.
        samples: inputs of each part to compare on, at most; exact covariances are expensive.
        batch_size: samples that are computed together, and that time and memory are measured of.
        seed: decides which inputs.
        progress: wraps what is done step by step, given a name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    run.check_replaceable(run.fidelity_path, run.fidelity_path.with_suffix(".npz"))
    steps = progress or unshown
    net = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    others, notes = run.ood(ood, seed=seed)
    known, news = known_or_measured(run, net, progress=progress is not None)
    chosen = known.named(run.config.model.tracked)
    rows = {chosen, *(row.covariance for row in known.rows)}
    tracked = sorted(rows, key=lambda name: exact_units(name) or 0)
    kinds = ["full", *tracked, "shared", "diagonal"]
    entropies: dict[str, np.ndarray] = {}
    agreements: dict[str, dict[str, PartAgreement]] = {kind: {} for kind in kinds}
    for part, x in ({"test": run.data.test_inputs} | others).items():
        # In random order: what a batch shares should not depend on how the data are sorted.
        order = np.random.default_rng(seed).permutation(len(x))[:samples]
        batches = in_batches(x[order], batch_size)
        exact: Moments | None = None
        for kind in kinds:
            moments = _moments(with_covariance(net, kind), steps(batches, f"{part}, {kind}"))
            exact = moments if exact is None else exact  # the first kind is
            agrees = PartAgreement(len(order), *agreement(exact, moments))
            # The largest of several targets says nothing.
            agreements[kind][part] = agrees if run.classifies else replace(agrees, argmax=None)
            entropies[f"{part}/{kind}"] = moments.entropy().float().cpu().numpy()
    batch = run.data.x_test[:batch_size]
    times = _times_over_plain(net, kinds, batch, steps)
    memory = {kind: costs.peak_memory(run, kind, len(batch)) for kind in steps(kinds, "memory")}
    return FidelityResult(
        batch=len(batch),
        parts=tuple(agreements[chosen]),
        representations=tuple(
            Representation(kind, times[kind], memory[kind], agreements[kind]) for kind in kinds
        ),
        chosen=chosen,
        notes=(*notes, *news),
        arrays=entropies,
        **run.about(started, seed),
    ).write(run.fidelity_path)


@torch.no_grad()
def _moments(net: nn.Module, batches: Iterable[Tensor | Moments]) -> Moments:
    device = next(net.parameters()).device
    return gathered([net(x.to(device)) for x in batches])


@torch.no_grad()
def _times_over_plain(
    net: nn.Sequential, kinds: Sequence[str], x: Tensor, steps: Steps
) -> dict[str, float]:
    """How many passes of the plain network a pass takes, covariances of the outputs included."""
    x = x.to(next(net.parameters()).device)
    passes: dict[str | None, Callable[[], object]] = {
        kind: partial(_covariances, with_covariance(net, kind), x) for kind in kinds
    }
    seconds = costs.fastest({**passes, None: partial(plain(net), x)}, steps(range(_ROUNDS), "time"))
    return {kind: seconds[kind] / seconds[None] for kind in kinds}


def _covariances(net: nn.Module, x: Tensor) -> Tensor:
    out: Moments = net(x)
    return out.covariance_matrix
