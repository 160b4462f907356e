"""Figures of how close cheaper covariances come to the exact one: Fidelity -> Drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from covary.report.drawing import (
    AMBER,
    BLUE,
    FOREIGN,
    PURPLE,
    SLATE,
    Drawing,
    canvas,
    head,
    lay_out,
    styled,
    swatch,
)
from covary.report.words import amount, number, rank, short
from covary.runs.predictions import Array
from covary.runs.results import Fidelity, Representation

SHOWN = 400  # points of one colour; more hide each other
TICKS = (-1.0, 0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 1.0)  # of rank correlations
_TRACKED = "tracked, "  # before an exact_width in the name of a representation


def drawings(fidelity: Fidelity) -> list[Drawing]:
    """Entropies of each part, then what they cost, as far as they were stored."""
    exact = fidelity.exact
    found = []
    if exact is not None:
        for i, part in enumerate(fidelity.parts):
            truth = fidelity.entropy(part, exact)
            others = _with_entropies(fidelity, part)
            if truth is not None and others:
                suffix = f"-{i + 1}" if len(fidelity.parts) > 1 else ""
                name = f"fidelity-entropy{suffix}"
                found.append(entropies(part, truth, others, name=name))
    if any(_points(fidelity, part) for part in fidelity.parts):
        found.append(cost(fidelity))
    return found


def _with_entropies(fidelity: Fidelity, part: str) -> list[tuple[Representation, Array]]:
    """The approximations that give each input a covariance of its own, the best known last."""
    shown = [one for one in fidelity.representations if one.covariance == "diagonal"]
    shown += [
        one
        for one in fidelity.representations
        if one.name == fidelity.chosen and one.covariance == "tracked"
    ]
    stored = [(one, fidelity.entropy(part, one)) for one in shown]
    return [(one, entropy) for one, entropy in stored if entropy is not None]


@styled
def entropies(
    part: str, exact: Array, others: Sequence[tuple[Representation, Array]], *, name: str
) -> Drawing:
    """Entropies of one part's inputs by approximate covariances, against exact ones."""
    figure, (axes,) = canvas(3.7)
    finite = np.isfinite(np.stack([exact, *(entropy for _, entropy in others)])).all(axis=0)
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(finite))[:SHOWN]
    handles, said = [], []
    for representation, entropy in others:
        tracked = representation.covariance == "tracked"
        colour, marker = (PURPLE, "o") if tracked else (AMBER, "D")
        axes.plot(exact[chosen], entropy[chosen], marker, ms=3.0, mew=0, alpha=0.6, color=colour)
        agreement = rank(representation.of(part, "rank"))
        label = f"{representation.name}: rank correlation {agreement}"
        handles.append(swatch(label, colour, "", marker))
        said.append(f"{representation.name} {agreement}")
    if len(chosen):
        ends = [exact[chosen].min(), exact[chosen].max()]
        axes.plot(ends, ends, ":", color=SLATE)
    axes.set_xlabel("exact entropy (nats)")
    axes.set_ylabel("approximate entropy (nats)")
    head(axes, f"Entropy against exact: {short(part)}", columns=1, handles=handles[::-1])
    alt = (
        f"Entropies of {number(len(chosen))} inputs ({part}) by cheaper covariances against exact "
        f"ones. Rank correlations: {'; '.join(said)}."
    )
    counted = (
        f"{number(len(chosen))} of {number(len(exact))}" if len(chosen) < len(exact) else "All"
    )
    caption = (
        f"{counted} inputs. On the dotted line an entropy is exact; a narrow band that rises "
        "beside it still orders inputs alike. Rank correlations (Spearman) are of all inputs."
    )
    lost = int((~finite).sum())
    if lost:
        caption += f" {number(lost)} inputs without a finite entropy are left out."
    return Drawing(name, alt, caption, figure)


Point = tuple[Representation, float, float]


def _points(fidelity: Fidelity, part: str) -> list[Point]:
    """Representations with time and rank correlation, as far as both are defined."""
    found = [(one, one.time_over_plain, one.of(part, "rank")) for one in fidelity.representations]
    return [
        (one, time, agreement)
        for one, time, agreement in found
        if time is not None and agreement is not None
    ]


@styled
def cost(fidelity: Fidelity) -> Drawing:
    """Rank correlation of entropies against the time that they take."""
    figure, (axes,) = canvas(3.7)
    measured = {part: points for part in fidelity.parts if (points := _points(fidelity, part))}
    said = []
    for i, (part, points) in enumerate(measured.items()):
        # Foreign sets are rings around the test set's dots: neither hides the other.
        colour, marker = ((BLUE, "o"), *zip(FOREIGN, "s^vD", strict=True))[i % 5]
        axes.plot(
            [time for _, time, _ in points],
            [_height(agreement) for *_, agreement in points],
            marker,
            ms=8.5 if i else 4.5,
            mew=1.3,
            fillstyle="none" if i else "full",
            color=colour,
            label=short(part),
        )
        listed = (f"{one.name} {rank(found)} at {amount(time)}" for one, time, found in points)
        said.append(f"{part}: {', '.join(listed)}")
    pooled = [point for points in measured.values() for point in points]
    _set_scales(axes, pooled)
    head(axes, "What agreement costs", columns=3)
    _label_columns(figure, axes, pooled)
    alt = (
        "Rank correlation of entropies with exact ones, and time in times of the plain network: "
        f"{'; '.join(said)}."
    )
    caption = (
        f"Whether entropies order inputs alike, against the time of a pass of "
        f"{number(fidelity.batch)}: the best place is at the top left. The vertical axis is "
        "stretched towards 1."
    )
    shown = {one.name for one, *_ in pooled}
    if any(name.startswith(_TRACKED) for name in shown):
        caption += " Points with an exact_width are tracked, too."
    left_out = [one.name for one in fidelity.representations if one.name not in shown]
    if left_out:
        caption += f" Not shown, as nothing is ranked: {', '.join(left_out)}."
    return Drawing("fidelity-cost", alt, caption, figure)


def _set_scales(axes: Axes, points: Sequence[Point]) -> None:
    axes.set_xscale("log")
    times = [time for _, time, _ in points]
    axes.set_xlim(min(1.0, *times) / 1.3, 1.7 * max(times))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time, times that of the plain network (logarithmic)")
    low = min(_height(agreement) for *_, agreement in points)
    high = max(_height(agreement) for *_, agreement in points)
    shown = [tick for tick in TICKS if low - 0.3 <= _height(tick) <= high + 0.3]
    labels = [f"{tick:g}".replace("-", "\N{MINUS SIGN}") for tick in shown]
    axes.set_yticks([_height(tick) for tick in shown], labels)
    axes.set_ylim(low - 0.4, high + 0.35)
    axes.set_ylabel("rank correlation with exact entropies")


def _height(agreement: float) -> float:
    """Where a rank correlation is drawn: 0.9, 0.99, 0.999 and so on are equally far apart."""
    return -math.log10(max(1 - agreement, 1e-5))


def _label_columns(figure: Figure, axes: Axes, points: Sequence[Point]) -> None:
    """Write each representation's name beside its points, which are above each other."""
    columns: dict[str, list[tuple[float, float]]] = {}
    for one, time, agreement in points:
        columns.setdefault(one.name, []).append((time, _height(agreement)))
    for places in columns.values():
        axes.plot(*zip(*places, strict=True), color=SLATE, lw=0.8, zorder=1)
    lay_out(figure)
    marks = {name: _in_points(axes, places) for name, places in columns.items()}
    taken = [_around(column) for column in marks.values()]
    for name, column in marks.items():
        label = axes.annotate(
            name.removeprefix(_TRACKED),
            columns[name][0],
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8.0,
        )
        label.set_in_layout(False)  # or the axes would shrink, and leave the label's place
        offset, box = _free_place(axes, label, column[0], taken)
        label.set_position(offset)
        taken.append(box)


def _in_points(axes: Axes, places: Sequence[tuple[float, float]]) -> Array:
    """(n, 2) where data are drawn, in points of 1/72 inch."""
    return np.asarray(axes.transData.transform(places) * 72 / axes.figure.dpi)


def _around(column: Array, reach: float = 6.5) -> Bbox:
    """What the marks of one column take up."""
    return Bbox([column.min(axis=0) - reach, column.max(axis=0) + reach])


def _free_place(
    axes: Axes, label: Annotation, mark: Array, taken: Sequence[Bbox]
) -> tuple[tuple[float, float], Bbox]:
    """The nearest place for a label, as offset from its mark, where it covers least."""
    scale = 72 / axes.figure.dpi
    extent = label.get_window_extent()
    half = np.array([extent.width, extent.height]) * scale / 2
    room = Bbox(axes.bbox.get_points() * scale)
    best: tuple[float, tuple[float, float], Bbox] | None = None
    for gap in (8.0, 12.0, 17.0, 24.0):
        for side in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1)):
            offset = np.array(side) * (half + gap)
            box = Bbox([mark + offset - half, mark + offset + half])
            covered = sum(_overlap(box, other) for other in taken)
            covered += 4 * half[0] * half[1] - _overlap(box, room)
            if best is None or covered < best[0] - 1e-6:
                best = covered, (float(offset[0]), float(offset[1])), box
    assert best is not None
    return best[1], best[2]


def _overlap(one: Bbox, other: Bbox) -> float:
    """Area that two boxes share."""
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else float(shared.width * shared.height)
