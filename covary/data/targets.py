"""What a table is to predict: the task, the targets, and the rows kept to test on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from covary.data.dataset import DataError
from covary.data.gather import Gathered, Values
from covary.data.optional import needed

MAX_CLASSES = 1000
MAX_INTEGER_CLASSES = 20  # a target of more different whole numbers is a quantity
Rows = npt.NDArray[np.int64]


def task_of(
    columns: Mapping[str, Gathered],
    targets: Sequence[str],
    task: str,
    rows: Rows,
    notes: list[str],
) -> str:
    """What is asked for, or what the target suggests; a note says why."""
    texts = [name for name in targets if columns[name].kind == "text"]
    if len(targets) > 1 or task == "regression":
        if texts or task == "classification":
            wrong = f"{texts[0]!r} holds texts" if texts else "there are several targets"
            raise DataError(
                f"Regression needs targets that are numbers, classification a single "
                f"one, but {wrong}."
            )
        return "regression"
    if task == "classification":
        return task
    (name,) = targets
    if texts:
        notes.append(f"classification, as the target {name!r} holds texts")
        return "classification"
    values = np.unique(columns[name].values[rows])
    whole = bool((values == np.rint(values)).all())
    if whole and len(values) <= MAX_INTEGER_CLASSES:
        notes.append(
            f"classification, as the target {name!r} holds {len(values)} different whole numbers"
        )
        return "classification"
    notes.append(f"regression, as the target {name!r} holds {len(values)} different numbers")
    return "regression"


def labels(
    column: Gathered, rows: Rows, classes: tuple[str, ...] = ()
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels ``(n,)`` and the names of the classes, sorted unless they are given."""
    found, inverse = np.unique(column.values[rows], return_inverse=True)
    if column.kind == "text":
        texts = list(column.texts)
        names = [texts[int(value)] for value in found]
        order = sorted(names)
    else:
        names = [_name(float(value)) for value in found]
        order = names
    if classes:
        if unseen := [name for name in names if name not in classes]:
            raise DataError(
                f"The target {column.name!r} holds {unseen[0]!r}, which is none of the classes "
                f"{', '.join(classes)}."
            )
    else:
        classes = tuple(order)
        if len(classes) < 2:
            raise DataError(f"The target {column.name!r} has a single class, {classes[0]!r}.")
        if len(classes) > MAX_CLASSES:
            raise DataError(
                f"The target {column.name!r} has {len(classes)} different values, too many for "
                "classes; try --task regression."
            )
    places = {name: i for i, name in enumerate(classes)}
    return np.array([places[name] for name in names])[inverse], classes


def _name(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def kind_of_classes(classes: Sequence[str]) -> str:
    """Whether the classes come from a column of numbers or of texts, as ``Gathered.kind``."""
    try:
        numbers = all(_name(float(name)) == name for name in classes)
    except (ValueError, OverflowError):
        numbers = False
    return "number" if numbers else "text"


def quantities(columns: Mapping[str, Gathered], targets: Sequence[str], rows: Rows) -> Values:
    """Targets ``(n, t)``."""
    return np.stack([columns[name].values[rows] for name in targets], axis=1)


def check_varying(y: Values, targets: Sequence[str]) -> None:
    """Refuse a target ``(n, t)`` that is always the same."""
    for name, values in zip(targets, y.T, strict=True):
        if (values == values[0]).all():
            raise DataError(
                f"The target {name!r} is always {_name(values[0])}; there is nothing to learn."
            )


def split(
    y: npt.NDArray[Any], task: str, test_fraction: float, seed: int, notes: list[str]
) -> tuple[Rows, Rows]:
    """Row numbers for training and for testing."""
    with needed("scikit-learn", "dividing rows at random", "sklearn"):
        from sklearn.model_selection import train_test_split

    rows = np.arange(len(y))
    if task == "classification":
        try:
            train, test = train_test_split(
                rows, test_size=test_fraction, random_state=seed, stratify=y
            )
            return train, test
        except ValueError:
            notes.append(
                "some classes have too few rows to be divided in proportion, so rows were divided "
                "without regard to them"
            )
    train, test = train_test_split(rows, test_size=test_fraction, random_state=seed)
    return train, test
