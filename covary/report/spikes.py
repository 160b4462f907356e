"""What `covary verify` found of a network of spiking neurons: rates, and how fast it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.report.files import Array, read_arrays, read_json, written_by
from covary.report.verification import Value, percent_of, plain_percent

# measure -> its column
COLUMNS = {
    "rate": "rate error",
    "variance": "variance error",
    "fano": "Fano factor error",
    "covariance": "covariance error",
    "off_diagonal": "error of pairs",
}


@dataclass(frozen=True)
class Layer:
    """One layer of neurons, on average over inputs."""

    name: str
    units: int
    poor: tuple[str, ...]  # what is off, beyond doubt
    rate: float  # spikes per ms
    fano: float | None
    errors: Mapping[str, Value]


@dataclass(frozen=True)
class Course:
    """A number that changes as time goes on, in ms, and where the moments say that it ends."""

    times: tuple[float, ...]
    values: tuple[float | None, ...]
    bars: tuple[float | None, ...]
    moments: float

    @classmethod
    def of(cls, content: Mapping[str, Any], key: str) -> Course:
        """As it stands in the file."""
        return cls(
            times=tuple(content["times"]),
            values=tuple(content[key]),
            bars=tuple(content["bar"]),
            moments=float(content["moments"]),
        )


@dataclass(frozen=True, eq=False)
class Spikes:
    """All layers, decisions if there were any, and what figures show."""

    weights: str  # digest of the network
    inputs: int
    copies: int
    duration: float
    window: float
    limit: float
    layers: tuple[Layer, ...]
    entropy: Course
    accuracy: Course | None
    decided: int  # inputs that were decided on
    notes: tuple[str, ...]
    arrays: Mapping[str, Array]
    command: str

    def of(self, layer: Layer, name: str) -> Array:
        """An array of a layer."""
        return self.arrays[f"{layer.name}/{name}"]

    @property
    def columns(self) -> list[str]:
        """Of the table."""
        return ["units", "spikes/s", "Fano factor", *COLUMNS.values(), "noise of rates"]

    @property
    def explained(self) -> str:
        """What the table says."""
        return (
            "Errors are relative, by norm, over inputs, with Monte-Carlo standard errors; what the "
            "noise of the simulation contributes is taken out in quadrature (the noise of rates is "
            "the error that exact rates would seem to have). Spikes are counted in windows of "
            f"{self.window:g} ms. Fano factors, variance over mean of such counts, are those of "
            "the moments, which are those of long windows: in short ones a neuron that fires by "
            "the clock has a variance of up to 1/4 of a spike that is no error of theirs. Pairs "
            "are covariances of different neurons."
        )

    def table(self) -> list[dict[str, Any]]:
        """A row of words for each layer."""
        return [
            {
                "name": layer.name,
                "poor": bool(layer.poor),
                "cells": [
                    f"{layer.units:,}",
                    f"{1000 * layer.rate:.1f}",
                    "\N{EN DASH}" if layer.fano is None else f"{layer.fano:.2f}",
                    *(percent_of(layer.errors[key]) for key in COLUMNS),
                    plain_percent(layer.errors["rate"]["floor"]),
                ],
            }
            for layer in self.layers
        ]


def read_spikes(run_dir: Path) -> Spikes | None:
    """Read ``spikes.json`` and ``spikes.npz``; None if there was none."""
    path, arrays_path = run_dir / "spikes.json", run_dir / "spikes.npz"
    if not path.is_file():
        return None
    content = read_json(path)
    with written_by("verify", path):
        decided = content["decisions"]
        return Spikes(
            weights=str(content["weights"]),
            inputs=len(content["inputs"]),
            copies=int(content["copies"]),
            duration=float(content["duration"]),
            window=float(content["window"]),
            limit=float(content["limit"]),
            layers=tuple(map(_layer, content["layers"])),
            entropy=Course.of(content["entropy"], "simulated"),
            accuracy=None if decided is None else Course.of(decided, "accuracy"),
            decided=0 if decided is None else int(decided["inputs"]),
            notes=tuple(map(str, content["notes"])),
            arrays=read_arrays(arrays_path),
            command=str(content.get("command") or f"covary verify {run_dir}"),
        )


def _layer(content: Mapping[str, Any]) -> Layer:
    return Layer(
        name=str(content["name"]),
        units=int(content["units"]),
        poor=tuple(content["poor"]),
        rate=float(content["mean_rate"]),
        fano=content["mean_fano"],
        errors=content["errors"],
    )
