"""How much each way of holding a covariance agrees with exact ones, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import plain, with_covariance
from covary.moments import Moments
from covary.nn.fidelity import Fidelity as TrackingFidelity
from covary.runs import costs
from covary.runs.directory import Run, environment
from covary.runs.measuring import Progress
from covary.runs.results import Agreement, Fidelity, Representation
from covary.runs.tracking import known_or_measured, quietly
from covary.uncertainty.fidelity import agreement, gathered

# Of which the fastest counts.
_ROUNDS = 8


class _Kind(NamedTuple):
    """A way to hold the covariance."""

    covariance: str
    exact_width: int | None = None

    @property
    def name(self) -> str:
        """What it is called in results."""
        width = "" if self.exact_width is None else f", exact_width={self.exact_width}"
        return self.covariance + width

    def of(self, net: nn.Module) -> nn.Module:
        """The network that holds its covariance in this way."""
        return with_covariance(net, self.covariance, exact_width=self.exact_width)


@quietly()
def measure_fidelity(
    run: Run,
    *,
    ood: Sequence[str] = (),
    samples: int = 1000,
    batch_size: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fidelity:
    """Compare the ways to hold a run's covariance with exact ones, on inputs it was not trained on.

    What comes out is also written to the run's folder: numbers to ``fidelity.json``, entropies of
    every sample to ``fidelity.npz``. If tracked covariances were never measured they are first, on
    training inputs, and the result is kept with the run's weights.

    Args:
        run: a trained run.
        ood: foreign data, as in ``evaluate``.
        samples: inputs of each part to compare on, at most; exact covariances are dear.
        batch_size: samples that are computed together, and that time and memory are measured of.
        seed: decides which inputs.
        progress: wraps what is done step by step, given a name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    run.check_replaceable(run.fidelity_path, run.fidelity_path.with_suffix(".npz"))
    config, steps = run.config, progress or _unshown
    net = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    foreign, notes = run.foreign(ood, seed=seed)
    known, news = known_or_measured(run, net, progress=progress is not None)
    kinds = _representations(known, config.model.exact_width)
    found = {}
    for part, x in ({"test": run.data.x_test} | foreign).items():
        batches = torch.split(_some(x, samples, seed), batch_size)
        found[part] = _compare(net, kinds, batches, part, steps, classify=run.classifies)
    batch = run.data.x_test[:batch_size]
    times = _times_over_plain(net, kinds, batch, steps(range(_ROUNDS), "time"))
    memory = {kind: _memory(run, kind, len(batch)) for kind in steps(kinds, "memory")}
    return Fidelity(
        dataset=config.data.name,
        task=config.model.task,  # type: ignore[arg-type]
        weights=run.weights,
        batch=len(batch),
        parts=tuple(found),
        representations=tuple(
            Representation(
                kind.name,
                *kind,
                time_over_plain=times[kind],
                peak_memory_mb=memory[kind],
                parts={part: compared[kind].agreement for part, compared in found.items()},
            )
            for kind in kinds
        ),
        chosen=_Kind("tracked", known.width(config.model.exact_width)).name,
        notes=(*notes, *news),
        arrays={
            f"{part}/{kind.name}": one.entropy
            for part, compared in found.items()
            for kind, one in compared.items()
        },
        **environment(started, seed=seed),
    ).write(run.fidelity_path)


def _representations(known: TrackingFidelity, asked: int | None) -> list[_Kind]:
    """Exact covariances first, which the others are compared with."""
    widths = {row.exact_width for row in known.rows} | {known.width(asked)}
    tracked = [_Kind("tracked", width) for width in sorted(widths)]
    return [
        _Kind("full"),
        *tracked,
        _Kind("shared"),
        _Kind("diagonal"),
    ]


def _some(x: Tensor, count: int, seed: int) -> Tensor:
    # In random order: what a batch shares should not depend on how the data are sorted.
    order = np.random.default_rng(seed).permutation(len(x))
    return x[order[:count]]


class _Compared(NamedTuple):
    agreement: Agreement
    entropy: np.ndarray  # (N,)


@torch.no_grad()
def _compare(
    net: nn.Module,
    kinds: Sequence[_Kind],
    batches: Sequence[Tensor],
    part: str,
    steps: Progress,
    *,
    classify: bool,
) -> dict[_Kind, _Compared]:
    """Each representation with the first, on the same samples."""
    device = next(net.parameters()).device
    compared: dict[_Kind, _Compared] = {}
    exact: Moments | None = None
    for kind in kinds:
        network, label = kind.of(net), f"{part}, {kind.name}"
        moments = gathered([network(x.to(device)) for x in steps(batches, label)])
        exact = moments if exact is None else exact
        agrees = Agreement(len(moments.mean), *agreement(exact, moments))
        if not classify:  # the largest of several targets says nothing
            agrees = replace(agrees, argmax=None)
        compared[kind] = _Compared(agrees, moments.entropy().float().cpu().numpy())
    return compared


@torch.no_grad()
def _times_over_plain(
    net: nn.Sequential, kinds: Sequence[_Kind], x: Tensor, rounds: Iterable[object]
) -> dict[_Kind, float]:
    """How many passes of the plain network a pass takes, covariances of the outputs included."""
    x = x.to(next(net.parameters()).device)
    networks = {kind: kind.of(net) for kind in kinds}
    passes: dict[_Kind | None, Callable[[], object]] = {
        kind: partial(_covariances, network, x) for kind, network in networks.items()
    }
    seconds = costs.fastest({**passes, None: partial(plain(net), x)}, rounds)
    return {kind: seconds[kind] / seconds[None] for kind in kinds}


def _covariances(net: nn.Module, x: Tensor) -> Tensor:
    out: Moments = net(x)
    return out.covariance_matrix


def _memory(run: Run, kind: _Kind, batch: int) -> float | None:
    return costs.peak_memory(run, kind.covariance, kind.exact_width, batch)


def _unshown(items: Sequence[Any], _name: str) -> Iterator[Any]:
    yield from items
