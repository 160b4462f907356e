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
    INK,
    ORANGE,
    PURPLE,
    SLATE,
    TEAL,
    Drawing,
    legend_inside,
    swatch,
)
from reproduction.experiments.networks import AUTHORS
from reproduction.figures.layout import (
    Record,
    ShownTable,
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
    ours, theirs = _parted(record)
    attacked = record.get("beside", {}).get("fgsm")
    shown = {"a  distributions": ours, "a  the authors' network": theirs}
    rows = {title: parts[0] for title, parts in shown.items() if parts}
    figure, axes = panels(1 + len(rows), 3, height=2.6 * (1 + len(rows)))
    for row, (title, part) in enumerate(rows.items()):
        for place, (name, words) in enumerate(_INDICATORS.items()):
            _distribution(axes[3 * row + place], part["series"]["histograms"][name], words)
        letter(axes[3 * row], "", title)
    separability, auroc, last = axes[-3:]
    letter(separability, "" if attacked else "b", "separability")
    letter(auroc, "", "AUROC (ours)")
    _bars(separability, ours, theirs, "separability", "separability")
    _bars(auroc, ours, theirs, "auroc", "AUROC")
    auroc.axhline(0.5, color=SLATE, lw=0.8, ls=":")
    groups = [swatch(f"{name} (above)", colour) for name, colour in _GROUPS.items()]
    bars = [swatch(f"{_SHORT[name]} (below)", colour, "", "s") for name, colour in _BARS.items()]
    diamond = [swatch("the authors' (below)", INK, "", "D")] if theirs else []
    if attacked:
        letter(last, "b", "entropy under attack")
        _boxes(last, _parted(attacked)[0][0]["series"])
        last.tick_params(axis="x", labelsize=7)
        columns = [each for pair in zip(groups, bars, strict=True) for each in pair]
        figure.legend(handles=[*columns, *diamond], loc="outside lower center", ncols=3)
    else:
        last.axis("off")
        last.legend(handles=[*groups, *bars, *diamond], loc="center left")
    beside = ", and below it the one whose weights the authors published" if theirs and ours else ""
    diamonds = ", diamonds the authors'" if theirs else ""
    first = (ours or theirs)[0]["metrics"]
    return Drawing(
        name=record["experiment"],
        alt="Separability of OOD from right inputs (first network): "
        + ", ".join(
            f"{words} {first[f'separability_foreign_right_{name}']:.3g}"
            for name, words in _SHORT.items()
        )
        + ".",
        caption="a: distributions of the three indicators over right and wrong predictions and "
        f"OOD inputs (first network{beside}); first and last bins have also what is beyond. "
        f"{'Below' if attacked else 'b'}: separability of pairs of these groups, and AUROC; bars "
        f"are averages over networks, points are networks{diamonds}. Above 0 (0.5 for AUROC), the "
        "first of the two groups is the less certain one."
        f"{_UNDER_ATTACK if attacked else ''}",
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


def _bars(axes: Axes, ours: list[Record], theirs: list[Record], key: str, words: str) -> None:
    for shift, (name, colour) in enumerate(_BARS.items()):
        for place, pair in enumerate(_PAIRS):
            metric, where = f"{key}_{pair}_{name}", place + (shift - 1) * 0.26
            if known := _known(ours, metric):
                axes.bar(where, np.mean(known), 0.24, color=colour, alpha=0.55)
                axes.plot([where] * len(known), known, ".", color=colour, ms=4)
            for value in _known(theirs, metric):
                axes.plot(where, value, "D", color=colour, mec=INK, mew=0.6, ms=4)
    axes.set_xticks(range(len(_PAIRS)), list(_PAIRS.values()))
    axes.axhline(0, color=SLATE, lw=0.7)
    axes.set_ylabel(words)


def _known(parts: Sequence[Record], metric: str) -> list[float]:
    """A number of each part that has it."""
    return [value for part in parts if (value := part["metrics"].get(metric)) is not None]


def _parted(record: Record) -> tuple[list[Record], list[Record]]:
    """Parts of networks that were trained here, and of those that the authors published."""
    theirs = [part for part in record["parts"] if part["label"].startswith(AUTHORS)]
    return [part for part in record["parts"] if part not in theirs], theirs


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
    """Accuracy against epsilon, and box plots of entropy: of ours, and of the authors' network."""
    every = record["parts"]
    ours, theirs = _parted({"parts": [part for part in every if part["label"] in ("", AUTHORS)]})
    rows = {"": ours or ([] if theirs else every), ", the authors' network": theirs}
    shown = {title: parts for title, parts in rows.items() if parts}
    figure, axes = panels(len(shown), 2, height=0.5 + 3.3 * len(shown))
    for row, (title, parts) in enumerate(shown.items()):
        accuracy, entropy = axes[2 * row : 2 * row + 2]
        letter(accuracy, "ce"[row], f"accuracy under FGSM{title}")
        letter(entropy, "df"[row], "entropy of the Heaviside MNN")
        _accuracies(accuracy, parts)
        _boxes(entropy, parts[0]["series"])
    there = {
        key for parts in shown.values() for part in parts for key in part["series"]["accuracy"]
    }
    handles = [swatch(*look) for key, look in _LINES.items() if key in there]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    first = next(iter(shown.values()))[0]["metrics"]
    more = " e, f: the same of the authors' network, as their script attacks it." if theirs else ""
    return Drawing(
        name=record["experiment"],
        alt=f"At the largest epsilon the Heaviside network has accuracy "
        f"{first['accuracy_attacked']:.3g}, without its first noises "
        f"{first['accuracy_defended_attacked']:.3g}, and by transfer "
        f"{first['accuracy_defended_transferred']:.3g}.",
        caption="c: test accuracy under FGSM, one line for each seed. Dashed: inputs made on the "
        "network as trained, given to the one without its first two noises. d: entropy of the "
        "output under attack (first seed); box: quartiles, whiskers: 5% and 95%, orange: median."
        + more,
        figure=figure,
    )


def _accuracies(axes: Axes, parts: Sequence[Record]) -> None:
    for key, (_, colour, dash) in _LINES.items():
        look: dict[str, Any] = {"color": colour, "ls": dash, "lw": 1.2, "marker": "o", "ms": 2.5}
        for series in (part["series"] for part in parts):
            if key in series["accuracy"]:
                axes.plot(series["epsilons"], series["accuracy"][key], **look)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("epsilon (parts of a pixel's range)")
    axes.set_ylabel("test accuracy")


@composed
def stochastic(record: Record) -> Drawing:
    """The input, the network in time, and moments beside what was sampled."""
    parts = record["parts"]
    shown = next((part for part in parts if part["label"] == AUTHORS), parts[0])
    others = [part for part in parts if part["label"] == "" and part is not shown]
    series = shown["series"]
    # Results from before layers were kept have the output alone.
    layers = list(series.get("trace_by_layer", {}).values())
    rows, first_row = (4 if others else 3), 1.3 if layers else 1.0
    figure = blank(height=2.45 * rows + (0.6 if layers else 0))
    grid = GridSpec(rows, 6, figure=figure, height_ratios=[first_row, *[1.0] * (rows - 1)])
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
    for row, part in enumerate([shown, *others[:1]]):
        places = [figure.add_subplot(grid[2 + row, i : i + 2]) for i in (0, 2, 4)]
        _covariances(places, part["series"], "de"[row])
    first = shown["metrics"]
    whose = "the authors' network" if shown["label"] == AUTHORS else "a network"
    return Drawing(
        name=record["experiment"],
        alt=f"Relative errors of the output of {whose}: mean {first['mean_error_steady']:.2g}, "
        f"covariance {first['covariance_error_steady']:.2g} against the steady state, "
        f"{first['covariance_error_ou-0']:.2g} against the network in time whose layers follow at "
        f"once, {first['covariance_error_ou-1']:.2g} against that of equal time constants.",
        caption=f"a: a test digit. b: {_SHOWN[bool(layers)]} of {whose} in time with "
        "equal time constants, Eq. (stoc_network), for a while. c: mean and variance of each "
        "output, moments against the network in time (Euler-Maruyama): filled if layers follow at "
        "once, hollow with equal time constants. d: covariance of the output by moments and by the "
        "two networks in time, the same scale of colours in all."
        + (" e: the same of ours with six layers (first of those)." if others else ""),
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


def _covariances(axes: list[Axes], series: Record, name: str) -> None:
    tables = {"moments": series["covariance"]} | {
        words: series["in_time"][name]["covariance"] for name, words in _IN_TIME.items()
    }
    limit = max(float(np.abs(table).max()) for table in tables.values())
    for one, (words, table) in zip(axes, tables.items(), strict=True):
        letter(one, name if one is axes[0] else "", words)
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


# What a table of networks says of each: a heading, and the number.
_ERRORS = {
    "mean, steady state": "mean_error_steady",
    "covariance, steady state": "covariance_error_steady",
    "covariance in time, layers at once": "covariance_error_ou-0",
    "covariance in time, equal constants": "covariance_error_ou-1",
    "covariance, noise behind activations": "covariance_error_behind",
}


def stochastic_table(record: Record) -> ShownTable:
    """Errors of moments by network: its widths, its noise and how it was trained."""
    rows = []
    for each in record["config"]:
        parts = [part for part in record["parts"] if part["label"] == each["label"]]
        if parts:
            about = _described(each["settings"]["network"])
            numbers = [_percent(_known(parts, metric)) for metric in _ERRORS.values()]
            rows.append([each["label"] or "shared", *about, *numbers])
    return ShownTable(
        ["label", "hidden layers", "variance of noise", "trained", *_ERRORS],
        rows,
        "Relative errors of the output's moments against what was sampled: the average over test "
        "digits (of ours with several seeds, networks too), the least and the largest. Noise is "
        "before activations in all columns but the last.",
    )


def _described(network: Record) -> list[str]:
    """Widths of hidden layers, variances of noise, and how it was trained."""
    settings = network["settings"]
    first, *others = [f"{sigma**2:.2g}" for sigma in settings["noise"]]
    rest = list(dict.fromkeys(others))
    noise = first if rest == [first] else f"{first}; {', '.join(rest)} in hidden layers"
    trained = f"{settings['covariance']}, {settings['epochs']} epochs"
    widths = "-".join(map(str, settings["hidden"]))
    return [widths, noise, "by the authors" if "published" in network else trained]


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "-"
    least, most, mean = (
        f"{each:.0%}" if each > 1 else f"{100 * each:.2g}%"
        for each in (min(values), max(values), float(np.mean(values)))
    )
    return mean if least == most else f"{mean} ({least} to {most})"


TABLES: dict[str, Callable[[Record], ShownTable]] = {
    "network-relu": stochastic_table,
    "network-heaviside": stochastic_table,
}
