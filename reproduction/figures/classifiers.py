"""Figures of classifiers through training: the paper's four panels, and two networks compared."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

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
from reproduction.experiments.classifiers import Errors
from reproduction.experiments.statistics import TWO_SIDED
from reproduction.figures.layout import Record, composed, letter, panels

RIGHT, WRONG = TEAL, ORANGE
_COLOURS = (BLUE, PURPLE, SLATE, AMBER)
_MARKERS = "os^Dv<>"


@composed
def four_panels(record: Record) -> Drawing:
    """Accuracy and entropy; the last two layers; separability by layer, and against accuracy."""
    # Of ordinary networks there is the accuracy alone.
    parts = [part for part in record["parts"] if "epochs" in part["series"]]
    figure, (top, last, layers, against) = panels(2, 2, height=5.8)
    _training(top, parts)
    _last_two(last, parts[0])
    _by_layer(layers, parts, _settings(record))
    _against_accuracy(against, parts)
    groups = [
        swatch("right predictions", RIGHT, "", "s"),
        swatch("wrong predictions", WRONG, "", "s"),
    ]
    handles = [*groups, *_swatches(parts)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    numbers = [part["metrics"] for part in parts]
    return Drawing(
        name=record["experiment"],
        alt=f"Accuracy reaches {_range(numbers, 'accuracy')}; separability at the output is "
        f"{_range(numbers, 'separability')}; R squared of separability against accuracy is "
        f"{_range(numbers, 'r_squared')}.",
        caption="a: test accuracy through training, one line for each network, and entropy of the "
        f"output for right and wrong predictions ({_named(parts[0])}; bands reach half a standard "
        "deviation over inputs to each side). b: entropy in the last two layers of that network at "
        "the end; first and last bins have also what is beyond. "
        "c: separability of wrong from right predictions by layer, with 95% intervals over test "
        f"samples{_estimated(parts)}. d: separability at the output against accuracy, one point "
        "for each epoch that was looked at, with lines of regression; markers are seeds.",
        figure=figure,
    )


def _training(axes: Axes, parts: Sequence[Record]) -> None:
    letter(axes, "a", "through training")
    lines = axes.twinx()
    for part, colour in zip(parts, _cycled(parts), strict=True):
        lines.plot(part["series"]["epochs"], part["series"]["accuracy"], color=colour, lw=1.1)
    lines.set_ylabel("test accuracy (lines)")
    lines.grid(visible=False)
    lines.spines["right"].set_visible(True)
    series = parts[0]["series"]
    for key, colour in (("entropy_right", RIGHT), ("entropy_wrong", WRONG)):
        known = np.array([[np.nan if one is None else one for one in pair] for pair in series[key]])
        axes.plot(series["epochs"], known[:, 0], color=colour, ls="--")
        low, high = known[:, 0] - known[:, 1] / 2, known[:, 0] + known[:, 1] / 2
        axes.fill_between(series["epochs"], low, high, color=colour, alpha=0.18, lw=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("entropy (nats, dashed)")
    if series["epochs"][-1] >= 20:
        axes.set_xscale("log")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick <= series["epochs"][-1]]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    else:
        axes.locator_params(axis="x", integer=True)


def _last_two(axes: Axes, part: Record) -> None:
    letter(axes, "b", "entropy in the last two layers")
    found = part["series"]["last_two"]
    for place, (_, histogram) in enumerate(found.items()):
        edges = np.array(histogram["edges"])
        if edges.size == 0:
            continue
        # On a scale of its own: layers differ in how many units they have.
        centre = (edges[:-1] + edges[1:]) / 2
        right = np.array(histogram["shares"]["right"])
        mean = float(centre @ right)
        spread = float(np.sqrt((centre - mean) ** 2 @ right)) or 1.0
        for name, colour in (("right", RIGHT), ("wrong", WRONG)):
            shares = np.array(histogram["shares"][name])
            top = max(max(each) for each in histogram["shares"].values())
            axes.fill_between(
                (centre - mean) / spread,
                place,
                place + 0.85 * shares / top,
                color=colour,
                alpha=0.4,
                step="mid",
                lw=0.8,
            )
    # Broken into lines: a long name would take its room from all panels.
    names = [textwrap.fill(name, 12) for name in found]
    axes.set_yticks(range(len(found)), names, va="bottom")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("entropy, in deviations of right predictions")


def _by_layer(axes: Axes, parts: Sequence[Record], settings: Mapping[str, Record]) -> None:
    letter(axes, "c", "separability by layer")
    for place, (part, colour) in enumerate(zip(parts, _cycled(parts), strict=True)):
        style = {"color": colour, "marker": _marker(part), "lw": 1.2}
        shift = 0.05 * (place - (len(parts) - 1) / 2)
        _with_errors(axes, part["series"], settings[part["label"]], shift, style)
    count = len(parts[0]["series"]["layers"])
    axes.set_xticks(range(1, count + 1), [*map(str, range(1, count)), "output"])
    axes.axhline(0, color=SLATE, lw=0.7)
    axes.set_xlabel("layer")
    axes.set_ylabel("separability of wrong from right")


def _with_errors(
    axes: Axes, series: Record, settings: Record, shift: float, style: Mapping[str, Any]
) -> None:
    """Separabilities of layers with 95% intervals, a little to one side of others."""
    errors = Errors.of(series, settings)
    reach = TWO_SIDED * np.sqrt(errors.covariance.diagonal())
    places = np.arange(1, len(errors.levels) + 1) + shift
    axes.errorbar(places, errors.levels, reach, ms=3.5, elinewidth=0.7, capsize=1.5, **style)


def _settings(record: Record) -> dict[str, Record]:
    """By label, as the results were made with."""
    return {each["label"]: each["settings"] for each in record["config"]}


def _estimated(parts: Sequence[Record]) -> str:
    """What is to be said of intervals of results that have none of their own."""
    bare = [part for part in parts if "separability_covariance" not in part["series"]]
    if not bare:
        return ""
    some = f"{' and '.join(map(_said, _labels(bare)))}: " if len(bare) < len(parts) else ""
    return f" ({some}estimated from the numbers of right and wrong ones)"


def _against_accuracy(axes: Axes, parts: Sequence[Record]) -> None:
    letter(axes, "d", "separability and accuracy")
    for part, colour in zip(parts, _cycled(parts), strict=True):
        series = part["series"]
        accuracy = np.array(series["accuracy"])
        values = [np.nan if one is None else one for one in series["separability"]]
        axes.plot(accuracy, values, _marker(part), color=colour, ms=3, alpha=0.8)
        slope, intercept = series["fit"]
        if slope is not None:
            ends = np.array([accuracy.min(), accuracy.max()])
            axes.plot(ends, slope * ends + intercept, color=colour, ls="--", lw=1)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("test accuracy")
    axes.set_ylabel("separability at the output")
    by_label = {
        label: _range([part["metrics"] for part in parts if part["label"] == label], "r_squared")
        for label in _labels(parts)
    }
    handles = [
        swatch(f"{_said(label) + ', ' if any(by_label) else ''}R² {found}", colour, "")
        for (label, found), colour in zip(by_label.items(), _COLOURS, strict=False)
    ]
    # Words in the colours of lines, without samples of these, which would look like one more.
    legend_inside(
        axes, handles=handles, loc="best", labelcolor="linecolor", handlelength=0, handletextpad=0
    )


def _swatches(parts: Sequence[Record]) -> list[Line2D]:
    """What a legend has of labels; nothing if there is one alone."""
    found = _labels(parts)
    if len(found) == 1:
        return []
    return [swatch(_said(label), colour) for label, colour in zip(found, _COLOURS, strict=False)]


def _labels(parts: Sequence[Record]) -> list[str]:
    """The labels of parts, each once."""
    return list(dict.fromkeys(part["label"] for part in parts))


def _said(label: str) -> str:
    """A label beside others."""
    return label or "no label"


def _cycled(parts: Sequence[Record]) -> list[str]:
    """A colour for each label."""
    known = _labels(parts)
    return [_COLOURS[known.index(part["label"]) % len(_COLOURS)] for part in parts]


def _marker(part: Record) -> str:
    """One for each seed."""
    return _MARKERS[part["seed"] % len(_MARKERS)]


def _named(part: Record) -> str:
    return f"{part['label']}, seed {part['seed']}" if part["label"] else f"seed {part['seed']}"


def _range(numbers: Sequence[Mapping[str, float | None]], key: str) -> str:
    known = [value for one in numbers if (value := one.get(key)) is not None]
    if not known:
        return "undefined"
    low, high = f"{min(known):.3g}", f"{max(known):.3g}"
    return low if low == high else f"{low} to {high}"


@composed
def with_and_without(record: Record) -> Drawing:
    """Accuracy through training and separability by layer, with correlations and without."""
    figure, (accuracy, separability) = panels(1, 2, height=3.2)
    letter(accuracy, "a", "accuracy through training")
    letter(separability, "b", "separability by layer")
    kinds = {"with": BLUE, "without": ORANGE}
    settings = _settings(record)
    for place, part in enumerate(record["parts"]):
        style: dict[str, Any] = {"ls": _dash(part["label"]), "lw": 1.1}
        for (kind, colour), side in zip(kinds.items(), (-1, 1), strict=True):
            series = part["series"][kind]
            accuracy.plot(series["epochs"], series["accuracy"], color=colour, **style)
            marked = {**style, "color": colour, "marker": _marker(part)}
            shift = 0.03 * side * (2 * place + 1)
            _with_errors(separability, series, settings[part["label"]][kind], shift, marked)
    count = len(series["layers"])
    separability.set_xticks(range(1, count + 1), [*map(str, range(1, count)), "output"])
    separability.set_xlabel("layer")
    separability.set_ylabel("separability of wrong from right")
    accuracy.set_xlabel("epoch")
    accuracy.set_ylabel("test accuracy")
    handles = [swatch(f"{kind} correlations", colour) for kind, colour in kinds.items()]
    labels = _labels(record["parts"])
    if len(labels) > 1:
        handles += [swatch(label, SLATE, _dash(label)) for label in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    numbers = [part["metrics"] for part in record["parts"]]
    return Drawing(
        name=record["experiment"],
        alt=f"Accuracy without correlations is {_range(numbers, 'accuracy_without')}, with them "
        f"{_range(numbers, 'accuracy_with')}; separability is "
        f"{_range(numbers, 'separability_without')} and {_range(numbers, 'separability_with')}.",
        caption="a: test accuracy through training. b: separability of wrong from right "
        "predictions by layer, at the end, with 95% intervals over test samples"
        f"{_estimated([{**part, 'series': part['series']['with']} for part in record['parts']])}; "
        "markers are seeds." + (" Dashed: label shared." if "shared" in labels else ""),
        figure=figure,
    )


def _dash(label: str) -> str:
    return "--" if label == "shared" else "-"


FIGURES: dict[str, Callable[[Record], Drawing]] = {
    **dict.fromkeys(
        (
            "mnist-relu",
            "mnist-heaviside",
            "mnist-lif",
            "cifar10-relu",
            "cifar10-heaviside",
            "shared-mnist",
            "shared-cifar10",
        ),
        four_panels,
    ),
    **dict.fromkeys(("correlation", "correlation-cifar10"), with_and_without),
}
