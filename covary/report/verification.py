"""What `covary verify` found: moments of each layer, held against simulations of the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.report.files import Array, read_arrays, read_json, written_by

# measure -> its column
COLUMNS = {
    "mean": "mean error",
    "variance": "variance error",
    "covariance": "covariance error",
    "off_diagonal": "error of pairs",
}
_UNKNOWN = "\N{EN DASH}"
Value = Mapping[str, float | None]  # "value", "bar", and "floor" of errors


@dataclass(frozen=True)
class Layer:
    """One layer, on average over inputs."""

    name: str
    units: int
    poor: bool  # whether covariances are off, beyond doubt
    errors: Mapping[str, Value]
    entropy: Value
    shares: Mapping[str, Value]  # of networks in time: variance, of that of the steady state
    samples: float | None


@dataclass(frozen=True, eq=False)
class Verification:
    """All layers, and what figures show."""

    weights: str  # digest of the network
    inputs: int
    copies: int
    limit: float
    layers: tuple[Layer, ...]
    notes: tuple[str, ...]
    arrays: Mapping[str, Array]
    command: str

    def of(self, layer: Layer, name: str) -> Array | None:
        """An array of a layer, None if it was not stored."""
        return self.arrays.get(f"{layer.name}/{name}")

    @property
    def output(self) -> Layer:
        """The last layer."""
        return self.layers[-1]

    @property
    def columns(self) -> list[str]:
        """Of the table."""
        return [
            "units",
            *COLUMNS.values(),
            "noise of covariance",
            "entropy gap, nats",
            "variance, at once",
            "variance, equal \N{GREEK SMALL LETTER TAU}",
        ]

    @property
    def explained(self) -> str:
        """What the table says."""
        return (
            "Errors are relative, by norm, over inputs, with Monte-Carlo standard errors; what the "
            "noise of sampling contributes is taken out in quadrature (the noise of covariance is "
            "the error that exact moments would seem to have). Pairs are covariances of different "
            "units. The entropy gap is that of the simulation less that of the moments. Variances "
            "are those of networks in time over that of the steady state: with layers that follow "
            "at once, and with equal time constants."
        )

    def table(self) -> list[dict[str, Any]]:
        """A row of words for each layer."""
        return [
            {
                "name": layer.name,
                "poor": layer.poor,
                "cells": [
                    f"{layer.units:,}",
                    *(percent_of(layer.errors[key]) for key in COLUMNS),
                    plain_percent(layer.errors["covariance"]["floor"]),
                    _plus_minus(layer.entropy),
                    *(_plus_minus(layer.shares[name]) for name in ("ou-0", "ou-1")),
                ],
            }
            for layer in self.layers
        ]


def percent_of(error: Value) -> str:
    """An error with its bar."""
    value, bar = error["value"], error["bar"]
    if value is None or bar is None:
        return _UNKNOWN
    decimals = 2 if bar < 0.0005 else 1 if bar < 0.05 else 0
    return f"{100 * value:.{decimals}f} \N{PLUS-MINUS SIGN} {100 * bar:.{decimals}f}%"


def plain_percent(value: float | None) -> str:
    """A part, as people read it."""
    return _UNKNOWN if value is None else f"{100 * value:.1f}%"


def _plus_minus(value: Value) -> str:
    if value["value"] is None or value["bar"] is None:
        return _UNKNOWN
    text = f"{value['value']:.2f} \N{PLUS-MINUS SIGN} {value['bar']:.2f}"
    return text.replace("-", "\N{MINUS SIGN}")


def read_verification(run_dir: Path) -> Verification | None:
    """Read ``verification.json`` and ``verification.npz``; None if there was none."""
    path, arrays_path = run_dir / "verification.json", run_dir / "verification.npz"
    if not path.is_file():
        return None
    content = read_json(path)
    with written_by("verify", path):
        return Verification(
            weights=str(content["weights"]),
            inputs=len(content["inputs"]),
            copies=int(content["copies"]),
            limit=float(content["limit"]),
            layers=tuple(map(_layer, content["layers"])),
            notes=tuple(map(str, content["notes"])),
            arrays=read_arrays(arrays_path) if arrays_path.is_file() else {},
            command=str(content.get("command") or f"covary verify {run_dir}"),
        )


def _layer(entry: Mapping[str, Any]) -> Layer:
    steady = entry["simulations"]["steady"]
    return Layer(
        name=str(entry["name"]),
        units=int(entry["units"]),
        poor=bool(entry["poor"]),
        errors={key: steady[key] for key in COLUMNS},
        entropy=steady["entropy"],
        shares={
            name: simulation["variance_share"]
            for name, simulation in entry["simulations"].items()
            if name != "steady"
        },
        samples=steady["effective_samples"],
    )
