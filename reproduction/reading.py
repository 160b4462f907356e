"""Stored results as claims and figures take them: with what follows from them, and what is beside.

Files keep what was measured. Noises of numbers and the results of other experiments, which some
claims compare with, are put beside it here, each time that they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reproduction import catalogue, store
from reproduction.experiment import Experiment


def read(folder: Path, experiment: Experiment) -> dict[str, Any] | None:
    """The results of an experiment, ready to be judged and drawn; None if there are none.

    Of a revision that is not shown, they are as they were stored.
    """
    record = store.load(folder, experiment.name)
    if record is None or not experiment.shows(record.get("revision") or 0):
        return record
    return completed(experiment, record, folder)


def completed(experiment: Experiment, record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Results with numbers that follow from them, and those of others by name (``beside``)."""
    beside = {}
    for name in experiment.others:
        other, found = catalogue.get(name), store.load(folder, name)
        if found is not None and other.shows(found.get("revision") or 0):
            beside[name] = other.read(found)
    return {**experiment.read(record), "beside": beside}
