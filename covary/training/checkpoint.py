"""Checkpoints: written whole or not at all, and without pickle."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from covary.files import FileError, read_tensors, write_tensors


@dataclass
class Position:
    """How far a run has come."""

    epoch: int = 0  # epochs that are complete
    batch: int = 0  # batches done of the epoch after those
    step: int = 0  # batches done in all
    samples: int = 0  # of the unfinished epoch, with the sums of their losses
    loss: float = 0.0
    statistic: float = 0.0


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
        tensors = {f"objective/{name}": value for name, value in objective.state_dict().items()}
        broken = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
        if broken:
            raise FloatingPointError(f"{broken[0].removeprefix('objective/')} is not finite")
        if position.epoch in self.keep and position.batch == 0:
            # Before the checkpoint: a process killed in between does this epoch again, and this.
            write_tensors(snapshot_path(self.path, position.epoch), tensors)
        for name, parameter in objective.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
        tensors["random/cpu"] = torch.get_rng_state()
        for index in range(torch.cuda.device_count()):
            tensors[f"random/cuda:{index}"] = torch.cuda.get_rng_state(index)
        write_tensors(self.path, tensors, {"position": json.dumps(asdict(position))})
        self._saved_at = time.monotonic()

    def restore(self, objective: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Put back what ``save`` wrote, in place, and say how far the run had come."""
        tensors, metadata = read_tensors(self.path)
        groups: dict[str, dict[str, Tensor]] = {"objective": {}, "optimizer": {}, "random": {}}
        for name, value in tensors.items():
            group, _, rest = name.partition("/")
            if group not in groups:
                raise FileError(f"{self.path} is not a checkpoint: it holds {name}.")
            groups[group][rest] = value
        load_weights(objective, groups["objective"], self.path)
        parameters = dict(objective.named_parameters())
        try:
            for name, value in groups["optimizer"].items():
                parameter, _, key = name.rpartition("/")
                owner = parameters[parameter]
                if value.numel() not in (1, owner.numel()):
                    raise ValueError(f"optimizer/{name} has shape {tuple(value.shape)}")
                optimizer.state[owner][key] = value.to(owner.device)
            if len({frozenset(state) for state in optimizer.state.values()}) > 1:
                raise ValueError("optimizer state, which some parameters lack,")
            torch.set_rng_state(groups["random"].pop("cpu"))
            for device, state in groups["random"].items():
                torch.cuda.set_rng_state(state, device)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise FileError(
                f"{self.path} is not a checkpoint of this training: its {error} does not fit."
            ) from error
        return _position_in(metadata, self.path)


def _position_in(metadata: Mapping[str, str], path: Path) -> Position:
    """How far the run had come whose checkpoint has this metadata."""
    try:
        position = Position(**json.loads(metadata["position"]))
        if not all(isinstance(value, int | float) for value in asdict(position).values()):
            raise TypeError("numbers are expected")
    except (KeyError, ValueError, TypeError) as error:
        raise FileError(f"{path} does not say how far training had come ({error!r}).") from error
    return position


def load_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], path: Path, what: str = "the network"
) -> None:
    """Load the tensors of a file into a module; an error names the file and what does not fit."""
    broken = [
        name
        for name, value in tensors.items()
        # How well covariances are tracked may be undefined.
        if not (name.endswith("fidelity") or torch.isfinite(value).all())
    ]
    if broken:
        raise FileError(f"{path} is damaged: {broken[0]} has numbers that are not finite.")
    try:
        module.load_state_dict(dict(tensors))
    except (RuntimeError, ValueError, TypeError) as error:
        problem = " ".join(str(error).partition("\n")[2].split()) or str(error)
        raise FileError(f"{path} does not fit {what}: {problem}") from error


def snapshot_path(checkpoint: Path, epoch: int) -> Path:
    """Where the weights after an epoch are put aside: a folder ``epochs`` beside the checkpoint."""
    return checkpoint.parent / "epochs" / f"{epoch:04d}.safetensors"
