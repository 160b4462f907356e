"""Figures of how close cheaper covariances come to the exact one: FidelityResult -> Drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from covary.report import drawing as draw
from covary.report.words import MINUS, amount, rank
from covary.runs.predictions import Array
from covary.runs.results import FidelityResult, Representation

TICKS = (-1.0, 0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 1.0)  # of rank correlations


def drawings(fidelity: FidelityResult) -> list[draw.Drawing]:
    """Entropies of each part, then what they cost, as far as they were stored."""
    found = []
    # Those that give each input a covariance of its own, the best known last.
    ways = [one for one in fidelity.representations if one.name == "diagonal"]
    ways += [one for one in fidelity.representations if one.name == fidelity.chosen]
    for i, part in enumerate(fidelity.parts):
        truth = fidelity.arrays.get(f"{part}/full")
        stored = [(one, fidelity.arrays.get(f"{part}/{one.name}")) for one in ways]
        others = [(one, entropy) for one, entropy in stored if entropy is not None]
        if truth is not None and others:
            suffix = f"-{i + 1}" if len(fidelity.parts) > 1 else ""
            found.append(entropies(part, truth, others, suffix))
    return [*found, cost(fidelity)] if _ranked(fidelity) else found


@draw.house_style()
def entropies(
    part: str, exact: Array, others: Sequence[tuple[Representation, Array]], suffix: str
) -> draw.Drawing:
    """Entropies of one part's inputs by approximate covariances, against exact ones."""
    (axes,) = draw.canvas(3.7)
    places = np.flatnonzero(np.isfinite([exact, *(entropy for _, entropy in others)]).all(axis=0))
    chosen = places[draw.some(len(places), 400)]
    said, handles = [], []
    for way, entropy in others:
        colour, marker = (draw.PURPLE, "o") if way.name.startswith("tracked") else (draw.AMBER, "D")
        axes.plot(exact[chosen], entropy[chosen], marker, ms=3.0, mew=0, alpha=0.6, color=colour)
        agreement = rank(way.of(part, "rank"))
        label = f"{way.name}: rank correlation {agreement}"
        handles.append(draw.swatch(label, colour, "", marker))
        said.append(f"{way.name} {agreement}")
    draw.identity(axes, exact[chosen])
    facts: dict[str, Any] = {
        "part": part,
        "exact": exact,
        "places": places,
        "chosen": chosen,
        "said": said,
    }
    name, shown = "fidelity-entropy", handles[::-1]
    return draw.drawn(axes, name, suffix=suffix, columns=1, handles=shown, **facts)


def _ranked(fidelity: FidelityResult) -> list[tuple[Representation, str, float, float]]:
    """Representation, part, time and rank correlation, as far as both are defined."""
    return [
        (one, part, one.time_over_plain, agreement)
        for one in fidelity.representations
        for part in fidelity.parts
        if one.time_over_plain is not None and (agreement := one.of(part, "rank")) is not None
    ]


@draw.house_style()
def cost(fidelity: FidelityResult) -> draw.Drawing:
    """Rank correlation of entropies against the time that they take."""
    (axes,) = draw.canvas(4.2)
    ranked = _ranked(fidelity)
    names = list(dict.fromkeys(one.name for one, *_ in ranked))
    looks = {name: draw.look(i) for i, name in enumerate(names)}
    said = []
    for one, part, time, agreement in ranked:
        which = fidelity.parts.index(part)
        # OOD sets are rings around the test set's dots: neither hides the other.
        size, fill = (8.5, "none") if which else (4.5, "full")
        colour, marker = looks[one.name]
        place = [time], [_height(agreement)]
        draw.line(axes, *place, marker, colour, ms=size, fillstyle=fill, mew=1.3)
        said.append(f"{one.name} {rank(agreement)} at {amount(time)} ({part})")
    draw.log_axis(axes)
    times = [time for *_, time, _ in ranked]
    axes.set_xlim(min(1.0, *times) / 1.3, 1.7 * max(times))
    heights = [_height(agreement) for *_, agreement in ranked]
    low, high = min(heights) - 0.4, max(heights) + 0.35
    shown = [tick for tick in TICKS if low < _height(tick) < high]
    axes.set_yticks(
        [_height(tick) for tick in shown], [f"{tick:g}".replace("-", MINUS) for tick in shown]
    )
    axes.set_ylim(low, high)
    handles = [draw.swatch(name, colour, "", marker) for name, (colour, marker) in looks.items()]
    left_out = [one.name for one in fidelity.representations if one.name not in names]
    facts: dict[str, Any] = {"fidelity": fidelity, "said": said, "left_out": left_out}
    return draw.drawn(axes, "fidelity-cost", handles=handles, **facts)


def _height(agreement: float) -> float:
    """Where a rank correlation is drawn: 0.9, 0.99, 0.999 and so on are equally far apart."""
    return -math.log10(max(1 - agreement, 1e-5))
