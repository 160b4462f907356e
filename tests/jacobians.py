"""Inputs that tests of rules share."""

from __future__ import annotations

import torch

from covary.testing.contract import seeded

IMAGE = torch.randn(3, 4, 6, 6, generator=seeded(), dtype=torch.float64)
LARGE = torch.randn(2, 2, 11, 12, generator=seeded(), dtype=torch.float64)
LINE = torch.randn(3, 4, 7, generator=seeded(), dtype=torch.float64)
BLOCK = torch.randn(2, 2, 4, 4, 4, generator=seeded(), dtype=torch.float64)
STEPS = torch.randn(3, 5, 8, generator=seeded(), dtype=torch.float64)
POSITIVE = STEPS.abs() + 0.5


def weights(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


ROW = torch.tensor([2, 0, 3])
MASK = weights(5, 8) > 0
