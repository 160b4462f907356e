"""Figures of trained networks: out-of-distribution inputs, attacks, the network in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec

from covary.report.drawing import (
    AMBER,
    BLUE,
    ORANGE,
    PURPLE,
    SLATE,
    TEAL,
    Drawing,
    legend_inside,
    swatch,
)
from reproduction.figures.layout import (
    Record,
    blank,
    composed,
    letter,
    panels,
    plain_ticks,
)

_GROUPS = {"right": TEAL, "wrong": ORANGE, "foreign": PURPLE}
# Of each indicator, what its axis says, and its short name.
_INDICATORS = {
    "entropy": "entropy (nats)",
    "msp": "MSP: 1 \N{MINUS SIGN} largest softmax",
    "se": "SE: softmax entropy (nats)",
}
_SHORT = {"entropy": "entropy", "msp": "MSP", "se": "SE"}
_PAIRS = {
    "wrong_right": "wrong\nvs right",
    "foreign_right": "OOD\nvs right",
    "foreign_wrong": "OOD\nvs wrong",
}
_BARS = {"entropy": BLUE, "msp": AMBER, "se": SLATE}


@composed
def out_of_distribution(record: Record) -> Drawing:
    """Distributions of three indicators, their separabilities and AUROC; entropy under attack."""
    parts = record["parts"]
    attacked = record.get("beside", {}).get("fgsm")
    figure, axes = panels(2, 3, height=5.2)
    for place, (name, words) in enumerate(_INDICATORS.items()):
        _distribution(axes[place], parts[0]["series"]["histograms"][name], words)
    letter(axes[0], "a", "distributions")
    letter(axes[3], "" if attacked else "b", "separability")
    letter(axes[4], "", "AUROC (ours)")
    _bars(axes[3], parts, "separability", "separability")
    _bars(axes[4], parts, "auroc", "AUROC")
    axes[4].axhline(0.5, color=SLATE, lw=0.8, ls=":")
    groups = [swatch(f"{name} (above)", colour) for name, colour in _GROUPS.items()]
    bars = [swatch(f"{_SHORT[name]} (below)", colour, "", "s") for name, colour in _BARS.items()]
    if attacked:
        letter(axes[5], "b", "entropy under attack")
        _boxes(axes[5], attacked["parts"][0]["series"])
        axes[5].tick_params(axis="x", labelsize=7)
        columns = [each for pair in zip(groups, bars, strict=True) for each in pair]
        figure.legend(handles=columns, loc="outside lower center", ncols=3)
    else:
        axes[5].axis("off")
        axes[5].legend(handles=[*groups, *bars], loc="center left")
    first = parts[0]["metrics"]
    return Drawing(
        name=record["experiment"],
        alt="Separability of OOD from right inputs (first network): "
        + ", ".join(
            f"{words} {first[f'separability_foreign_right_{name}']:.3g}"
            for name, words in _SHORT.items()
        )
        + ".",
        caption="a: distributions of the three indicators over right and wrong predictions and "
        "OOD inputs (first network); first and last bins have also what is beyond. "
        f"{'Below' if attacked else 'b'}: separability of pairs of these groups, and AUROC; bars "
        "are averages over networks, points are networks. Above 0 (0.5 for AUROC), the first of "
        f"the two groups is the less certain one.{_UNDER_ATTACK if attacked else ''}",
        figure=figure,
    )


def _distribution(axes: Axes, histogram: Record, words: str) -> None:
    edges = histogram["edges"]
    for name, colour in _GROUPS.items():
        axes.stairs(histogram["shares"][name], edges, color=colour, lw=1.2)
    axes.set_xlabel(words)
    axes.set_ylabel("share of inputs")
    axes.set_yscale("log")
    plain_ticks(axes, "y")


def _bars(axes: Axes, parts: list[Record], key: str, words: str) -> None:
    for shift, (name, colour) in enumerate(_BARS.items()):
        for place, pair in enumerate(_PAIRS):
            values = [part["metrics"][f"{key}_{pair}_{name}"] for part in parts]
            known = [value for value in values if value is not None]
            where = place + (shift - 1) * 0.26
            if known:
                axes.bar(where, np.mean(known), 0.24, color=colour, alpha=0.55)
                axes.plot([where] * len(known), known, ".", color=colour, ms=4)
    axes.set_xticks(range(len(_PAIRS)), list(_PAIRS.values()))
    axes.axhline(0, color=SLATE, lw=0.7)
    axes.set_ylabel(words)


# Of the figure of shared covariances, whose panel b is of the networks that were attacked.
_UNDER_ATTACK = (
    " b: entropy of the output of a Heaviside network under attack by FGSM, against epsilon (first "
    "seed of fgsm); box: quartiles, whiskers: 5% and 95%, orange: median."
)


def _boxes(axes: Axes, series: Record) -> None:
    """Quantiles of the entropy at each epsilon."""
    keys = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [
        {**dict(zip(keys, box, strict=True)), "label": f"{epsilon:g}"}
        for epsilon, box in zip(series["epsilons"], series["entropy"], strict=True)
        if None not in box
    ]
    axes.bxp(
        boxes,
        showfliers=False,
        medianprops={"color": ORANGE},
        boxprops={"color": BLUE},
        whiskerprops={"color": SLATE},
        capprops={"color": SLATE},
    )
    axes.set_xlabel("epsilon")
    axes.set_ylabel("entropy (nats)")


_LINES = {
    "relu ann": ("ReLU ANN", SLATE, "-"),
    "heaviside mnn": ("Heaviside MNN", BLUE, "-"),
    "without first noises": ("the same, sigma_1 = sigma_2 = 0", TEAL, "-"),
    "without first noises, transferred": ("that, by transfer (ours)", ORANGE, "--"),
}


@composed
def attacks(record: Record) -> Drawing:
    """Accuracy against epsilon, and box plots of entropy."""
    parts = record["parts"]
    figure, (accuracy, entropy) = panels(1, 2, height=3.8)
    letter(accuracy, "c", "accuracy under FGSM")
    letter(entropy, "d", "entropy of the Heaviside MNN")
    for key, (_, colour, dash) in _LINES.items():
        for part in parts:
            series = part["series"]
            accuracy.plot(
                series["epsilons"],
                series["accuracy"][key],
                color=colour,
                ls=dash,
                lw=1.2,
                marker="o",
                ms=2.5,
            )
    accuracy.set_ylim(0, 1.02)
    accuracy.set_xlabel("epsilon (parts of a pixel's range)")
    accuracy.set_ylabel("test accuracy")
    handles = [swatch(words, colour, dash) for words, colour, dash in _LINES.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    _boxes(entropy, parts[0]["series"])
    first = parts[0]["metrics"]
    return Drawing(
        name=record["experiment"],
        alt=f"At the largest epsilon the Heaviside network has accuracy "
        f"{first['accuracy_attacked']:.3g}, without its first noises "
        f"{first['accuracy_defended_attacked']:.3g}, and by transfer "
        f"{first['accuracy_defended_transferred']:.3g}.",
        caption="c: test accuracy under FGSM, one line for each seed. Dashed: inputs made on the "
        "network as trained, given to the one without its first two noises. d: entropy of the "
        "output under attack (first seed); box: quartiles, whiskers: 5% and 95%, orange: median.",
        figure=figure,
    )


@composed
def stochastic(record: Record) -> Drawing:
    """The input, the network in time, and moments beside what was sampled."""
    series = record["parts"][0]["series"]
    # Results from before layers were kept have the output alone.
    layers = list(series.get("trace_by_layer", {}).values())
    figure = blank(height=8.0 if layers else 7.4)
    grid = GridSpec(3, 6, figure=figure, height_ratios=[1.3 if layers else 1.0, 1.0, 1.0])
    image = figure.add_subplot(grid[0, :2])
    letter(image, "a", "input")
    image.imshow(np.array(series["input"]), cmap="gray_r")
    image.set_anchor("NW")  # its title is in line with the next one
    image.set_axis_off()
    trace = figure.add_subplot(grid[0, 2:])
    letter(trace, "b", "layers in time" if layers else "output in time")
    if layers:
        _in_time(trace, layers, series["times"])
    else:
        for values, colour in zip(series["trace"], cycle(_TRACES), strict=False):
            trace.plot(series["times"], values, color=colour, lw=0.9)
        trace.set_ylabel("state")
    trace.set_xlabel("time (time constants)")
    means, variances = (figure.add_subplot(grid[1, i : i + 3]) for i in (0, 3))
    letter(means, "c", "mean, variance")
    _moments(means, "mean", series, BLUE)
    _moments(variances, "variance", series, ORANGE)
    legend_inside(means, loc="upper left", fontsize=7.5, handletextpad=0.1)
    _covariances([figure.add_subplot(grid[2, i : i + 2]) for i in (0, 2, 4)], series)
    first = record["parts"][0]["metrics"]
    return Drawing(
        name=record["experiment"],
        alt=f"Relative errors of the output: mean {first['mean_error_steady']:.2g}, covariance "
        f"{first['covariance_error_steady']:.2g} against the steady state, "
        f"{first['covariance_error_ou-0']:.2g} against the network in time whose layers follow at "
        f"once, {first['covariance_error_ou-1']:.2g} against that of equal time constants.",
        caption=f"a: a test digit. b: {_SHOWN[bool(layers)]} of the stochastic network with "
        "equal time constants, Eq. (stoc_network), for a while. c: mean and variance of each "
        "output, moments against the network in time (Euler-Maruyama): filled if layers follow at "
        "once, hollow with equal time constants. d: covariance of the output by moments and by the "
        "two networks in time, the same scale of colours in all.",
        figure=figure,
    )


_SHOWN = {
    True: "every layer, the six units of each that vary most, on a scale of its own,",
    False: "the six outputs that vary most",
}


def _in_time(axes: Axes, traces: Sequence[Any], times: Sequence[float]) -> None:
    """The units of each layer, layers above one another, each on a scale of its own."""
    for place, found in enumerate(reversed(traces)):
        states = np.array(found, dtype=float)
        low, span = states.min(), float(np.ptp(states)) or 1.0
        for values, colour in zip((states - low) / span, cycle(_TRACES), strict=False):
            axes.plot(times, place + 0.8 * values, color=colour, lw=0.7)
    names = ["output", *map(str, range(len(traces) - 1, 0, -1))]
    axes.set_yticks(range(len(traces)), names, va="bottom")
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("layer")


_TRACES = (BLUE, ORANGE, TEAL, PURPLE, AMBER, SLATE)
# Networks in time, by what results call them.
_IN_TIME = {"ou-0": "layers at once", "ou-1": "equal constants"}


def _moments(axes: Axes, key: str, series: Record, colour: str) -> None:
    ends = list(series[key])
    for name, filled in (("ou-0", True), ("ou-1", False)):
        seen = series["in_time"][name]
        values = seen["mean"] if key == "mean" else np.diag(seen["covariance"]).tolist()
        face = colour if filled else "none"
        axes.plot(values, series[key], "o", color=colour, mfc=face, ms=4, label=_IN_TIME[name])
        ends += values
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=SLATE, lw=0.8, ls="--")
    axes.set_xlabel(f"{key} in time")
    axes.set_ylabel(f"{key} by moments")
    axes.locator_params(nbins=4)


def _covariances(axes: list[Axes], series: Record) -> None:
    tables = {"moments": series["covariance"]} | {
        words: series["in_time"][name]["covariance"] for name, words in _IN_TIME.items()
    }
    limit = max(float(np.abs(table).max()) for table in tables.values())
    for one, (words, table) in zip(axes, tables.items(), strict=True):
        letter(one, "d" if one is axes[0] else "", words)
        shown = one.imshow(np.array(table), cmap="RdBu_r", vmin=-limit, vmax=limit)
        one.grid(visible=False)
        one.set_xticks(range(0, len(table), 3))
        one.set_yticks(range(0, len(table), 3))
        one.set_xlabel("output")
    axes[-1].figure.colorbar(
        shown, ax=axes[-1], shrink=0.85, use_gridspec=False, label="covariance"
    )


FIGURES: dict[str, Callable[[Record], Drawing]] = {
    "ood-notmnist": out_of_distribution,
    "shared-ood": out_of_distribution,
    "fgsm": attacks,
    "network-relu": stochastic,
    "network-heaviside": stochastic,
}
