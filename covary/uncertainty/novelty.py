"""Novelty: how far inputs are from those that a model was trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Of the eigenvalues of the correlation matrix, the least that counts: rows that break a rule that
# all others keep are far away, but not infinitely far.
_LEAST_EIGENVALUE = 0.01
# New rows of the same kind are farther out than those that it was fitted to. So many parts of these
# are held out to see how far, and this share of them counts as inside.
_PARTS, _INSIDE = 5, 0.99


class Novelty(nn.Module):
    """Standardised inputs (n, d) -> (n,) how far they are outside of those it was fitted to.

    The unit is the standard deviation of a column; 0 is inside. Inputs are outside as far as they
    are beyond the least or largest value of a column (the norm over columns), or as far as their
    Mahalanobis distance, which sees combinations of columns that never came together, is beyond the
    largest of all rows, whichever is more; less what 99% of rows are at most outside of others.
    """

    low: Tensor  # (d,)
    high: Tensor  # (d,)
    whiten: Tensor  # (d, d)
    radius: Tensor  # ()
    slack: Tensor  # () how far rows are outside of other rows

    def __init__(self, inputs: int) -> None:
        super().__init__()
        shapes = {"low": (inputs,), "high": (inputs,), "whiten": (inputs, inputs)}
        for name, shape in {**shapes, "radius": (), "slack": ()}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    @classmethod
    def fit(cls, inputs: Tensor) -> Novelty:
        """Of standardised inputs (n, d)."""
        values = inputs.double()
        found = cls._around(values)
        if len(values) > 1:
            order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
            part = order.argsort() % min(_PARTS, len(values))
            apart = [
                cls._around(values[part != k])(values[part == k])
                for k in range(int(part.max()) + 1)
            ]
            found.slack = torch.cat(apart).quantile(_INSIDE)
        return found

    @classmethod
    def _around(cls, values: Tensor) -> Novelty:
        """Without slack."""
        found = cls(values.shape[1])
        found.low, found.high = values.min(0).values, values.max(0).values
        eigenvalues, vectors = torch.linalg.eigh(values.mT @ values / len(values))
        found.whiten = vectors / eigenvalues.clamp(min=_LEAST_EIGENVALUE).sqrt()
        found.radius = (values @ found.whiten).norm(dim=1).max()
        return found

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """(n,) in double precision."""
        values = inputs.double()
        beyond = (values - self.high).clamp(min=0) + (self.low - values).clamp(min=0)
        apart = (values @ self.whiten).norm(dim=1) - self.radius
        return (torch.maximum(beyond.norm(dim=1), apart) - self.slack).clamp(min=0)
