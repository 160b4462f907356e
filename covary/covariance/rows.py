"""The covariance of samples that are several rows of features, which share no noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from covary.covariance.base import Covariance, Selection, register_value
from covary.covariance.exact import Diagonal, Full, Shared


@partial(register_value, constants=["rows"])
@dataclass(frozen=True, eq=False, repr=False)
class Rows(Covariance):
    """The covariance of T rows of n features each, as that of B T samples of n features.

    Its units are the T n features of a sample, end to end; those of different rows are not
    correlated. Layers of ``covary.nn`` act on the rows (``each_row``); whatever else mixes or
    scales units takes it ``flattened``.

    Attributes:
        each_row: the covariance of the rows, (1 | B T, n, n).
        rows: the number T of rows.
    """

    each_row: Covariance
    rows: int

    @classmethod
    def start(cls, var: Tensor, n: int) -> Rows:
        raise TypeError("Rows are made by a Lift of inputs (B, T, n), not chosen by name.")

    @property
    def variance(self) -> Tensor:
        return self._end_to_end(self.each_row.variance)

    @property
    def unit_variance(self) -> Tensor:
        return self._end_to_end(self.each_row.unit_variance)

    def dense(self) -> Tensor:
        blocks = self._by_sample(self.each_row.dense())
        # (B, T, n, n) -> (B, n, n, T, T) -> (B, T, n, T, n)
        apart = torch.diag_embed(blocks.movedim(-3, -1)).movedim((-2, -1), (-4, -2))
        units = apart.shape[-1] * self.rows
        return apart.reshape(*apart.shape[:-4], units, units)

    def quadratic(self, rows: Tensor) -> Tensor:
        if rows.dim() > 3:  # of what vmap stacked
            return super().quadratic(rows)
        count, r, units = rows.shape
        apart = rows.reshape(count, r, self.rows, units // self.rows).transpose(1, 2)
        samples = self.each_row.shape[-2] // self.rows
        if count == 1 and samples > 1:
            apart = apart.expand(samples, *apart.shape[1:])
        found = self.each_row.quadratic(apart.flatten(0, 1))  # (B T, r, r)
        return found.reshape(-1, self.rows, r, r).sum(1)

    def select(self, samples: Selection) -> Rows:
        count = self.each_row.shape[-2]
        if count == 1:
            return self
        chosen = torch.arange(count).reshape(-1, self.rows)[samples].flatten()
        return Rows(self.each_row.select(chosen), self.rows)

    def flattened(self) -> Covariance:
        """The same as the covariance of one row of T n features, held in the same way if exact."""
        if isinstance(self.each_row, Diagonal):
            return Diagonal(self.variance)
        full = Full(self.dense())
        return Shared(full) if isinstance(self.each_row, Shared) else full

    def linear(self, weight: Tensor) -> Covariance:
        return self.flattened().linear(weight)

    def add_noise(self, var: float) -> Rows:
        return Rows(self.each_row.add_noise(var), self.rows)

    def gate(self, gain: Tensor, variance: Tensor) -> Covariance:
        return self.flattened().gate(gain, variance)

    def scale(self, factor: Tensor) -> Covariance:
        return self.flattened().scale(factor)

    def _by_sample(self, values: Tensor) -> Tensor:
        """(1 | B T, n, n) of rows -> (1 | B, T, n, n) of samples."""
        if values.shape[-3] == 1:
            return values.unsqueeze(-4).expand(*values.shape[:-3], 1, self.rows, *values.shape[-2:])
        return values.reshape(*values.shape[:-3], -1, self.rows, *values.shape[-2:])

    def _end_to_end(self, values: Tensor) -> Tensor:
        """(1 | B T, n) of rows -> (1 | B, T n) of samples."""
        if values.shape[-2] == 1:
            return values.repeat(*[1] * (values.dim() - 1), self.rows)
        return values.reshape(*values.shape[:-2], -1, self.rows * values.shape[-1])
