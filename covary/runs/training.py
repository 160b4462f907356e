"""From data to a trained network in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from covary import activations, data, training
from covary.covariance import class_name
from covary.data import DataError, Dataset, Schema
from covary.data.download import file_sha256
from covary.files import write_atomically, write_json
from covary.models import with_covariance
from covary.moments import Moments
from covary.nn import Rescale, Standardize
from covary.progress import is_first_process
from covary.runs import tracking
from covary.runs.card import write_card
from covary.runs.config import Choices, DataConfig, DeviceConfig, ModelConfig, RunConfig
from covary.runs.directory import Run, RunError, elapsed, environment
from covary.runs.presets import preset
from covary.runs.records import to_json
from covary.runs.results import Environment
from covary.runs.samples import validation_rows
from covary.training.config import make_optimizer

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Existing = Literal["refuse", "resume", "overwrite"]
# Per-sample covariances are dear; so many show how entropy goes through training.
_ENTROPY_SAMPLES = 500


def resolve(config: DataConfig, dataset: Dataset, chosen: Choices) -> RunConfig:
    """The whole configuration: what was chosen, and the preset of the data for the rest."""
    if len(dataset.x) == 0:
        raise DataError(
            f"{dataset.name} has no training part here, only {len(dataset.x_test)} test samples. A "
            f"run can be tested on it as out-of-distribution data: covary evaluate RUN --ood "
            f"{dataset.name}"
        )
    usual = preset(
        dataset,
        published_splits=config.name in data.names() and data.describe(config.name).splits > 1,
        trunk=chosen.trunk or "",
        likelihood=chosen.loss == "likelihood",
        spiking=activations.get(chosen.activation or "relu").neuron is not None,
        optimizer=chosen.optimizer,
        schedule=chosen.schedule,
    )
    values = (usual | chosen).given()
    if usual.noise and chosen.noise is None:
        # A preset's noise is for its own number of layers: the input's, then the hidden ones'.
        inputs, others = usual.noise[0], usual.noise[-1]
        values["noise"] = (inputs, *[others] * len(values["hidden"]))
    if config.is_table:
        config = replace(config, sha256=file_sha256(Path(config.name)))
    if values.get("trunk") and not dataset.is_image:
        raise ValueError(f"A trunk is for images, and {dataset.name} is a table.")
    classify = dataset.task == "classification"
    values |= {
        "task": dataset.task,
        "input_shape": tuple(dataset.x.shape[1:]),
        "outputs": len(dataset.classes) if classify else dataset.y.shape[1],
    }
    of_model, of_training = (
        {field.name: values[field.name] for field in fields(section) if field.name in values}
        for section in (ModelConfig, training.TrainingConfig)
    )
    return RunConfig(
        data=config,
        model=ModelConfig(**of_model),
        training=training.TrainingConfig(**of_training),
        **{name: values[name] for name in ("loss", "precision") if name in values},
    )


@contextmanager
def prepared(
    run: Run, config: RunConfig, existing: Existing, schema: Schema | None
) -> Iterator[None]:
    """Make the folder and keep other processes out, or refuse to touch the run that is there.

    Of a run that is gone on with nothing is changed here: what it has is good until training has
    made something better. One that is replaced is put aside until training is done, and put back if
    training fails before it has made anything to go on from.
    """
    with run.locked_for_training():
        if not run.exists():
            run.put_back()  # a process was killed before it put anything in its place
        if not run.exists():
            if any(run.path.iterdir()):
                raise RunError(
                    f"{run.path} is not empty and holds no run (there is no config.toml in it). "
                    "Choose another folder (--out)."
                )
        elif existing == "refuse":
            raise RunError(
                f"{run.path} holds a run already. Go on with it (--resume), replace it "
                "(--overwrite) or choose another folder (--out)."
            )
        if run.exists() and existing == "resume":
            _check_resumable(run, config)
        else:
            config.model.build()  # what cannot be built replaces nothing
            run.put_aside()
            write_atomically(run.config_path, config.to_toml().encode())
        try:
            if schema is not None and not run.schema_path.exists():
                write_json(run.schema_path, to_json(schema))
            yield
        except BaseException:
            if existing == "overwrite" and not run.checkpoint_path.exists():
                run.put_back()
            raise
        run.drop_aside()


def _check_resumable(run: Run, config: RunConfig) -> None:
    """Whether a run can be gone on with, to the end that the configuration has."""
    before = run.config
    differences = config.differences(before)
    more = config.training.epochs > before.training.epochs
    if more and config.training.schedule == "constant":
        # Nothing that was done depends on how many epochs there will be.
        differences = [text for text in differences if not text.startswith("training.epochs")]
    if differences:
        longer = more and all(text.startswith("training.epochs") for text in differences)
        why = " More epochs go on from a constant schedule alone." if longer else ""
        raise RunError(
            f"{run.config_path} has another configuration ({'; '.join(differences)}).{why} "
            "Resume with the command it was begun with, or choose another folder (--out)."
        )
    run.check_replaceable(run.model_path, run.environment_path)
    if run.metrics_path.exists():
        training.log.read(run.metrics_path)
    checkpoint = training.Checkpoint(run.checkpoint_path)
    if checkpoint.path.exists():
        objective = objective_of(config.model.build(), config)
        checkpoint.restore(objective, make_optimizer(config.training, objective))
    elif run.model_path.exists():
        raise RunError(
            f"{run.path} is trained to its end, but {checkpoint.path.name}, from which it could "
            "go on, is not there. Use it as it is, or train it anew (--overwrite)."
        )


def train(
    config: RunConfig,
    dataset: Dataset,
    run: Run,
    *,
    schema: Schema | None = None,
    existing: Existing = "refuse",
    devices: DeviceConfig | None = None,
    display: training.Display | None = None,
) -> list[training.Epoch]:
    """Train the network of a configuration on its data and keep everything in the run's folder.

    Args:
        config: what to do.
        dataset: the data it names.
        run: the folder.
        schema: how a table's columns became numbers, to be kept with the run.
        existing: what to do with a run that is in the folder: ``"refuse"`` to touch it,
            ``"resume"`` it where it stopped, or ``"overwrite"`` it.
        devices: where it is trained, how often it is saved, and the epochs whose weights are put
            aside, for ``Run.network(epoch=...)``.
        display: what shows progress.
    """
    started, devices = datetime.now(timezone.utc), devices or DeviceConfig()
    fabric = _fabric(config, devices)
    if config.data.augment and not dataset.is_image:
        raise DataError(f"--augment is for images, and {dataset.name} is a table.")
    # What cannot be trained leaves no folder. A checkpoint that is gone on from has its trunk.
    goes_on = existing == "resume" and run.checkpoint_path.exists()
    trunk = None if goes_on else _trunk_of(config.model)
    # Processes that a strategy starts run this too; the folder is for the first of them.
    first = is_first_process()
    with prepared(run, config, existing, schema) if first else nullcontext():
        fabric.launch()
        held_out, rows = validation_rows(len(dataset.x), config)
        x, y = dataset.x[rows], dataset.y[rows]
        std = None if dataset.x_std is None else dataset.x_std[rows]
        net = _new_network(config, trunk, x, y, rank=fabric.global_rank)
        record = Environment(
            data=dataset.source,
            notes=tuple(dataset.notes),
            training_samples=len(x),
            validation_samples=len(held_out),
            test_samples=len(dataset.x_test),
            processes=fabric.world_size,
            device=str(fabric.device),
            seed=config.training.seed,
            **vars(environment(started)),
        )
        if fabric.is_global_zero:
            # Now, and again at the end: a run that is killed has its circumstances on record too.
            record.write(run.environment_path)
        objective, how = objective_of(net, config), config.training
        transform = data.augmented if config.data.augment else None
        batches = training.TensorBatches(
            x, y, how.batch_size, seed=how.seed, transform=transform, std=std
        )
        minutes, kept = devices.checkpoint_minutes, frozenset(devices.keep)
        history = training.fit(
            objective,
            batches,
            how,
            fabric=fabric,
            checkpoint=training.Checkpoint(run.checkpoint_path, minutes, kept),
            resume=existing == "resume",
            validate=_validation(objective, dataset, held_out, config, fabric.device),
            log=training.MetricsLog(run.metrics_path) if fabric.is_global_zero else None,
            display=display,
        )
        if fabric.is_global_zero:
            if history or not run.model_path.exists() or run.config != config:
                shown = display is not None and not isinstance(display, training.Silent)
                _keep(run, config, net, dataset.inputs[rows], progress=shown)
            replace(record, seconds=elapsed(started)).write(run.environment_path)
            write_card(run)
        fabric.barrier()
        return history


def _keep(
    run: Run, config: RunConfig, net: nn.Module, x: Tensor | Moments, *, progress: bool
) -> None:
    """Put a trained network into the run's folder, with the corrections that tracking needs."""
    if class_name(config.model.covariance) == "tracked":
        tracking.measure(net, x, seed=config.training.seed, progress=progress)
    run.save_network(net)
    # Of a run that went on only now: weights and configuration belong together.
    write_atomically(run.config_path, config.to_toml().encode())


def _new_network(
    config: RunConfig, trunk: nn.Module | None, x: Tensor, y: Tensor, *, rank: int
) -> nn.Sequential:
    """The network before training, for these inputs and targets; and the seed of its process."""
    torch.manual_seed(config.training.seed)
    net = config.model.build()
    if trunk is not None:
        net.get_submodule("trunk").load_state_dict(trunk.state_dict())
    if not config.model.is_image:
        net.get_submodule("standardize").load_state_dict(Standardize.of(x).state_dict())
        if config.model.task == "regression":
            net.get_submodule("rescale").load_state_dict(Rescale.of(y).state_dict())
    # Each process draws its own dropout masks and crops.
    torch.manual_seed(config.training.seed + rank)
    return net


def _fabric(config: RunConfig, devices: DeviceConfig) -> Fabric:
    # Not at the top: it takes seconds to import, and `covary --help` can do without.
    from lightning_fabric import Fabric

    accelerator = devices.accelerator
    if accelerator == "auto":  # what else there is lacks float64, which tables are read in
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    count, nodes, strategy = devices.devices, 1, devices.strategy
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        here, all_of_them = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if count not in (1, here):
            raise ValueError(
                f"torchrun started {here} processes on this node, and --devices says {count}: "
                "leave --devices out, and say it to torchrun (--nproc-per-node)."
            )
        count, nodes = here, all_of_them // here
        strategy = "ddp" if strategy == "auto" else strategy
    return Fabric(
        accelerator=accelerator,
        devices=count,
        num_nodes=nodes,
        strategy=strategy,
        precision=config.precision,  # type: ignore[arg-type]
    )


def _trunk_of(config: ModelConfig) -> nn.Module | None:
    """The trained trunk of another run, if one is to be taken; it has to be of the same kind."""
    if not config.trunk_from:
        return None
    other = Run(config.trunk_from)
    found = other.config.model
    if (found.trunk, found.input_shape) != (config.trunk, config.input_shape):
        theirs = f"a {found.trunk} trunk" if found.trunk else "no trunk"
        raise RunError(
            f"{other.path} has {theirs} for inputs of shape {found.input_shape}; this network "
            f"needs a {config.trunk} trunk for {config.input_shape}."
        )
    return other.network().get_submodule("trunk")


def objective_of(net: nn.Module, config: RunConfig) -> nn.Module:
    """What the network of a run minimises."""
    if config.model.task == "classification":
        return training.ClassificationLoss(net)
    if config.loss == "likelihood":
        return training.GaussianLikelihood(net)
    return training.RegressionLoss(net)


def _validation(
    objective: nn.Module, dataset: Dataset, rows: Tensor, config: RunConfig, device: torch.device
) -> Callable[[], dict[str, float]] | None:
    """What is measured on held-out rows after each epoch; of classes, entropies too."""
    if len(rows) == 0:
        return None
    per_sample = with_covariance(objective, "full").get_submodule("net")

    @torch.no_grad()
    @tracking.quietly()  # how well tracked covariances agree is measured when training is over
    def validate() -> dict[str, float]:
        per_sample.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for some in torch.split(rows, config.training.batch_size):
            parts = (dataset.x, dataset.y, dataset.x_std)
            batch = [part[some].to(device) for part in parts if part is not None]
            total += len(some) * torch.stack(objective(*batch)).double().cpu()
        loss, statistic = (total / len(rows)).tolist()
        metrics = {"validation_loss": loss, f"validation_{objective.statistic}": statistic}
        if config.model.task == "classification":
            some = rows[:_ENTROPY_SAMPLES]
            out: Moments = per_sample(dataset.inputs[some].to(device))
            right = out.mean.argmax(-1).cpu() == dataset.y[some]
            entropy = out.entropy().cpu()
            metrics["entropy_right"] = entropy[right].mean().item()
            metrics["entropy_wrong"] = entropy[~right].mean().item()
        return metrics

    return validate
