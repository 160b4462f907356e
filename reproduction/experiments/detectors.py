"""Scores of logits and penultimate features that detectors of OOD inputs are known by.

Each is higher where the network is less sure, and a function of tensors alone: logits (B, K) and
features (B, d), which are what the last linear layer gives and takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of the sum of GEN, as its authors have it for all networks.
GEN_POWER = 0.1
# Rows whose distances to all neighbours are in memory at once.
_ROWS = 256
_TINY = 1e-30


def energy(logits: Tensor) -> Tensor:
    """(B,) minus the log of the summed exponentials (Liu et al., 2020)."""
    return -logits.double().logsumexp(-1)


def generalised_entropy(logits: Tensor, power: float = GEN_POWER, top: int = 100) -> Tensor:
    """(B,) sum of p^g (1 - p)^g over the largest probabilities: GEN (Liu, Lochman, Zach, 2023)."""
    p = logits.double().softmax(-1).sort(-1, descending=True).values
    rest = 1 - p
    # The difference itself would be 0 for every confident sample.
    rest[..., 0] = p[..., 1:].sum(-1)
    return (p * rest)[..., :top].pow(power).sum(-1)


@dataclass(frozen=True)
class NearestFeatures:
    """Distance to the k-th nearest of known features, all of length 1 (KNN; Sun et al., 2022).

    Attributes:
        bank: (n, d) known features.
        k: which neighbour counts.
    """

    bank: Tensor
    k: int

    @classmethod
    def of(cls, features: Tensor, k: int) -> NearestFeatures:
        """Of features (n, d) of training samples; the last neighbour if there are fewer than k."""
        return cls(_of_length_one(features), min(k, len(features)))

    def distance(self, features: Tensor) -> Tensor:
        """(B,) of features (B, d)."""
        return torch.cat([self._of_rows(some) for some in torch.split(features, _ROWS)])

    def _of_rows(self, features: Tensor) -> Tensor:
        cosines = _of_length_one(features) @ self.bank.mT
        nearest = cosines.topk(self.k, -1).values[:, -1]
        return (2 - 2 * nearest).clamp(min=0).sqrt().double()


def _of_length_one(features: Tensor) -> Tensor:
    unit: Tensor = features / features.norm(dim=-1, keepdim=True).clamp(min=_TINY)
    return unit


@dataclass(frozen=True)
class VirtualLogit:
    """What features have outside of the subspace of training features (ViM; Wang et al., 2022).

    Features are taken from the point where all logits are alike, as far as they can be: the origin
    is -W^+ b. Their principal subspace holds most of what training features are; the norm of the
    rest, scaled to the average of the largest logits, is the logit of one more class.

    Attributes:
        origin: (d,).
        rest: (d, r) orthonormal directions outside of the principal subspace.
        scale: of the norm.
    """

    origin: Tensor
    rest: Tensor
    scale: float

    @classmethod
    def of(
        cls, features: Tensor, logits: Tensor, weight: Tensor, bias: Tensor, dimensions: int
    ) -> VirtualLogit:
        """Fitted to training samples.

        Args:
            features: (n, d).
            logits: (n, K).
            weight, bias: (K, d) and (K,) of the last layer.
            dimensions: of the principal subspace.
        """
        origin = -torch.linalg.pinv(weight.double()) @ bias.double()
        gap = features.double() - origin
        # Eigenvalues are in ascending order.
        directions = torch.linalg.eigh(gap.mT @ gap / len(gap)).eigenvectors
        rest = directions[:, : gap.shape[-1] - dimensions]
        scale = logits.double().amax(-1).mean() / (gap @ rest).norm(dim=-1).mean()
        return cls(origin.float(), rest.float(), scale.item())

    def norm(self, features: Tensor) -> Tensor:
        """(B,) length of what features (B, d) have outside of the subspace."""
        length: Tensor = ((features - self.origin) @ self.rest).norm(dim=-1)
        return length.double()

    def score(self, features: Tensor, logits: Tensor) -> Tensor:
        """(B,) the virtual logit above the log of the summed exponentials of the others.

        In the order of the virtual class's probability, which rounds to 0 or 1 sooner.
        """
        virtual: Tensor = self.scale * self.norm(features)
        return virtual - logits.double().logsumexp(-1)
