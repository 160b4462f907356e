"""Figures of logistic regression, of covariance activations and of the three theorems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from covary.report.drawing import (
    AMBER,
    BLUE,
    INK,
    ORANGE,
    PURPLE,
    SLATE,
    TEAL,
    Drawing,
    swatch,
)
from reproduction.figures.layout import Record, composed, letter, panels, plain_ticks
from reproduction.words import number, spread


def labelled(record: Record, label: str) -> list[Record]:
    """Parts of that label."""
    return [part for part in record["parts"] if part["label"] == label]


def values_of(parts: Sequence[Record], metric: str) -> str:
    """A number of these parts, in words."""
    return spread([part["metrics"][metric] for part in parts])


def logarithmic(axes: Axes, *which: str) -> None:
    """Logarithmic axes with plain numbers."""
    for axis in which:
        getattr(axes, f"set_{axis}scale")("log")
        plain_ticks(axes, axis)
        getattr(axes, f"{axis}axis").set_minor_formatter(NullFormatter())


# Logistic regression

_ENTROPIES = {
    "linear": ("linear approximation", ORANGE, "-"),
    "exact": ("exact", BLUE, "-"),
    "gaussian": ("Gaussian, exact variance", SLATE, "--"),
}


@composed
def sensitivity(record: Record) -> Drawing:
    """The sigmoid's slope, heat maps of entropy, and entropy against distance."""
    parts = record["parts"]
    series, metrics = parts[0]["series"], parts[0]["metrics"]
    figure, axes = panels(2, 2, height=5.6)
    axes[0].plot(series["s"], series["slope"], color=BLUE)
    axes[0].axvline(0.0, color=SLATE, lw=0.8, ls=":")
    axes[0].set_xlabel("s")
    axes[0].set_ylabel("slope of the sigmoid")
    square = series["square"]
    every = np.array([square["linear"], square["sampled"]])
    for place, key in ((1, "linear"), (2, "sampled")):
        _heat(axes[place], square, key, (float(every.min()), float(every.max())))
    _curves(axes[3], series)
    letter(axes[0], "a", "slope")
    letter(axes[1], "b", "entropy, linear approximation")
    letter(axes[2], "c", "entropy, from samples (ours)")
    letter(axes[3], "d", "against distance (ours)")
    return Drawing(
        name=record["experiment"],
        alt=f"Entropy at the boundary: {number(metrics['linear_at_boundary'])} nats by the linear "
        f"approximation, {number(metrics['exact_at_boundary'])} exactly. Largest difference of "
        f"the approximation from samples: {values_of(parts, 'linear_gap')} nats.",
        caption="a: the slope of the sigmoid. b: entropy (nats) of stochastic logistic regression "
        "with w = (1, 0.5), by the paper's linear approximation; the black line is the boundary. "
        "c: the same from samples, on the same scale of colours. d: entropy against the distance "
        "to the boundary; dots are the points of c. No distribution on [0, 1] has an entropy above "
        "0 (dotted).",
        figure=figure,
    )


def _heat(axes: Axes, square: Record, key: str, limits: tuple[float, float]) -> None:
    reach, (w1, w2) = square["reach"], square["weight"]
    image = axes.imshow(
        square[key],
        origin="lower",
        extent=(-reach, reach, -reach, reach),
        cmap="viridis",
        vmin=limits[0],
        vmax=limits[1],
        interpolation="bilinear",
        aspect="auto",
    )
    # Where w x = 0.
    ends = np.array([-reach, reach]) * min(1.0, w2 / w1)
    axes.plot(ends, -ends * w1 / w2, color=INK, lw=1.4)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)
    axes.grid(visible=False)
    axes.set_xlabel("x1")
    axes.set_ylabel("x2")
    axes.figure.colorbar(image, ax=axes, label="nats", use_gridspec=False)


def _curves(axes: Axes, series: Record) -> None:
    square = series["square"]
    ticks = np.linspace(-square["reach"], square["reach"], len(square["sampled"]))
    x2, x1 = np.meshgrid(ticks, ticks, indexing="ij")
    weight = np.array(square["weight"])
    distance = np.abs(x1 * weight[0] + x2 * weight[1]) / np.linalg.norm(weight)
    axes.plot(
        distance.ravel()[::5],
        np.ravel(square["sampled"])[::5],
        "o",
        ms=2.5,
        mew=0,
        color=TEAL,
        alpha=0.6,
        label="samples",
    )
    for key, (words, colour, dash) in _ENTROPIES.items():
        axes.plot(series["distance"], series[key], dash, color=colour, label=words, lw=1.3)
    axes.axhline(0.0, color=SLATE, lw=0.8, ls=":")
    axes.set_xlabel("distance to the boundary")
    axes.set_ylabel("entropy (nats)")
    axes.legend(loc="lower left", borderaxespad=0.6)


# Covariance activations

_ACTIVATIONS = {"heaviside": "Heaviside", "relu": "ReLU"}


@composed
def activations(record: Record) -> Drawing:
    """First-order covariances against Monte Carlo, by activation and correlation."""
    figure, axes = panels(2, 2, height=5.4)
    labels = list(dict.fromkeys(part["label"] for part in record["parts"]))
    told = []
    for place, (label, name) in enumerate((a, b) for a in labels for b in _ACTIVATIONS):
        parts = labelled(record, label)
        points = {key: np.array(value) for key, value in parts[0]["series"][name].items()}
        panel = axes[place]
        panel.errorbar(
            points["analytic"],
            points["sampled"],
            2 * points["error"],
            fmt="o",
            ms=3.2,
            mew=0,
            alpha=0.7,
            color=BLUE,
            ecolor=SLATE,
            elinewidth=0.7,
        )
        ends = [0.0, float(max(points["analytic"].max(), points["sampled"].max()))]
        panel.plot(ends, ends, ":", color=ORANGE, lw=1.3, zorder=3)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_major_locator(MaxNLocator(4))
        panel.set_xlabel("covariance activation")
        panel.set_ylabel("Monte Carlo")
        letter(panel, "", f"{_ACTIVATIONS[name]}, {label.replace('=', ' = ')}")
        told.append(f"{_ACTIVATIONS[name]} at {label} {values_of(parts, f'{name}_error')}")
    return Drawing(
        name=record["experiment"],
        alt=f"Relative error of the first order against exact covariances: {', '.join(told)}.",
        caption="Covariance of two units by the paper's covariance activation against Monte Carlo, "
        "with twice its standard error, for random pairs of inputs whose correlation is c; on the "
        "dotted line they agree.",
        figure=figure,
    )


# The first theorem

_STEPS = {
    "one-layer": ("one layer", BLUE),
    "one-layer-noisy": ("one layer, noisy labels", TEAL),
    "layers-one-sample": ("several layers, one input a step", PURPLE),
    "layers-batches": ("several layers, mini-batches", ORANGE),
}


@composed
def theorem_1(record: Record) -> Drawing:
    """Differences of steps, and the gradient, through training."""
    figure, axes = panels(1, 2, height=3.5)
    for label, (_, colour) in _STEPS.items():
        for part in labelled(record, label):
            series = part["series"]
            step = np.array(series["step"]) + 1
            axes[0].plot(step, series["difference"], color=colour, lw=1.0, alpha=0.8)
            norms = np.array(series["gradient"])
            axes[1].plot(step, norms / norms[0], color=colour, lw=1.0, alpha=0.8)
    for panel, words in zip(
        axes, ("relative difference", "gradient, of that at the start"), strict=True
    ):
        logarithmic(panel, "x", "y")
        panel.set_xlabel("step")
        panel.set_ylabel(words)
    axes[0].axhline(1e-10, color=SLATE, lw=0.8, ls=":")
    letter(axes[0], "a", "SMUC against the Riemannian form")
    letter(axes[1], "b", "norm of the gradient")
    figure.legend(
        handles=[swatch(words, colour) for words, colour in _STEPS.values()],
        loc="outside lower center",
        ncols=2,
    )
    differences = ", ".join(
        f"{words} {values_of(labelled(record, label), 'difference')}"
        for label, (words, _) in _STEPS.items()
    )
    left = ", ".join(
        f"{words} {values_of(labelled(record, label), 'gradient_left')}"
        for label, (words, _) in _STEPS.items()
    )
    return Drawing(
        name=record["experiment"],
        alt=f"Largest relative difference of SMUC and the Riemannian form: {differences}. "
        f"Gradient left: {left}.",
        caption="a: how far SMUC is from the two-step Riemannian form: the weights, where both go "
        "their own way from one start (one layer), and the next step from the same weights "
        "(several layers). Below the dotted line is rounding. b: norm of the expected SMUC "
        "gradient. Each line is one seed.",
        figure=figure,
    )


# The second theorem

_STUDENTS = {
    "one-layer": "one layer",
    "one-layer-loud": "one, loud",
    "layers-informed": "informed",
    "layers-near": "near",
    "layers-random": "random",
    "layers-random-informed": "random, informed",
}
# Errors below this are off the axis: a student that has reached its teacher.
_ROUNDING = 1e-4
_MOMENTS = {"mean": "means", "variance": "variances", "covariance": "covariances of pairs"}


@composed
def theorem_2(record: Record) -> Drawing:
    """Errors of every layer before and after training, by student."""
    figure, axes = panels(3, 1, height=6.2)
    for panel, (key, words), name in zip(axes, _MOMENTS.items(), "abc", strict=True):
        ticks, names = _students(panel, record, key)
        logarithmic(panel, "y")
        panel.set_ylim(bottom=_ROUNDING)
        panel.set_ylabel("relative error")
        panel.set_xticks(ticks, names)
        panel.grid(visible=False, axis="x")
        letter(panel, name, words)
    figure.legend(
        handles=[swatch("before training", SLATE, "", "o"), swatch("after", BLUE, "", "o")],
        loc="outside lower center",
        ncols=2,
    )
    told = ", ".join(
        f"{words} {values_of(labelled(record, label), 'mean_error')}"
        for label, words in _STUDENTS.items()
    )
    return Drawing(
        name=record["experiment"],
        alt=f"Largest relative error of means over layers after training: {told}.",
        caption="Relative errors of a student's moments at each layer, on fresh inputs; dots are "
        "seeds, triangles are those far below the axis. One layer: from random weights, and where "
        "the student takes its input to be far too noisy (loud). Two hidden layers (1, 2) and a "
        "readout (out): near the teacher's weights and knowing its noise (informed), near them "
        "(near), from random weights (random), and from those but knowing its noise.",
        figure=figure,
    )


def _students(axes: Axes, record: Record, key: str) -> tuple[list[float], list[str]]:
    """Dots of all students side by side; where the ticks are, and what they say."""
    ticks, names, place = [], [], 0.0
    for label, words in _STUDENTS.items():
        parts = labelled(record, label)
        if not parts:
            continue
        count = len(parts[0]["series"]["after"][key])
        for layer in range(count):
            for when, colour in (("before", SLATE), ("after", BLUE)):
                at = place + (0.12 if when == "after" else -0.12)
                for part in parts:
                    value = part["series"][when][key][layer]
                    marker = "o" if value > _ROUNDING else "v"
                    height = max(value, 1.5 * _ROUNDING)
                    axes.plot(at, height, marker, ms=4.5, mew=0, color=colour, alpha=0.75)
            name = str(layer + 1) if count == 1 or layer < count - 1 else "out"
            ticks.append(place)
            names.append(f"{name}\n{words}" if layer == count // 2 else name)
            place += 1
        place += 0.8
    return ticks, names


# The third theorem

_NETWORKS = {
    "random": ("random", BLUE),
    "balanced": ("balanced", TEAL),
    "trained": ("trained", AMBER),
}
# Less than this is nothing, whatever the scale.
_LEAST = 1e-12


@composed
def theorem_3(record: Record) -> Drawing:
    """Deviations and rates by depth."""
    figure, axes = panels(2, 2, height=5.8)
    for label, (_, colour) in _NETWORKS.items():
        for part in labelled(record, label):
            _deep(axes, part["series"], colour)
    axes[1].axhline(1.0, color=SLATE, lw=0.8, ls=":")
    axes[2].axhline(0.0, color=SLATE, lw=0.8, ls=":")
    for panel in (axes[0], axes[1], axes[3]):
        logarithmic(panel, "y")
    for panel in (axes[0], axes[3]):
        panel.set_ylim(bottom=_LEAST)
    for panel, name, title, words in zip(
        axes,
        "abcd",
        ("deviation", "growth, and its bound r", "the condition", "relative deviation"),
        (
            "largest element",
            "from a layer to the next",
            "sum of \N{MINUS SIGN}log r",
            "of the largest covariance",
        ),
        strict=True,
    ):
        panel.set_xlabel("layer")
        panel.set_ylabel(words)
        letter(panel, name, title)
    handles = [swatch(words, colour) for words, colour in _NETWORKS.values()]
    handles += [
        swatch("bound r (b)", SLATE, "--"),
        swatch("squared response to the input (d)", SLATE, ":"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Drawing(
        name=record["experiment"], alt=_told(record), caption=_DEEP_CAPTION, figure=figure
    )


def _deep(axes: Sequence[Axes], series: Record, colour: str) -> None:
    look: dict[str, Any] = {"color": colour, "lw": 1.2, "alpha": 0.85}
    layers = np.arange(len(series["deviation"]))
    axes[0].plot(layers, series["deviation"], **look)
    axes[1].plot(layers[1:], series["ratio"], **look)
    axes[1].plot(layers[1:], series["rate"], "--", **look)
    axes[2].plot(layers[1:], series["sum_of_minus_log_rate"], **look)
    axes[3].plot(layers[1:], series["relative"], **look)
    axes[3].plot(layers[1:], series["response"][1:], ":", **look)


_DEEP_CAPTION = (
    "a: the largest difference of a covariance between two units of teacher and student, by layer "
    "(0 is the input, with variances). b: by how much it grows from a layer to the next (full "
    "lines), and the paper's bound r for that (dashed); above 1 (dotted) the bound allows growth. "
    "c: partial sums of \N{MINUS SIGN}log r, which the theorem needs to grow to infinity. d: the "
    "deviation as a part of the teacher's largest covariance, with the squared response of means "
    "to the input. Each line is a seed, of medians over inputs; random and balanced networks have "
    "an idealised student, trained ones a real one."
)


def _told(record: Record) -> str:
    said = [
        f"{words}: growth {values_of(parts, 'average_ratio')} per layer on average, r "
        f"{values_of(parts, 'smallest_rate')} at least, relative deviation at the end "
        f"{values_of(parts, 'relative_deviation')}"
        for label, (words, _) in _NETWORKS.items()
        if (parts := labelled(record, label))
    ]
    broken = values_of(labelled(record, "counterexample"), "ratio_over_rate")
    return f"{'; '.join(said)}. In the counterexample the growth over r is {broken}."


FIGURES: dict[str, Callable[[Record], Drawing]] = {
    "sensitivity": sensitivity,
    "activations": activations,
    "theorem-1": theorem_1,
    "theorem-2": theorem_2,
    "theorem-3": theorem_3,
}
