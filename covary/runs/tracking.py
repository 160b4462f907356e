"""How well a run's tracked covariances agree with exact ones: measured once, kept with weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from covary.covariance import class_name
from covary.moments import Moments
from covary.nn import Lift
from covary.nn.fidelity import Fidelity, FidelityRow, TrackingWarning
from covary.runs.config import check_covariance
from covary.runs.directory import Run
from covary.runs.samples import validation_rows
from covary.tracking import track
from covary.training.batches import shuffled

# Training inputs to measure on.
_SAMPLES = 256


def measure(net: nn.Module, x: Tensor | Moments, *, seed: int, progress: bool) -> Fidelity:
    """Measure on a few of the inputs that a network was trained on, chosen by the seed."""
    # A key beyond any epoch, and not that of the validation rows.
    few = shuffled(len(x), seed, 2**31 + 1)[:_SAMPLES]
    return track(net, x[few], samples=_SAMPLES, progress=progress)


def fidelity_of(net: nn.Module) -> Fidelity | None:
    """What was measured of a network, if it was."""
    for layer in net.modules():
        if isinstance(layer, Lift) and layer.fidelity is not None:
            return Fidelity.of(layer.fidelity)
    return None


class Chosen(NamedTuple):
    """How covariances are stored in a measurement."""

    covariance: str
    fidelity: FidelityRow | None = None  # of tracked ones
    notes: tuple[str, ...] = ()


def chosen(run: Run, net: nn.Module, covariance: str | None, *, progress: bool = False) -> Chosen:
    """How to store covariances: as asked for; else tracked, or full where tracked ones are poor.

    If tracked covariances were never compared with exact ones they are now, and what comes out is
    kept with the run's weights; ``net`` is told, too.
    """
    if covariance is not None:
        check_covariance(covariance)
    if covariance is not None and class_name(covariance) != "tracked":
        return Chosen(covariance)
    asked = run.config.model.tracked if covariance in (None, "tracked") else covariance
    known, news = known_or_measured(run, net, progress=progress)
    row = known.used(asked)
    if covariance is None and row.is_poor:
        poor = f"Tracked covariances of this network are poor ({row}), so exact ones are taken."
        return Chosen("full", notes=(*news, poor))
    return Chosen(known.named(asked), row, (*news, summary(known, asked)))


def known_or_measured(run: Run, net: nn.Module, *, progress: bool) -> tuple[Fidelity, list[str]]:
    """What is known of a run's network, measured and kept now if nothing was; and a note if so."""
    known = fidelity_of(net)
    if known is not None:
        return known, []
    _, rows = validation_rows(len(run.data.x), run.config)
    seed = run.config.training.seed
    fidelity = measure(net, run.data.inputs[rows], seed=seed, progress=progress)
    kept = run.save_tracking(net)
    why = "training is not finished" if run.is_writable else "the folder is read-only"
    where = f"kept in {run.model_path.name}" if kept else f"not kept, since {why}"
    return fidelity, [f"Tracked covariances were never measured here: done now, and {where}."]


def summary(fidelity: Fidelity, asked: str) -> str:
    """One sentence on how well tracked covariances agree, and one more if they do not."""
    row, named = fidelity.used(asked), fidelity.named(asked)
    found = f"Tracked covariances ({named}) against exact ones, on training inputs: {row}."
    if not row.is_poor:
        return found
    best = fidelity.used("tracked")
    better = "full" if best.is_poor else best.covariance
    return f"{found} That is poor. Better: covary evaluate with --covariance {better}."


@contextmanager
def quietly() -> Iterator[None]:
    """Within this block nothing warns of poor tracked covariances: notes report them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        yield
