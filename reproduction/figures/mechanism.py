"""The figure of the quadrant task."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from covary.report.drawing import BLUE, INK, ORANGE, SLATE, TEAL, Drawing, swatch
from reproduction.figures.layout import Record, composed, letter, panels
from reproduction.words import spread

# Least and most area of a mark, in square points.
_AREAS = (2.0, 34.0)


@composed
def mechanism(record: Record) -> Drawing:
    """Classes and entropy in the plane, samples, and entropy against distance."""
    label = record["parts"][0]["label"]
    parts = [part for part in record["parts"] if part["label"] == label]
    shown = parts[0]["series"]
    figure, axes = panels(1, 3, height=3.1)
    _plane(axes[0], shown["square"])
    _samples(axes[1], shown["samples"])
    _distances(axes[2], shown["samples"], [part["series"]["bins"] for part in parts])
    first = parts[0]["metrics"]
    told = (
        f"r in bins {first['binned_correlation']:.2f}\nby sample {first['sample_correlation']:.2f}"
    )
    axes[2].text(
        0.97,
        0.96,
        told.replace("-", "\N{MINUS SIGN}"),
        transform=axes[2].transAxes,
        ha="right",
        va="top",
        fontsize=8,
    )
    letter(axes[0], "a", "entropy in the plane")
    letter(axes[1], "b", "samples, size by entropy")
    letter(axes[2], "c", "entropy and distance")
    figure.legend(
        handles=[
            swatch("class A", BLUE, "", "o"),
            swatch("class B", TEAL, "", "o"),
            swatch("wrong", ORANGE, "", "x"),
            swatch("averages in bins", BLUE, "-", "o"),
        ],
        loc="outside lower center",
        ncols=4,
    )
    numbers = {
        name: spread([part["metrics"][metric] for part in parts])
        for name, metric in (
            ("accuracy", "accuracy"),
            ("correlation of distance and entropy in bins", "binned_correlation"),
            ("by sample", "sample_correlation"),
            ("separability of wrong from right samples", "wrong_separability"),
        )
    }
    return Drawing(
        name=record["experiment"],
        alt="; ".join(f"{name} {value}" for name, value in numbers.items()) + ".",
        caption="a: output entropy (colours, in nats) and the boundary that the network learned "
        "(black line), with the axes, which are the true one (dotted). b: fresh samples of class A "
        "and B, all that are wrong (crosses) and some of the others; larger marks have more "
        "entropy. c: entropy against the distance to the axes, of these samples and averaged in "
        f"bins over all of them; each line is one of {len(parts)} networks, all else is of the "
        "first.",
        figure=figure,
    )


def _plane(axes: Axes, square: Record) -> None:
    reach = square["reach"]
    lead = np.array(square["lead"])
    image = axes.imshow(
        square["entropy"],
        origin="lower",
        extent=(-reach, reach, -reach, reach),
        cmap="viridis",
        interpolation="bilinear",
        aspect="auto",
    )
    if lead.min() < 0 < lead.max():
        ticks = np.linspace(-reach, reach, len(lead))
        axes.contour(ticks, ticks, lead, levels=[0.0], colors=INK, linewidths=1.4)
    for line in (axes.axhline, axes.axvline):
        line(0.0, color="#ffffff", lw=1.0, ls=":")
    for x1, x2, name in ((1, 1, "A"), (-1, -1, "A"), (-1, 1, "B"), (1, -1, "B")):
        at = 0.82 * reach
        axes.text(x1 * at, x2 * at, name, color="#ffffff", ha="center", va="center", weight="bold")
    axes.grid(visible=False)
    axes.set_xlabel("x1")
    axes.set_ylabel("x2")
    axes.figure.colorbar(image, ax=axes, label="entropy (nats)", use_gridspec=False)


def _samples(axes: Axes, samples: Record) -> None:
    x1, x2, entropy = (np.array(samples[name]) for name in ("x1", "x2", "entropy"))
    wrong = np.array(samples["wrong"], dtype=bool)
    area = np.interp(entropy, np.quantile(entropy, [0.02, 0.98]), _AREAS)
    for same, colour in ((True, BLUE), (False, TEAL)):
        chosen = ~wrong & ((x1 * x2 > 0) == same)
        axes.scatter(x1[chosen], x2[chosen], area[chosen], color=colour, alpha=0.55, lw=0)
    axes.scatter(x1[wrong], x2[wrong], area[wrong], color=ORANGE, marker="x", lw=0.8)
    for line in (axes.axhline, axes.axvline):
        line(0.0, color=SLATE, lw=0.8, ls=":")
    axes.set_xlim(-3, 3)
    axes.set_ylim(-3, 3)
    axes.set_xlabel("x1")
    axes.set_ylabel("x2")


def _distances(axes: Axes, samples: Record, bins: list[Record]) -> None:
    distance = np.minimum(np.abs(samples["x1"]), np.abs(samples["x2"]))
    entropy, wrong = np.array(samples["entropy"]), np.array(samples["wrong"], dtype=bool)
    axes.plot(distance[~wrong], entropy[~wrong], "o", ms=2, mew=0, color=SLATE, alpha=0.35)
    axes.plot(distance[wrong], entropy[wrong], "x", ms=3.5, mew=0.9, color=ORANGE)
    for each in bins[1:]:
        axes.plot(each["distance"], each["entropy"], color=BLUE, lw=0.9, alpha=0.45)
    axes.plot(bins[0]["distance"], bins[0]["entropy"], "o-", ms=3, color=BLUE, lw=1.5)
    axes.set_xlabel("distance to the boundary")
    axes.set_ylabel("entropy (nats)")


FIGURES: dict[str, Callable[[Record], Drawing]] = {"mechanism": mechanism}
