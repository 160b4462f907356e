"""Variances at the calls of a model, measured by a few draws of its noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Spread:
    """Variances and covariances of values at one call, over draws, averaged over samples.

    Values are taken relative to their first draw, so that nothing cancels where means are large.

    Args:
        axes: the dimensions of the batch, in the broadcast shape of the values.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        self._axes = axes
        self._count = 0
        self._first: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._products: dict[str, Tensor] = {}

    def add(self, values: Sequence[Tensor]) -> None:
        """Take in a draw: what goes into an activation, or both factors of a product."""
        self._count += 1
        if not self._first:
            # Copies: what is drawn goes on in the same memory where functions are in-place.
            self._first = [value.clone() for value in values]
            self._sums = [torch.zeros_like(value) for value in values]
            return
        apart = [value - first for value, first in zip(values, self._first, strict=True)]
        for total, more in zip(self._sums, apart, strict=True):
            total += more
        for suffix, i, j in _pairs(len(values)):
            product = apart[i] * apart[j]
            known = self._products.get(suffix)
            self._products[suffix] = product if known is None else known + product

    def measured(self) -> dict[str, Tensor]:
        """By suffix of the call's name, of size 1 along the batch."""
        found = {}
        for suffix, i, j in _pairs(len(self._sums)):
            of_means = self._sums[i] * self._sums[j] / self._count
            value = (self._products[suffix] - of_means) / (self._count - 1)
            missing = max(part.dim() for part in self._sums) - value.dim()
            axes = [axis - missing for axis in self._axes if axis >= missing]
            found[suffix] = value.mean(axes, keepdim=True) if axes else value
        return found


def _pairs(count: int) -> tuple[tuple[str, int, int], ...]:
    return (("", 0, 0),) if count == 1 else ((":x", 0, 0), (":y", 1, 1), (":xy", 0, 1))


class Average:
    """The average of measurements on several batches, weighted by their numbers of samples."""

    def __init__(self) -> None:
        self._total: dict[str, Tensor] = {}
        self._weight: dict[str, int] = {}

    def add(self, measured: Mapping[str, Tensor], samples: int) -> None:
        """Take in what was measured on so many samples."""
        for name, value in measured.items():
            known = self._total.get(name)
            if known is not None and known.shape != value.shape:
                known, value = alike(known, value)
            self._total[name] = value * samples if known is None else known + value * samples
            self._weight[name] = self._weight.get(name, 0) + samples

    def value(self) -> dict[str, Tensor]:
        """The averages by name."""
        return {name: total / self._weight[name] for name, total in self._total.items()}


def alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both averaged over the dimensions in which their sizes differ (images of several sizes)."""
    for axis in range(one.dim()):
        if one.shape[axis] != other.shape[axis]:
            one, other = one.mean(axis, keepdim=True), other.mean(axis, keepdim=True)
    return one, other
