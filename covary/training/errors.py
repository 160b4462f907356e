"""Exceptions that stop training early."""

from __future__ import annotations

from covary.training.checkpoint import Position
from covary.training.config import TrainingConfig


class DivergedError(RuntimeError):
    """The loss, or a weight, is no longer a number."""


class StoppedError(KeyboardInterrupt):
    """Someone asked training to stop, and it stopped between two steps.

    An interrupt and no ordinary error: whoever tries many trainings in a row, as a grid search
    does, should not take it for one that failed and begin the next.
    """


def diverged(problem: str, at: Position, batches: int, config: TrainingConfig) -> DivergedError:
    """The error of this problem, with where it came up and what to try."""
    return DivergedError(
        f"{problem}, at step {at.step + 1} (epoch {at.epoch + 1}, batch {at.batch + 1} of "
        f"{batches}). The last checkpoint was kept. Try a smaller learning rate (it is "
        f"{config.lr:g}), a limit on gradients (clip), or look for extreme values."
    )


def stopped(at: Position) -> StoppedError:
    """The interrupt, with how far training had come."""
    return StoppedError(f"Stopped on request after step {at.step}, {at.epoch} epochs complete.")
