"""The parts of an experiment measured, one after another or several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from covary.files import without_nan
from covary.training import StoppedError
from reproduction import store
from reproduction.experiment import Experiment, Part
from reproduction.workshop import Workshop, networks_in


def _path(experiment: Experiment, part: Part, workshop: Workshop) -> Path:
    """The file of what a part gave."""
    return workshop.folder / "parts" / experiment.name / f"{store.slug(part)}.json"


def kept(experiment: Experiment, part: Part, workshop: Workshop) -> dict[str, Any] | None:
    """What a part gave before, if it was measured in the same way, of the networks that are there.

    A network whose folder was removed since may have been the same.
    """
    found = store.known_part(_path(experiment, part, workshop), part, experiment.revision)
    if found is None:
        return None
    before = found.get("weights", {})
    now = workshop.weights(part.settings, part.seed)
    same = all(before.get(name, digest) == digest for name, digest in now.items())
    return found if same else None


class Done(NamedTuple):
    """What was measured now: how many parts, and by how many processes at a time."""

    parts: int
    jobs: int


def measure(
    experiment: Experiment, scale: str, workshop: Workshop, *, chosen: Sequence[Part], jobs: int = 1
) -> Done:
    """Measure those of the chosen parts that were not measured before, and keep what they give.

    A part that needs published weights which are not on this machine is left out, and said to be.

    Args:
        experiment: what to measure.
        scale: where the parts are from.
        workshop: where networks are trained, and parts kept.
        chosen: some of the experiment's parts, or all.
        jobs: how many processes measure at a time. Parts that look at the same network are left
            to one of them; the progress of trainings is not shown by more than one.
    """
    rest = []
    for part in chosen:
        where = f"{experiment.name} ({scale}): {_name(part)}"
        if kept(experiment, part, workshop) is not None:
            workshop.say(f"{where}; measured before.")
        elif lacking := workshop.lacking(part.settings):
            workshop.say(f"{where}; left out. {lacking}")
        else:
            rest.append(part)
    groups = list(by_networks(rest))
    jobs = max(1, min(jobs, len(groups)))
    if jobs > 1:
        _in_processes(experiment, scale, workshop, groups, jobs)
        return Done(len(rest), jobs)
    for count, part in enumerate(rest):
        workshop.say(
            f"{experiment.name} ({scale}), part {count + 1} of {len(rest)} to measure: "
            f"{_name(part)}."
        )
        _keep(experiment, part, workshop)
    return Done(len(rest), jobs)


class _ElsewhereError(Exception):
    """Where in another process an error came from: the text of its traceback."""


class _Worker(NamedTuple):
    """A process that measures some parts."""

    process: SpawnProcess
    failed: Connection
    parts: Sequence[Part]

    @classmethod
    def begin(
        cls, experiment: Experiment, parts: Sequence[Part], workshop: Workshop, threads: int
    ) -> _Worker:
        # Not forked: threads of torch and of progress bars do not survive that.
        context = multiprocessing.get_context("spawn")
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_work,
            args=(sending, experiment, parts, workshop.folder, workshop.data_dir, threads),
        )
        process.start()
        sending.close()
        return cls(process, receiving, parts)

    def check(self) -> None:
        """Raise what stopped it, if it has not done its work."""
        self.process.join()
        if self.process.exitcode == 0:
            return
        try:
            error, trace = self.failed.recv()
        except EOFError:
            raise RuntimeError(
                f"The process that measured {_name(self.parts[0])} was ended from outside (code "
                f"{self.process.exitcode}); was there too little memory for so many at a time?"
            ) from None
        raise error from _ElsewhereError(trace)


def _in_processes(
    experiment: Experiment,
    scale: str,
    workshop: Workshop,
    groups: Sequence[Sequence[Part]],
    jobs: int,
) -> None:
    count = sum(len(group) for group in groups)
    workshop.say(
        f"{experiment.name} ({scale}): {count} parts to measure, {jobs} at a time. Trainings can "
        f"be followed in {workshop.folder}."
    )
    threads = max(1, torch.get_num_threads() // jobs)
    waiting, running, done = list(groups), list[_Worker](), 0
    with _terminated_like_interrupted():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Worker.begin(experiment, waiting.pop(0), workshop, threads))
                ended = wait([each.process.sentinel for each in running])
                for worker in [each for each in running if each.process.sentinel in ended]:
                    running.remove(worker)
                    worker.check()
                    for part in worker.parts:
                        done += 1
                        workshop.say(f"{_name(part)} is measured, {done} of {count}.")
        except StoppedError:
            raise
        except KeyboardInterrupt:
            raise StoppedError("Stopped on request.") from None
        finally:
            # Others stop too; trainings do so after a checkpoint.
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.process.join()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """So that SIGTERM leaves no processes behind, as Ctrl-C does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def by_networks(parts: Sequence[Part]) -> Iterator[list[Part]]:
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


def _work(
    failed: Connection,
    experiment: Experiment,
    parts: Sequence[Part],
    folder: Path,
    data_dir: str | None,
    threads: int,
) -> None:
    """What another process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    workshop = Workshop(folder=folder, data_dir=data_dir)
    try:
        for part in parts:
            _keep(experiment, part, workshop)
    except KeyboardInterrupt as interrupt:
        failed.send((StoppedError(str(interrupt) or "Stopped on request."), "on request"))
        sys.exit(1)
    except Exception as error:
        # Words of a kind that the command line knows: whatever else there is to an error may not
        # arrive as it was.
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        said = str(error) if isinstance(error, (ValueError, RuntimeError, OSError)) else ""
        failed.send((kind(said or repr(error)), traceback.format_exc()))
        sys.exit(1)


def _end_with_parent() -> None:
    """Nobody would know of a process that outlives the one that began it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _keep(experiment: Experiment, part: Part, workshop: Workshop) -> None:
    found = _measured(experiment, part, replace(workshop, revision=experiment.revision))
    store.save_part(_path(experiment, part, workshop), found)


def _measured(experiment: Experiment, part: Part, workshop: Workshop) -> dict[str, Any]:
    began, trainings, found = time.perf_counter(), len(workshop.spent), len(workshop.reused)
    metrics, series = experiment.measure(part, workshop)
    seconds = time.perf_counter() - began - sum(workshop.spent[trainings:])
    seconds += sum(workshop.reused[found:])
    about: Mapping[str, Any] = store.provenance(datetime.now(timezone.utc))
    return {
        "revision": experiment.revision,
        "label": part.label,
        "seed": part.seed,
        "settings": dict(part.settings),
        "weights": workshop.weights(part.settings, part.seed),
        "metrics": without_nan(dict(metrics)),
        "series": store.rounded(dict(series)),
        "seconds": round(seconds, 1),
        "measured": about["started"],
        "git_commit": about["git_commit"],
    }


def _name(part: Part) -> str:
    return f"{part.label}, seed {part.seed}" if part.label else f"seed {part.seed}"
