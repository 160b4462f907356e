"""Results as files: ``<name>.json`` with all that is needed to make them again."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from covary.files import write_atomically
from covary.runs.directory import environment
from reproduction.experiment import SCALES, Experiment, Part

# Significant digits of what figures show; metrics keep all of theirs.
_DIGITS = 6


# What pages read of a record.
_KEYS = ("seconds", "training_seconds", "seeds", "config", "started", "git_commit", "versions")


class ResultError(ValueError):
    """A file that is no result of an experiment, or one that would be lost."""


def path_of(folder: Path, name: str) -> Path:
    """Where the results of an experiment are kept."""
    return folder / f"{name}.json"


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """The results of an experiment; None if there are none."""
    path = path_of(folder, name)
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["experiment"] != name or record["scale"] not in SCALES:
            raise ValueError("it is of another experiment, or of an unknown scale")
        for key in _KEYS:
            record[key]
        for part in record["parts"]:
            part["label"], part["seed"], part["metrics"], part["series"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"{path} is not as `python -m reproduction run {name}` writes it ({error}). Make it "
            "again with that command and --overwrite, or remove it."
        ) from error
    return record


def check_replaceable(folder: Path, name: str, scale: str, *, overwrite: bool) -> None:
    """Refuse to replace results by those of a smaller scale, before any work is done for them."""
    if overwrite:
        return
    before = load(folder, name)
    if before is None or SCALES.index(before["scale"]) <= SCALES.index(scale):
        return
    raise ResultError(
        f"{path_of(folder, name)} has results at scale {before['scale']}, which those at scale "
        f"{scale} would replace. Keep both, with another folder for these (--results trial), or "
        "say --overwrite."
    )


def check_complete(folder: Path, record: Mapping[str, Any], *, overwrite: bool) -> None:
    """Refuse to replace results by others of the same scale that lack some of their parts."""
    if overwrite:
        return
    name = record["experiment"]
    before = load(folder, name)
    if before is None or before["scale"] != record["scale"]:
        return
    lost = _places(before) - _places(record)
    if lost and before["config"] == record["config"]:
        raise ResultError(
            f"{path_of(folder, name)} has {len(lost)} parts that these results lack. What was "
            "measured is kept; run the command without --only, or say --overwrite."
        )


def carried(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], earlier: Collection[int] = ()
) -> dict[tuple[str, int], dict[str, Any]]:
    """Parts of results, by label and seed, that those of now would have the same.

    Args:
        before: what a file has; None if there is none.
        now: the revision, scale and configuration that results are to be of.
        earlier: revisions before whose parts are taken too.
    """
    if before is None or before["scale"] != now["scale"]:
        return {}
    if (before.get("revision") or 0) not in (now["revision"], *earlier):
        return {}
    same = [each["label"] for each in before["config"] if each in now["config"]]
    found = [part for part in before["parts"] if part["label"] in same]
    return {(part["label"], part["seed"]): part for part in found}


def sittings(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How many parts each command measured, by how many processes, and in how many seconds."""
    once = [record["this_time"]] if "this_time" in record else []
    found: list[dict[str, Any]] = record.get("sittings", once)
    return found


def _places(record: Mapping[str, Any]) -> set[tuple[str, int]]:
    return {(part["label"], part["seed"]) for part in record["parts"]}


def save(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write results, whole or not at all."""
    path = path_of(folder, record["experiment"])
    write_atomically(path, (_as_text(record) + "\n").encode())
    return path


def slug(part: Part) -> str:
    """The name of a part's file."""
    label = "".join(each if each.isalnum() else "-" for each in part.label)
    return f"{label}-{part.seed}" if label else str(part.seed)


def known_part(path: Path, part: Part, revision: int = 0) -> dict[str, Any] | None:
    """What a part gave before, if the same settings decided it, measured in the same way."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    settings = json.loads(json.dumps(part.settings))
    keys = ("label", "seed", "settings")
    same = (*(found.get(key) for key in keys), found.get("revision", 0))
    return found if same == (part.label, part.seed, settings, revision) else None


def save_part(path: Path, found: Mapping[str, Any]) -> None:
    """Keep what a part gave, so that an experiment that is cut short goes on after it."""
    write_atomically(path, _as_text(found).encode())


def configuration(experiment: Experiment, scale: str) -> list[dict[str, Any]]:
    """The settings of every part, by label: what a result was made with, seeds aside.

    As a file gives them back, so that the two can be compared.
    """
    by_label = {part.label: dict(part.settings) for part in experiment.parts[scale]}
    rows = [{"label": label, "settings": settings} for label, settings in by_label.items()]
    as_stored: list[dict[str, Any]] = json.loads(json.dumps(rows))
    return as_stored


def provenance(started: datetime) -> dict[str, Any]:
    """Command, versions, commit and machine; changes here mark the commit as those of covary do."""
    return vars(environment(started, code=[Path(__file__).parent]))


def rounded(value: Any) -> Any:
    """Numbers with the digits that a figure can show, None where they are not finite."""
    if isinstance(value, Mapping):
        return {key: rounded(some) for key, some in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(some) for some in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
