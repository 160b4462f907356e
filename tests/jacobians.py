"""Covariances of functions by their Jacobians, to compare rules with."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import covary
from covary.nn.fidelity import TrackingWarning

SIGMA = 1e-4


class Apply(nn.Module):
    """A function as a module, with a parameter so that it has a device."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args):
        return self.function(*args)


def converted(function, noise=SIGMA):
    return covary.convert(Apply(function).eval().double(), noise={"input": noise})


def moments(function, x, noise=SIGMA):
    net = converted(function, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        return net(x)


def jacobian_covariance(function, x, differentiate=torch.func.jacrev):
    """(B, m, m) sigma^2 J J^T, by the derivative of the whole batch: samples must not mix."""
    batch = len(x)
    jacobian = differentiate(lambda x: function(x).reshape(batch, -1))(x)
    jacobian = jacobian.reshape(batch, -1, batch, x[0].numel())
    own = torch.stack([jacobian[i, :, i] for i in range(batch)])
    assert jacobian.square().sum() <= own.square().sum() * (1 + 1e-12)
    return SIGMA**2 * own @ own.mT


def generator():
    return torch.Generator().manual_seed(0)


IMAGE = torch.randn(3, 4, 6, 6, generator=generator(), dtype=torch.float64)
LARGE = torch.randn(2, 2, 11, 12, generator=generator(), dtype=torch.float64)
LINE = torch.randn(3, 4, 7, generator=generator(), dtype=torch.float64)
BLOCK = torch.randn(2, 2, 4, 4, 4, generator=generator(), dtype=torch.float64)
STEPS = torch.randn(3, 5, 8, generator=generator(), dtype=torch.float64)
POSITIVE = STEPS.abs() + 0.5


def weights(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


ROW = torch.tensor([2, 0, 3])
MASK = weights(5, 8) > 0


def relative(value, truth):
    return ((value - truth).norm() / truth.norm()).item()
