"""Which samples a run is trained on and tested on, and out-of-distribution ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from covary import data
from covary.data import DataError, Dataset, Schema
from covary.data.download import file_sha256
from covary.moments import Moments
from covary.runs.config import FOR_TABLES, DataConfig, RunConfig
from covary.training.batches import shuffled


def load_data(
    config: DataConfig, *, data_dir: str | None = None, seed: int = 0
) -> tuple[Dataset, Schema | None]:
    """The data of a run, and how a table's columns became numbers."""
    schema = None
    if config.is_table:
        dataset, schema = _table(config, seed)
    else:
        dataset = data.load(config.name, data_dir=data_dir, split=config.split, seed=seed)
    if not config.limit:
        return dataset, schema
    # The same ones whatever the seed.
    train, test = (shuffled(len(x), 0, 0)[: config.limit] for x in (dataset.x, dataset.x_test))
    few = replace(
        dataset,
        x=dataset.x[train],
        y=dataset.y[train],
        x_test=dataset.x_test[test],
        y_test=dataset.y_test[test],
        x_std=None if dataset.x_std is None else dataset.x_std[train],
        x_test_std=None if dataset.x_test_std is None else dataset.x_test_std[test],
    )
    return few, schema


def _table(config: DataConfig, seed: int) -> tuple[Dataset, Schema]:
    path = Path(config.name)
    if config.sha256 and path.exists() and file_sha256(path) != config.sha256:
        raise DataError(
            f"{path} is not the file that this run was trained on (config.toml has its SHA-256): "
            "its content has changed, and its rows would be divided into training and test rows in "
            "another way. Put the old one back, or train again; new rows can be looked at with "
            "covary evaluate RUN --ood."
        )
    settings = {name: getattr(config, name) for name in FOR_TABLES}
    settings |= {"delimiter": config.delimiter or None, "errors": config.error_columns}
    return data.read_table(path, seed=seed, **settings)


# Held-out samples: fewer say nothing of how large errors are.
LEAST = 10


def validation_rows(n: int, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Which of n training samples to watch training with, and which to train on.

    Of a table that is not too small so many at least that they say how large errors are.
    """
    # A key of two numbers beyond any epoch: the order of no epoch is this one.
    order = shuffled(n, config.training.seed, 2**31)
    count = min(round(config.data.validation * n), n - 1)
    if count and config.data.is_table and n >= 3 * LEAST:
        count = max(count, LEAST)
    return order[:count], order[count:].sort().values


def enough(n: int) -> str:
    """The option by which enough of n training samples are held out, in words."""
    if n < 3 * LEAST:
        return f"more rows ({3 * LEAST} to train on at least)"
    return f"--validation {max(0.1, math.ceil(100 * LEAST / n) / 100):g}"


def ood_sets(
    config: DataConfig,
    schema: Schema | None,
    dataset: Dataset,
    names: Sequence[str],
    *,
    data_dir: str | None,
    seed: int,
) -> tuple[dict[str, Tensor | Moments], list[str]]:
    """Out-of-distribution inputs, by what results call them, and notes on reading them.

    They are test parts of known sets, or tables that have the columns of the run's table.
    """
    inputs: dict[str, Tensor | Moments] = {}
    notes: list[str] = []
    for name in names:
        # Two tables may have one name, in two folders.
        short = [Path(other).name for other in names].count(Path(name).name) == 1
        label = Path(name).name if short else name
        if label in inputs or label == "test":
            raise DataError(f"{label} was named twice, or has the name of another part.")
        if not DataConfig(name=name).is_table:
            found = data.load(name, data_dir=data_dir, seed=seed)
        elif schema is None:
            raise DataError(f"{name} is a table, and {dataset.name} is none: they do not compare.")
        else:
            encoding, delimiter = config.encoding, config.delimiter or None
            found, _ = data.read_table(name, schema=schema, encoding=encoding, delimiter=delimiter)
        theirs, ours = (tuple(some.x_test.shape[1:]) for some in (found, dataset))
        if theirs != ours:
            raise DataError(
                f"{name} has inputs of shape {theirs}, the network takes {ours}. "
                "Out-of-distribution data must have the same shape (mnist, fashion-mnist, "
                "notmnist; or cifar10, cifar100, svhn)."
            )
        notes += [f"{label}: {note}" for note in found.notes]
        inputs[label] = found.test_inputs
    return inputs, notes
