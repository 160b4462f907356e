"""Figures that both tasks have, and those of a classification: Results -> Drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from covary.report.curves import Curve
from covary.report.drawing import (
    BLUE,
    DASHES,
    FOREIGN,
    ORANGE,
    PURPLE,
    SLATE,
    TEAL,
    Drawing,
    canvas,
    head,
    styled,
    swatch,
)
from covary.report.reading import Part, Results
from covary.report.words import number, percent, short
from covary.runs.predictions import Array
from covary.uncertainty import metrics

# Entropy, max-softmax and the fitted score, wherever they are drawn together.
_SCORE_LINES = ((BLUE, "-"), (PURPLE, "--"), (TEAL, "-."))


@dataclass(frozen=True, eq=False)
class Group:
    """Samples of a part that are shown in one colour."""

    label: str
    colour: str
    dash: str
    part: Part
    chosen: Array  # (n,) bool

    def of(self, values: Array) -> Array:
        """The finite ones of the group's values."""
        own = np.asarray(values[self.chosen], dtype=float)
        return np.asarray(own[np.isfinite(own)])


def groups(results: Results) -> list[Group]:
    """Right, wrong and each foreign set; of a regression, the test set and each foreign set."""
    test = results.test
    found = []
    if results.is_classification:
        found.append(Group("right", BLUE, "-", test, test.right))
        found.append(Group("wrong", ORANGE, "--", test, ~test.right))
    else:
        found.append(Group("test", BLUE, "-", test, np.ones(len(test), dtype=bool)))
    for i, part in enumerate(results.foreign):
        colour, dash = FOREIGN[i % len(FOREIGN)], DASHES[(i + 2) % len(DASHES)]
        found.append(Group(short(part.name), colour, dash, part, np.ones(len(part), dtype=bool)))
    return [group for group in found if group.chosen.any()]


@dataclass(frozen=True)
class Line:
    """One column of the history, and how it is drawn."""

    key: str
    label: str
    colour: str
    dash: str


def histories(results: Results) -> list[Drawing]:
    """Loss, accuracy or error, and entropy through training, as far as they were recorded."""
    score = "accuracy" if results.is_classification else "mae"
    title, label = ("Accuracy", "accuracy")
    if not results.is_classification:
        title, label = ("Mean absolute error", "error (units of the target)")
    entropies = [
        Line("entropy_right", "right (validation)", BLUE, "-"),
        Line("entropy_wrong", "wrong (validation)", ORANGE, "--"),
    ]
    wanted = [
        ("loss", "Loss", "loss", _training_and_validation("loss")),
        (score, title, label, _training_and_validation(score)),
        ("entropy", "Entropy through training", "mean entropy (nats)", entropies),
    ]
    return [
        history(results, name=f"training-{name}", title=title, label=label, lines=lines)
        for name, title, label, lines in wanted
        if any(row.get(line.key) is not None for row in results.history for line in lines)
    ]


def _training_and_validation(key: str) -> list[Line]:
    return [
        Line(key, "training", SLATE, "--"),
        Line(f"validation_{key}", "validation", BLUE, "-"),
    ]


@styled
def history(
    results: Results, *, name: str, title: str, label: str, lines: Sequence[Line]
) -> Drawing:
    """Quantities of each epoch."""
    figure, (axes,) = canvas()
    ends = []
    for line in lines:
        rows = [row for row in results.history if row.get(line.key) is not None]
        if rows:
            epochs = [int(row["epoch"] or 0) for row in rows]
            values = [float(row[line.key] or 0.0) for row in rows]
            marker = "o" if len(rows) < 12 else ""
            (drawn,) = axes.plot(epochs, values, line.dash, color=line.colour, label=line.label)
            drawn.set(marker=marker, markersize=4)
            ends.append(f"{line.label} {number(values[0])} to {number(values[-1])}")
    first, last = (int(results.history[i]["epoch"] or 0) for i in (0, -1))
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if last - first < 3:  # where the locator would put fractions of an epoch
        axes.set_xticks(range(first, last + 1))
        axes.set_xlim(first - 0.5, last + 0.5)
    if label == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    head(axes, title)
    alt = f"{title}, epochs {first} to {last}: {'; '.join(ends)}."
    return Drawing(name, alt, "", figure)


@styled
def entropy_histogram(results: Results) -> Drawing:
    """Densities of the output entropy of each group."""
    figure, (axes,) = canvas()
    shown = groups(results)
    values = [group.of(group.part.entropy) for group in shown]
    said = _densities(axes, shown, values)
    axes.set_xlabel("entropy of the output covariance (nats)")
    head(axes, "Entropy", columns=3)
    alt = f"Histogram of the output entropy. Means: {'; '.join(said)}."
    lost = sum(int(group.chosen.sum()) for group in shown) - sum(map(len, values))
    caption = ""
    if len(shown) > 1:
        caption = "Each histogram has area 1, so that groups of different size can be compared."
    if lost:
        caption += f" {number(lost)} inputs without a finite entropy are left out."
    return Drawing("entropy", alt, caption, figure)


@styled
def softmax_histogram(results: Results) -> Drawing:
    """Densities of one minus max-softmax of each group, on a logarithmic axis."""
    figure, (axes,) = canvas()
    shown = groups(results)
    # Below this the difference to 1 says nothing about the network.
    values = [np.log10(np.maximum(group.of(group.part.doubt), 1e-12)) for group in shown]
    _densities(axes, shown, values)
    axes.set_xlabel("1 \N{MINUS SIGN} max-softmax (logarithmic)")
    exponents = _decades(*axes.get_xlim())
    axes.set_xticks(exponents, [_power(exponent) for exponent in exponents])
    head(axes, "Max-softmax", columns=3)
    said = [
        f"{group.label} {number(float(np.median(group.of(group.part.confidence))))}"
        for group in shown
    ]
    alt = f"Histogram of one minus the largest probability. Median max-softmax: {'; '.join(said)}."
    caption = "The same inputs by the probability of the predicted class: certain ones are left."
    return Drawing("max-softmax", alt, caption, figure)


@styled
def stddev_histogram(results: Results, column: int) -> Drawing:
    """Densities of a target's predicted standard deviation, of a regression."""
    figure, (axes,) = canvas()
    shown = groups(results)
    said = _densities(axes, shown, [group.of(group.part.stddev[:, column]) for group in shown])
    name = short(results.target_name(column))
    axes.set_xlabel(f"predicted standard deviation of {name}")
    several = results.test.mean.shape[1] > 1
    title = "Standard deviation" + (f": {name}" if several else "")
    head(axes, title, columns=3)
    alt = f"Histogram of the predicted standard deviation. Means: {'; '.join(said)}."
    return Drawing(f"stddev{f'-{column + 1}' if several else ''}", alt, "", figure)


def _decades(low: float, high: float) -> list[float]:
    """Exponents of round numbers between two, about six of them."""
    whole = range(int(np.ceil(low)), int(np.floor(high)) + 1)
    if len(whole) >= 3:
        return [float(power) for power in whole[:: -(-len(whole) // 6)]]
    digits = np.log10([1, 2, 5])
    finer = [power + digit for power in range(int(np.floor(low)), 1) for digit in digits]
    return [float(exponent) for exponent in finer if low <= exponent <= high]


def _power(exponent: float) -> str:
    if exponent > -4:
        return f"{10.0**exponent:.4g}"
    return f"1e{exponent:.0f}".replace("-", "\N{MINUS SIGN}")


def _densities(axes: Axes, shown: list[Group], values: list[Array]) -> list[str]:
    pooled = np.concatenate(values)
    edges = np.histogram_bin_edges(pooled, bins=int(np.clip(2 * np.sqrt(len(pooled)), 12, 48)))
    said = []
    for group, own in zip(shown, values, strict=True):
        if not len(own):
            continue
        heights, _ = np.histogram(own, edges, density=True)
        axes.stairs(heights, edges, fill=True, color=group.colour, alpha=0.16, lw=0)
        axes.stairs(heights, edges, color=group.colour, ls=group.dash, lw=1.5)
        said.append(f"{group.label} {number(float(own.mean()))} ({number(len(own))} inputs)")
    axes.set_ylabel("density")
    axes.set_ylim(bottom=0)
    handles = [
        swatch(f"{group.label} ({number(len(own))})", group.colour, group.dash)
        for group, own in zip(shown, values, strict=True)
    ]
    for handle in handles:
        axes.add_line(handle)  # the legend is made of what the axes hold
    return said


@styled
def entropy_by_layer(results: Results) -> Drawing:
    """Quantiles of each layer's entropy, in units in which layers can be compared."""
    shown = groups(results)
    count = len(results.layers)
    step = 0.8 / len(shown)
    figure, (axes,) = canvas(1.4 + count * max(0.42, 0.2 * len(shown)))
    medians = []
    for layer in range(count):
        reference = shown[0].of(shown[0].part.layer_entropy[:, layer])
        if not len(reference):
            continue
        scale = reference.std() or 1.0
        for i, group in enumerate(shown):
            values = (group.of(group.part.layer_entropy[:, layer]) - reference.mean()) / scale
            if not len(values):
                continue
            low, lower, middle, upper, high = np.percentile(values, [5, 25, 50, 75, 95])
            y = layer - 0.4 + (i + 0.5) * step
            axes.hlines(y, low, high, color=group.colour, lw=1.1)
            axes.hlines(y, lower, upper, color=group.colour, lw=5.5, alpha=0.45)
            axes.plot(middle, y, "oDs^v"[i % 5], color=group.colour, ms=4.2)
            if layer == count - 1 and i:
                medians.append(f"{group.label} {number(float(middle))}")
    axes.set_yticks(range(count), results.layers)
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel(
        f"standard deviations from the mean of \N{LEFT SINGLE QUOTATION MARK}"
        f"{shown[0].label}\N{RIGHT SINGLE QUOTATION MARK}"
    )
    handles = [
        swatch(group.label, group.colour, "-", "oDs^v"[i % 5]) for i, group in enumerate(shown)
    ]
    head(axes, "Entropy by layer", columns=3, handles=handles)
    taken = [len(group.of(group.part.layer_entropy[:, -1])) for group in shown]
    counted = ", ".join(
        f"{number(own)} {group.label}" for own, group in zip(taken, shown, strict=True)
    )
    alt = (
        f"Entropy of {count} layers for {', '.join(group.label for group in shown)}. At the output "
        f"the medians are, in standard deviations of {shown[0].label}: "
        f"{'; '.join(medians) or number(0.0)}."
    )
    caption = (
        f"Median (mark), middle half (bar) and middle 90% (line) of {counted} inputs. Entropies of "
        "layers of different width cannot be compared, so each is measured in standard deviations "
        f"of its own {shown[0].label} inputs."
    )
    return Drawing("entropy-by-layer", alt, caption, figure)


@styled
def separability_by_layer(results: Results) -> Drawing:
    """How far apart wrong and right, and foreign and right, are in each layer."""
    count = len(results.layers)
    figure, (axes,) = canvas(1.4 + count * max(0.42, 0.2 * len(groups(results))))
    said = []
    colours = {"test": (ORANGE, "--", "D")} | {
        part.name: (FOREIGN[i % len(FOREIGN)], DASHES[(i + 2) % len(DASHES)], "s^v"[i % 3])
        for i, part in enumerate(results.foreign)
    }
    reference = "right" if results.is_classification else "test"
    axes.axvline(0, color=SLATE, lw=0.9)
    for name, values in results.separability.items():
        known = [(value, row) for row, value in enumerate(values) if value is not None]
        if name not in colours or not known:
            continue
        colour, dash, marker = colours[name]
        label = f"{'wrong' if name == 'test' else short(name)} against {reference}"
        axes.plot(*zip(*known, strict=True), dash, color=colour, marker=marker, ms=5, label=label)
        said.append(f"{label} {', '.join(number(float(value)) for value, _ in known)}")
    axes.set_yticks(range(count), results.layers)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlabel("separability (0: no difference)")
    head(axes, "Separability by layer", columns=2)
    alt = f"Separability of entropies, from the first layer to the output: {'; '.join(said)}."
    caption = (
        "Difference of the mean entropies over the root of the summed variances. Where "
        "uncertainty builds up through the network, it grows with depth."
    )
    return Drawing("separability-by-layer", alt, caption, figure)


@styled
def risk_coverage(results: Results, curves: list[Curve]) -> Drawing:
    """Error rate of the answered inputs against how many are answered, for each score."""
    figure, (axes,) = canvas(3.6)
    said = []
    wrong = float(curves[0].risk[-1])
    for curve, (colour, dash) in zip(curves, _SCORE_LINES, strict=False):
        axes.plot(curve.coverage, curve.risk, dash, color=colour, label=curve.label.lower())
        most = int(np.searchsorted(curve.coverage, 0.8))
        said.append(
            f"{percent(curve.risk[most], decimals=2)} by {curve.label.lower()} when "
            f"{percent(curve.coverage[most])} are answered"
        )
    best = np.maximum(0.0, 1 - (1 - wrong) / np.linspace(0.01, 1, 200))
    axes.plot(np.linspace(0.01, 1, 200), best, ":", color=SLATE, label="best possible")
    axes.axhline(wrong, color=SLATE, lw=1.0, ls="-.", label="refusing at random")
    axes.set_xlabel("inputs answered, the most certain first")
    axes.set_ylabel("wrong among the answered")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(0, 1)
    # The first few inputs make a rate of 0 or 100%; they must not set the scale.
    settled = [curve.risk[curve.coverage > 0.05].max(initial=0.0) for curve in curves]
    axes.set_ylim(0, 1.15 * max(wrong, *settled) or 0.05)
    head(axes, "Mistakes among the answered inputs")
    alt = f"Error rate {percent(wrong, decimals=2)} when all are answered; {'; '.join(said)}."
    return Drawing("risk-coverage", alt, "", figure)


@styled
def reliability(results: Results) -> Drawing:
    """Accuracy against max-softmax in bins, with the number of inputs of each."""
    test = results.test
    edges, confidence, accuracy, count = metrics.calibration_bins(test.confidence, test.right)
    used = count > 0
    low, high = _wilson(accuracy[used], count[used])
    figure, (axes, below) = canvas(4.3, rows=(3, 1))
    axes.plot([0, 1], [0, 1], ":", color=SLATE, label="perfect calibration")
    axes.errorbar(
        confidence[used],
        accuracy[used],
        yerr=(accuracy[used] - low, high - accuracy[used]),
        fmt="o-",
        ms=4.5,
        lw=1.4,
        elinewidth=0.9,
        color=BLUE,
        label="accuracy (95% interval)",
    )
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.02)
    below.stairs(count, edges, fill=True, color=BLUE, alpha=0.35)
    below.set_yscale("log")
    below.set_ylim(0.7, 2.0 * count.max())
    below.set_yticks([10.0**power for power in range(len(str(count.max())))])
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    below.set_ylabel("inputs")
    below.set_xlabel("max-softmax (probability of the predicted class)")
    below.set_xlim(0, 1.01)
    for each in (axes, below):
        each.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    ece = results.metrics.get("test", {}).get("ece")
    rounded = "undefined" if ece is None else f"{ece:.3f}"
    head(axes, f"Calibration of max-softmax (ECE {rounded})")
    gap = float((confidence[used] * count[used]).sum() - (accuracy[used] * count[used]).sum())
    leaning = "over" if gap > 0 else "under"
    alt = (
        f"Reliability diagram, expected calibration error {rounded}. Mean max-softmax "
        f"{percent(float(test.confidence.mean()))}, accuracy {percent(float(test.right.mean()))}: "
        f"{leaning}confident on average. {number(int(count[-1]))} of {number(len(test))} inputs "
        "are in the most confident bin."
    )
    caption = (
        "Points below the line are overconfident. Lower panel: how many inputs each point stands "
        "for, on a logarithmic scale."
    )
    return Drawing("reliability", alt, caption, figure)


@styled
def accuracy_by_tenth(results: Results) -> Drawing:
    """Accuracy of ten groups of equal size, from the most certain to the least, for each score."""
    test = results.test
    tenths = min(10, len(test))
    figure, (axes,) = canvas(4.3)
    said = []
    for label, score, colour, style in (
        ("entropy", test.entropy, BLUE, "o-"),
        ("max-softmax", test.doubt, PURPLE, "D--"),
    ):
        split = np.array_split(np.argsort(score, kind="stable"), tenths)
        shares = [float(test.right[own].mean()) for own in split]
        axes.plot(range(1, tenths + 1), shares, style, ms=5, color=colour, label=f"by {label}")
        said.append(f"by {label} from {percent(shares[0])} to {percent(shares[-1])}")
    axes.axhline(test.right.mean(), color=SLATE, lw=1.0, ls="-.", label="all test inputs")
    axes.set_xticks(range(1, tenths + 1))
    axes.set_xlabel("tenth of the inputs, from most to least certain")
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(top=1.0 + 0.02 * (1.0 - axes.get_ylim()[0]))
    head(axes, "Accuracy by certainty", columns=3)
    alt = f"Accuracy of tenths of the test inputs, most to least certain: {'; '.join(said)}."
    caption = (
        "Inputs sorted by each score and cut into ten groups of equal size. A score that knows "
        "the mistakes falls late and steeply; a useless one is flat."
    )
    return Drawing("accuracy-by-certainty", alt, caption, figure)


def _wilson(share: Array, count: Array, z: float = 1.96) -> tuple[Array, Array]:
    """The score interval of a share, which stays within 0 and 1 for few inputs."""
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    # Round-off puts an end on the wrong side of a share of exactly 0 or 1.
    return np.minimum(centre - half, share), np.maximum(centre + half, share)
