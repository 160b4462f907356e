"""How much each way of holding a covariance agrees with exact ones, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import plain, with_covariance
from covary.moments import Moments
from covary.nn.fidelity import Fidelity
from covary.runs import costs
from covary.runs.directory import Run, environment, weights_digest
from covary.runs.measuring import Progress
from covary.runs.samples import foreign_inputs, load_data
from covary.runs.tracking import known_or_measured, quietly
from covary.training.log import without_nan
from covary.uncertainty.fidelity import agreement, gathered

# Of which the fastest counts.
_ROUNDS = 8


class Representation(NamedTuple):
    """A way to hold the covariance."""

    covariance: str
    exact_width: int | None = None

    @property
    def name(self) -> str:
        """What it is called in results."""
        width = "" if self.exact_width is None else f", exact_width={self.exact_width}"
        return self.covariance + width

    def described(self) -> dict[str, Any]:
        """As it stands in results."""
        return {"name": self.name, **self._asdict()}

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
    data_dir: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare the ways to hold a run's covariance with exact ones, on inputs it was not trained on.

    What comes out is also written to the run's folder: numbers to ``fidelity.json``, entropies of
    every sample to ``fidelity.npz``. If tracked covariances were never measured they are first, on
    training inputs, and the result is kept with the run's weights.

    Args:
        run: a trained run.
        ood: foreign data, as in ``evaluate``.
        samples: inputs of each part to compare on, at most; exact covariances are dear.
        batch_size: samples that are computed together, and that time and memory are measured of.
        data_dir: where data are looked for first.
        seed: decides which inputs.
        progress: wraps what is done step by step, given a name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    config, steps = run.config(), progress or _unshown
    net = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    dataset, _ = load_data(config.data, data_dir=data_dir, seed=config.training.seed)
    foreign, notes = foreign_inputs(run, dataset, ood, data_dir=data_dir, seed=seed)
    known, news = known_or_measured(run, net, dataset, progress=progress is not None)
    kinds = _representations(known, config.model.exact_width)
    inputs = {"test": dataset.x_test} | foreign
    classify = config.model.task == "classification"
    found = {}
    for part, x in inputs.items():
        batches = torch.split(_some(x, samples, seed), batch_size)
        found[part] = _compare(net, kinds, batches, part, steps, classify=classify)
    batch = dataset.x_test[:batch_size]
    times = _times_over_plain(net, kinds, batch, steps(range(_ROUNDS), "time"))
    memory = {kind: _memory(run, kind, len(batch)) for kind in steps(kinds, "memory")}
    result = {
        "dataset": config.data.name,
        "task": config.model.task,
        "weights": weights_digest(net),
        "batch": len(batch),
        "parts": list(found),
        "representations": [
            {
                **kind.described(),
                "time_over_plain": times[kind],
                "peak_memory_mb": memory[kind],
                "parts": {part: compared[kind].agreement for part, compared in found.items()},
            }
            for kind in kinds
        ],
        "chosen": Representation("tracked", known.width(config.model.exact_width)).name,
        "notes": [*notes, *news],
        **environment(started, seed=seed),
    }
    run.write_arrays("fidelity.npz", _entropies(found))
    clean: dict[str, Any] = without_nan(result)
    run.write_json(run.fidelity_path.name, clean)
    return clean


def _representations(known: Fidelity, asked: int | None) -> list[Representation]:
    """Exact covariances first, which the others are compared with."""
    widths = {row.exact_width for row in known.rows} | {known.width(asked)}
    tracked = [Representation("tracked", width) for width in sorted(widths)]
    return [
        Representation("full"),
        *tracked,
        Representation("shared"),
        Representation("diagonal"),
    ]


def _some(x: Tensor, count: int, seed: int) -> Tensor:
    # In random order: what a batch shares should not depend on how the data are sorted.
    order = np.random.default_rng(seed).permutation(len(x))
    return x[order[:count]]


class _Compared(NamedTuple):
    agreement: dict[str, Any]
    entropy: np.ndarray  # (N,)


@torch.no_grad()
def _compare(
    net: nn.Module,
    kinds: Sequence[Representation],
    batches: Sequence[Tensor],
    part: str,
    steps: Progress,
    *,
    classify: bool,
) -> dict[Representation, _Compared]:
    """Each representation with the first, on the same samples."""
    device = next(net.parameters()).device
    compared: dict[Representation, _Compared] = {}
    exact: Moments | None = None
    for kind in kinds:
        network, label = kind.of(net), f"{part}, {kind.name}"
        moments = gathered([network(x.to(device)) for x in steps(batches, label)])
        exact = moments if exact is None else exact
        agrees = {"samples": len(moments.mean), **agreement(exact, moments)._asdict()}
        if not classify:  # the largest of several targets says nothing
            agrees["argmax"] = None
        compared[kind] = _Compared(agrees, moments.entropy().float().cpu().numpy())
    return compared


def _entropies(found: dict[str, dict[Representation, _Compared]]) -> dict[str, np.ndarray]:
    return {
        f"{part}/{kind.name}": one.entropy
        for part, compared in found.items()
        for kind, one in compared.items()
    }


@torch.no_grad()
def _times_over_plain(
    net: nn.Sequential, kinds: Sequence[Representation], x: Tensor, rounds: Iterable[object]
) -> dict[Representation, float]:
    """How many passes of the plain network a pass takes, covariances of the outputs included."""
    x = x.to(next(net.parameters()).device)
    networks = {kind: kind.of(net) for kind in kinds}
    passes: dict[Representation | None, Callable[[], object]] = {
        kind: partial(_covariances, network, x) for kind, network in networks.items()
    }
    seconds = costs.fastest({**passes, None: partial(plain(net), x)}, rounds)
    return {kind: seconds[kind] / seconds[None] for kind in kinds}


def _covariances(net: nn.Module, x: Tensor) -> Tensor:
    out: Moments = net(x)
    return out.covariance_matrix


def _memory(run: Run, kind: Representation, batch: int) -> float | None:
    return costs.peak_memory(run, kind.covariance, kind.exact_width, batch)


def _unshown(items: Sequence[Any], _name: str) -> Iterator[Any]:
    yield from items
