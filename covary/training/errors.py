"""How training ends before its time."""

from __future__ import annotations

from covary.training.checkpoint import Position
from covary.training.config import TrainingConfig


class DivergedError(RuntimeError):
    """The loss, or a weight, is no longer a number."""

    def __init__(self, problem: str, at: Position, batches: int, config: TrainingConfig) -> None:
        super().__init__(
            f"{problem}, at step {at.step + 1} (epoch {at.epoch + 1}, batch {at.batch + 1} of "
            f"{batches}). The last checkpoint was kept. Try a smaller learning rate (it is "
            f"{config.lr:g}), a limit on gradients (clip), or look for extreme values in the data."
        )


class StoppedError(RuntimeError):
    """Someone asked training to stop; the checkpoint is written."""

    def __init__(self, at: Position) -> None:
        super().__init__(f"Stopped on request after step {at.step} ({at.epoch} epochs complete).")
