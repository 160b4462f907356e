"""ANI-1x: energies of molecules from eight networks, rebuilt in plain torch.

Weights come from the files of the package torchani 2.0 (MIT licence), which is not imported.
Formulas are those of Smith, Isayev and Roitberg (Chemical Science 8, 3192, 2017).
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ELEMENTS, MEMBERS, FEATURES = "HCNO", 8, 384
HIDDEN = {"H": (160, 128, 96), "C": (144, 112, 96), "N": (128, 112, 96), "O": (128, 112, 96)}
# Energies of the atoms alone, in Hartree: from sae_linfit.dat, beside the weights.
ATOMS = {"H": -0.60095298, "C": -38.08316124, "N": -54.7077577, "O": -75.19446356}
RADIAL, ANGULAR = 5.2, 3.5  # how far atoms see each other, in Angstrom
CENTRES = torch.linspace(0.9, 4.93125, 16)
SHELLS, ANGLES = torch.linspace(0.9, 2.85, 4), (torch.arange(8) + 0.5) * math.pi / 8
PAIRS = list(combinations_with_replacement(range(len(ELEMENTS)), 2))


def cutoff(distance: Tensor, end: float) -> Tensor:
    return (0.5 * torch.cos(distance * math.pi / end) + 0.5) * (distance < end)


def features(symbols: str, positions: Tensor) -> Tensor:
    """(atoms, 384) what each atom sees: distances by element, angles by pair of elements."""
    kinds = torch.tensor([ELEMENTS.index(symbol) for symbol in symbols])
    apart = positions[None] - positions[:, None]
    distance = apart.norm(dim=-1)
    near = 0.25 * torch.exp(-16 * (distance[..., None] - CENTRES) ** 2)
    near = near * (cutoff(distance, RADIAL) * (distance > 0))[..., None]
    seen = [near[:, kinds == kind].sum(1) for kind in range(len(ELEMENTS))]
    j, k = torch.triu_indices(len(symbols), len(symbols), 1)
    to_j, to_k = distance[:, j], distance[:, k]  # (atoms, pairs)
    cosine = (apart[:, j] * apart[:, k]).sum(-1) / (to_j * to_k).clamp(min=1e-9)
    angle = torch.acos(0.95 * cosine)
    turned = 2 * ((1 + torch.cos(angle[..., None] - ANGLES)) / 2) ** 32
    shell = torch.exp(-8 * ((to_j + to_k)[..., None] / 2 - SHELLS) ** 2)
    counts = cutoff(to_j, ANGULAR) * cutoff(to_k, ANGULAR) * (to_j > 0) * (to_k > 0)
    around = (counts[..., None, None] * shell[..., None] * turned[..., None, :]).flatten(2)
    low, high = torch.minimum(kinds[j], kinds[k]), torch.maximum(kinds[j], kinds[k])
    seen += [around[:, (low == a) & (high == b)].sum(1) for a, b in PAIRS]
    return torch.cat(seen, 1)


class Energies(nn.Module):
    """Features (B, atoms, 384) of B molecules, ``seen`` -> their energies (B, 1), in Hartree."""

    def __init__(self, molecules: list[tuple[str, Tensor]], member: int) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({one: network(member, one) for one in ELEMENTS})
        most = max(len(symbols) for symbols, _ in molecules)
        self.seen = torch.zeros(len(molecules), most, FEATURES)
        self.is_atom = torch.zeros(len(ELEMENTS), len(molecules), most, 1)
        for i, (symbols, positions) in enumerate(molecules):
            self.seen[i, : len(symbols)] = features(symbols, positions)
            for place, symbol in enumerate(symbols):
                self.is_atom[ELEMENTS.index(symbol), i, place] = 1
        alone = [sum(ATOMS[symbol] for symbol in symbols) for symbols, _ in molecules]
        self.alone = torch.tensor(alone, dtype=torch.float64)[:, None]

    def forward(self, seen: Tensor) -> Tensor:
        """Without the energies of the atoms alone: float32 has too few digits for the sum."""
        parts = zip(self.networks.values(), self.is_atom, strict=True)
        return sum((net(seen) * is_atom).sum(1) for net, is_atom in parts)


def network(member: int, element: str) -> nn.Sequential:
    """The network of an element, with weights read as raw float32."""
    sizes, layers = [FEATURES, *HIDDEN[element], 1], []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        file = folder() / f"train{member}" / "networks" / f"ANN-{element}.nnf-l{i + 1}"
        layer = nn.Linear(inputs, outputs)
        weight, bias = (np.fromfile(f"{file}.{kind}param", "<f4") for kind in "wb")
        layer.weight.data = torch.from_numpy(weight).view(outputs, inputs)
        layer.bias.data = torch.from_numpy(bias)
        layers += [layer, nn.CELU(0.1)]
    return nn.Sequential(*layers[:-1])


def folder() -> Path:
    found = find_spec("torchani")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("torchani is not installed: pip install -e '.[molecules]'")
    return Path(found.submodule_search_locations[0]) / "resources" / "ani-1x_8x"
