"""How training ends before its time."""

from __future__ import annotations


class DivergedError(RuntimeError):
    """The loss, or a weight, is no longer a number."""


class StoppedError(KeyboardInterrupt):
    """Someone asked training to stop, and it stopped between two steps.

    An interrupt and no ordinary error: whoever tries many trainings in a row, as a grid search
    does, should not take it for one that failed and begin the next.
    """
