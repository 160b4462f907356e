"""From an experiment's name to its results, going on where it was cut short."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reproduction import measuring, store
from reproduction.experiment import Experiment, Part
from reproduction.workshop import Workshop


def reproduce(
    experiment: Experiment,
    scale: str,
    workshop: Workshop,
    *,
    results: Path,
    only: Collection[str] = (),
    seeds: Collection[int] = (),
    overwrite: bool = False,
    jobs: int = 1,
) -> dict[str, Any]:
    """Measure every part of an experiment that was not measured before, and write the results.

    Args:
        experiment: what to measure.
        scale: ``"smoke"``, ``"quick"`` or ``"paper"``.
        workshop: where networks are trained, and parts kept (``parts/`` in its folder).
        results: folder of the results, ``<name>.json``.
        only: measure parts of these labels alone; others stay in the results if they were measured
            before with the same settings, and are named as missing if not.
        seeds: measure parts of these seeds alone, in the same way; of all seeds if empty.
        overwrite: replace results of a larger scale.
        jobs: measure in so many processes at a time; a script that asks for several has to begin
            with ``if __name__ == "__main__":``, as others with processes have.

    Returns:
        What was written: parts with their metrics, and all that is needed to make them again.
    """
    store.check_replaceable(results, experiment.name, scale, overwrite=overwrite)
    wanted = experiment.parts[scale]
    check_chosen(experiment, scale, only, seeds)
    started = datetime.now(timezone.utc)
    began = time.perf_counter()
    chosen = _chosen(wanted, only, seeds)
    measured = measuring.measure(experiment, scale, workshop, chosen=chosen, jobs=jobs)
    elapsed = time.perf_counter() - began
    of_what = {
        "experiment": experiment.name,
        "revision": experiment.revision,
        "scale": scale,
        "config": store.configuration(experiment, scale),
    }
    # What was there says how parts that were not measured now were measured.
    partly = measured.parts < len(wanted) and (bool(only or seeds) or not overwrite)
    before = store.load(results, experiment.name) if partly else None
    carried = store.carried(before, of_what, experiment.earlier)
    trained = _trainings(before) if before and carried else {}
    sittings = store.sittings(before) if before and carried else []
    this = {**measured._asdict(), "seconds": round(elapsed, 1)}
    parts, missing = [], []
    for part in wanted:
        found = measuring.kept(experiment, part, workshop) or carried.get((part.label, part.seed))
        if found is None:
            missing.append({"label": part.label, "seed": part.seed})
            continue
        parts.append(found)
        trained |= workshop.training_seconds(part.settings, part.seed)
    if not parts:
        lacking = dict.fromkeys(filter(None, (workshop.lacking(each.settings) for each in chosen)))
        raise ValueError(f"Nothing of {experiment.name} can be measured. {' '.join(lacking)}")
    record = {
        **of_what,
        **store.provenance(started),
        # Of measuring all parts, now or before; and of training their networks, which other
        # experiments may have in common with this one.
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "training_seconds": round(sum(trained.values()), 1),
        "trainings": trained,
        # What commands measured one after another, and how long each took by the clock.
        "sittings": [*sittings, *([this] if measured.parts or not sittings else [])],
        "seeds": sorted({part["seed"] for part in parts}),
        "missing": missing,
        "parts": [
            {key: part[key] for key in part if key not in ("settings", "revision", "weights")}
            for part in parts
        ],
    }
    store.check_complete(results, record, overwrite=overwrite)
    store.save(results, record)
    return record


def _trainings(record: dict[str, Any]) -> dict[str, float]:
    """Seconds of each training that results rest on; older files have their sum alone."""
    return dict(record.get("trainings", {"before": record["training_seconds"]}))


def _chosen(parts: Iterable[Part], only: Collection[str], seeds: Collection[int]) -> list[Part]:
    return [
        part
        for part in parts
        if (not only or part.label in only) and (not seeds or part.seed in seeds)
    ]


def check_chosen(
    experiment: Experiment, scale: str, only: Collection[str], seeds: Collection[int] = ()
) -> None:
    """Refuse labels, and seeds of these, that no part has."""
    labels = {part.label for part in experiment.parts[scale]}
    unknown = sorted(set(only) - labels)
    if unknown:
        known = ", ".join(map(repr, sorted(labels))) if labels != {""} else "without labels"
        asked = ", ".join(map(repr, unknown))
        raise ValueError(f"{experiment.name} has parts {known} at scale {scale}, and none {asked}.")
    known_seeds = sorted({part.seed for part in _chosen(experiment.parts[scale], only, ())})
    if strange := sorted(set(seeds) - set(known_seeds)):
        theirs, asked = (", ".join(map(str, each)) for each in (known_seeds, strange))
        raise ValueError(
            f"{experiment.name} has such parts of seeds {theirs} at scale {scale}, and none "
            f"{asked}."
        )
