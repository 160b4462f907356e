"""Figures of what the paper's proofs and its second order leave out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from covary.report.drawing import AMBER, BLUE, INK, ORANGE, PURPLE, SLATE, TEAL, Drawing, swatch
from reproduction.figures.layout import Record, composed, letter, panels
from reproduction.figures.theory import labelled, logarithmic, values_of

# General activations

_MOMENTS = {
    "mean": ("mean", BLUE, "-"),
    "gain": ("slope", TEAL, "-"),
    "variance": ("variance", PURPLE, "-"),
    "network_variance": ("variance of the Heaviside network", ORANGE, "--"),
}
_TAUGHT = {
    "gradient": ("first gradient", SLATE),
    "output": ("means after training", BLUE),
    "output_variance": ("variances after training", PURPLE),
}
_STUDENTS = {
    "one-layer": "one layer",
    "one-layer-steps": "one layer,\nsteps",
    "one-layer-informed": "one layer,\ninformed",
    "layers-near": "layers,\nnear",
    "layers-informed": "layers,\ninformed",
}
# Errors below this are off the axis.
_ROUNDING = 1e-5


@composed
def general_activations(record: Record) -> Drawing:
    """The sequence, training with it, the theorems with ReLU, and the sums of rates."""
    figure, axes = panels(3, 2, height=8.6)
    _sequence(axes[0], labelled(record, "sequence"))
    _taught(axes[1], labelled(record, "training"))
    _learned(axes[2], record)
    _deep(axes[3], labelled(record, "deep"))
    for place, label in ((4, "rates"), (5, "rates-constant")):
        _sums(axes[place], labelled(record, label))
    for panel, name, title in zip(
        axes,
        "abcdef",
        (
            "sums of steps for ReLU",
            "students with them",
            "theorem 2 with ReLU",
            "theorem 3 with ReLU",
            "rates that fall as t^\N{MINUS SIGN}3/4",
            "constant rates",
        ),
        strict=True,
    ):
        letter(panel, name, title)
    told = ", ".join(
        f"{words.replace(chr(10), ' ')} {values_of(parts, 'mean_error')} and "
        f"{values_of(parts, 'variance_error')}"
        for label, words in _STUDENTS.items()
        if (parts := labelled(record, label))
    )
    return Drawing(
        name=record["experiment"],
        alt=f"Largest relative error of means and of variances over layers: {told}.",
        caption="a: relative errors of the moments of sums of steps of width 2^\N{MINUS SIGN}n, "
        "for ReLU, and of the variance of the Heaviside network that such a sum is. b: relative "
        "differences of students with sums of steps from one with ReLU (full lines), and of those "
        "with the variance of the Heaviside network (dashed), averages of seeds. c: relative "
        "errors of the moments that students of ReLU teachers have after training, the largest "
        "over layers; dots are seeds, triangles are below the axis. d: the deviation of "
        "covariances by layer, as a part of the largest covariance (full), and the squared "
        "response of means to the input (dotted). e, f: partial sums of rates times alpha^2 (full) "
        "and of their squares (dashed) through training, for the unit where each grows fastest and "
        "slowest.",
        figure=figure,
    )


def _sequence(axes: Axes, parts: Sequence[Record]) -> None:
    for part in parts:
        for key, (_, colour, dash) in _MOMENTS.items():
            axes.plot(
                part["series"]["steps"],
                part["series"]["sequence"]["relu"][key],
                dash,
                color=colour,
                lw=1.2,
                alpha=0.8,
            )
    logarithmic(axes, "y")
    axes.set_xlabel("n")
    axes.set_ylabel("relative error")
    axes.legend(
        handles=[swatch(words, colour, dash) for words, colour, dash in _MOMENTS.values()],
        loc="lower left",
        fontsize=7,
    )


def _taught(axes: Axes, parts: Sequence[Record]) -> None:
    for kind, dash in (("staircase", "-"), ("network", "--")):
        for key, (_, colour) in _TAUGHT.items() if parts else ():
            curves = np.mean([part["series"][kind][key] for part in parts], 0)
            axes.plot(parts[0]["series"]["n"], curves, dash, color=colour, lw=1.2)
    logarithmic(axes, "y")
    axes.set_xlabel("n")
    axes.set_ylabel("relative difference")
    axes.legend(
        handles=[swatch(words, colour) for words, colour in _TAUGHT.values()],
        loc="lower left",
        fontsize=7,
    )


def _learned(axes: Axes, record: Record) -> None:
    for place, label in enumerate(_STUDENTS):
        for part in labelled(record, label):
            for shift, key, colour in ((-0.12, "mean", BLUE), (0.12, "variance", PURPLE)):
                value = max(part["series"]["after"][key])
                marker = "o" if value > _ROUNDING else "v"
                height = max(value, 1.5 * _ROUNDING)
                axes.plot(place + shift, height, marker, ms=4.5, mew=0, color=colour, alpha=0.75)
    logarithmic(axes, "y")
    axes.set_ylim(bottom=_ROUNDING)
    axes.set_xticks(range(len(_STUDENTS)), list(_STUDENTS.values()), fontsize=7)
    axes.set_ylabel("relative error")
    axes.grid(visible=False, axis="x")
    axes.legend(
        handles=[swatch("means", BLUE, "", "o"), swatch("variances", PURPLE, "", "o")],
        loc="lower right",
        fontsize=7,
    )


def _deep(axes: Axes, parts: Sequence[Record]) -> None:
    for part in parts:
        layers = np.arange(1, len(part["series"]["relative"]) + 1)
        axes.plot(layers, part["series"]["relative"], color=BLUE, lw=1.2, alpha=0.85)
        axes.plot(layers, part["series"]["response"][1:], ":", color=SLATE, lw=1.2, alpha=0.85)
    logarithmic(axes, "y")
    axes.set_xlabel("layer")
    axes.set_ylabel("of the largest covariance")


def _sums(axes: Axes, parts: Sequence[Record]) -> None:
    for part in parts:
        for key, colour, dash in (("first", BLUE, "-"), ("second", ORANGE, "--")):
            curves = np.array(part["series"][key])
            for unit in {int(curves[:, -1].argmin()), int(curves[:, -1].argmax())}:
                axes.plot(part["series"]["step"], curves[unit], dash, color=colour, lw=1.0)
    logarithmic(axes, "x", "y")
    axes.set_xlabel("step")
    axes.set_ylabel("partial sum")
    axes.legend(
        handles=[swatch("rate alpha^2", BLUE), swatch("its square", ORANGE, "--")],
        loc="upper left",
        fontsize=7,
    )


# Higher cumulants

_TRAINED = {
    "mnist-relu": ("MNIST, ReLU", BLUE, "o"),
    "mnist-heaviside": ("MNIST, Heaviside", ORANGE, "s"),
    "concrete-relu": ("regression", TEAL, "^"),
    "quadrants-relu": ("plane", PURPLE, "D"),
}
# Less than this is nothing that draws could tell.
_LEAST = 1e-3
_RANDOM = {
    "random-relu": ("random ReLU", BLUE),
    "random-heaviside": ("random Heaviside", ORANGE),
    "random-few-inputs": ("random ReLU, 4 inputs", AMBER),
}


@composed
def second_order(record: Record) -> Drawing:
    """Cumulants by layer and by width, intervals, entropies and a distribution."""
    figure, axes = panels(3, 2, height=8.6)
    for label, (_, colour, marker) in _TRAINED.items():
        for part in labelled(record, label):
            _of_network(axes, part, colour, marker)
    for label, (_, colour) in _RANDOM.items():
        for part in labelled(record, label):
            for key, dash in (("skewness", "-"), ("kurtosis", "--")):
                series = part["series"]
                seen = np.maximum(series[key], series["least"][key])
                axes[2].plot(series["widths"], seen, dash, color=colour, lw=1.1, alpha=0.85)
    _around(axes)
    figure.legend(
        handles=[
            *(swatch(words, colour, "-", marker) for words, colour, marker in _TRAINED.values()),
            *(swatch(words, colour) for words, colour in _RANDOM.values()),
        ],
        loc="outside lower center",
        ncols=4,
    )
    told = "; ".join(
        f"{words} skewness {values_of(parts, 'output_skewness')}, excess kurtosis "
        f"{values_of(parts, 'output_kurtosis')}, share within 95% intervals "
        f"{values_of(parts, 'coverage')}"
        for label, (words, _, _) in _TRAINED.items()
        if (parts := labelled(record, label))
    )
    return Drawing(
        name=record["experiment"],
        alt=f"Outputs of trained networks: {told}." if told else "Random networks, 3 seeds.",
        caption="a, b: skewness and excess kurtosis in front of the activation of each layer and "
        "at the output, which is the last point (roots of mean squares over units and inputs; each "
        "line is a seed; what is below the axis is at its lower end). c: the same at the output of "
        "random networks by width, skewness in full lines and excess kurtosis dashed; dotted are "
        "powers \N{MINUS SIGN}1/2 and \N{MINUS SIGN}1. d: the share of draws in intervals that a "
        "Gaussian fills as the axis says, less that; full lines have mean and deviation of the "
        "draws, dashed ones those of the moment network (averages of inputs and outputs). e: what "
        "the output's entropy is less than a Gaussian's, in nats per output, by Edgeworth's first "
        "terms and by nearest neighbours; each dot is an input, and on the dotted line they agree. "
        "A Heaviside network has no such entropy. f: draws of the output that is most skewed (seed "
        "0), in its deviations, beside the Gaussian (black).",
        figure=figure,
    )


def _of_network(axes: Sequence[Axes], part: Record, colour: str, marker: str) -> None:
    series = part["series"]
    layers = np.arange(1, len(series["layers"]["skewness"]) + 1)
    for panel, key in ((axes[0], "skewness"), (axes[1], "kurtosis")):
        seen = np.maximum(series["layers"][key], _LEAST)
        panel.plot(layers, seen, marker=marker, ms=3.5, color=colour, lw=1.1, alpha=0.85)
    levels = np.array(series["levels"])
    places = np.arange(len(levels))
    for key, dash in (("sampled", "-"), ("analytic", "--")):
        off = 100 * (np.array(series["coverage"][key]) - levels)
        axes[3].plot(places, off, dash, color=colour, lw=1.1, alpha=0.85)
    axes[3].set_xticks(places, [f"{100 * level:g}%" for level in levels])
    pairs = zip(series["entropy"]["edgeworth"], series["entropy"]["neighbours"], strict=True)
    known = np.array([pair for pair in pairs if None not in pair], dtype=float).reshape(-1, 2)
    axes[4].plot(*np.maximum(known, _LEAST).T, marker, ms=3, mew=0, color=colour, alpha=0.6)
    if "histogram" in series:
        edges, density = (np.array(series["histogram"][key]) for key in ("edges", "density"))
        axes[5].stairs(np.where(density > 0, density, np.nan), edges, color=colour, lw=1.1)


def _around(axes: Sequence[Axes]) -> None:
    """Scales, words and lines to compare with."""
    widths = np.array([4.0, 128.0])
    for power in (0.5, 1.0):
        axes[2].plot(widths, (widths / widths[0]) ** -power, ":", color=SLATE, lw=0.9)
    z = np.linspace(-4.5, 4.5, 181)
    axes[5].plot(z, np.exp(-z * z / 2) / math.sqrt(2 * math.pi), color=INK, lw=0.9)
    for panel in (axes[0], axes[1], axes[5]):
        logarithmic(panel, "y")
    for panel in (axes[2], axes[4]):
        logarithmic(panel, "x", "y")
    axes[3].axhline(0.0, color=SLATE, lw=0.8, ls=":")
    axes[4].plot([_LEAST, 10.0], [_LEAST, 10.0], ":", color=SLATE, lw=0.9)
    axes[5].set_ylim(bottom=3e-5)
    words = (
        ("skewness by layer", "layer", "skewness"),
        ("excess kurtosis by layer", "layer", "excess kurtosis"),
        ("random networks", "width", "skewness, excess kurtosis"),
        ("intervals", "share in a Gaussian", "too many (percent of draws)"),
        ("entropy that is lost", "by Edgeworth's terms", "by neighbours"),
        ("the most skewed output", "deviations from the mean", "density"),
    )
    for panel, name, (title, x, y) in zip(axes, "abcdef", words, strict=True):
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        letter(panel, name, title)


FIGURES: dict[str, Callable[[Record], Drawing]] = {
    "general-activations": general_activations,
    "second-order": second_order,
}
