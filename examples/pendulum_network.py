"""A pendulum with random kicks, and a network that learned its steps, for examples/pendulum.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEP, KICK = 0.1, 0.02  # of time; standard deviation of what each step adds to the state
SIZE = 3.0  # angles and velocities of training states are between -SIZE and SIZE


class Step(nn.Module):
    """One step: angle and velocity (B, 2) and how the network says that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def forward(self, state: Tensor) -> Tensor:
        return state + STEP * self.change(state)


def nature(state: Tensor) -> Tensor:
    """What a pendulum with friction and random kicks does in one step, (..., 2) -> (..., 2)."""
    angle, velocity = state.unbind(-1)
    for _ in range(10):
        velocity = velocity + STEP / 10 * (-torch.sin(angle) - 0.1 * velocity)
        angle = angle + STEP / 10 * velocity
    moved = torch.stack([angle, velocity], -1)
    return moved + KICK * torch.randn(moved.shape)


def learned(steps: int) -> tuple[Step, Tensor, float]:
    """A trained network, its states, and the standard deviation of its errors on other states."""
    model, x = Step(), SIZE * (2 * torch.rand(5000, 2) - 1)
    y = nature(x)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        some = torch.randint(0, 4000, (256,))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[some]), y[some]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return model.eval(), x[:4000], float((model(x[4000:]) - y[4000:]).std())
