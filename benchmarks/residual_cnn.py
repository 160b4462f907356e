"""A small residual network in plain torch, trained on Fashion-MNIST: a model to convert and time.

    python -m benchmarks.residual_cnn    # about five minutes on one core

The weights go to out/residual_cnn/fashion-mnist.safetensors and are not trained again while they
are there. 55,000 images train, 5,000 validate; the weights kept are those of the epoch with the
best validation accuracy. The test images are looked at once, at the end.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import results
from covary import data
from covary.files import read_tensors, write_tensors
from covary.training.batches import shuffled

PATH = results.ROOT / "out" / "residual_cnn" / "fashion-mnist.safetensors"
EPOCHS = 30
BATCH = 128
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 1e-2
VALIDATION = 5000
# Of the pixels of Fashion-MNIST's training images, divided by 255.
PIXEL_MEAN, PIXEL_STDDEV = 0.286, 0.353


class Block(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)): (B, c, H, W) to (B, c', H', W').

    The shortcut is the identity, or a 1x1 convolution with batch norm where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResidualCNN(nn.Module):
    """(B, 1, 28, 28) to (B, 10): a stem of stride 2, three residual blocks, global average."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 16, stride=2), Block(16, 16), Block(16, 32, stride=2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = self.blocks(x)
        return self.head(x.mean((2, 3)))


def build(seed: int = 0) -> ResidualCNN:
    """The network with weights at their random start, in evaluation mode."""
    torch.manual_seed(seed)
    return ResidualCNN().eval()


def inputs(images: Tensor) -> Tensor:
    """Bytes (n, 1, 28, 28) as the network takes them: average 0, standard deviation 1."""
    return (images.float() / 255 - PIXEL_MEAN) / PIXEL_STDDEV


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of images (n, 1, 28, 28) whose largest output is their label's."""
    right = [
        (net(inputs(x)).argmax(1) == y).sum()
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    ]
    return (sum(right) / len(labels)).item()


def train(x: Tensor, y: Tensor, *, epochs: int = EPOCHS, seed: int = 0) -> dict[str, Tensor]:
    """The state of the epoch with the best validation accuracy; AdamW, one cycle, shifts, flips."""
    net = build(seed)
    order = shuffled(len(x), seed)
    held_out, order = order[:VALIDATION], order[VALIDATION:]
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = epochs * (len(order) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    best, kept = 0.0, net.state_dict()
    for epoch in range(epochs):
        began = time.perf_counter()
        net.train()
        mixed = order[shuffled(len(order), seed, epoch)]
        for batch in mixed[: len(mixed) // BATCH * BATCH].split(BATCH):
            images = data.horizontal_flip(data.random_crop(x[batch], padding=2))
            optimizer.zero_grad()
            F.cross_entropy(net(inputs(images)), y[batch]).backward()
            optimizer.step()
            schedule.step()
        net.eval()
        reached = accuracy(net, x[held_out], y[held_out])
        seconds = time.perf_counter() - began
        print(f"epoch {epoch + 1}: validation accuracy {reached:.4f}, {seconds:.1f} s", flush=True)
        if reached > best:
            best, kept = reached, {k: v.detach().clone() for k, v in net.state_dict().items()}
    return kept


def trained() -> ResidualCNN:
    """The network with the stored weights, trained now if they are not there yet."""
    net = build()
    if not PATH.exists():
        dataset = data.load("fashion-mnist")
        kept = train(dataset.x, dataset.y)
        net.load_state_dict(kept)
        reached = accuracy(net, dataset.x_test, dataset.y_test)
        write_tensors(PATH, kept, {"test accuracy": f"{reached:.4f}"})
    tensors, _ = read_tensors(PATH)
    net.load_state_dict(tensors)
    return net


def main() -> None:
    trained()
    _, metadata = read_tensors(PATH)
    print(f"test accuracy {metadata['test accuracy']}, {PATH.relative_to(results.ROOT)}")


if __name__ == "__main__":
    main()
