"""Networks trained on scikit-learn's bundled digits, for tests and measurements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import covary

WIDTHS = [64, 64, 32, 10]


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs (1347, 64) in [0, 1] and labels, then the same for testing (450)."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in parts)
    return x.float(), y, x_test.float(), y_test


def trained(activation: str, noise: float, *, epochs: int = 60, seed: int = 0) -> nn.Sequential:
    """An mlp trained with SMUC and one covariance per mini-batch, with one per sample."""
    torch.manual_seed(seed)
    x, y, _, _ = data()
    net = covary.mlp(WIDTHS, activation=activation, noise=noise, covariance="shared")
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]).mean, y[batch]).backward()
            optimizer.step()
    return covary.with_covariance(net, "full")


def accuracy(net: nn.Module) -> float:
    _, _, x_test, y_test = data()
    with torch.no_grad():
        return (net(x_test).mean.argmax(-1) == y_test).float().mean().item()
