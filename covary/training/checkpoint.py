"""Checkpoints: written whole or not at all, and without pickle."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Position:
    """How far a run has come."""

    epoch: int = 0  # epochs that are complete
    batch: int = 0  # batches done of the epoch after those
    step: int = 0  # batches done in all
    samples: int = 0  # of the unfinished epoch, with the sums of their losses
    loss: float = 0.0
    statistic: float = 0.0


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: at any moment a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this process alone: another may be writing the same file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    # The new name has to reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass
class Checkpoint:
    """One safetensors file with all that a run needs to go on: weights, optimizer, random state.

    Args:
        path: where it is kept; each save replaces the one before.
        minutes: save after so many minutes within an epoch too.
        keep: epochs after which the weights are also put aside, as ``snapshot_path`` says.
    """

    path: Path
    minutes: float = 5.0
    keep: frozenset[int] = frozenset()
    _saved_at: float = field(default_factory=time.monotonic, repr=False)

    def due(self) -> bool:
        """Whether the last save is long enough ago."""
        return time.monotonic() - self._saved_at >= self.minutes * 60

    def save(
        self, objective: nn.Module, optimizer: torch.optim.Optimizer, position: Position
    ) -> None:
        """Write weights, optimizer and random state; refuse weights that are not finite."""
        from safetensors.torch import save

        tensors = {f"objective/{name}": value for name, value in objective.state_dict().items()}
        broken = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
        if broken:
            raise FloatingPointError(f"{broken[0].removeprefix('objective/')} is not finite")
        if position.epoch in self.keep and position.batch == 0:
            # Before the checkpoint: a process killed in between does this epoch again, and this.
            weights = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            write_atomically(snapshot_path(self.path, position.epoch), save(weights))
        for name, state in _optimizer_states(objective, optimizer).items():
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
        tensors |= {f"random/{device}": state for device, state in _random_states().items()}
        whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        content = save(whole, metadata={"position": json.dumps(asdict(position))})
        write_atomically(self.path, content)
        self._saved_at = time.monotonic()

    def restore(self, objective: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Put back what ``save`` wrote, in place, and say how far the run had come."""
        tensors, metadata = read(self.path)
        groups: dict[str, dict[str, Tensor]] = {"objective": {}, "optimizer": {}, "random": {}}
        for name, value in tensors.items():
            group, _, rest = name.partition("/")
            groups[group][rest] = value
        objective.load_state_dict(groups["objective"])
        parameters = dict(objective.named_parameters())
        for name, value in groups["optimizer"].items():
            parameter, _, key = name.rpartition("/")
            owner = parameters[parameter]
            optimizer.state[owner][key] = value.to(owner.device)
        torch.set_rng_state(groups["random"]["cpu"])
        for device, state in groups["random"].items():
            if device.startswith("cuda"):
                torch.cuda.set_rng_state(state, device)
        return Position(**json.loads(metadata["position"]))


def snapshot_path(checkpoint: Path, epoch: int) -> Path:
    """Where the weights after an epoch are put aside: a folder ``epochs`` beside the checkpoint."""
    return checkpoint.parent / "epochs" / f"{epoch:04d}.safetensors"


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, or an error that names it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error


def _optimizer_states(
    objective: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in objective.named_parameters()
        if parameter in optimizer.state
    }


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for index in range(torch.cuda.device_count()):
        states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
    return states
