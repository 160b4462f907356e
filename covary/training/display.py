"""What a person sees while a network trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Display(Protocol):
    """Told of every step and every epoch."""

    def start(self, epochs: int, batches: int, step: int) -> None:
        """Training begins, or goes on after so many steps."""

    def step(self, loss: float, name: str, statistic: float, samples: int) -> None:
        """A step was made on so many samples, with this loss and accuracy (or error)."""

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch is complete, with these metrics."""

    def close(self) -> None:
        """Training is over, or broke off."""


class Silent:
    """Shows nothing."""

    def start(self, epochs: int, batches: int, step: int) -> None:
        """Show nothing."""

    def step(self, loss: float, name: str, statistic: float, samples: int) -> None:
        """Show nothing."""

    def epoch(self, row: dict[str, Any]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Lines:
    """A line per epoch, and one a minute in long epochs: for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._epochs = self._done = self._total = 0
        self._spoke = 0.0

    def start(self, epochs: int, batches: int, step: int) -> None:
        """Remember how long it will be."""
        self._epochs, self._done, self._total = epochs, step, epochs * batches
        self._spoke = time.monotonic()

    def step(self, loss: float, name: str, statistic: float, samples: int) -> None:
        """Say where training is, if nothing was said for a minute."""
        self._done += 1
        if time.monotonic() - self._spoke > 60:
            self._spoke = time.monotonic()
            line = f"step {self._done} of {self._total}: loss {loss:.4f}, {name} {statistic:.4f}"
            self._console.print(line, highlight=False)

    def epoch(self, row: dict[str, Any]) -> None:
        """One line with the epoch's metrics."""
        if not worth_a_line(row["epoch"], self._epochs):
            return
        self._spoke = time.monotonic()
        line = f"epoch {row['epoch']:>{len(str(self._epochs))}} of {self._epochs}: {summary(row)}"
        self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """A progress bar with loss, accuracy, throughput and time left, and a line per epoch."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task("training", total=None, numbers="")
        self._epochs = self._samples = 0
        self._since = 0.0

    def start(self, epochs: int, batches: int, step: int) -> None:
        """Show the bar, as full as training is."""
        self._epochs, self._since = epochs, time.monotonic()
        self._progress.update(self._task, total=epochs * batches, completed=step)
        self._progress.start()

    def step(self, loss: float, name: str, statistic: float, samples: int) -> None:
        """Move the bar; it draws itself a few times a second."""
        self._samples += samples
        rate = self._samples / max(1e-9, time.monotonic() - self._since)
        numbers = f"loss {loss:.3f}  {name} {statistic:.3f}  {rate:,.0f} samples/s"
        self._progress.update(self._task, advance=1, numbers=numbers)

    def epoch(self, row: dict[str, Any]) -> None:
        """A line above the bar."""
        if worth_a_line(row["epoch"], self._epochs):
            epoch = f"epoch {row['epoch']:>{len(str(self._epochs))}} of {self._epochs}"
            self._progress.console.print(f"{epoch}: {summary(row)}", highlight=False)
        # Validation is not training: the rate starts anew.
        self._samples, self._since = 0, time.monotonic()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def worth_a_line(epoch: int, epochs: int) -> bool:
    """At most about 20 lines, the first and the last epoch among them; all are in the log."""
    return epoch in (1, epochs) or epoch % max(1, epochs // 20) == 0


def summary(row: dict[str, Any]) -> str:
    """The numbers of an epoch that a person wants to see."""
    shown = {
        "loss": "loss",
        "accuracy": "accuracy",
        "mae": "mean absolute error",
        "validation_loss": "validation loss",
        "validation_accuracy": "validation accuracy",
        "validation_mae": "validation mean absolute error",
    }
    numbers = [f"{shown[key]} {row[key]:.4f}" for key in shown if row.get(key) is not None]
    return ", ".join([*numbers, f"{row['samples_per_second']:,.0f} samples/s"])


def terminal_or_lines(console: Console) -> Display:
    """A progress bar on a terminal, plain lines elsewhere."""
    return Bar(console) if console.is_terminal else Lines(console)
