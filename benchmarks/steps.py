"""One training step of the paper's MNIST network, in every way it can be computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary

WIDTHS = [784, 392, 196, 96, 48, 24, 10]
NOISE = 0.2
BATCH = 128


def batch_of(size: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, width, generator=generator) * 2 - 1
    return x, torch.randint(0, 10, (size,), generator=generator)


def plain(widths: Sequence[int]) -> nn.Sequential:
    """The conventional network."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Literal(nn.Module):
    """The paper's equations as they stand: a (B, m, m) matrix per layer, chi and rho and all.

    Gradients skip the covariance (SMUC), as in the paper. Nothing else is clever.
    """

    def __init__(self, widths: Sequence[int], noise: float, activation: str = "relu") -> None:
        super().__init__()
        self.activation = activation
        pairs = pairwise(widths)
        self.linears = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.noise = noise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x
        cov = self.noise**2 * torch.eye(x.shape[1], dtype=x.dtype).expand(len(x), -1, -1)
        for layer, linear in enumerate(self.linears):
            assert isinstance(linear, nn.Linear)
            weight = linear.weight
            mean = linear(mean)
            with torch.no_grad():
                cov = weight @ cov @ weight.mT
            if layer == len(self.linears) - 1:
                break
            with torch.no_grad():
                cov = cov + self.noise**2 * torch.eye(cov.shape[-1], dtype=x.dtype)
            mean, cov = self.activate(mean, cov)
        return mean, cov

    def activate(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """The moment activations, eqs. (mean_map) to (relu_chi) of the paper."""
        var = cov.diagonal(dim1=1, dim2=2)
        s = var.sqrt()
        cdf = 0.5 * (1 + torch.erf(mean / s / math.sqrt(2)))
        density = torch.exp(-(mean**2) / (2 * var)) / math.sqrt(2 * math.pi)
        if self.activation == "relu":
            out = s * density + mean * cdf
            variance = (var + mean**2) * cdf + mean * s * density - out**2
            chi = s * cdf
        else:  # Heaviside
            out, variance, chi = cdf, cdf - cdf**2, density
        with torch.no_grad():
            rho = cov / (s[:, :, None] * s[:, None, :])
            after = chi[:, :, None] * chi[:, None, :] * rho
            after.diagonal(dim1=1, dim2=2).copy_(variance)
        return out, after


def mean_of(out: Tensor | covary.Moments | tuple[Tensor, Tensor]) -> Tensor:
    if isinstance(out, Tensor):
        return out
    return out[0] if isinstance(out, tuple) else out.mean


def build(kind: str, widths: Sequence[int]) -> nn.Module:
    """The plain network, the literal equations, or covary with this covariance; same weights."""
    torch.manual_seed(0)
    if kind == "plain":
        return plain(widths)
    if kind == "literal":
        return Literal(widths, NOISE)
    return covary.mlp(widths, noise=NOISE, covariance=kind)


def training_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, loss of the mean, backward, Adam."""
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(mean_of(net(x)), y).backward()
        optimizer.step()

    return step
