"""``covary fidelity``."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from covary import runs
from covary.cli import common
from covary.cli.common import (
    DataDir,
    Debug,
    ForeignData,
    Json,
    RunPath,
    Seed,
    quoted,
    reported,
    say,
)
from covary.nn.fidelity import Row
from covary.runs.config import PER_SAMPLE
from covary.runs.results import Fidelity, Representation

_ERRORS = ("mean", "variance", "covariance")


@reported
def fidelity(
    run: RunPath,
    ood: ForeignData = None,
    samples: Annotated[
        int, typer.Option("--samples", min=2, help="Inputs of each part, at most.")
    ] = 1000,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples that are computed together.")
    ] = 128,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the ways to hold a run's covariance: how exact they are, and what they cost.

    Each is compared with exact covariances (full), on test inputs and on foreign ones: relative
    errors of mean, variance and covariance, Spearman's rank correlation of entropies, and how often
    another class is predicted. Time is that of a forward pass with the covariances of a batch, as a
    multiple of the plain network's; memory is the peak for such a batch. Numbers go to
    fidelity.json in the folder of the run.

    Examples:

    - `covary fidelity runs/mnist --ood notmnist`
    - `covary fidelity runs/houses --samples 200 --json`
    """
    opened = runs.open(run, data_dir=data_dir)
    result = runs.measure_fidelity(
        opened,
        ood=tuple(ood or ()),
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        progress=common.progress,
    )
    if as_json:
        common.show_json(result.to_json())
        return
    for part in result.parts:
        _show_part(f"{run}, {part}", result, part)
    _show_costs(result)
    say("* is what --covariance tracked uses by itself.")
    for note in result.notes:
        say(f"Note: {note}")
    say(_advice(result, quoted(run)))
    say(f"Written to {opened.fidelity_path}.")


def _show_part(title: str, result: Fidelity, part: str) -> None:
    kinds = result.representations
    samples = kinds[0].parts[part].samples
    classify = result.task == "classification"
    common.show_table(
        f"{title}: errors against exact covariances, {samples:,} samples",
        ["", *_ERRORS, "rank", *(["class"] if classify else [])],
        [
            [
                _marked(kind, result),
                *(_percent(kind.of(part, key)) for key in _ERRORS),
                _decimal(kind.parts[part].rank, 3, "undefined"),
                *([_percent(kind.parts[part].argmax)] if classify else []),
            ]
            for kind in kinds
        ],
    )


def _show_costs(result: Fidelity) -> None:
    common.show_table(
        f"What a batch of {result.batch} costs",
        ["", "time (plain = 1)", "memory (MB)"],
        [
            [
                _marked(kind, result),
                _decimal(kind.time_over_plain, 1, "unknown"),
                _decimal(kind.peak_memory_mb, 1, "unknown"),
            ]
            for kind in result.representations
        ],
    )


def _advice(result: Fidelity, run: str) -> str:
    """Which representation to take: the cheapest that agrees well enough on every part."""
    kinds = [kind for kind in result.representations if kind.covariance in PER_SAMPLE]
    full = kinds[0]
    best = min(filter(_is_good, kinds), key=_time)
    if best is full:
        cheaper = [kind for kind in kinds if _time(kind) < _time(full)]
        reason = "what is cheaper agrees too little" if cheaper else "nothing is cheaper here"
        return f"Take full: it is exact, and {reason} (covary evaluate {run} --covariance full)."
    option = f"--covariance {best.covariance}"
    if best.exact_width is not None and best.name != result.chosen:
        option += f" --exact-width {best.exact_width}"
    times = _time(full) / _time(best)
    return (
        f"Take {best.name}: {times:.1f} times faster than full, {_worst(best)} at worst "
        f"(covary evaluate {run} {option})."
    )


def _is_good(kind: Representation) -> bool:
    return kind.covariance == "full" or _worst(kind).is_good


def _worst(kind: Representation) -> Row:
    """Of all parts, the lowest rank and the largest error; unknown ones count for nothing good."""
    parts = kind.parts.values()
    ranks = [part.rank for part in parts if part.rank is not None]
    errors = [math.inf if part.covariance is None else part.covariance for part in parts]
    return Row(kind.exact_width or 0, min(ranks, default=math.nan), max(errors))


def _time(kind: Representation) -> float:
    return math.inf if kind.time_over_plain is None else kind.time_over_plain


def _marked(kind: Representation, result: Fidelity) -> str:
    return f"{kind.name} *" if kind.name == result.chosen else kind.name


def _percent(value: float | None) -> str:
    if value is None:
        return "undefined"
    if value == 0:
        return "0%"
    if value < 1e-4:
        return "<0.01%"
    if value > 10:
        return ">1000%"
    return f"{100 * value:.{2 if value < 0.01 else 1 if value < 0.1 else 0}f}%"


def _decimal(value: float | None, digits: int, nothing: str) -> str:
    return nothing if value is None else f"{value:,.{digits}f}"
