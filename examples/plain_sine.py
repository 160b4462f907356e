"""A plain network of one input that learned a sine, with dropout, for sources_of_error.py."""

from __future__ import annotations

import torch
from torch import nn


def trained(steps: int) -> nn.Module:
    """(B, 1) -> (B, 1), of inputs between -3 and 3; in evaluation mode."""
    torch.manual_seed(0)
    tail = (nn.Linear(100, 100), nn.Tanh(), nn.Dropout(0.2), nn.Linear(100, 1))
    model = nn.Sequential(nn.Linear(1, 100), nn.Tanh(), *tail)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        x = 6 * torch.rand(256, 1) - 3
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), torch.sin(2 * x)).backward()
        optimizer.step()
    return model.eval()
