"""Figures of what the variance of the output is made of: Results -> Drawing."""

from __future__ import annotations

from typing import Any

import numpy as np

from covary.budget import REMOVABLE, kind_of
from covary.report import drawing as draw
from covary.report.gallery import items
from covary.report.reading import Results
from covary.report.words import percent
from covary.runs.results import BudgetResult, ErrorBars

_COLOURS = {
    "input": draw.ORANGE,
    "noise": draw.BLUE,
    "dropout": draw.PURPLE,
    REMOVABLE: draw.TEAL,
}
_TITLES = {
    "input": "errors of the inputs",
    "noise": "noise of the network",
    "dropout": "dropout",
    REMOVABLE: "weights (more data could remove it)",
}
_MOST_SOURCES, _REST = 8, "all others"


def drawings(results: Results) -> list[draw.Drawing]:
    """The average budget, that of each input of the gallery, and error bars without errors."""
    budget = results.evaluation.budget
    assert budget is not None
    found = [average(budget, results.test.mean.shape[1])]
    shown = _shown(results, budget)
    if shown:
        found.append(by_input(budget, shown))
        if budget.errors is not None:
            columns = range(len(budget.errors.stddev))
            found += [perfect(results, budget.errors, shown, column) for column in columns]
    return found


def _shown(results: Results, budget: BudgetResult) -> list[int]:
    """Test inputs that the gallery shows, from the most to the least certain."""
    known = {one.index for one in budget.gallery}
    listed = {item.index for row in items(results, results.test).values() for item in row}
    return sorted(known & listed, key=lambda index: results.test.entropy[index])


@draw.house_style()
def average(budget: BudgetResult, outputs: int) -> draw.Drawing:
    """A bar for each source: its average share in the variance of the output."""
    looks = _looks(budget)
    shares = dict.fromkeys(looks, 0.0)
    for name, share in budget.sources.items():
        shares[name if name in looks else _REST] += share or 0.0
    (axes,) = draw.canvas(1.4 + 0.32 * len(shares))
    for place, (name, share) in enumerate(shares.items()):
        axes.barh(place, share, height=0.7, **looks[name])
        text, at = f" {percent(share)}", (share, place)
        axes.annotate(text, at, va="center", fontsize=8, annotation_clip=False)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(shares.values()))
    draw.percentages(axes, "x")
    axes.grid(visible=False, axis="y")
    said = [f"{name} {percent(share)}" for name, share in shares.items()]
    handles = [draw.swatch(_TITLES[kind], _COLOURS[kind], "", "s") for kind in budget.kinds]
    return draw.drawn(axes, "budget", handles=handles, budget=budget, said=said, outputs=outputs)


@draw.house_style()
def by_input(budget: BudgetResult, shown: list[int]) -> draw.Drawing:
    """A stacked bar for each input: shares of what it varies by."""
    rows, looks = {one.index: one.sources for one in budget.gallery}, _looks(budget)
    (axes,) = draw.canvas(3.3 + 0.19 * (len(looks) // 2))
    places, below, said = np.arange(len(shown)), np.zeros(len(shown)), []
    order = list(_COLOURS)  # errors of the inputs at the bottom
    for name in sorted(looks, key=lambda name: [*order, "all"].index(kind_of(name))):
        own = budget.sources.keys() - looks.keys() if name == _REST else {name}
        shares = np.array([sum(rows[index].get(each) or 0.0 for each in own) for index in shown])
        axes.bar(places, shares, 0.85, bottom=below, label=name, **looks[name])
        below += shares
        said.append(f"{name} {percent(float(shares.min()))} to {percent(float(shares.max()))}")
    axes.set_xticks(places, [str(index) for index in shown], rotation=90, fontsize=7)
    axes.set(xlim=(-0.6, len(shown) - 0.4), ylim=(0, 1))
    axes.grid(visible=False, axis="x")
    draw.percentages(axes, "y")
    return draw.drawn(axes, "budget-inputs", shown=shown, said=said)


def _looks(budget: BudgetResult) -> dict[str, dict[str, Any]]:
    """How each source is filled: the colour of its kind, paler from one to the next.

    Those that more training data could remove stand last, and are hatched; small ones are put
    together.
    """
    names = list(budget.sources)
    if len(names) > _MOST_SOURCES:
        names = [*names[: _MOST_SOURCES - 1], _REST]
    names.sort(key=lambda name: kind_of(name) == REMOVABLE)
    kinds = [kind_of(name) for name in names]
    looks = {}
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        alpha = 1.0 - 0.7 * kinds[:i].count(kind) / max(1, kinds.count(kind))
        colour = draw.SLATE if name == _REST else _COLOURS[kind]
        looks[name] = {"color": colour, "alpha": alpha, "hatch": "//" * (kind == REMOVABLE)}
    return looks


@draw.house_style()
def perfect(results: Results, errors: ErrorBars, shown: list[int], column: int) -> draw.Drawing:
    """Standard deviations with the errors of the inputs, and as if they were exact."""
    pairs = [errors.gallery[str(index)] for index in shown]
    given, exact = (np.array([pair[i][column] for pair in pairs], float) for i in (0, 1))
    (axes,) = draw.canvas()
    places = np.arange(len(shown))
    axes.vlines(places, exact, given, color=draw.SLATE, lw=1.0)
    draw.line(axes, places, given, "o", draw.ORANGE, ms=5, label="with the errors of the inputs")
    draw.line(axes, places, exact, "D", draw.BLUE, ms=4, label="if the inputs were exact")
    axes.set_xticks(places, [str(index) for index in shown], rotation=90, fontsize=7)
    axes.set(xlim=(-0.6, len(shown) - 0.4), ylim=(0, None))
    several = len(errors.stddev) > 1
    return draw.drawn(
        axes,
        "budget-errors",
        suffix=f"-{column + 1}" if several else "",
        targets=len(errors.stddev),
        target=results.target_name(column),
        classify=results.is_classification,
        shown=shown,
        given=errors.stddev[column],
        exact=errors.exact[column],
    )
