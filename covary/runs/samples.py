"""Which samples a run is trained on, tested on, and shown as foreign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from covary import data
from covary.data import DataError, Dataset, Schema
from covary.data.download import file_sha256
from covary.runs.config import DataConfig, RunConfig
from covary.training.batches import shuffled


def load_data(
    config: DataConfig, *, data_dir: str | None = None, seed: int = 0
) -> tuple[Dataset, Schema | None]:
    """The data of a run, and how a table's columns became numbers."""
    dataset, schema = _whole(config, data_dir=data_dir, seed=seed)
    return (_some(dataset, config.limit) if config.limit else dataset), schema


def _some(dataset: Dataset, limit: int) -> Dataset:
    """So many samples of each part, the same ones whatever the seed."""
    train, test = (shuffled(n, 0, 0)[:limit] for n in (len(dataset.x), len(dataset.x_test)))
    return replace(
        dataset,
        x=dataset.x[train],
        y=dataset.y[train],
        x_test=dataset.x_test[test],
        y_test=dataset.y_test[test],
    )


def _whole(config: DataConfig, *, data_dir: str | None, seed: int) -> tuple[Dataset, Schema | None]:
    if not config.is_table:
        return data.load(config.name, data_dir=data_dir, split=config.split, seed=seed), None
    path = Path(config.name)
    if config.sha256 and path.exists() and file_sha256(path) != config.sha256:
        raise DataError(
            f"{path} is not the file that this run was trained on (config.toml has its SHA-256): "
            "its content has changed, and its rows would be divided into training and test rows in "
            "another way. Put the old one back, or train again; new rows can be looked at with "
            "covary evaluate RUN --ood."
        )
    return data.read_table(
        path,
        target=list(config.target),
        task=config.task,
        test_fraction=config.test_fraction,
        seed=seed,
        missing=config.missing,
        categories=config.categories,
        drop=config.drop,
        encoding=config.encoding,
        delimiter=config.delimiter or None,
    )


def validation_rows(n: int, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Which of n training samples to watch training with, and which to train on."""
    # A key of two numbers beyond any epoch: the order of no epoch is this one.
    order = shuffled(n, config.training.seed, 2**31)
    count = round(config.data.validation * n)
    if count == n:
        count = n - 1
    return order[:count], order[count:].sort().values


def foreign_sets(
    config: DataConfig,
    schema: Schema | None,
    dataset: Dataset,
    names: Sequence[str],
    *,
    data_dir: str | None,
    seed: int,
) -> tuple[dict[str, Tensor], list[str]]:
    """Inputs foreign to a run, by what they are called in results, and notes on reading them."""
    inputs: dict[str, Tensor] = {}
    notes: list[str] = []
    for name in names:
        # Two tables may have one name, in two folders.
        short = [Path(other).name for other in names].count(Path(name).name) == 1
        label = Path(name).name if short else name
        if label in inputs or label == "test":
            raise DataError(f"{label} was named twice, or has the name of another part.")
        foreign = _foreign(config, schema, dataset, name, data_dir, seed)
        notes += [f"{label}: {note}" for note in foreign.notes]
        inputs[label] = foreign.x_test
    return inputs, notes


def _foreign(
    config: DataConfig,
    schema: Schema | None,
    dataset: Dataset,
    name: str,
    data_dir: str | None,
    seed: int,
) -> Dataset:
    if DataConfig(name=name).is_table:
        if schema is None:
            raise DataError(f"{name} is a table, and {dataset.name} is none: they do not compare.")
        path, encoding, delimiter = Path(name), config.encoding, config.delimiter or None
        return data.read_table(path, schema=schema, encoding=encoding, delimiter=delimiter)[0]
    foreign = data.load(name, data_dir=data_dir, seed=seed)
    if foreign.x_test.shape[1:] != dataset.x_test.shape[1:]:
        shapes = [tuple(some.x_test.shape[1:]) for some in (foreign, dataset)]
        raise DataError(
            f"{name} has inputs of shape {shapes[0]}, the network takes {shapes[1]}. Foreign data "
            "must have the same shape (mnist, fashion-mnist, notmnist; or cifar10, cifar100, svhn)."
        )
    return foreign
