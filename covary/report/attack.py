"""What `covary attack` found: accuracy and doubt under attacks of growing strength."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.report.files import Array, read_arrays, read_json, written_by

TITLES = {
    "fgsm": "FGSM",
    "pgd": "PGD",
    "square": "Square",
    "transfer-fgsm": "FGSM, transferred",
    "transfer-pgd": "PGD, transferred",
}


@dataclass(frozen=True)
class Row:
    """One attack of one strength on one network."""

    attack: str
    network: str
    epsilon: float
    samples: int
    accuracy: float
    auroc: Mapping[str, float | None]  # score -> of attacked against clean inputs

    @property
    def title(self) -> str:
        """What the attack is called."""
        return TITLES.get(self.attack, self.attack)


@dataclass(frozen=True, eq=False)
class Attacks:
    """All attacks on one run's networks."""

    weights: str  # digest of the network
    unit: str  # of epsilon
    epsilons: tuple[float, ...]
    networks: tuple[str, ...]
    rows: tuple[Row, ...]
    verdict: tuple[str, ...]
    entropies: Mapping[str, Array]  # "<attack>/<network>/<epsilon>" -> (n,)
    command: str

    def names(self, network: str) -> list[str]:
        """The attacks on a network."""
        return list(dict.fromkeys(row.attack for row in self.rows if row.network == network))

    def of(self, attack: str, network: str) -> list[Row]:
        """By epsilon."""
        found = [row for row in self.rows if (row.attack, row.network) == (attack, network)]
        return sorted(found, key=lambda row: row.epsilon)

    def entropy(self, row: Row) -> Array | None:
        """(n,) entropies of the row's inputs, None if they were not stored."""
        return self.entropies.get(f"{row.attack}/{row.network}/{row.epsilon:g}")

    def table(self) -> list[tuple[str, str, list[str]]]:
        """Network, attack, and accuracy at each epsilon; empty where it was not measured."""
        found = []
        for network in self.networks:
            for attack in self.names(network):
                rows = self.of(attack, network)
                known = {row.epsilon: f"{row.accuracy:.3f}" for row in rows}
                cells = [known.get(epsilon, "") for epsilon in self.epsilons]
                found.append((network, rows[0].title, cells))
        return found


def read_attacks(run_dir: Path) -> Attacks | None:
    """Read ``attack.json`` and ``attack.npz``; None if there is no such measurement."""
    path, arrays_path = run_dir / "attack.json", run_dir / "attack.npz"
    if not path.is_file():
        return None
    content = read_json(path)
    with written_by("attack", path):
        return Attacks(
            weights=str(content["weights"]),
            unit=str(content["epsilon_unit"]),
            epsilons=tuple(map(float, content["epsilons"])),
            networks=tuple(str(network["name"]) for network in content["networks"]),
            rows=tuple(map(_row, content["rows"])),
            verdict=tuple(map(str, content["verdict"])),
            entropies=read_arrays(arrays_path) if arrays_path.is_file() else {},
            command=str(content.get("command") or f"covary attack {run_dir}"),
        )


def _row(entry: Mapping[str, Any]) -> Row:
    return Row(
        attack=str(entry["attack"]),
        network=str(entry["network"]),
        epsilon=float(entry["epsilon"]),
        samples=int(entry["samples"]),
        accuracy=float(entry["accuracy"]),
        auroc=dict(entry["auroc"]),
    )
