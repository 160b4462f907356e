"""Figures of the distributions that a run of a table predicts: DistributionResult -> Drawing."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from covary.report import drawing as draw
from covary.report.words import number, percent, short, squeezed
from covary.runs.results import (
    ColumnEffect,
    DistributionResult,
    SliceCoverage,
    TargetDistribution,
)

TARGETS = 4  # that have figures of their own
_SLICES = 12  # that are shown
_COLUMNS = 8  # whose effects are shown
_PARTS = {
    "emergent": "emerges in the network",
    "spread": "spread of the networks",
    "learned": "learned from residuals",
}
_LOOKS = {"emergent": draw.BLUE, "spread": draw.TEAL, "learned": draw.ORANGE}


def drawings(found: DistributionResult) -> list[draw.Drawing]:
    """Where intervals fail, what columns do to the error bar, and what it is made of."""
    shown, several = found.targets[:TARGETS], len(found.targets) > 1
    every = []
    for i, target in enumerate(shown):
        suffix = f"-{i + 1}" if several else ""
        if target.slices:
            every.append(slices(found, target, suffix))
        if any(effect.change > 0 for effect in target.effects):
            every.append(effects(found, target, suffix))
    if any(target.shares for target in shown):
        every.append(parts(shown))
    return every


@draw.house_style()
def slices(found: DistributionResult, target: TargetDistribution, suffix: str) -> draw.Drawing:
    """Coverage of the intervals in slices of rows, the most unusual at the top."""
    beyond = [one for one in target.slices if one.is_beyond]
    shown = target.slices[: max(_SLICES, min(len(beyond), 2 * _SLICES))]
    (axes,) = draw.canvas(1.5 + 0.23 * len(shown))
    axes.axvline(found.level, color=draw.SLATE, lw=1.2, ls=":", zorder=0)
    whole = target.test.get(f"coverage_{100 * found.level:.0f}")
    if whole is not None:
        axes.axvline(whole, color=draw.TEAL, lw=1.2, ls="-.", label="all test rows", zorder=0)
    for is_beyond, label, colour, marker in (
        (True, "beyond chance", draw.ORANGE, "D"),
        (False, "within chance", draw.BLUE, "o"),
    ):
        own = [(place, one) for place, one in enumerate(shown) if one.is_beyond == is_beyond]
        if own:
            share = np.array([one.share for _, one in own])
            ends = np.array([[one.low, one.high] for _, one in own]).T
            bars = np.abs(ends - share)
            places = [place for place, _ in own]
            look: dict[str, Any] = {"fmt": marker, "ms": 4.5, "color": colour, "elinewidth": 1.0}
            axes.errorbar(share, places, xerr=bars, label=label, **look)
    axes.set_yticks(range(len(shown)), map(_named, shown), fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(min(0.7, *(one.low for one in shown)) - 0.02, 1.02)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    usual = found.level if target.usual is None else target.usual
    outside = sum(one.is_outside(usual) for one in target.slices)
    facts: dict[str, Any] = {"target": target, "found": found, "shown": shown, "outside": outside}
    several = len(found.targets) > 1
    return draw.drawn(
        axes,
        "slices",
        suffix=suffix,
        columns=3,
        several=several,
        beyond=beyond,
        usual=usual,
        **facts,
    )


def _named(one: SliceCoverage) -> str:
    label = squeezed(one.label, 22)
    return f"{squeezed(one.column, 32 - len(label))}: {label} ({one.samples:,})"


@draw.house_style()
def effects(found: DistributionResult, target: TargetDistribution, suffix: str) -> draw.Drawing:
    """A panel for each of the columns that change the standard deviation most."""
    shown = target.effects[:_COLUMNS]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    top, grid = draw.grid_of_panels(rows, columns, 1.0 + 1.35 * rows)
    panels = [axes for row in grid for axes in row]
    values = [x for one in shown for x in (*one.lower, *one.upper, *one.std) if x is not None]
    edge = 0.05 * (max(values) - min(values)) or 0.5
    for axes, effect in zip(panels, shown, strict=False):
        _effect(axes, effect)
        axes.set_ylim(max(0.0, min(values) - edge), max(values) + edge)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set_ylabel("std")
    handles = [draw.swatch("average over rows", draw.BLUE, "-", "o")]
    handles.append(draw.swatch("middle half of the rows", draw.BLUE, "-"))
    handles[-1].set(alpha=0.3, linewidth=6)
    rest = [one for one in target.effects[_COLUMNS:] if one.change > 0]
    said = [f"{one.column} {percent(one.change, decimals=0)}" for one in shown]
    return draw.drawn(
        top,
        "effects",
        suffix=suffix,
        handles=handles,
        target=target,
        several=len(found.targets) > 1,
        found=found,
        shown=shown,
        rest=rest,
        said=said,
    )


def _effect(axes: Axes, effect: ColumnEffect) -> None:
    places = np.arange(len(effect.labels))
    std, lower, upper = (
        np.array(each, dtype=float) for each in (effect.std, effect.lower, effect.upper)
    )
    order = places if effect.is_ordered else np.argsort(std, kind="stable")
    std, lower, upper = std[order], lower[order], upper[order]
    if effect.is_ordered:
        axes.fill_between(places, lower, upper, color=draw.BLUE, alpha=0.2, lw=0)
        axes.plot(places, std, "o-", color=draw.BLUE, ms=3.5)
    else:
        axes.vlines(places, lower, upper, color=draw.BLUE, alpha=0.3, lw=6)
        axes.plot(places, std, "o", color=draw.BLUE, ms=3.5)
    # The middle one of texts has no room of its own if there are more.
    middle = {len(places) // 2} if effect.is_ordered or len(places) == 3 else set()
    marked = sorted({0, len(places) - 1} | middle)
    names = [squeezed(effect.labels[order[place]], 30 // len(marked)) for place in marked]
    axes.set_xticks(marked, names, fontsize=7.5)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(ticker.MaxNLocator(3))
    draw.name_panel(axes, short(effect.column, 28))


@draw.house_style()
def parts(targets: tuple[TargetDistribution, ...]) -> draw.Drawing:
    """Shares of the parts of the variance, and what each is worth."""
    rows = [(target, name) for target in targets for name in target.shares]
    top, ((left, right),) = draw.grid_of_panels(1, 2, 1.4 + 0.3 * len(rows))
    colours = [_LOOKS[name] for _, name in rows]
    shares = [target.shares[name] or 0.0 for target, name in rows]
    gains = [target.gains.get(name) or 0.0 for target, name in rows]
    several = len(targets) > 1
    names = [f"{short(target.name, 14)}: {name}" if several else name for target, name in rows]
    for axes, values, title in (
        (left, shares, "share of the variance"),
        (right, gains, "gain (nats a row)"),
    ):
        axes.barh(range(len(rows)), values, height=0.65, color=colours)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(title)
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=draw.SLATE, lw=0.9)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.set_xlim(0, 1)
    draw.percentages(left, "x")
    right.set_yticks([])
    known = dict.fromkeys(name for _, name in rows)
    handles = [draw.swatch(_PARTS[name], _LOOKS[name], "", "s") for name in known]
    said = [
        f"{label} {percent(share)}, {number(gain)} nats"
        for label, share, gain in zip(names, shares, gains, strict=True)
    ]
    return draw.drawn(top, "variance-parts", handles=handles, said=said, targets=targets)
