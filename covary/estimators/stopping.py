"""Early stopping of several networks that train together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covary.replicas import Replicas


class EarlyStopping:
    """Keeps, for each replica, the state of the epoch with the lowest loss on held-out data.

    Args:
        replicas: of objectives; they and what is trained share their parameters.
        x: held-out inputs (m, d), the same for all replicas.
        y: their labels or targets.
        rows_at_a_time: how many of them to evaluate at once.
        patience: epochs that each replica waits for a lower loss.
    """

    def __init__(
        self, replicas: Replicas, x: Tensor, y: Tensor, *, rows_at_a_time: int, patience: int
    ) -> None:
        self.replicas, self.patience = replicas, patience
        size = replicas.size
        self.parts = [
            (some.expand(size, *some.shape), target.expand(size, *target.shape))
            for some, target in zip(
                torch.split(x, rows_at_a_time), torch.split(y, rows_at_a_time), strict=True
            )
        ]
        self.lowest = torch.full((size,), torch.inf)
        self.waited = torch.zeros(size)
        self.kept: dict[str, Tensor] = {}

    def validate(self) -> dict[str, Any]:
        """Losses now, averaged over replicas for the record; remembers the best states."""
        self.replicas.eval()
        with torch.no_grad():
            losses = [self.replicas(x, y)[0] * x.shape[1] for x, y in self.parts]
        loss = torch.stack(losses).sum(0) / sum(x.shape[1] for x, _ in self.parts)
        better = loss < self.lowest
        for name, value in self.replicas.state_dict().items():
            choice = better.view(-1, *[1] * (value.dim() - 1))
            self.kept[name] = torch.where(choice, value, self.kept.get(name, value))
        self.lowest = torch.where(better, loss, self.lowest)
        self.waited = torch.where(better, 0, self.waited + 1)
        return {"validation_loss": float(loss.mean())}

    def stop(self, _row: dict[str, Any]) -> bool:
        """Whether every replica has waited long enough."""
        return bool((self.waited >= self.patience).all())

    def restore(self) -> None:
        """Back to the best, each to its own."""
        self.replicas.load_state_dict(self.kept)
