"""The networks that a comparison needs: trained as the run beside them, or found trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary import data
from covary.baselines import (
    CrossEntropy,
    GaussianLikelihood,
    SquaredError,
    has_slope,
    plain,
    with_variance_head,
)
from covary.data import Dataset
from covary.models import with_covariance
from covary.runs.config import RunConfig
from covary.runs.directory import Run, RunError
from covary.runs.samples import validation_rows
from covary.training import Checkpoint, Display, MetricsLog, TensorBatches, fit
from covary.training.checkpoint import read, write_atomically
from covary.training.log import without_nan

KINDS = ("plain", "dropout", "gaussian", "smsc")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What a comparison fixes for the methods beside the moment neural network.

    Attributes:
        members: networks of a deep ensemble.
        dropout: probability of Monte Carlo dropout, in training and in use.
        samples: dropout masks per prediction.
        epsilon: how far an attack moves a pixel, as a fraction of its range.
        attacked: test images that are attacked, the first so many.
    """

    members: int = 5
    dropout: float = 0.1
    samples: int = 30
    epsilon: float = 0.1
    attacked: int = 1000

    def __post_init__(self) -> None:
        for name in ("members", "samples", "attacked"):
            if getattr(self, name) < 1:
                raise ValueError(f"A comparison needs {name} >= 1, got {getattr(self, name)}.")
        if not 0 < self.dropout < 1:
            raise ValueError(
                f"Monte Carlo dropout needs a probability between 0 and 1, got {self.dropout}."
            )
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon is a fraction in (0, 1] of a range, got {self.epsilon}.")


def member_seed(seed: int, member: int) -> int:
    """The seed of an ensemble's member: the first has the run's own, initial weights and all."""
    if member == 0:
        return seed
    return int(np.random.SeedSequence((seed, member)).generate_state(1)[0])


class Workshop:
    """Trains what methods ask for, once, in folders beside that of a run.

    All have the run's widths, rows, batches, budget and optimizer. Networks of one seed and kind
    begin with the same weights as the run.

    Args:
        run: the trained moment neural network.
        dataset: its data.
        settings: of the comparison.
        say: told what is being trained.
        display: makes what shows a training's progress.
    """

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        settings: CompareConfig,
        *,
        say: Callable[[str], None],
        display: Callable[[], Display],
    ) -> None:
        self.run, self.dataset, self.settings = run, dataset, settings
        self.config = run.config()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._say, self._display = say, display
        self.notes: list[str] = []
        held_out, rows = validation_rows(len(dataset.x), self.config)
        self.x, self.y = dataset.x[rows], dataset.y[rows]
        self.x_held_out, self.y_held_out = dataset.x[held_out], dataset.y[held_out]
        if not has_slope(self.config.model.build()):
            self.note(
                f"A conventional {self.config.model.activation} network has no gradient: the "
                "conventional networks have ReLU."
            )

    def note(self, sentence: str) -> None:
        """Remember what whoever reports numbers should know."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    @property
    def classify(self) -> bool:
        """Whether the task is classification."""
        return self.config.model.task == "classification"

    def moment_network(self) -> nn.Sequential:
        """The run's own, as it was trained."""
        return self.run.network().to(self.device)

    def network(self, kind: str, member: int = 0) -> nn.Sequential:
        """A trained network of this kind, in evaluation mode."""
        folder = Run(self.folder(kind, member))
        net = self.build(kind, member)
        if folder.model_path.exists():
            self._check(folder.path, kind, member)
            net.load_state_dict(read(folder.model_path)[0])
            return net.to(self.device).eval()
        self._begin(folder, kind, member)
        self._train(net, folder, kind, member)
        folder.save_network(net)
        folder.checkpoint_path.unlink(missing_ok=True)
        return net.eval()

    def folder(self, kind: str, member: int) -> Path:
        """Where a network is kept."""
        return self.run.path.parent / f"{kind}-{member}"

    def build(self, kind: str, member: int = 0) -> nn.Sequential:
        """A network of this kind before training."""
        torch.manual_seed(member_seed(self.config.training.seed, member))
        fresh = self.config.model.build()
        units = {
            name: value
            for name, value in self.run.network().state_dict().items()
            if name.startswith(("standardize.", "rescale."))
        }
        fresh.load_state_dict(units, strict=False)
        if kind == "smsc":
            return with_covariance(fresh, "full")
        dropout = self.settings.dropout if kind == "dropout" else self.config.model.dropout
        net = plain(fresh, dropout=dropout, activation=None if has_slope(fresh) else "relu")
        return with_variance_head(net) if kind == "gaussian" else net

    def objective(self, kind: str, net: nn.Sequential) -> nn.Module:
        """What a network of this kind minimises."""
        if kind in ("gaussian", "smsc"):
            return GaussianLikelihood(net)
        return CrossEntropy(net) if self.classify else SquaredError(net)

    def _train(self, net: nn.Sequential, folder: Run, kind: str, member: int) -> None:
        from lightning_fabric import Fabric

        config = self.config
        training = replace(config.training, seed=member_seed(config.training.seed, member))
        transform = None
        if config.data.augment:
            transform = _augmented
        self._say(f"seed {config.training.seed}: training {folder.path.name}")
        torch.manual_seed(training.seed)
        fit(
            self.objective(kind, net),
            TensorBatches(
                self.x, self.y, training.batch_size, seed=training.seed, transform=transform
            ),
            training,
            fabric=Fabric(
                accelerator=self.device,
                devices=1,
                precision=config.precision,  # type: ignore[arg-type]
            ),
            checkpoint=Checkpoint(folder.checkpoint_path),
            resume=True,
            log=MetricsLog(folder.metrics_path, tensorboard=False),
            display=self._display(),
        )

    def _begin(self, folder: Run, kind: str, member: int) -> None:
        if (folder.path / "training.json").exists():
            self._check(folder.path, kind, member)
        else:
            folder.write_json("training.json", self._decides(kind, member))

    def _check(self, path: Path, kind: str, member: int) -> None:
        before = json.loads((path / "training.json").read_text(encoding="utf-8"))
        if before != json.loads(json.dumps(self._decides(kind, member))):
            raise RunError(
                f"{path} was trained with another configuration. Replace all (--overwrite), or "
                "choose another folder (--out)."
            )

    def _decides(self, kind: str, member: int) -> dict[str, Any]:
        """All that a network's weights depend on."""
        found = {"kind": kind, "member": member, "config": described(self.config)}
        if kind == "dropout":
            found["dropout"] = self.settings.dropout
        return found


def described(config: RunConfig) -> dict[str, Any]:
    """A configuration as JSON has it."""
    plain_values: dict[str, Any] = without_nan(asdict(config))
    return plain_values


def _augmented(x: Tensor) -> Tensor:
    return data.horizontal_flip(data.random_crop(x))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    from safetensors.torch import save

    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(path, save(whole))
