"""One number per sample, higher where the network is less sure."""

from __future__ import annotations

import torch
from torch import Tensor

from covary.moments import Moments


def entropy(moments: Moments) -> Tensor:
    """(B,) entropy of the covariance, in nats; docs/theory.md, eq. (20). Sees no mean."""
    return moments.entropy()


def max_softmax(mean: Tensor) -> Tensor:
    """(B,) one minus the largest softmax probability of the mean (B, n). Sees no covariance.

    Summed from the other classes, in float64: the difference itself is 0 for every confident
    sample, and would tie samples that differ.
    """
    probabilities = torch.softmax(mean.double(), -1)
    largest = probabilities.argmax(-1, keepdim=True)
    return probabilities.scatter(-1, largest, 0.0).sum(-1)
