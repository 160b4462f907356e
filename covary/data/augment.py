"""Random changes to batches of images, each image its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_crop(x: Tensor, padding: int = 4, generator: torch.Generator | None = None) -> Tensor:
    """Shift each image by up to ``padding`` pixels in both directions, with zeros coming in.

    The same as to surround an image with ``padding`` zeros and to cut a window of the old size out
    of it at random. Takes and gives ``(B, C, H, W)`` of any dtype.
    """
    _check(x)
    if padding < 0:
        raise ValueError(f"random_crop needs a padding of 0 or more, got {padding}.")
    batch, channels, height, width = x.shape
    device = x.device if generator is None else generator.device
    offset = torch.randint(2 * padding + 1, (2, batch, 1), generator=generator, device=device)
    top, left = offset.to(x.device)
    padded = F.pad(x, [padding] * 4)
    image = torch.arange(batch, device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
    row = (top + torch.arange(height, device=x.device)).view(batch, 1, height, 1)
    column = (left + torch.arange(width, device=x.device)).view(batch, 1, 1, width)
    return padded[image, channel, row, column]


def horizontal_flip(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mirror each image left to right with probability 1/2; ``(B, C, H, W)`` of any dtype."""
    _check(x)
    device = x.device if generator is None else generator.device
    flipped = torch.rand(len(x), generator=generator, device=device) < 0.5
    return torch.where(flipped.to(x.device).view(-1, 1, 1, 1), x.flip(-1), x)


def augmented(x: Tensor) -> Tensor:
    """What ``--augment`` does to a batch of images (B, C, H, W): a random crop, and then a flip."""
    return horizontal_flip(random_crop(x))


def _check(x: Tensor) -> None:
    if x.ndim != 4:
        raise ValueError(f"expected a batch of images (B, C, H, W), got shape {tuple(x.shape)}.")
