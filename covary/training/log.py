"""Metrics as JSON lines, and in TensorBoard's format where its writer is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covary.files import FileError, read_text, without_nan, write_atomically


class MetricsLog:
    """Rows appended to a file, one JSON object a line, each flushed as it is written.

    A run that was killed may have written rows beyond its last checkpoint; ``rewind`` takes them
    back, so that no step is there twice.
    """

    def __init__(self, path: Path, *, tensorboard: bool = True) -> None:
        self.path = path
        self._writer: Any = None
        if tensorboard and find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(path.parent / "tensorboard"))

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Numbers that JSON does not know (NaN, infinity) become null."""
        clean = without_nan(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
        if self._writer is not None:
            for key, value in clean.items():
                if isinstance(value, int | float) and key not in ("step", "epoch"):
                    self._writer.add_scalar(key, value, clean["step"])
            self._writer.flush()

    def rewind(self, step: int) -> None:
        """Keep the rows up to this step, and drop a last line that was cut in the middle."""
        if not self.path.exists():
            return
        kept = [row for row in read(self.path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_atomically(self.path, text.encode())

    def close(self) -> None:
        """Write out what may still be in a buffer."""
        if self._writer is not None:
            self._writer.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that a killed process left unfinished does not count."""
    lines = read_text(path).splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError("expected an object with a whole number as 'step'")
        except (ValueError, AttributeError) as error:
            if number == len(lines):
                break
            raise FileError(f"{path}, line {number}, is not a row of metrics: {error}.") from error
        rows.append(without_nan(row))
    return rows
