"""From data to a trained network in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from covary import activations, data
from covary.data import DataError, Dataset, Schema
from covary.data.download import file_sha256
from covary.files import write_atomically
from covary.models import with_covariance
from covary.moments import Moments
from covary.nn import Rescale, Standardize
from covary.runs import tracking
from covary.runs.config import DataConfig, ModelConfig, RunConfig
from covary.runs.directory import Run, RunError, elapsed, environment
from covary.runs.presets import preset
from covary.runs.records import to_json
from covary.runs.results import Environment
from covary.runs.samples import validation_rows
from covary.training import (
    Checkpoint,
    ClassificationLoss,
    Display,
    MetricsLog,
    RegressionLoss,
    Silent,
    TensorBatches,
    TrainingConfig,
    fit,
    log,
)
from covary.training.config import make_optimizer

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Existing = Literal["refuse", "resume", "overwrite"]
# Per-sample covariances are dear; so many show how entropy goes through training.
_ENTROPY_SAMPLES = 500


def resolve(config: DataConfig, dataset: Dataset, chosen: dict[str, Any]) -> RunConfig:
    """The whole configuration: what was chosen, and the preset of the data for the rest.

    ``chosen`` has names of ``ModelConfig`` and ``TrainingConfig``, and ``precision``; None counts
    as not chosen.
    """
    if len(dataset.x) == 0:
        raise DataError(
            f"{dataset.name} has no training part here, only {len(dataset.x_test)} test samples. "
            "It can be looked at as foreign data: covary evaluate RUN --ood " + dataset.name
        )
    chosen = {key: value for key, value in chosen.items() if value is not None}
    usual = preset(
        dataset,
        published_splits=_is_uci(config.name),
        trunk=chosen.get("trunk", ""),
        spiking=activations.get(chosen.get("activation", "relu")).neuron is not None,
    )
    values = usual | chosen
    if "noise" in values and "noise" not in chosen:
        # A preset's noise is for its own number of layers: the input's, then the hidden ones'.
        first, *hidden = values["noise"]
        rest = hidden[-1] if hidden else first
        values["noise"] = (first, *[rest] * len(values["hidden"]))
    if config.is_table:
        config = replace(config, sha256=file_sha256(Path(config.name)))
    training = {key: values[key] for key in TrainingConfig.__dataclass_fields__ if key in values}
    model = {key: values[key] for key in ModelConfig.__dataclass_fields__ if key in values}
    outputs = len(dataset.classes) if dataset.task == "classification" else dataset.y.shape[1]
    model |= {
        "task": dataset.task,
        "input_shape": tuple(dataset.x.shape[1:]),
        "outputs": outputs,
    }
    if model.get("trunk") and not dataset.is_image:
        raise ValueError(f"A trunk is for images, and {dataset.name} is a table.")
    return RunConfig(
        data=config,
        model=ModelConfig(**model),
        training=TrainingConfig(**training),
        precision=values.get("precision", "32-true"),
    )


@contextmanager
def prepared(run: Run, config: RunConfig, existing: Existing) -> Iterator[None]:
    """Make the folder and keep other processes out, or refuse to touch the run that is there.

    Of a run that is gone on with nothing is changed here: what it has is good until training has
    made something better. One that is replaced is put aside until training is done, and put back if
    training fails before it has made anything to go on from.
    """
    with run.held_for_training():
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
        raise RunError(
            f"{run.config_path} has another configuration ({'; '.join(differences)}). "
            "Resume with the command it was begun with, or choose another folder (--out)."
        )
    run.check_replaceable(run.model_path, run.path / "environment.json")
    if run.metrics_path.exists():
        log.read(run.metrics_path)
    checkpoint = Checkpoint(run.checkpoint_path)
    if checkpoint.path.exists():
        objective = _objective(config.model.build(), config)
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
    accelerator: str = "auto",
    devices: int | str = 1,
    strategy: str = "auto",
    existing: Existing = "refuse",
    checkpoint_minutes: float = 5.0,
    keep: Collection[int] = (),
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Train the network of a configuration on its data and keep everything in the run's folder.

    Args:
        config: what to do.
        dataset: the data it names.
        run: the folder.
        schema: how a table's columns became numbers, to be kept with the run.
        accelerator: as in Lightning Fabric, as are devices and strategy; ``"auto"`` is CUDA where
            there is any, else the CPU.
        devices: how many.
        strategy: how they work together, such as ``"ddp"``.
        existing: what to do with a run that is in the folder: ``"refuse"`` to touch it,
            ``"resume"`` it where it stopped, or ``"overwrite"`` it.
        checkpoint_minutes: save after so many minutes within an epoch too.
        keep: epochs whose weights are put aside, for ``Run.network(epoch=...)``.
        display: what shows progress.
    """
    started = datetime.now(timezone.utc)
    fabric = _fabric(config, accelerator, devices, strategy)
    augmentation = _augmentation(config, dataset)
    # What cannot be trained leaves no folder. A checkpoint that is gone on from has its trunk.
    goes_on = existing == "resume" and run.checkpoint_path.exists()
    trunk = None if goes_on else _trunk_of(config.model)
    # Processes that a strategy starts run this too; the folder is for the first of them.
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with prepared(run, config, existing) if first else nullcontext():
        if first and schema is not None and not (run.path / "schema.json").exists():
            run.write_json("schema.json", to_json(schema))
        fabric.launch()
        held_out, rows = validation_rows(len(dataset.x), config)
        x, y = dataset.x[rows], dataset.y[rows]
        net = _new_network(config, trunk, x, y, rank=fabric.global_rank)
        record = Environment(
            data=dataset.source,
            notes=tuple(dataset.notes),
            training_samples=len(x),
            validation_samples=len(held_out),
            test_samples=len(dataset.x_test),
            processes=fabric.world_size,
            device=str(fabric.device),
            **environment(started, seed=config.training.seed),
        )
        if fabric.is_global_zero:
            # Now, and again at the end: a run that is killed has its circumstances on record too.
            record.write(run.path / "environment.json")
        objective = _objective(net, config)
        history = fit(
            objective,
            _batches(x, y, config.training, augmentation),
            config.training,
            fabric=fabric,
            checkpoint=Checkpoint(run.checkpoint_path, checkpoint_minutes, frozenset(keep)),
            resume=existing == "resume",
            validate=_validation(objective, dataset, held_out, config, fabric.device),
            log=MetricsLog(run.metrics_path) if fabric.is_global_zero else None,
            display=display,
        )
        if fabric.is_global_zero:
            if history or not run.model_path.exists() or run.config != config:
                _keep(run, config, net, dataset.x, rows, display)
            record = replace(record, seconds=elapsed(started)["seconds"])
            record.write(run.path / "environment.json")
        fabric.barrier()
        return history


def _batches(
    x: Tensor, y: Tensor, config: TrainingConfig, augmentation: Callable[[Tensor], Tensor] | None
) -> TensorBatches:
    return TensorBatches(x, y, config.batch_size, seed=config.seed, transform=augmentation)


def _new_network(
    config: RunConfig, trunk: nn.Module | None, x: Tensor, y: Tensor, *, rank: int
) -> nn.Sequential:
    """The network before training, for these inputs and targets; and the seed of its process."""
    seed = config.training.seed
    torch.manual_seed(seed)
    net = config.model.build()
    if trunk is not None:
        net.get_submodule("trunk").load_state_dict(trunk.state_dict())
    if not config.model.is_image:
        _standardize(net, x, y)
    # Each process draws its own dropout masks and crops.
    torch.manual_seed(seed + rank)
    return net


def _keep(
    run: Run,
    config: RunConfig,
    net: nn.Sequential,
    x: Tensor,
    rows: Tensor,
    display: Display | None,
) -> None:
    """Put a trained network into the run's folder, with the corrections that tracking needs."""
    if config.model.covariance == "tracked":
        shown = display is not None and not isinstance(display, Silent)
        tracking.measure(net, x, rows, seed=config.training.seed, progress=shown)
    run.save_network(net)
    # Of a run that went on only now: weights and configuration belong together.
    write_atomically(run.config_path, config.to_toml().encode())


def _fabric(config: RunConfig, accelerator: str, devices: int | str, strategy: str) -> Fabric:
    # Not at the top: it takes seconds to import, and `covary --help` can do without.
    from lightning_fabric import Fabric

    if accelerator == "auto":  # what else there is lacks float64, which tables are read in
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    return Fabric(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=config.precision,  # type: ignore[arg-type]
    )


def _is_uci(name: str) -> bool:
    return name in data.names() and data.describe(name).splits > 1


def _standardize(net: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Tell the network the average and spread of its inputs, and of targets if it has them."""
    net.get_submodule("standardize").load_state_dict(Standardize.of(x).state_dict())
    if hasattr(net, "rescale"):
        net.get_submodule("rescale").load_state_dict(Rescale.of(y).state_dict())


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


def _objective(net: nn.Module, config: RunConfig) -> nn.Module:
    if config.model.task == "classification":
        return ClassificationLoss(net)
    return RegressionLoss(net)


def _augmentation(config: RunConfig, dataset: Dataset) -> Callable[[Tensor], Tensor] | None:
    if not config.data.augment:
        return None
    if not dataset.is_image:
        raise DataError(f"--augment is for images, and {dataset.name} is a table.")
    return data.augmented


def _validation(
    objective: nn.Module, dataset: Dataset, rows: Tensor, config: RunConfig, device: torch.device
) -> Callable[[], dict[str, Any]] | None:
    if len(rows) == 0:
        return None
    per_sample = with_covariance(objective, "full").get_submodule("net")

    @torch.no_grad()
    @tracking.quietly()  # how well tracked covariances agree is measured when training is over
    def validate() -> dict[str, Any]:
        per_sample.eval()
        loss = statistic = 0.0
        for some in torch.split(rows, config.training.batch_size):
            x, y = dataset.x[some].to(device), dataset.y[some].to(device)
            numbers = torch.stack(objective(x, y)).tolist()
            loss += numbers[0] * len(some)
            statistic += numbers[1] * len(some)
        metrics = {
            "validation_loss": loss / len(rows),
            f"validation_{objective.statistic}": statistic / len(rows),
        }
        if config.model.task == "classification":
            some = rows[:_ENTROPY_SAMPLES]
            out: Moments = per_sample(dataset.x[some].to(device))
            right = out.mean.argmax(-1).cpu() == dataset.y[some]
            entropy = out.entropy().cpu()
            metrics["entropy_right"] = entropy[right].mean().item()
            metrics["entropy_wrong"] = entropy[~right].mean().item()
        return metrics

    return validate
