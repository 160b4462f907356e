"""What a person sees while a network trains."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from covary.training.log import Epoch

if TYPE_CHECKING:
    from rich.console import Console


class Display(Protocol):
    """Told of every step and every epoch."""

    def start(self, epochs: int, batches: int, step: int) -> None:
        """Training begins, or goes on after so many steps."""

    def step(self, loss: float, name: str, statistic: float, samples: int) -> None:
        """A step was made on so many samples, with this loss and accuracy (or error)."""

    def epoch(self, row: Epoch) -> None:
        """An epoch is complete, with these metrics."""

    def close(self) -> None:
        """Training is over, or broke off."""


class Silent:
    """Shows nothing."""

    def _show_nothing(self, *_: Any) -> None:
        pass

    start = step = epoch = close = _show_nothing


class Shown:
    """About 20 lines with the metrics of epochs, and how training goes on between them.

    On a terminal, or in a notebook that has widgets, that is a progress bar with loss, accuracy,
    throughput and time left; elsewhere (files and pipes) a line a minute.

    Args:
        console: where.
        after: show the bar alone, from when training has taken so many seconds until it is over.
    """

    def __init__(self, console: Console, *, after: float | None = None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console, self._has_bar, self._after = console, has_bars(console), after
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self._has_bar,
            transient=after is not None,
        )
        self._task = self._bar.add_task("training", total=None, numbers="")
        self._epochs = self._total = self._done = self._samples = 0
        self._since = self._spoke = self._began = 0.0

    def start(self, epochs: int, batches: int, step: int) -> None:
        """Show the bar, as full as training is."""
        self._epochs, self._total, self._done = epochs, epochs * batches, step
        self._since = self._spoke = self._began = time.monotonic()
        self._bar.update(self._task, total=self._total, completed=step)
        if self._after is None:
            self._bar.start()

    def step(self, loss: float, name: str, statistic: float, samples: int) -> None:
        """Move the bar, which draws itself a few times a second; or say where training is."""
        self._done += 1
        self._samples += samples
        now = time.monotonic()
        if self._after is not None and now - self._began > self._after:
            self._bar.start()  # which does nothing the second time
        if self._has_bar:
            rate = self._samples / max(1e-9, now - self._since)
            numbers = f"loss {loss:.3f}  {name} {statistic:.3f}  {rate:,.0f} samples/s"
            self._bar.update(self._task, advance=1, numbers=numbers)
        elif self._after is None and now - self._spoke > 60:
            numbers = f"loss {loss:.4f}, {name} {statistic:.4f}"
            self._say(f"step {self._done} of {self._total}: {numbers}")

    def epoch(self, row: Epoch) -> None:
        """A line for about every 20th part, the first and the last epoch; all are in the log."""
        epoch, epochs = row.epoch, self._epochs
        is_told = epoch in (1, epochs) or epoch % max(1, epochs // 20) == 0
        if is_told and self._after is None:
            self._say(f"epoch {epoch:>{len(str(epochs))}} of {epochs}: {summary(row)}")
        # Validation is not training: the rate starts anew.
        self._samples, self._since = 0, time.monotonic()

    def close(self) -> None:
        """Leave the bar as it stands; remove one that came late."""
        if self._after is None or self._bar.live.is_started:
            self._bar.stop()

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(line, highlight=False, soft_wrap=not self._console.is_terminal)


def has_bars(console: Console) -> bool:
    """Whether progress bars can be shown: on a terminal, or in a notebook that has widgets."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal


def summary(row: Epoch) -> str:
    """The numbers of an epoch that a person wants to see."""
    words = {"loss": "loss", "accuracy": "accuracy", "mae": "mean absolute error"}
    words |= {f"validation_{key}": f"validation {word}" for key, word in words.items()}
    numbers = [f"{words[key]} {row.shown[key]:.4f}" for key in words if key in row.shown]
    return ", ".join([*numbers, f"{row.samples_per_second:,.0f} samples/s"])


def terminal_or_lines(console: Console) -> Display:
    """A progress bar on a terminal, plain lines elsewhere."""
    return Shown(console)
