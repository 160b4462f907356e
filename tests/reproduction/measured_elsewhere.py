"""What other processes measure in tests: they import this, and little else."""

from __future__ import annotations

import os
import time
from pathlib import Path

from reproduction.experiment import Measured, Part
from reproduction.workshop import Workshop


def number(part: Part, _workshop: Workshop) -> Measured:
    """10 * size + seed, and where it was measured; an error, or a long wait, if asked for."""
    settings = part.settings
    if "begun" in settings:
        (Path(settings["begun"]) / f"{part.label}-{part.seed}").touch()
    if settings.get("fails"):
        raise ValueError("This part cannot be measured.")
    if settings.get("waits"):
        time.sleep(600)
    found = 10.0 * settings["size"] + part.seed
    return Measured({"number": found, "process": os.getpid()}, {})
