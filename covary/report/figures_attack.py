"""Figures of what attacks do to a network: Attack -> Drawing. figures.toml has their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from covary.report import drawing as draw
from covary.report.words import attack_title, number
from covary.runs.predictions import Array
from covary.runs.results import Attack, AttackRow
from covary.uncertainty.scores import about

# attack -> colour and marker
_LOOKS = {"fgsm": (draw.BLUE, "o"), "pgd": (draw.ORANGE, "s"), "square": (draw.TEAL, "^")}
_SCORES = {"entropy": "-", "max_softmax": "--"}  # with their dashes


def drawings(attacks: Attack) -> list[draw.Drawing]:
    """Accuracy of each network, then how well attacks are noticed, and entropies under each."""
    found = [accuracy(attacks, i) for i in range(len(attacks.networks))]
    first = attacks.networks[0].name
    for attack in attacks.names(first):
        stored = []
        for row in attacks.of(attack, first):
            values = attacks.arrays.get(row.key)
            if values is not None and np.isfinite(values).any():
                stored.append((row, values[np.isfinite(values)]))
        if stored:
            found.append(entropies(attacks, stored))
    if any(row.epsilon > 0 for row in attacks.rows):
        found.append(awareness(attacks, first))
    return found


@draw.house_style()
def accuracy(attacks: Attack, which: int) -> draw.Drawing:
    """Accuracy of one network against epsilon, a line for each attack."""
    network = attacks.networks[which].name
    (axes,) = draw.canvas(3.5)
    said, names = [], attacks.names(network)
    for attack in names:
        known = [(row.epsilon, row.accuracy) for row in attacks.of(attack, network)]
        dash = "--" if attack.startswith("transfer-") else "-"
        said.append(_line(axes, attack, known, dash))
    axes.set_ylim(-0.03, 1.03)
    suffix = f"-{which + 1}" if len(attacks.networks) > 1 else ""
    facts: dict[str, Any] = {"attacks": attacks, "network": network, "names": names, "said": said}
    return draw.drawn(axes, "attack-accuracy", suffix=suffix, columns=3, **facts)


@draw.house_style()
def entropies(attacks: Attack, stored: Sequence[tuple[AttackRow, Array]]) -> draw.Drawing:
    """A box of entropies for each epsilon of one attack."""
    (axes,) = draw.canvas(3.5)
    axes.boxplot(
        [values for _, values in stored],
        whis=(5, 95),
        showfliers=False,
        widths=0.55,
        boxprops={"color": draw.INK},
        medianprops={"color": draw.ORANGE, "linewidth": 1.8},
        whiskerprops={"color": draw.SLATE},
        capprops={"color": draw.SLATE},
    )
    axes.set_xticklabels([f"{row.epsilon:g}" for row, _ in stored])
    axes.grid(visible=False, axis="x")
    medians = [f"{number(float(np.median(values)))} at {row.epsilon:g}" for row, values in stored]
    name = stored[0][0].attack
    facts: dict[str, Any] = {"attacks": attacks, "stored": stored, "medians": medians}
    return draw.drawn(axes, "attack-entropy", suffix=f"-{name}", attack=attack_title(name), **facts)


def _line(
    axes: Axes, attack: str, known: Sequence[tuple[float, float]], dash: str, score: str = ""
) -> str:
    """A line of numbers by epsilon, and what it shows in words."""
    # Transfers look as their attack does, dashed.
    colour, marker = _LOOKS.get(attack.removeprefix("transfer-"), (draw.PURPLE, "D"))
    title = attack_title(attack) + (f", {about(score).title}" if score else "")
    # Attacks that fail lie on one line: show both.
    size, fill = 7.5 if marker == "o" else 5, "none" if dash == "--" else "full"
    x, y = zip(*known, strict=True)
    draw.line(axes, x, y, f"{marker}{dash}", colour, ms=size, fillstyle=fill, label=title)
    return f"{title}: {', '.join(f'{value:.3f} at {epsilon:g}' for epsilon, value in known)}"


@draw.house_style()
def awareness(attacks: Attack, network: str) -> draw.Drawing:
    """How well attacked inputs are told from clean ones, by attack and score."""
    (axes,) = draw.canvas(3.7)
    said = []
    for attack in attacks.names(network):
        rows = [row for row in attacks.of(attack, network) if row.epsilon > 0]
        for score, dash in _SCORES.items():
            found = [(row.epsilon, row.auroc.get(score)) for row in rows]
            known = [(epsilon, value) for epsilon, value in found if value is not None]
            if known:
                said.append(_line(axes, attack, known, dash, score))
    axes.axhline(0.5, color=draw.SLATE, lw=1.0, ls=":")
    axes.set_xlim(left=0)
    return draw.drawn(axes, "attack-awareness", network=network, attacks=attacks, said=said)
