"""What held-out data say about a run's uncertainty, kept in its folder: calibration and scores."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from covary.files import read_json, write_json
from covary.runs.records import decoded, to_json
from covary.uncertainty.calibration import LogitCalibration, VarianceCalibration, from_dict
from covary.uncertainty.fitted import FittedScore

Calibration = LogitCalibration | VarianceCalibration
CALIBRATION = "calibration.json"
# The name of each score in results, the features it has, and its file.
SCORES = {
    "fitted": ("moments", "score.safetensors"),
    "fitted_plain": ("plain", "score-plain.safetensors"),
}


class HeldOut(NamedTuple):
    """What was found on held-out data; empty if there were none."""

    calibration: Calibration | None
    scores: dict[str, FittedScore]
    samples: int
    notes: list[str]
    noise: tuple[float, ...] | None = None  # of the layers, if it was chosen anew


@dataclass(frozen=True, kw_only=True)
class KeptCalibration:
    """``calibration.json``: numbers of the calibration, and of which network it is.

    Attributes:
        weights: digest of the network.
        covariance: how it was held.
        scores: which were fitted beside it; None in files that do not say.
    """

    kind: Literal["logits", "variance"]
    scale: float
    temperature: float | None = None
    offset: tuple[float, ...] | None = None
    noise: tuple[float, ...] | None
    samples: int
    notes: tuple[str, ...]
    weights: str
    covariance: str
    scores: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        numbers = (self.scale, self.temperature, *(self.offset or ()), *(self.noise or ()))
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError("numbers of a calibration are finite")
        self.layer()

    def layer(self) -> Calibration:
        """The calibration."""
        return from_dict({key: value for key, value in asdict(self).items() if value is not None})

    @property
    def about(self) -> dict[str, str]:
        """Of which network it is."""
        return {"weights": self.weights, "covariance": self.covariance}


def write(folder: Path, found: HeldOut, *, weights: str, covariance: str) -> None:
    """Keep what was fitted; a score that could not be fitted is kept no longer."""
    assert found.calibration is not None
    for name, (_, file) in SCORES.items():
        if name in found.scores:
            found.scores[name].save(folder / file, weights=weights, covariance=covariance)
    numbers = found.calibration.to_dict()
    kept = KeptCalibration(
        **numbers | ({"offset": tuple(numbers["offset"])} if "offset" in numbers else {}),
        noise=found.noise,
        samples=found.samples,
        notes=tuple(found.notes),
        weights=weights,
        covariance=covariance,
        scores=tuple(found.scores),
    )
    write_json(folder / CALIBRATION, to_json(kept))
    for name in SCORES.keys() - found.scores.keys():
        (folder / SCORES[name][1]).unlink(missing_ok=True)


def read_calibration(path: Path) -> KeptCalibration:
    """``calibration.json``, or an error that names it and what is wrong."""
    remedy = f"Run `covary calibrate {path.parent}` again, or remove the file."
    return decoded(KeptCalibration, read_json(path, remedy), str(path), remedy)


def read(folder: Path, kept: KeptCalibration) -> HeldOut | None:
    """All that belongs to a calibration; None if a score is gone, or is of another network."""
    scores = {}
    for name, (_, file) in SCORES.items():
        path = folder / file
        if path.exists():
            score, about = FittedScore.load_with(path)
            if about != kept.about:
                return None
            scores[name] = score
    if kept.scores is not None and set(kept.scores) != set(scores):
        return None
    return HeldOut(kept.layer(), scores, kept.samples, list(kept.notes), kept.noise)
