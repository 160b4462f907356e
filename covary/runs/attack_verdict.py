"""What the numbers of attacks say, in sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from covary.runs.results import Attack, AttackRow

TRAINED = "as trained"
DEFENDED = "sigma_1 = sigma_2 = 0"
TITLES = {
    "fgsm": "FGSM",
    "pgd": "PGD",
    "transfer-fgsm": "FGSM",
    "transfer-pgd": "PGD",
    "square": "Square",
}
# An accuracy that has fallen by less is not called broken.
_DROP = 0.05


class _Numbers:
    """The rows of a result, by attack and network, in order of epsilon."""

    def __init__(self, result: Attack) -> None:
        self.rows, self.of, self.attacks = result.rows, result.of, result.names
        self.networks = {network.name: network for network in result.networks}
        positive = [epsilon for epsilon in result.epsilons if epsilon > 0]
        # What is quoted: one strength that is moderate for the sweep, and the largest.
        self.quoted = sorted({positive[(len(positive) - 1) // 3], positive[-1]}) if positive else []

    def quotes(self, attack: str, network: str) -> list[AttackRow]:
        return [row for row in self.of(attack, network) if row.epsilon in self.quoted]

    def clean(self, attack: str, network: str) -> float:
        """Accuracy before the attack, on the inputs of this attack if it is known."""
        first = self.of(attack, network)[0]
        return first.accuracy if first.epsilon == 0 else self.networks[network].accuracy

    def drop(self, attack: str, network: str) -> float:
        """How much accuracy the attack costs at its worst."""
        worst = min(row.accuracy for row in self.of(attack, network))
        return self.clean(attack, network) - worst


def verdict(result: Attack) -> list[str]:
    """What survives the attacks, in sentences made of the numbers alone."""
    numbers = _Numbers(result)
    if not numbers.quoted:
        return ["Nothing was attacked: epsilon is 0 throughout."]
    sentences = [_trained(numbers)]
    for attack in numbers.attacks(TRAINED):
        sentences += [_entropy(numbers, attack), _awareness(numbers, attack)]
    if DEFENDED in numbers.networks:
        sentences += _defended(numbers)
    return [sentence for sentence in sentences if sentence]


def _trained(numbers: _Numbers) -> str:
    clean = numbers.networks[TRAINED].accuracy
    falls = [_fall(numbers, attack, TRAINED) for attack in numbers.attacks(TRAINED)]
    return f"As trained, accuracy is {_share(clean)} on clean inputs; {'; '.join(falls)}."


def _fall(numbers: _Numbers, attack: str, network: str) -> str:
    found = numbers.quotes(attack, network)
    values = " and ".join(f"{_share(row.accuracy)} at {row.epsilon:g}" for row in found)
    samples = found[0].samples
    of_fewer = any(row.samples != samples for row in numbers.rows)
    counted = f" (of {samples:,} inputs)" if of_fewer and attack == "square" else ""
    return f"{TITLES[attack]} leaves {values}{counted}"


def _entropy(numbers: _Numbers, attack: str) -> str:
    """Whether the network's doubt grows with the attack, by its median entropy."""
    rows = [row for row in numbers.of(attack, TRAINED) if _is_known(row.entropy.median)]
    if len(rows) < 2:
        return ""
    # As they are quoted: what rounds to the same has not moved.
    medians = [round(_median(row), 1) for row in rows]
    first, last = rows[0], rows[-1]
    peak = max(range(len(rows)), key=lambda i: (medians[i], i))
    about = f"Under {TITLES[attack]} the median entropy"
    ends = f"from {_at(first)} to {_at(last)}"
    rises = [b - a for a, b in itertools.pairwise(medians)]
    if min(rises) > 0:
        return f"{about} rises with every step of epsilon, {ends}."
    if max(rises) <= 0:
        return f"{about} never rises: {ends}."
    if 0 < peak < len(rows) - 1:
        steps = "" if min(rises[:peak]) >= 0 else ", though not with every step,"
        rest = f"and falls again to {_at(last)}"
        return f"{about} rises{steps} from {_at(first)} to {_at(rows[peak])}, {rest}."
    trend = "rises, though not with every step" if medians[-1] > medians[0] else "falls"
    return f"{about} {trend}, {ends}."


def _at(row: AttackRow) -> str:
    return f"{_median(row):.1f} nats at {row.epsilon:g}"


def _awareness(numbers: _Numbers, attack: str) -> str:
    """How well each score tells attacked inputs from clean ones."""
    rows = numbers.quotes(attack, TRAINED)
    parts = []
    for score in rows[0].auroc:
        values = [row.auroc[score] for row in rows]
        if all(map(_is_known, values)):
            listed = " and ".join(f"{value:.2f}" for value in values)
            parts.append(f"{score.replace('_', '-')} {listed}")
    if not parts:
        return ""
    where = " and ".join(f"{row.epsilon:g}" for row in rows)
    told = f"AUROC of {TITLES[attack]}'s inputs against clean ones, at {where}: {', '.join(parts)}."
    lows = [score for score in rows[0].auroc if any(_is_low(row, score) for row in rows)]
    if lows:
        names = " and ".join(score.replace("_", "-") for score in lows)
        told += f" Below 0.5 the network is surer of them than of clean inputs (by {names})."
    return told


def _is_low(row: AttackRow, score: str) -> bool:
    value = row.auroc[score]
    return value is not None and value < 0.5


def _defended(numbers: _Numbers) -> list[str]:
    network, attacks = numbers.networks[DEFENDED], numbers.attacks(DEFENDED)
    trained = numbers.networks[TRAINED].accuracy
    sentences = [
        f"With {DEFENDED}, accuracy is {_share(network.accuracy)} on clean inputs "
        f"({_share(trained)} as trained)."
    ]
    direct = [attack for attack in attacks if attack in ("fgsm", "pgd")]
    if direct:
        sentences.append(_direct(numbers, direct, network.with_gradient))
    others = [attack for attack in attacks if attack not in ("fgsm", "pgd")]
    if not others:
        return sentences
    moved = [attack for attack in others if attack != "square"]
    told = []
    if moved:
        falls = ", ".join(_fall(numbers, attack, DEFENDED) for attack in moved)
        told.append(f"of attacks made on the network as trained, {falls}")
    if "square" in others:
        told.append(f"{_fall(numbers, 'square', DEFENDED)}, and needs no gradient")
    listed = "; ".join(told)
    sentences.append(f"{listed[0].upper()}{listed[1:]}.")
    hidden = network.with_gradient == 0
    if max(numbers.drop(attack, DEFENDED) for attack in others) > _DROP:
        sentences.append(
            "So the defence hides gradients; it does not remove the weakness."
            if hidden
            else "So the defence does not remove the weakness."
        )
    else:
        sentences.append(
            f"None of these costs more than {_DROP:g} of accuracy: the defence holds against what "
            "was tried, which is no proof against what was not."
        )
    return sentences


def _direct(numbers: _Numbers, attacks: Sequence[str], with_gradient: float | None) -> str:
    """What attacks that follow the defended network's own gradient find."""
    parts = []
    for attack in attacks:
        changes = [
            abs(row.accuracy - numbers.clean(attack, DEFENDED))
            for row in numbers.of(attack, DEFENDED)
        ]
        if max(changes) == 0:
            parts.append(f"{TITLES[attack]} leaves accuracy unchanged at every epsilon")
        else:
            start = (
                ", from its random start alone," if attack == "pgd" and not with_gradient else ""
            )
            fall = _fall(numbers, attack, DEFENDED).replace(" leaves", f"{start} leaves", 1)
            parts.append(fall)
    if with_gradient == 0:
        return f"Its gradient is zero for every input: {'; '.join(parts)}."
    return f"A gradient is left for {_share(with_gradient or 0.0)} of inputs: {'; '.join(parts)}."


def _median(row: AttackRow) -> float:
    return math.nan if row.entropy.median is None else row.entropy.median


def _share(value: float) -> str:
    return f"{value:.3f}"


def _is_known(value: float | None) -> bool:
    return value is not None and value == value
