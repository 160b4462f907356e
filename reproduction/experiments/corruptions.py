"""Images made strange, to choose a score without a look at foreign sets.

Each corruption takes and gives bytes (B, C, H, W); what is random comes from a generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

_NOISE = 25.5  # standard deviation, a tenth of the range
_CONTRAST = 0.3
_BLUR, _PIXEL, _TILE = 5, 4, 8  # sides of squares


def noise(images: Tensor, generator: Generator) -> Tensor:
    """With Gaussian noise on each pixel."""
    return _bytes(images.float() + _NOISE * torch.randn(images.shape, generator=generator))


def blur(images: Tensor, _generator: Generator) -> Tensor:
    """Each pixel the average of a square around it."""
    padded = F.pad(images.float(), [_BLUR // 2] * 4, mode="reflect")
    return _bytes(F.avg_pool2d(padded, _BLUR, stride=1))


def contrast(images: Tensor, _generator: Generator) -> Tensor:
    """Nearer to the average of the image."""
    values = images.float()
    mean = values.mean((1, 2, 3), keepdim=True)
    return _bytes(mean + _CONTRAST * (values - mean))


def pixels(images: Tensor, _generator: Generator) -> Tensor:
    """In larger pixels."""
    return _bytes(
        F.avg_pool2d(images.float(), _PIXEL)
        .repeat_interleave(_PIXEL, 2)
        .repeat_interleave(_PIXEL, 3)
    )


def tiles(images: Tensor, generator: Generator) -> Tensor:
    """Cut into square tiles, which change places, in each image in another way."""
    batch, channels, height, width = images.shape
    rows, columns = height // _TILE, width // _TILE
    cut = images.view(batch, channels, rows, _TILE, columns, _TILE).permute(0, 2, 4, 1, 3, 5)
    cut = cut.reshape(batch, rows * columns, channels, _TILE, _TILE)
    order = torch.rand(batch, rows * columns, generator=generator).argsort(1)
    mixed = cut[torch.arange(batch)[:, None], order]
    mixed = mixed.view(batch, rows, columns, channels, _TILE, _TILE).permute(0, 3, 1, 4, 2, 5)
    return mixed.reshape(images.shape)


def mixture(images: Tensor, _generator: Generator) -> Tensor:
    """The average of an image and the next one."""
    return _bytes((images.float() + images.roll(1, 0).float()) / 2)


def negative(images: Tensor, _generator: Generator) -> Tensor:
    """Dark where it was light."""
    return 255 - images


def _bytes(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


CORRUPTIONS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    each.__name__: each for each in (noise, blur, contrast, pixels, tiles, mixture, negative)
}


def corrupted(images: Tensor, seed: int) -> dict[str, Tensor]:
    """Bytes (n, C, H, W) by what was done to them."""
    generator = torch.Generator().manual_seed(seed)
    return {name: change(images, generator) for name, change in CORRUPTIONS.items()}
