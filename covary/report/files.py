"""Reading the files of a run: what is undefined is None, what cannot be read says what to do."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ReportError(ValueError):
    """A run directory of which no page can be made; the message says what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of JSON holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is not JSON: {error}. Was writing it interrupted?") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} holds a {type(content).__name__} where an object is expected.")
    return {key: without_nan(value) for key, value in content.items()}


@contextmanager
def written_by(command: str, path: Path) -> Iterator[None]:
    """Say what to do where a file of a run lacks something that the command writes."""
    try:
        yield
    except ReportError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(
            f"{path} is not as `covary {command}` writes it ({error!r}). Run `covary {command} "
            f"{path.parent}` again, or remove the file."
        ) from error


def without_nan(value: Any) -> Any:
    """NaN and null both stand for what is undefined; only None does from here on."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an npz file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
