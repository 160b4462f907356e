"""The parts of an experiment measured, one after another or several at a time."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from covary.experiments import store
from covary.experiments.experiment import Experiment, Part
from covary.experiments.workshop import Workshop, networks_in
from covary.runs.directory import environment
from covary.training.log import without_nan


def kept_in(workshop: Workshop, experiment: Experiment) -> Path:
    """The folder of what parts of an experiment gave."""
    return workshop.folder / "parts" / experiment.name


def path_of(folder: Path, part: Part) -> Path:
    """The file of what a part gave."""
    return folder / f"{store.slug(part)}.json"


def measure(
    experiment: Experiment, scale: str, workshop: Workshop, *, chosen: Sequence[Part], jobs: int = 1
) -> int:
    """Measure those of the chosen parts that were not measured before, and keep what they give.

    Args:
        experiment: what to measure.
        scale: where the parts are from.
        workshop: where networks are trained, and parts kept.
        chosen: some of the experiment's parts, or all.
        jobs: how many processes measure at a time. Parts that look at the same network are left
            to one of them; the progress of trainings is not shown by more than one.

    Returns:
        How many parts were measured now.
    """
    folder = kept_in(workshop, experiment)
    rest = []
    for part in chosen:
        if store.known_part(path_of(folder, part), part) is None:
            rest.append(part)
        else:
            workshop.say(f"{experiment.name} ({scale}): {_name(part)}; measured before.")
    if jobs > 1 and len(rest) > 1:
        _in_processes(experiment, scale, workshop, rest, jobs)
        return len(rest)
    for count, part in enumerate(rest):
        workshop.say(
            f"{experiment.name} ({scale}), part {count + 1} of {len(rest)} to measure: "
            f"{_name(part)}."
        )
        _keep(experiment, part, workshop)
    return len(rest)


def _in_processes(
    experiment: Experiment, scale: str, workshop: Workshop, parts: Sequence[Part], jobs: int
) -> None:
    groups = list(_by_networks(parts))
    jobs = min(jobs, len(groups))
    workshop.say(
        f"{experiment.name} ({scale}): {len(parts)} parts to measure, {jobs} at a time. Trainings "
        f"can be followed in {workshop.folder}."
    )
    # Not forked: threads of torch and of the progress bars do not survive that.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    done = 0
    try:
        waiting = {
            pool.submit(
                _keep_all, experiment, group, workshop.folder, workshop.data_dir, threads
            ): group
            for group in groups
        }
        for finished in as_completed(waiting):
            finished.result()
            for part in waiting[finished]:
                done += 1
                workshop.say(f"{_name(part)} is measured, {done} of {len(parts)}.")
    finally:
        # After an error, or Ctrl-C, what has not begun does not begin.
        pool.shutdown(cancel_futures=True)


def _by_networks(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts in groups, so that no two of them are about the same network."""
    groups: list[tuple[set[str], list[Part]]] = []
    for part in parts:
        names = {f"{each['name']}-{part.seed}" for each in networks_in(part.settings)}
        joined = [part]
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names |= group[0]
            joined = [*group[1], *joined]
        groups.append((names, joined))
    for _, joined in groups:
        yield joined


def _keep_all(
    experiment: Experiment, parts: Sequence[Part], folder: Path, data_dir: str | None, threads: int
) -> None:
    """What another process does."""
    torch.set_num_threads(threads)
    workshop = Workshop(folder=folder, data_dir=data_dir)
    for part in parts:
        _keep(experiment, part, workshop)


def _keep(experiment: Experiment, part: Part, workshop: Workshop) -> None:
    found = _measured(experiment, part, workshop)
    store.save_part(path_of(kept_in(workshop, experiment), part), found)


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


def _name(part: Part) -> str:
    return f"{part.label}, seed {part.seed}" if part.label else f"seed {part.seed}"
