"""Figures of what the variance of the output is made of: Results -> Drawing."""

from __future__ import annotations

import numpy as np
from matplotlib.lines import Line2D

from covary.budget import REMOVABLE, kind_of
from covary.report import drawing as draw
from covary.report.gallery import items
from covary.report.reading import Results
from covary.report.words import percent
from covary.runs.results import BudgetResult, ErrorBars

# What more training data could remove is told apart by hatching, too.
_LOOKS = {
    "input": (draw.ORANGE, "errors of the inputs"),
    "noise": (draw.BLUE, "noise of the network"),
    "dropout": (draw.PURPLE, "dropout"),
    REMOVABLE: (draw.TEAL, "weights (more data could remove it)"),
}
_MOST_SOURCES = 12


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
    sources = list(budget.sources.items())
    named = [(name, share or 0.0, kind_of(name)) for name, share in sources[:_MOST_SOURCES]]
    if rest := sum(share or 0.0 for _, share in sources[_MOST_SOURCES:]):
        named.append((f"{len(sources) - _MOST_SOURCES} more", rest, "noise"))
    (axes,) = draw.canvas(1.4 + 0.32 * len(named))
    for place, (_, share, kind) in enumerate(named):
        axes.barh(place, share, color=_LOOKS[kind][0], hatch=_hatch(kind), height=0.7)
        axes.annotate(
            f" {percent(share)}", (share, place), va="center", fontsize=8, annotation_clip=False
        )
    axes.set_yticks(range(len(named)), [name for name, _, _ in named])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(share for _, share, _ in named))
    draw.percentages(axes, "x")
    axes.grid(visible=False, axis="y")
    kinds = dict.fromkeys(kind for _, _, kind in named)
    said = [f"{name} {percent(share)}" for name, share, _ in named]
    handles = [_swatch(kind) for kind in kinds]
    return draw.drawn(axes, "budget", handles=handles, budget=budget, said=said, outputs=outputs)


@draw.house_style()
def by_input(budget: BudgetResult, shown: list[int]) -> draw.Drawing:
    """A stacked bar for each input: shares of what it varies by."""
    rows = {one.index: one.kinds for one in budget.gallery}
    (axes,) = draw.canvas()
    places, below, said = np.arange(len(shown)), np.zeros(len(shown)), []
    kinds = [kind for kind in _LOOKS if kind in budget.kinds]
    for kind in kinds:
        shares = np.array([rows[index].get(kind) or 0.0 for index in shown])
        colour, hatch = _LOOKS[kind][0], _hatch(kind)
        axes.bar(places, shares, 0.85, bottom=below, color=colour, hatch=hatch)
        below += shares
        said.append(f"{kind} {percent(float(shares.min()))} to {percent(float(shares.max()))}")
    axes.set_xticks(places, [str(index) for index in shown], rotation=90, fontsize=7)
    axes.set(xlim=(-0.6, len(shown) - 0.4), ylim=(0, 1))
    axes.grid(visible=False, axis="x")
    draw.percentages(axes, "y")
    handles = [_swatch(kind) for kind in kinds]
    return draw.drawn(axes, "budget-inputs", handles=handles, shown=shown, said=said)


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


def _hatch(kind: str) -> str:
    return "//" if kind == REMOVABLE else ""


def _swatch(kind: str) -> Line2D:
    colour, label = _LOOKS[kind]
    return draw.swatch(label, colour, "", "s")
