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
    labels = {part.label for part in wanted}
    if not labels.issuperset(only):
        raise ValueError(
            f"{experiment.name} has parts {', '.join(sorted(labels))} at scale {scale}, got "
            f"{', '.join(sorted(set(only) - labels))}."
        )
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
    store.save(results, record)
    return record


def _measured(experiment: Experiment, part: Part, workshop: Workshop) -> dict[str, Any]:
    began, trainings = time.perf_counter(), len(workshop.spent)
    metrics, series = experiment.measure(part, workshop)
    about: Mapping[str, Any] = environment(datetime.now(timezone.utc))
    return {
        "label": part.label,
        "seed": part.seed,
        "settings": dict(part.settings),
        "metrics": without_nan(dict(metrics)),
        "series": store.rounded(dict(series)),
        "seconds": round(time.perf_counter() - began - sum(workshop.spent[trainings:]), 1),
        "git_commit": about["git_commit"],
    }


def _slug(part: Part) -> str:
    label = "".join(each if each.isalnum() else "-" for each in part.label)
    return f"{label}-{part.seed}" if label else str(part.seed)
