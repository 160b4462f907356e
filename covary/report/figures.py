"""Figures of a run's training and evaluation: Results -> Drawing. figures.toml has their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from covary.report import drawing as draw
from covary.report.reading import Part, Results
from covary.report.refusing import Curve
from covary.report.words import number, percent, short
from covary.runs.predictions import Array
from covary.uncertainty import metrics
from covary.uncertainty.slices import errors_by_std

LEVELS = (0.5, 0.9, 0.95)
_HISTORIES = ("loss", "accuracy", "mae", "entropy")
# columns of the history -> label, colour and dash
_COLUMNS = {
    "{}": ("training", draw.SLATE, "--"),
    "validation_{}": ("validation", draw.BLUE, "-"),
    "{}_right": ("right (validation)", draw.BLUE, "-"),
    "{}_wrong": ("wrong (validation)", draw.ORANGE, "--"),
}
# The scores that have a line of their own where all are drawn together.
_LINES = {
    "calibrated": (draw.BLUE, "-"),
    "stddev": (draw.BLUE, "-"),
    "entropy": (draw.ORANGE, "--"),
    "max_softmax": (draw.PURPLE, "--"),
    "fitted": (draw.TEAL, "-."),
}


class SampleGroup(NamedTuple):
    """Samples of a part that are shown in one colour."""

    label: str
    look: draw.Look
    part: Part
    chosen: Array  # (n,) bool

    def of(self, values: Array) -> Array:
        """The finite ones of the group's values."""
        own = np.asarray(values[self.chosen], dtype=float)
        return np.asarray(own[np.isfinite(own)])


def groups(results: Results) -> list[SampleGroup]:
    """Right and wrong test inputs (all of them, of a regression), and each OOD set."""
    test = results.test
    found = [SampleGroup("test", draw.TEST, test, np.ones(len(test), dtype=bool))]
    if results.is_classification:
        found = [SampleGroup("right", draw.TEST, test, test.right)]
        found += [SampleGroup("wrong", draw.WRONG, test, ~test.right)]
    for i, part in enumerate(results.ood):
        look = draw.OOD[i % len(draw.OOD)]
        found.append(SampleGroup(short(part.name), look, part, np.ones(len(part), dtype=bool)))
    return [group for group in found if group.chosen.any()]


def histories(results: Results) -> list[draw.Drawing]:
    """Loss, accuracy or error, and entropy through training, as far as they were recorded."""
    recorded = {key for row in results.run.history for key in row.shown}
    return [
        _history(results, name)
        for name in _HISTORIES
        if any(column.format(name) in recorded for column in _COLUMNS)
    ]


@draw.house_style()
def _history(results: Results, name: str) -> draw.Drawing:
    (axes,) = draw.canvas()
    ends, history = [], results.run.history
    for column, (label, colour, dash) in _COLUMNS.items():
        key = column.format(name)
        points = {row.epoch: row.shown[key] for row in history if key in row.shown}
        if points:
            epochs, values = list(points), list(points.values())
            marker = "o" if len(points) < 12 else ""
            axes.plot(epochs, values, dash, color=colour, label=label, marker=marker, ms=4)
            ends.append(f"{label} {number(values[0])} to {number(values[-1])}")
    first, last = history[0].epoch, history[-1].epoch
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if last - first < 3:  # where the locator would put fractions of an epoch
        axes.set(xticks=range(first, last + 1), xlim=(first - 0.5, last + 0.5))
    if name == "accuracy":
        draw.percentages(axes, "y")
    return draw.drawn(axes, f"training-{name}", first=first, last=last, ends=ends)


@draw.house_style()
def entropy_histogram(results: Results) -> draw.Drawing:
    """Densities of the output entropy of each group."""
    (axes,) = draw.canvas()
    shown = groups(results)
    values = [group.of(group.part.entropy) for group in shown]
    means = _densities(axes, shown, values)
    lost = sum(int(group.chosen.sum()) for group in shown) - sum(map(len, values))
    return draw.drawn(axes, "entropy", columns=3, means=means, lost=lost)


@draw.house_style()
def probability_histogram(results: Results) -> draw.Drawing:
    """Densities of one minus the probability of the predicted class, on a logarithmic axis."""
    (axes,) = draw.canvas()
    shown, calibrated = groups(results), results.is_calibrated
    # Below 1e-12 the difference to 1 says nothing about the network.
    kinds = [[np.maximum(group.of(group.part.doubt), 1e-12) for group in shown]]
    if calibrated:
        after = [np.maximum(group.of(group.part.calibrated.doubt), 1e-12) for group in shown]
        kinds.insert(0, after)
    means = _densities(axes, shown, *kinds, log=True)
    return draw.drawn(axes, "max-softmax", columns=3, means=means, calibrated=calibrated)


@draw.house_style()
def stddev_histogram(results: Results, column: int) -> draw.Drawing:
    """Densities of a target's predicted standard deviation, of a regression."""
    (axes,) = draw.canvas()
    shown = groups(results)
    kinds = [[group.of(group.part.stddev[:, column]) for group in shown]]
    if results.is_calibrated:
        kinds.insert(0, [group.of(group.part.calibrated.stddev[:, column]) for group in shown])
    means = _densities(axes, shown, *kinds)
    return _of_target(axes, "stddev", results, column, columns=3, means=means)


def _of_target(
    axes: Axes, name: str, results: Results, column: int, columns: int = 2, **facts: Any
) -> draw.Drawing:
    """A figure of one target, which its name and title tell where there are several."""
    target, several = short(results.target_name(column)), results.targets > 1
    facts |= {"target": target, "named": f": {target}" if several else "", "results": results}
    suffix = f"-{column + 1}" if several else ""
    return draw.drawn(axes, name, suffix=suffix, columns=columns, **facts)


def _densities(
    axes: Axes, shown: Sequence[SampleGroup], *kinds: Sequence[Array], log: bool = False
) -> list[str]:
    """A histogram of each group's values, dotted those before calibration; gives the means."""
    pooled = np.concatenate([values for kind in kinds for values in kind])
    bins = int(np.clip(2 * np.sqrt(len(pooled) / len(kinds)), 12, 48))
    edges = np.histogram_bin_edges(np.log10(pooled) if log else pooled, bins=bins)
    places = 10**edges if log else edges
    if log:
        draw.log_axis(axes, subs=(1.0,) if edges[-1] - edges[0] > 3 else (1.0, 2.0, 5.0))
    means = []
    for group, own, *before in zip(shown, *kinds, strict=True):
        colour, dash, _ = group.look
        axes.plot([], [], dash, color=colour, label=f"{group.label} ({number(len(own))})")
        for values, line, width in zip([own, *before], (dash, ":"), (1.5, 1.0), strict=False):
            counts, _ = np.histogram(np.log10(values) if log else values, edges)
            heights = counts / max(1, len(values)) / np.diff(edges)
            axes.stairs(heights, places, color=colour, ls=line, lw=width)
            if values is own and len(own):
                axes.stairs(heights, places, fill=True, color=colour, alpha=0.16, lw=0)
                means.append(f"{group.label} {number(float(own.mean()))}")
    axes.set_ylim(bottom=0)
    return means


@draw.house_style()
def entropy_by_layer(results: Results) -> draw.Drawing:
    """Quantiles of each layer's entropy, on a scale on which layers can be compared."""
    shown = groups(results)
    axes = _layers(results, len(shown))
    medians = {}
    for layer in range(len(results.evaluation.layers)):
        own = [group.of(group.part.layer_entropy[:, layer]) for group in shown]
        for i, (group, values) in enumerate(zip(shown, own, strict=True)):
            if len(values) and len(own[0]):
                scaled = (values - own[0].mean()) / (own[0].std() or 1.0)
                low, lower, median, upper, high = np.percentile(scaled, [5, 25, 50, 75, 95])
                y, (colour, _, marker) = layer - 0.4 + 0.8 * (i + 0.5) / len(shown), group.look
                axes.hlines(y, low, high, color=colour, lw=1.1)
                axes.hlines(y, lower, upper, color=colour, lw=5.5, alpha=0.45)
                axes.plot(median, y, marker, color=colour, ms=4.2)
                medians[group.label] = float(median)
    axes.grid(visible=False, axis="y")
    handles = [draw.swatch(group.label, group.look[0], "-", group.look[2]) for group in shown]
    facts: dict[str, Any] = {"shown": shown, "own": own, "results": results, "medians": medians}
    return draw.drawn(axes, "entropy-by-layer", columns=3, handles=handles, **facts)


def _layers(results: Results, groups: int) -> Axes:
    """Axes with a row for each layer, high enough for so many groups."""
    layers = results.evaluation.layers
    (axes,) = draw.canvas(1.4 + len(layers) * max(0.42, 0.2 * groups))
    axes.set_yticks(range(len(layers)), layers)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    return axes


@draw.house_style()
def separability_by_layer(results: Results) -> draw.Drawing:
    """How far apart wrong and right, and OOD and right, are in each layer."""
    axes = _layers(results, len(groups(results)))
    looks = {"test": draw.WRONG}
    looks |= {part.name: draw.OOD[i % len(draw.OOD)] for i, part in enumerate(results.ood)}
    reference = "right" if results.is_classification else "test"
    axes.axvline(0, color=draw.SLATE, lw=0.9)
    said = []
    for name, values in results.evaluation.separability.items():
        known = [(value, row) for row, value in enumerate(values) if value is not None]
        if name in looks and known:
            colour, dash, marker = looks[name]
            label = f"{'wrong' if name == 'test' else short(name)} against {reference}"
            x, y = zip(*known, strict=True)
            axes.plot(x, y, dash, color=colour, marker=marker, ms=5, label=label)
            said.append(f"{label} {number(x)}")
    return draw.drawn(axes, "separability-by-layer", said=said)


@draw.house_style()
def risk_coverage(results: Results, curves: Sequence[Curve]) -> draw.Drawing:
    """Errors of the answered inputs against how many are answered, for each score of a target."""
    (axes,) = draw.canvas(3.6)
    classify = results.is_classification
    said, others = [], "other scores"
    for curve in curves:
        if curve.score in _LINES:
            colour, dash = _LINES[curve.score]
            axes.plot(curve.coverage, curve.risk, dash, color=colour, label=curve.label, zorder=3)
            most = int(np.searchsorted(curve.coverage, 0.8))
            said.append(f"{number(float(curve.risk[most]))} by {curve.label}")
        else:
            axes.plot(curve.coverage, curve.risk, color=draw.SLATE, lw=0.6, alpha=0.6, label=others)
            others = "_"  # one entry of the legend is enough
    total = float(curves[0].risk[-1])
    if classify:
        share = np.linspace(0.01, 1, 200)
        best = np.maximum(0.0, 1 - (1 - total) / share)
        axes.plot(share, best, ":", color=draw.SLATE, label="best possible")
    axes.axhline(total, color=draw.SLATE, lw=1.0, ls="-.", label="refusing at random")
    draw.percentages(axes, "xy" if classify else "x")
    # The first few inputs make a rate of 0 or 100%; they must not set the scale.
    settled = [curve.risk[curve.coverage > 0.05].max(initial=0.0) for curve in curves]
    axes.set(xlim=(0, 1), ylim=(0, 1.15 * max(total, *settled) or 0.05))
    target = curves[0].target
    return _of_target(axes, "risk-coverage", results, target, total=total, said=said)


@draw.house_style()
def reliability(results: Results) -> draw.Drawing:
    """Accuracy against the predicted probability in bins, with the number of inputs of each."""
    raw, shown = results.test, results.test.calibrated
    axes, below = draw.canvas(4.3, rows=(3, 1))
    edges, confidence, accuracy, count = metrics.calibration_bins(shown.confidence, shown.right)
    used = count > 0
    low, high = _wilson(accuracy[used], count[used])
    axes.plot([0, 1], [0, 1], ":", color=draw.SLATE, label="perfect calibration")
    errors = results.with_and_without("ece")
    ece, before = ("undefined" if error is None else f"{error:.3f}" for error in errors)
    if results.is_calibrated:
        _, x, y, own = metrics.calibration_bins(raw.confidence, raw.right)
        label = f"before calibration (ECE {before})"
        axes.plot(x[own > 0], y[own > 0], "D--", color=draw.SLATE, lw=1.0, ms=3, label=label)
    bars, label = (accuracy[used] - low, high - accuracy[used]), "accuracy (95% interval)"
    draw.points(axes, confidence[used], accuracy[used], bars, fmt="o-", ms=4.5, label=label)
    what = "calibrated probability" if results.is_calibrated else "max-softmax"
    below.stairs(count, edges, fill=True, color=draw.BLUE, alpha=0.35)
    draw.log_axis(below, "y", subs=(1.0,))
    below.set(ylim=(0.7, 2.0 * count.max()), xlim=(0, 1.01), ylabel="inputs")
    below.set_xlabel(f"{what} of the predicted class")
    axes.set_ylim(0, 1.02)
    draw.percentages(axes)
    draw.percentages(below, "x")
    facts: dict[str, Any] = {"shown": shown, "what": what, "count": count, "ece": ece}
    return draw.drawn(axes, "reliability", results=results, **facts)


@draw.house_style()
def accuracy_by_tenth(results: Results) -> draw.Drawing:
    """Accuracy of ten groups of equal size, from the most certain to the least, for each score."""
    test = results.test
    tenths = range(1, min(10, len(test)) + 1)
    (axes,) = draw.canvas(4.3)
    rows = [("entropy", test.entropy, draw.ORANGE, "o-")]
    rows += [("max-softmax", test.doubt, draw.PURPLE, "D--")]
    if results.is_calibrated:
        rows.insert(0, ("calibrated probability", test.calibrated.doubt, draw.BLUE, "s-"))
    said = []
    for label, score, colour, style in rows:
        split = np.array_split(np.argsort(score, kind="stable"), len(tenths))
        shares = [float(test.right[own].mean()) for own in split]
        axes.plot(tenths, shares, style, ms=5, color=colour, label=f"by {label}")
        said.append(f"by {label} from {percent(shares[0])} to {percent(shares[-1])}")
    axes.axhline(test.right.mean(), color=draw.SLATE, lw=1.0, ls="-.", label="all test inputs")
    axes.set(xticks=tenths, ylim=(None, 1.0 + 0.02 * (1.0 - axes.get_ylim()[0])))
    draw.percentages(axes, "y")
    return draw.drawn(axes, "accuracy-by-certainty", said=said)


def _wilson(share: Array, count: Array, z: float = 1.96) -> tuple[Array, Array]:
    """The score interval of a share, which stays within 0 and 1 for few inputs."""
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    # Round-off puts an end on the wrong side of a share of exactly 0 or 1.
    return np.minimum(centre - half, share), np.maximum(centre + half, share)


@draw.house_style()
def predicted_against_true(results: Results, column: int) -> draw.Drawing:
    """Predictions with 90% intervals; what falls outside is marked."""
    test = results.test.calibrated
    assert test.target is not None
    chosen = np.sort(draw.some(len(test), 200))
    true, mean = test.target[chosen, column], test.mean[chosen, column].astype(float)
    low, high = (end[chosen, column].astype(float) for end in test.interval)
    # The mean of a skewed distribution may lie beyond the end of its interval.
    bar = np.maximum(0.0, [mean - low, high - mean])
    inside = test.holds(0.9)[chosen, column]
    (axes,) = draw.canvas(3.7)
    draw.identity(axes, true, mean)
    for own, label, colour, marker in (
        (inside, "90% interval holds it", draw.BLUE, "o"),
        (~inside, "does not", draw.ORANGE, "D"),
    ):
        named = f"{label} ({int(own.sum())})"
        draw.points(
            axes, true[own], mean[own], bar[:, own], colour, fmt=marker, ms=3.2, label=named
        )
    rmse = results.rmse(column)
    return _of_target(axes, "predictions", results, column, rmse=rmse, inside=inside)


@draw.house_style()
def interval_coverage(results: Results) -> draw.Drawing:
    """How many intervals hold the truth, against how many should."""
    (axes,) = draw.canvas(3.7)
    axes.plot([0, 1], [0, 1], ":", color=draw.SLATE, label="ideal")
    levels = np.linspace(0.02, 0.98, 49)

    def hits(part: Part, column: int, levels: Sequence[float] | Array) -> list[float]:
        return [float(part.holds(level)[:, column].mean()) for level in levels]

    said = []
    for column in range(results.targets):
        colour, dash = draw.COLOURS[column % 6], ("-", "--", "-.", ":")[column % 4]
        name = "distributions" if results.is_calibrated else "intervals, not calibrated"
        if results.targets > 1:
            name = short(results.target_name(column))
        if results.is_calibrated:
            raw, label = hits(results.test, column, levels), "_" if column else "network alone"
            axes.plot(levels, raw, ":", color=colour, lw=1.0, label=label)
        shown = results.test.calibrated
        axes.plot(levels, hits(shown, column, levels), dash, color=colour, label=name)
        marked = hits(shown, column, LEVELS)
        axes.plot(LEVELS, marked, "o", color=colour, ms=5)
        pairs = zip(marked, LEVELS, strict=True)
        listed = ", ".join(f"{percent(share)} at {level:.0%}" for share, level in pairs)
        said.append(f"{name}: {listed}" if results.targets > 1 else listed)
    draw.percentages(axes)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    return draw.drawn(axes, "coverage", columns=3, said=said)


@draw.house_style()
def residuals(results: Results, column: int) -> draw.Drawing:
    """True values as they should have a standard Gaussian, against one."""
    scaled = results.test.calibrated.scaled[:, column]
    scaled = scaled[~np.isnan(scaled)]
    edges = np.linspace(-5, 5, 41)
    heights, _ = np.histogram(np.clip(scaled, -5, 5), edges)
    density = heights / max(len(scaled), 1) / np.diff(edges)
    (axes,) = draw.canvas()
    axes.stairs(density, edges, fill=True, color=draw.BLUE, alpha=0.3)
    axes.stairs(density, edges, color=draw.BLUE, lw=1.2, label=f"test ({number(len(scaled))})")
    grid = np.linspace(-5, 5, 201)
    gaussian = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    axes.plot(grid, gaussian, "--", color=draw.ORANGE, label="standard Gaussian")
    inner = scaled[np.isfinite(scaled)]
    spread = "none finite, as no deviation is predicted"
    if len(inner):
        deviation = number(float(inner.std()))
        spread = f"mean {number(float(inner.mean()))}, standard deviation {deviation}"
    outside = int((np.abs(scaled) > 5).sum())
    return _of_target(axes, "residuals", results, column, spread=spread, outside=outside)


@draw.house_style()
def spread_against_error(results: Results, column: int) -> draw.Drawing:
    """RMSE of inputs with like predicted standard deviations: the reliability of a regression."""
    part, label = results.test.calibrated, "groups of like inputs (90%)"
    groups = min(10, max(1, len(part) // 10))
    found = errors_by_std(part.stddev[:, column], part.error[:, column], groups)
    right, top = (1.08 * float(each.max()) or 1.0 for each in (found.std, found.high))
    (axes,) = draw.canvas(3.7)
    axes.plot([0, right + top], [0, right + top], ":", color=draw.SLATE, label="ideal", zorder=0)
    bars = np.maximum(0.0, (found.rmse - found.low, found.high - found.rmse))
    look: dict[str, Any] = {"fmt": "o", "ms": 4.5, "elinewidth": 1.0, "label": label}
    axes.errorbar(found.std, found.rmse, bars, color=draw.BLUE, **look)
    axes.set(xlim=(0, right), ylim=(0, top))
    return _of_target(axes, "spread", results, column, found=found)
