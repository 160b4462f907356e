"""The training loop, for all networks; Lightning Fabric brings devices, processes and precision.

A run that is cut short at any moment and resumed ends with the same weights as one that was not:
the order of samples and the learning rate depend on seed and step alone, the checkpoint has the
rest.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from covary.training.batches import Batches
from covary.training.checkpoint import Checkpoint, Position
from covary.training.config import TrainingConfig, learning_rate, make_optimizer
from covary.training.display import Display, Silent
from covary.training.log import Epoch, MetricsLog

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.wrappers import _FabricOptimizer


class DivergedError(RuntimeError):
    """The loss, or a weight, is no longer a number."""


class StoppedError(KeyboardInterrupt):
    """Someone asked training to stop, and it stopped between two steps.

    An interrupt and no ordinary error: whoever tries many trainings in a row, as a grid search
    does, should not take it for one that failed and begin the next.
    """


def fit(
    objective: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    *,
    fabric: Fabric | None = None,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    validate: Callable[[], Mapping[str, float]] | None = None,
    stop: Callable[[Epoch], bool] | None = None,
    log: MetricsLog | None = None,
    display: Display | None = None,
) -> list[Epoch]:
    """Train, and give the metrics of every epoch.

    Args:
        objective: ``objective(x, y)``, or whatever else a batch has, gives a scalar loss and a
            scalar to look at, whose name is ``objective.statistic``; both averages over the samples
            of the batch.
        batches: what to train on.
        config: how.
        fabric: devices, strategy and precision, launched; one process on the CPU by default. With
            several processes, each gets its part of every batch.
        checkpoint: where to save, after each epoch and every few minutes.
        resume: go on from the checkpoint if there is one.
        validate: called after each epoch, in evaluation mode, by the first process alone; what it
            gives is added to what the epoch ``measured``.
        stop: looks at the metrics of an epoch and says whether to stop (early stopping).
        log: where metrics are written.
        display: what shows progress; nothing by default.

    Raises:
        DivergedError: at the step whose loss is not a finite number. The checkpoint is older,
            and good.
        StoppedError: after SIGINT or SIGTERM and a last checkpoint.
    """
    if fabric is None:
        # Not at the top: it takes seconds to import, and not everyone who imports this trains.
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
    first = fabric.is_global_zero
    loop = _Loop(objective, batches, config, fabric, checkpoint)
    if not first or display is None:
        display = Silent()
    if resume and checkpoint and checkpoint.path.exists():
        loop.position = checkpoint.restore(objective, loop.optimizer)
        if not first:  # random numbers of its own, not those that the first process had
            torch.manual_seed(loop.position.step * fabric.world_size + fabric.global_rank)
    if log and first:
        log.rewind(loop.position.step)
    history: list[Epoch] = []
    display.start(config.epochs, len(batches), loop.position.step)
    try:
        with asked_to_stop() as asked:
            while loop.position.epoch < config.epochs:
                row = loop.epoch(display, asked)
                if validate and first:
                    objective.eval()
                    row = replace(row, measured={**row.measured, **validate()})
                if log and first:
                    log.write(row)  # before the checkpoint: what is written too early is taken back
                problem = loop.save()
                history.append(row)
                display.epoch(row)
                # What the first process sees decides for all: none may go on without the others.
                enough = first and stop is not None and stop(row)
                problem, enough, interrupted = fabric.broadcast((problem, enough, asked.is_set()))
                if problem:
                    raise loop.diverged(problem)
                if enough:
                    break
                if interrupted and loop.position.epoch < config.epochs:
                    raise loop.stopped()
    finally:
        display.close()
        if log:
            log.close()
    objective.eval()
    return history


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """An event that SIGINT (Ctrl-C) or SIGTERM sets within this block.

    So no update of the weights is cut in its middle. The second signal acts as it would have
    without this block: whoever cannot wait need not. Only a main thread may listen to signals.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Loop:
    """The state of training, and what a step, an epoch and a save do to it."""

    objective: nn.Module
    batches: Batches
    config: TrainingConfig
    fabric: Fabric
    checkpoint: Checkpoint | None

    def __post_init__(self) -> None:
        module = torch.compile(self.objective) if self.config.compile else self.objective
        self.module = self.fabric.setup_module(cast(nn.Module, module), _reapply_compile=False)
        self.optimizer = make_optimizer(self.config, self.objective)
        self.engine = cast("_FabricOptimizer", self.fabric.setup_optimizers(self.optimizer))
        self.position = Position()

    def epoch(self, display: Display, asked: threading.Event) -> Epoch:
        """The rest of the epoch that ``position`` is in."""
        position, name = self.position, str(self.objective.statistic)
        self.module.train()
        began, computing, fresh = time.perf_counter(), 0.0, 0
        for batch in self.batches.epoch(position.epoch, skip=position.batch):
            before = time.perf_counter()
            loss, statistic, stop = self.step(batch, asked)
            computing += time.perf_counter() - before
            samples = len(batch[0])
            fresh += samples
            position.batch += 1
            position.step += 1
            position.samples += samples
            position.loss += loss * samples
            position.statistic += statistic * samples
            display.step(loss, name, statistic, samples)
            if position.batch == len(self.batches):
                break  # whoever wants to stop now gets a complete epoch
            if stop or (self.checkpoint and self.checkpoint.due()):
                self.save()
            if stop:
                raise self.stopped()
        seconds = time.perf_counter() - began
        self.position = Position(epoch=position.epoch + 1, step=position.step)
        return Epoch(
            epoch=position.epoch + 1,
            step=position.step,
            loss=position.loss / position.samples,
            lr=self.optimizer.param_groups[0]["lr"],
            samples_per_second=fresh / seconds,
            seconds=seconds,
            seconds_outside_steps=seconds - computing,
            measured={name: position.statistic / position.samples},
        )

    def step(self, batch: tuple[Tensor, ...], asked: threading.Event) -> tuple[float, float, bool]:
        """Forward, backward, update: loss and statistic of the whole batch, and whether to stop."""
        fabric, processes = self.fabric, self.fabric.world_size
        steps = self.config.epochs * len(self.batches)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.position.step, steps)
        share = 1.0
        if 1 < processes <= len(batch[0]):
            samples = slice(fabric.global_rank, None, processes)
            # Gradients are averaged over processes: parts of unequal size need their weight.
            share = len(batch[0][samples]) * processes / len(batch[0])
            batch = tuple(each[samples] for each in batch)
        batch = fabric.to_device(batch)
        loss, statistic = self.module(*batch)
        numbers = torch.stack([loss.detach() * share, statistic * share]).float()
        if processes > 1:
            flag = numbers.new_full((1,), float(asked.is_set()))
            numbers = cast(Tensor, fabric.all_reduce(torch.cat([numbers, flag]), reduce_op="mean"))
        value, shown, *flags = numbers.tolist()
        stop = any(flags) if processes > 1 else asked.is_set()
        if not math.isfinite(value):
            x = batch[0]
            inputs = f"(inputs of this batch from {x.min().item():.4g} to {x.max().item():.4g})"
            raise self.diverged(f"The loss is {value} {inputs}")
        fabric.backward(loss * share)
        if self.config.clip:
            fabric.clip_gradients(self.module, self.engine, max_norm=self.config.clip)
        self.engine.step()
        self.engine.zero_grad()
        return value, shown, stop

    def save(self) -> str | None:
        """Write the checkpoint; if a weight is not a number keep the one before, and say so."""
        if self.checkpoint and self.fabric.is_global_zero:
            try:
                self.checkpoint.save(self.objective, self.optimizer, self.position)
            except FloatingPointError as error:
                return str(error)
        return None

    def diverged(self, problem: str) -> DivergedError:
        """The error of this problem, with where it came up and what to try."""
        at = self.position
        return DivergedError(
            f"{problem}, at step {at.step + 1} (epoch {at.epoch + 1}, batch {at.batch + 1} of "
            f"{len(self.batches)}). The last checkpoint was kept. Try a smaller learning rate (it "
            f"is {self.config.lr:g}), a limit on gradients (clip), or look for extreme values."
        )

    def stopped(self) -> StoppedError:
        """The interrupt, with how far training had come."""
        at = self.position
        return StoppedError(f"Stopped on request after step {at.step}, {at.epoch} epochs complete.")
