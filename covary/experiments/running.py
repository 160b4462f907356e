"""From an experiment's name to its results, going on where it was cut short."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from covary.experiments import store
from covary.experiments.experiment import Experiment, Part
from covary.experiments.workshop import Workshop
from covary.runs.directory import environment
from covary.training.log import without_nan


def reproduce(
    experiment: Experiment,
    scale: str,
    workshop: Workshop,
    *,
    results: Path,
    only: Collection[str] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Measure every part of an experiment that was not measured before, and write the results.

    Args:
        experiment: what to measure.
        scale: ``"smoke"``, ``"quick"`` or ``"paper"``.
        workshop: where networks are trained, and parts kept (``parts/`` in its folder).
        results: folder of the results, ``<name>.json``.
        only: measure parts of these labels alone; others are in the results if they were measured
            before, and named as missing if not.
        overwrite: replace results of a larger scale.

    Returns:
        What was written: parts with their metrics, and all that is needed to make them again.
    """
    store.check_replaceable(results, experiment.name, scale, overwrite=overwrite)
    wanted = experiment.parts[scale]
    check_labels(experiment, scale, only)
    started = datetime.now(timezone.utc)
    parts, missing = [], []
    for i, part in enumerate(wanted):
        name = f"{part.label}, seed {part.seed}" if part.label else f"seed {part.seed}"
        path = workshop.folder / "parts" / experiment.name / f"{_slug(part)}.json"
        found = store.known_part(path, part)
        if found is None and only and part.label not in only:
            missing.append({"label": part.label, "seed": part.seed})
            continue
        workshop.say(
            f"{experiment.name} ({scale}), part {i + 1} of {len(wanted)}: {name}"
            + ("; measured before." if found else ".")
        )
        if found is None:
            found = _measured(experiment, part, workshop)
            store.save_part(path, found)
        parts.append(found)
    trained: dict[str, float] = {}
    for each in parts:
        trained |= workshop.training_seconds(each["settings"], each["seed"])
    record = {
        "experiment": experiment.name,
        "scale": scale,
        **environment(started),
        # Of measuring all parts, now or before; and of training their networks, which other
        # experiments may have in common with this one.
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "training_seconds": round(sum(trained.values()), 1),
        "seeds": sorted({part["seed"] for part in parts}),
        "config": store.configuration(experiment, scale),
        "missing": missing,
        "parts": [{key: part[key] for key in part if key != "settings"} for part in parts],
    }
    store.check_complete(results, record, overwrite=overwrite)
    store.save(results, record)
    return record


def check_labels(experiment: Experiment, scale: str, only: Collection[str]) -> None:
    """Refuse labels that no part has."""
    labels = {part.label for part in experiment.parts[scale]}
    unknown = sorted(set(only) - labels)
    if unknown:
        known = ", ".join(sorted(labels)) if labels != {""} else "without labels"
        raise ValueError(
            f"{experiment.name} has parts {known} at scale {scale}, and none {', '.join(unknown)}."
        )


def _measured(experiment: Experiment, part: Part, workshop: Workshop) -> dict[str, Any]:
    began, trainings, found = time.perf_counter(), len(workshop.spent), len(workshop.reused)
    metrics, series = experiment.measure(part, workshop)
    seconds = time.perf_counter() - began - sum(workshop.spent[trainings:])
    seconds += sum(workshop.reused[found:])
    about: Mapping[str, Any] = environment(datetime.now(timezone.utc))
    return {
        "label": part.label,
        "seed": part.seed,
        "settings": dict(part.settings),
        "metrics": without_nan(dict(metrics)),
        "series": store.rounded(dict(series)),
        "seconds": round(seconds, 1),
        "git_commit": about["git_commit"],
    }


def _slug(part: Part) -> str:
    label = "".join(each if each.isalnum() else "-" for each in part.label)
    return f"{label}-{part.seed}" if label else str(part.seed)
