"""How the columns of a table become numbers, kept so that new rows are encoded alike."""

from __future__ import annotations

from dataclasses import dataclass

_KINDS = ("number", "boolean", "category", "constant")


@dataclass(frozen=True)
class Column:
    """One column of the file.

    Attributes:
        name: as in the file's header.
        kind: ``"number"``, ``"boolean"`` (0 or 1), ``"category"`` (a 0/1 column for each of
            ``categories``) or ``"constant"`` (left out).
        categories: the texts of a category, sorted.
        fill: the training mean, which stands for a missing number where missing values are filled.
        indicator: whether a 0/1 column says where the value was missing.
    """

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    fill: float | None = None
    indicator: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"column {self.name!r} is of kind {self.kind!r}, none of {_KINDS}")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ``x`` that this column becomes."""
        if self.kind == "constant":
            return ()
        if self.kind == "category":
            encoded = tuple(f"{self.name}={category}" for category in self.categories)
        else:
            encoded = (self.name,)
        return (*encoded, f"{self.name} missing") if self.indicator else encoded


@dataclass(frozen=True)
class Schema:
    """The encoding of a whole table.

    Attributes:
        columns: the input columns in the file's order.
        task: ``"classification"`` or ``"regression"``.
        targets: the target columns.
        classes: the labels' names (classification).
        missing: what is done with missing values: ``"error"``, ``"mean"`` or ``"drop"``.
    """

    columns: tuple[Column, ...]
    task: str
    targets: tuple[str, ...]
    classes: tuple[str, ...] = ()
    missing: str = "error"

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ``x``."""
        return tuple(feature for column in self.columns for feature in column.features)
