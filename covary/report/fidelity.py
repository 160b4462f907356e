"""What `covary fidelity` found: ways of holding the covariance, held against the exact one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.report.files import Array, ReportError, read_arrays, read_json, written_by


@dataclass(frozen=True)
class Representation:
    """One way of holding the covariance: what it costs, and how close to the exact it comes."""

    name: str
    covariance: str  # "full", "tracked", "shared" or "diagonal"
    time: float | None  # of a batch, in times of the plain network's
    memory: float | None  # MB, at most
    # part -> samples; errors of mean, variance and covariance; rank, argmax; None if undefined
    parts: Mapping[str, Mapping[str, float | None]]

    def of(self, part: str, measure: str) -> float | None:
        """One number of a part, None where it is undefined or was not measured."""
        return self.parts.get(part, {}).get(measure)


@dataclass(frozen=True, eq=False)
class Fidelity:
    """All representations of one network, measured on the same inputs."""

    weights: str  # digest of the network
    batch: int  # inputs at a time, where time was taken
    parts: tuple[str, ...]
    representations: tuple[Representation, ...]
    chosen: str  # what "tracked" uses by itself, empty if unknown
    entropies: Mapping[str, Array]  # "<part>/<representation>" -> (n,)
    command: str

    def entropy(self, part: str, representation: Representation) -> Array | None:
        """(n,) entropies of a part's inputs, None if they were not stored."""
        return self.entropies.get(f"{part}/{representation.name}")

    @property
    def exact(self) -> Representation | None:
        """What the others are held against."""
        return next((one for one in self.representations if one.covariance == "full"), None)


def read_fidelity(run_dir: Path) -> Fidelity | None:
    """Read ``fidelity.json`` and ``fidelity.npz``; None if there is no such measurement."""
    path, arrays_path = run_dir / "fidelity.json", run_dir / "fidelity.npz"
    if not path.is_file():
        return None
    content = read_json(path)
    entropies = read_arrays(arrays_path) if arrays_path.is_file() else {}
    with written_by("fidelity", path):
        fidelity = Fidelity(
            weights=str(content["weights"]),
            batch=int(content["batch"]),
            parts=tuple(map(str, content["parts"])),
            representations=tuple(map(_representation, content["representations"])),
            chosen=str(content.get("chosen") or ""),
            entropies=entropies,
            command=str(content.get("command") or f"covary fidelity {run_dir}"),
        )
    _check_lengths(arrays_path, fidelity)
    return fidelity


def _representation(entry: Mapping[str, Any]) -> Representation:
    return Representation(
        name=str(entry["name"]),
        covariance=str(entry["covariance"]),
        time=entry["time_over_plain"],
        memory=entry["peak_memory_mb"],
        parts=entry["parts"],
    )


def _check_lengths(path: Path, fidelity: Fidelity) -> None:
    """Entropies of one part are of the same inputs, or cannot be compared."""
    for part in fidelity.parts:
        stored = [fidelity.entropy(part, one) for one in fidelity.representations]
        lengths = {len(entropy) for entropy in stored if entropy is not None}
        if len(lengths) > 1:
            found = " and ".join(map(str, sorted(lengths)))
            raise ReportError(
                f"{path} has entropies of {found} inputs for {part}; all must be of the same. Run "
                f"`covary fidelity {path.parent}` again."
            )
