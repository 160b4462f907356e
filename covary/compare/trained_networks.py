"""The networks that a comparison needs: trained as the run beside them, or found trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from covary import data
from covary.compare.comparison import CompareConfig
from covary.compare.networks import with_variance_head
from covary.compare.table_models import TABLE_MODELS
from covary.covariance import class_name
from covary.data import Dataset, Schema
from covary.files import read_json, read_tensors, write_json
from covary.models import has_slope, plain, with_covariance
from covary.runs.config import Choices, RunConfig
from covary.runs.directory import Run, RunError
from covary.runs.records import to_json
from covary.runs.results import TrackedFidelity
from covary.runs.samples import validation_rows
from covary.runs.tracking import known_or_measured
from covary.runs.training import Existing, objective_of, resolve, train
from covary.training import (
    Checkpoint,
    Display,
    GaussianLikelihood,
    MetricsLog,
    TensorBatches,
    fit,
)
from covary.training.batches import count
from covary.training.checkpoint import load_weights
from covary.training.log import read

KINDS = ("plain", "dropout", "gaussian", "smsc")


def member_seed(seed: int, member: int) -> int:
    """The seed of an ensemble's member: the first has the run's own, initial weights and all."""
    if member == 0:
        return seed
    return int(np.random.SeedSequence((seed, member)).generate_state(1)[0])


def train_run(
    config: RunConfig,
    dataset: Dataset,
    run: Run,
    say: Callable[[str], None],
    display: Display,
    schema: Schema | None = None,
) -> None:
    """Train a moment neural network, or what is left of its training."""
    if run.model_path.exists():
        if run.config == config:
            return  # nothing of it is touched
    else:
        say(f"seed {config.training.seed}: training {run.path.name}")
    existing: Existing = "resume" if run.exists() else "refuse"
    train(config, dataset, run, schema=schema, existing=existing, display=display)


class TrainedNetworks:
    """Trains what methods ask for, once, in folders beside that of a run.

    All have the widths, rows, batches, budget and optimizer of the run, a trained moment neural
    network, whose own covariance is stored as ``covariance`` says; but one that is trained by the
    likelihood (``"smsc"``) has noise and training of ``covary train --loss likelihood``, where
    nothing else was ``chosen``. Networks of one seed and kind begin with the same weights as the
    run.
    """

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        settings: CompareConfig,
        *,
        covariance: str,
        chosen: Choices | None = None,
        say: Callable[[str], None],
        display: Callable[[], Display],
    ) -> None:
        self.run, self.dataset, self.settings = run, dataset, settings
        self.config, self.covariance = run.config, covariance
        self.fidelity: TrackedFidelity | None = None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._say, self._display, self._chosen = say, display, chosen or Choices()
        self._models: dict[str, tuple[list[Any], float]] = {}
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
        """The run's own, with a covariance for each sample.

        How good tracked ones are is measured first if it never was, kept with the run's weights,
        and told by ``fidelity``.
        """
        net = self.run.network().to(self.device)
        if class_name(self.covariance) != "tracked":
            return with_covariance(net, self.covariance).eval()
        asked = self.config.model.tracked if self.covariance == "tracked" else self.covariance
        known, _ = known_or_measured(self.run, net, progress=False)
        named, row = known.named(asked), known.used(asked)
        self.fidelity = TrackedFidelity(named, row.rank, row.error)
        return with_covariance(net, named).eval()

    def likelihood_network(self) -> nn.Sequential:
        """The moment network whose covariance is trained too, with one for each sample."""
        run = Run(self.folder("smsc", 0))
        train_run(self.config_of("smsc"), self.dataset, run, self._say, self._display())
        return with_covariance(run.network(), "full").to(self.device).eval()

    def config_of(self, kind: str) -> RunConfig:
        """How a kind of network is trained."""
        if kind != "smsc":
            return self.config
        model = self.config.model
        own = Choices(
            loss="likelihood",
            hidden=model.hidden,
            activation=model.activation,
            seed=self.config.training.seed,
        )
        noise = self._chosen.noise if any(self._chosen.noise or ()) else None
        chosen = replace(self._chosen, covariance=None, noise=noise) | own
        return resolve(self.config.data, self.dataset, chosen)

    def steps(self, kind: str) -> int:
        """How many steps the training of a kind of network has."""
        how = self.config_of(kind).training
        return how.epochs * count(len(self.x), how.batch_size)

    def network(self, kind: str, member: int = 0) -> nn.Sequential:
        """A trained network of this kind, in evaluation mode."""
        folder = Run(self.folder(kind, member))
        net = self.build(kind, member)
        self._claim(folder, kind, member)
        if folder.model_path.exists():
            load_weights(net, read_tensors(folder.model_path)[0], folder.model_path)
            return net.to(self.device).eval()
        self._train(net, folder, kind, member)
        folder.save_network(net)
        folder.checkpoint_path.unlink(missing_ok=True)
        return net.eval()

    def ensemble(self, kind: str) -> list[nn.Sequential]:
        """Trained networks of this kind and of several seeds."""
        return [self.network(kind, member) for member in range(self.settings.members)]

    def seconds(self, kind: str, members: int = 1) -> float:
        """How long so many networks of this kind, trained before, took to train."""
        runs = [self.run] if kind == "mnn" else [Run(self.folder(kind, m)) for m in range(members)]
        return sum(epoch.seconds for run in runs for epoch in read(run.metrics_path))

    def table_models(self, name: str) -> tuple[list[Any], float]:
        """Fitted models of a table, one for each target or one for classes; and in how long.

        They see all training rows, also those that are held out from networks: what they hold out
        is theirs to choose. Within a process they are fitted once.
        """
        if name not in self._models:
            self._say(f"seed {self.config.training.seed}: fitting {name}")
            fit_model = TABLE_MODELS[self.config.model.task][name].fit
            x, y = self.dataset.x.double().numpy(), self.dataset.y.numpy()
            began = time.perf_counter()
            columns = [y] if self.classify else list(y.astype(np.float64).T)
            models = [fit_model(x, column, self.config.training.seed) for column in columns]
            self._models[name] = models, time.perf_counter() - began
        return self._models[name]

    def folder(self, kind: str, member: int) -> Path:
        """Where a network is kept."""
        return self.run.path.parent / f"{kind}-{member}"

    def build(self, kind: str, member: int = 0) -> nn.Sequential:
        """A network of this kind before training."""
        if kind in ("mnn", "smsc"):
            return self.config_of(kind).model.build()
        torch.manual_seed(member_seed(self.config.training.seed, member))
        fresh = self.config.model.build()
        scales = {
            name: value
            for name, value in self.run.network().state_dict().items()
            if name.startswith(("standardize.", "rescale."))
        }
        fresh.load_state_dict(scales, strict=False)
        dropout = self.settings.dropout if kind == "dropout" else self.config.model.dropout
        net = plain(fresh, dropout=dropout, activation=None if has_slope(fresh) else "relu")
        assert isinstance(net, nn.Sequential)  # as the builder made it
        return with_variance_head(net) if kind == "gaussian" else net

    def objective(self, kind: str, net: nn.Module) -> nn.Module:
        """What a network of this kind minimises."""
        return (
            GaussianLikelihood(net)
            if kind == "gaussian"
            else objective_of(net, self.config_of(kind))
        )

    def _train(self, net: nn.Sequential, folder: Run, kind: str, member: int) -> None:
        from lightning_fabric import Fabric

        config = self.config
        seed = member_seed(config.training.seed, member)
        training = replace(config.training, seed=seed)
        transform = data.augmented if config.data.augment else None
        precision: Any = config.precision
        self._say(f"seed {config.training.seed}: training {folder.path.name}")
        torch.manual_seed(seed)
        fit(
            self.objective(kind, net),
            TensorBatches(self.x, self.y, training.batch_size, seed=seed, transform=transform),
            training,
            fabric=Fabric(accelerator=self.device, devices=1, precision=precision),
            checkpoint=Checkpoint(folder.checkpoint_path),
            resume=True,
            log=MetricsLog(folder.metrics_path, tensorboard=False),
            display=self._display(),
        )

    def _claim(self, folder: Run, kind: str, member: int) -> None:
        """Keep all that a network's weights depend on; refuse a folder where that is different."""
        decides = {"kind": kind, "member": member, "config": to_json(self.config)}
        if kind == "dropout":
            decides["dropout"] = self.settings.dropout
        path = folder.path / "training.json"
        if not (path.exists() or folder.model_path.exists()):
            write_json(path, decides)
        elif read_json(path) != decides:
            raise RunError(
                f"{path} says that the network was trained with another configuration. Replace all "
                "(--overwrite), or choose another folder (--out)."
            )
