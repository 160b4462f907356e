"""Budget: what a variance is made of, one part for each source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# What sources are; names of sources begin with these.
KINDS = ("input", "noise", "dropout", "weights")
# What more data for training could remove; all else stays however much there is.
REMOVABLE = "weights"


class Budget(Mapping[str, Tensor]):
    """Variances by the name of their source; they add up to the variance of the output.

    ``print(budget)`` shows the average share of each source. Names begin with what the source is:
    ``input`` (errors and noise of the inputs), ``noise at ...``, ``dropout at ...``,
    ``weights of ...``.

    Args:
        parts: (B, *event) variances of each source, or (B, r, r) covariances.
        are_matrices: whether they are covariances. Shares are those of their traces then.
    """

    def __init__(self, parts: Mapping[str, Tensor], *, are_matrices: bool = False) -> None:
        self._parts = dict(parts)
        self._are_matrices = are_matrices

    def __getitem__(self, source: str) -> Tensor:
        if source not in self._parts:
            raise KeyError(f"no source {source!r}; there are {', '.join(self._parts)}")
        return self._parts[source]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def total(self) -> Tensor:
        """The sum over sources: the variance."""
        return torch.stack(list(self._parts.values())).sum(0)

    def shares(self) -> dict[str, Tensor]:
        """The part of each source in the whole, 0 to 1: (B, *event), or (B,) of covariances."""
        parts = dict(self.items())
        if self._are_matrices:
            parts = {name: part.diagonal(dim1=-2, dim2=-1).sum(-1) for name, part in parts.items()}
        whole = torch.stack(list(parts.values())).sum(0)
        return {name: torch.where(whole > 0, part / whole, 0.0) for name, part in parts.items()}

    def by_kind(self) -> Budget:
        """The same with the places added up: input, noise, dropout, weights."""
        found: dict[str, Tensor] = {}
        for name, part in self.items():
            kind = kind_of(name)
            found[kind] = found[kind] + part if kind in found else part
        return Budget(found, are_matrices=self._are_matrices)

    def average_shares(self) -> dict[str, float]:
        """The average share of each source over samples and outputs, the largest first."""
        found = {name: share.double().mean().item() for name, share in self.shares().items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        shares = self.average_shares()
        width = max(map(len, shares), default=0)
        return "\n".join(f"{name:<{width}}  {share:6.1%}" for name, share in shares.items())

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{k} {v:.0%}' for k, v in self.average_shares().items())})"


def kind_of(name: str) -> str:
    """What a source of this name is: input, noise, dropout or weights."""
    return name.split(" ")[0].partition("#")[0]
