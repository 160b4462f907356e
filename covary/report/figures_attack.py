"""Figures of what attacks do to a network: Attack -> Drawing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covary.report.drawing import (
    BLUE,
    INK,
    ORANGE,
    PURPLE,
    SLATE,
    TEAL,
    Drawing,
    canvas,
    head,
    styled,
)
from covary.report.tables import ATTACKS
from covary.report.words import number
from covary.runs.predictions import Array
from covary.runs.results import Attack, AttackRow
from covary.uncertainty.scores import about

# attack -> colour, dash, marker: transfers are dashed and hollow, in the colour of their attack
_LOOKS = {
    "fgsm": (BLUE, "-", "o"),
    "pgd": (ORANGE, "-", "s"),
    "square": (TEAL, "-.", "^"),
    "transfer-fgsm": (BLUE, "--", "o"),
    "transfer-pgd": (ORANGE, "--", "s"),
}
_SCORES = {name: about(name).title for name in ("entropy", "max_softmax")}


def drawings(attacks: Attack) -> list[Drawing]:
    """Accuracy of each network, then how well attacks are noticed, and entropies under each."""
    found = []
    for i, network in enumerate(network.name for network in attacks.networks):
        suffix = f"-{i + 1}" if len(attacks.networks) > 1 else ""
        found.append(accuracy(attacks, network, name=f"attack-accuracy{suffix}"))
    first = attacks.networks[0].name
    for attack in attacks.names(first):
        rows = [(row, attacks.entropy(row)) for row in attacks.of(attack, first)]
        stored = [
            (row, finite)
            for row, values in rows
            if values is not None and (finite := values[np.isfinite(values)]).size
        ]
        if stored:
            found.append(entropies(attacks, stored, name=f"attack-entropy-{attack}"))
    if any(row.epsilon > 0 for row in attacks.rows):
        found.append(awareness(attacks, first))
    return found


@styled
def accuracy(attacks: Attack, network: str, *, name: str) -> Drawing:
    """Accuracy against epsilon, a line for each attack."""
    figure, (axes,) = canvas(3.5)
    said = []
    for attack in attacks.names(network):
        rows = attacks.of(attack, network)
        colour, dash, marker = _LOOKS.get(attack, (PURPLE, ":", "D"))
        (line,) = axes.plot(
            [row.epsilon for row in rows],
            [row.accuracy for row in rows],
            color=colour,
            marker=marker,
            ms=7.5 if marker == "o" else 5,  # attacks that fail lie on one line: show both
            fillstyle="none" if dash == "--" else "full",
            label=_title(rows[0]),
        )
        line.set_linestyle(dash)  # type: ignore[arg-type]  # matplotlib names each style it knows
        listed = ", ".join(f"{row.accuracy:.3f} at {row.epsilon:g}" for row in rows)
        said.append(f"{_title(rows[0])}: {listed}")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("epsilon")
    axes.set_ylabel("accuracy")
    head(axes, f"Accuracy under attack: {network}", columns=3)
    alt = f"Accuracy of the network {network} against epsilon. {'; '.join(said)}."
    caption = f"epsilon is in {attacks.epsilon_unit}.{_counted(attacks, network)}"
    if any(attack.startswith("transfer-") for attack in attacks.names(network)):
        caption += " Transferred: made on the network as trained, given to this one."
    return Drawing(name, alt, caption, figure)


def _title(row: AttackRow) -> str:
    return ATTACKS.get(row.attack, row.attack)


def _counted(attacks: Attack, network: str) -> str:
    """Of how many inputs, if that is not the same for all attacks."""
    counts = {attack: attacks.of(attack, network)[0].samples for attack in attacks.names(network)}
    most = max(counts.values())
    fewer = {count for count in counts.values() if count != most}
    text = f" {number(most)} inputs"
    if fewer:
        text += f", Square {number(min(fewer))}"
    return f"{text}."


@styled
def entropies(attacks: Attack, stored: Sequence[tuple[AttackRow, Array]], *, name: str) -> Drawing:
    """A box of entropies for each epsilon."""
    figure, (axes,) = canvas(3.5)
    title = _title(stored[0][0])
    boxes = axes.boxplot(
        [values for _, values in stored],
        whis=(5, 95),
        showfliers=False,
        widths=0.55,
        patch_artist=True,
        medianprops={"color": ORANGE, "linewidth": 1.8},
        whiskerprops={"color": SLATE},
        capprops={"color": SLATE},
    )
    for box in boxes["boxes"]:
        box.set(facecolor="none", edgecolor=INK, linewidth=1.0)
    axes.set_xticklabels([f"{row.epsilon:g}" for row, _ in stored])
    axes.set_xlabel("epsilon")
    axes.set_ylabel("entropy (nats)")
    axes.grid(axis="x", visible=False)
    head(axes, f"Entropy under {title}: {stored[0][0].network}")
    medians = [f"{number(float(np.median(values)))} at {row.epsilon:g}" for row, values in stored]
    alt = f"Box plots of entropies under {title}. Medians: {'; '.join(medians)}."
    most = max(len(values) for _, values in stored)
    caption = (
        f"Median, quartiles, and 5% to 95% of {number(most)} inputs. epsilon is in "
        f"{attacks.epsilon_unit}."
    )
    return Drawing(name, alt, caption, figure)


@styled
def awareness(attacks: Attack, network: str) -> Drawing:
    """How well attacked inputs are told from clean ones, by attack and score."""
    figure, (axes,) = canvas(3.7)
    said = []
    for attack in attacks.names(network):
        colour, _, marker = _LOOKS.get(attack, (PURPLE, ":", "D"))
        for score, label in _SCORES.items():
            known = [
                (row, value)
                for row in attacks.of(attack, network)
                if row.epsilon > 0 and (value := row.auroc.get(score)) is not None
            ]
            if not known:
                continue
            title = f"{_title(known[0][0])}, {label}"
            axes.plot(
                [row.epsilon for row, _ in known],
                [value for _, value in known],
                color=colour,
                linestyle="-" if score == "entropy" else "--",
                marker=marker,
                fillstyle="full" if score == "entropy" else "none",
                ms=5,
                label=title,
            )
            listed = ", ".join(f"{value:.2f} at {row.epsilon:g}" for row, value in known)
            said.append(f"{title}: {listed}")
    axes.axhline(0.5, color=SLATE, lw=1.0, ls=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("epsilon")
    axes.set_ylabel("AUROC, attacked against clean")
    head(axes, f"Are attacks noticed: {network}", columns=2)
    alt = f"AUROC of attacked against clean inputs. {'; '.join(said)}."
    caption = (
        "The chance that an attacked input has the higher score of doubt than a clean one. 0.5, "
        "dotted, is a coin toss; below it the network is surer of attacked inputs. epsilon is in "
        f"{attacks.epsilon_unit}."
    )
    return Drawing("attack-awareness", alt, caption, figure)
