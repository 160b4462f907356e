"""Metrics as JSON lines, and in TensorBoard's format where its writer is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covary.files import FileError, read_text, without_nan, write_atomically


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch of training, as a line of ``metrics.jsonl`` has it; undefined numbers are NaN."""

    epoch: int  # counted from 1
    step: int  # steps since training began
    loss: float  # average over the epoch's samples
    lr: float  # at the last step
    samples_per_second: float
    seconds: float
    seconds_outside_steps: float
    measured: Mapping[str, float]  # by name: the objective's statistic, and of held-out data

    @property
    def shown(self) -> dict[str, float]:
        """The loss and what was measured, by name, where they are defined."""
        numbers = {"loss": self.loss, **self.measured}
        return {name: number for name, number in numbers.items() if not math.isnan(number)}

    def to_json(self) -> dict[str, Any]:
        """As its line has it: what was measured among the rest, null where it is undefined."""
        named: dict[str, Any] = without_nan({"kind": "epoch", **vars(self), **self.measured})
        del named["measured"]
        return named

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Epoch:
        """The inverse of ``to_json``; numbers that a line does not have are NaN."""
        for name in ("step", "epoch"):
            if not isinstance(row.get(name), int):
                raise ValueError(f"expected a whole number as {name!r}")
        numbers: dict[str, Any] = {
            name: math.nan if value is None else value
            for name, value in row.items()
            if isinstance(value, int | float | None)
        }
        own = {field.name: numbers.pop(field.name, math.nan) for field in fields(cls)[:-1]}
        return cls(**own, measured=numbers)


class MetricsLog:
    """Epochs appended to a file, one JSON object a line, each flushed as it is written.

    A run that was killed may have written lines beyond its last checkpoint; ``rewind`` takes them
    back, so that no step is there twice.
    """

    def __init__(self, path: Path, *, tensorboard: bool = True) -> None:
        self.path = path
        self._writer: Any = None
        if tensorboard and find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(path.parent / "tensorboard"))

    def write(self, epoch: Epoch) -> None:
        """Append an epoch."""
        clean = epoch.to_json()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
        if self._writer is not None:
            for key, value in clean.items():
                if isinstance(value, int | float) and key not in ("step", "epoch"):
                    self._writer.add_scalar(key, value, epoch.step)
            self._writer.flush()

    def rewind(self, step: int) -> None:
        """Keep the epochs up to this step, and drop a last line that was cut in the middle."""
        if not self.path.exists():
            return
        kept = [epoch for epoch in read(self.path) if epoch.step <= step]
        text = "".join(json.dumps(epoch.to_json()) + "\n" for epoch in kept)
        write_atomically(self.path, text.encode())

    def close(self) -> None:
        """Write out what may still be in a buffer."""
        if self._writer is not None:
            self._writer.close()


def read(path: Path) -> list[Epoch]:
    """The epochs of a file; a last line that a killed process left unfinished does not count."""
    lines = read_text(path).splitlines()
    epochs = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row.get("kind") == "epoch":
                epochs.append(Epoch.from_json(row))
        except (ValueError, AttributeError) as error:
            if number == len(lines):
                break
            raise FileError(f"{path}, line {number}, is not a row of metrics: {error}.") from error
    return epochs
