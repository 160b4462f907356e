"""A plain convolutional network and scikit-learn's bundled digits, for the scripts beside this."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn


class DigitNet(nn.Module):
    """(B, 1, 8, 8) to (B, 10): convolutions with a residual sum, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Sequential(nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        x = F.relu(x + self.block(x))
        x = F.max_pool2d(x, 2)
        logits: Tensor = self.head(torch.flatten(x, 1))
        return logits


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (898, 1, 8, 8) in [0, 1] and labels, then the same for testing."""
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x / 16, y, test_size=0.5, random_state=0, stratify=y)
    images = [torch.tensor(each, dtype=torch.float32).view(-1, 1, 8, 8) for each in (x, x_test)]
    return images[0], torch.tensor(y), images[1], torch.tensor(y_test)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Adam on the cross-entropy of the output, or of its mean, in batches of 64."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(x)), 64):
            out = model(x[batch])
            loss = F.cross_entropy(out if isinstance(out, Tensor) else out.mean, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def trained(epochs: int) -> tuple[DigitNet, Tensor, Tensor, Tensor, Tensor]:
    """A network trained on the digits, in evaluation mode, and what ``load`` gives."""
    torch.manual_seed(0)
    x, y, x_test, y_test = load()
    model = DigitNet()
    train(model, x, y, epochs)
    return model, x, y, x_test, y_test
