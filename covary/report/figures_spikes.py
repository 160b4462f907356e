"""Figures of moments against the spiking network that they describe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from covary.report.drawing import BLUE, ORANGE, SLATE, Drawing, canvas, head, styled, swatch
from covary.report.panels import grid_of_panels, identity, name_panel, said
from covary.report.words import number
from covary.runs.predictions import Array
from covary.runs.results import SpikingLayer as Layer
from covary.runs.results import SpikingVerification as Spikes

SHOWN = 400  # neurons, or pairs, of one layer; more hide each other
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # ms
# What of each layer is shown, and in which units.
_ROWS = {
    "rate": ("rate (spikes/s)", 1000.0),
    "fano": ("Fano factor", 1.0),
    "correlation": ("correlation", 1.0),
}


def drawings(spikes: Spikes) -> list[Drawing]:
    """Neurons, pairs of them, and decisions as time goes on."""
    return [neurons(spikes), course(spikes)]


@styled
def neurons(spikes: Spikes) -> Drawing:
    """Rates, Fano factors and correlations of each layer, by moments against simulated ones."""
    layers = spikes.layers[:1] + spikes.layers[1:][-1:]
    figure, top, panels = grid_of_panels(len(_ROWS), len(layers), 1.0 + 1.75 * len(_ROWS))
    for row, (key, (label, scale)) in zip(panels, _ROWS.items(), strict=True):
        for axes, layer in zip(row, layers, strict=True):
            analytic, sampled, error = (scale * values for values in _points(spikes, layer, key))
            axes.errorbar(
                analytic,
                sampled,
                error,
                fmt="o",
                ms=2.5,
                mew=0,
                alpha=0.6,
                color=ORANGE if "rate" in layer.poor and key == "rate" else BLUE,
                ecolor=SLATE,
                elinewidth=0.5,
            )
            if len(analytic):
                identity(axes, analytic, sampled)
            name_panel(axes, f"{layer.name}: {label}")
    for axes in panels[-1]:
        axes.set_xlabel("by moments")
    for row in panels:
        row[0].set_ylabel("by simulation")
    head(top, "Neurons that spike, and their moments", handles=[])
    errors = "; ".join(
        f"{layer.name}: rate {said(layer.errors['rate'])}, Fano factor "
        f"{said(layer.errors['fano'])}, covariances of pairs {said(layer.errors['off_diagonal'])}"
        for layer in layers
    )
    alt = f"Rates, Fano factors and correlations of neurons. Relative errors: {errors}."
    caption = (
        f"Up to {SHOWN} neurons (or pairs of them) of each layer, counted in windows of "
        f"{spikes.window:g} ms, with Monte-Carlo standard errors; on the dotted line moments "
        "are exact."
    )
    if len(spikes.layers) > len(layers):
        caption += f" The first and the last of {len(spikes.layers)} layers are shown."
    return Drawing("spikes-neurons", alt, caption, figure)


def _points(spikes: Spikes, layer: Layer, key: str) -> tuple[Array, Array, Array]:
    """By moments, sampled, and its standard error, (p,) of each."""
    if key == "correlation":
        analytic, sampled, error = spikes.of(layer, "pairs").reshape(-1, 3).T
    else:
        analytic = spikes.of(layer, key).ravel()
        sampled = spikes.of(layer, f"sampled_{key}").ravel()
        error = spikes.of(layer, f"{key}_error").ravel()
    known = np.isfinite(analytic) & np.isfinite(sampled) & np.isfinite(error)
    if key == "fano":
        # Of neurons that hardly ever fired, nothing is known.
        known &= spikes.of(layer, "sampled_rate").ravel() * spikes.window > 0.2
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(known))[:SHOWN]
    return analytic[chosen], sampled[chosen], error[chosen]


@styled
def course(spikes: Spikes) -> Drawing:
    """Accuracy and entropy against time."""
    decided, entropy = spikes.decisions, spikes.entropy
    figure, panels = canvas(4.3 if decided else 2.9, rows=(1.0,) * (2 if decided else 1))
    told = []
    if decided is not None:
        right, aim = [100 * value for value in decided.accuracy], 100 * decided.moments
        bars = [None if bar is None else 100 * bar for bar in decided.bar]
        _plot(panels[0], decided.times, right, bars, aim)
        panels[0].set_ylabel("accuracy (%)")
        told.append(
            f"Accuracy on {number(decided.inputs)} inputs reaches {right[-1]:.1f}% after "
            f"{decided.times[-1]:g} ms; that of the moments is {aim:.1f}%"
        )
    _plot(panels[-1], entropy.times, entropy.simulated, entropy.bar, entropy.moments)
    panels[-1].set_ylabel("entropy (nats)")
    panels[-1].set_xlabel("time (ms, logarithmic)")
    known = [value for value in entropy.simulated if value is not None]
    ends = f"ends at {known[-1]:.1f} nats" if known else "is unknown"
    aimed = "unknown" if entropy.moments is None else f"{entropy.moments:.1f}"
    told.append(f"Entropy of the output {ends}; that of moments is {aimed}")
    head(
        panels[0],
        "How fast it decides",
        handles=[swatch("spiking network", BLUE, "-", "o"), swatch("moments", SLATE, ":")],
    )
    caption = (
        "What the output says, by the spikes so far. Entropy is that of the accumulated output of "
        f"{number(spikes.copies)} networks (its covariance times the time), on average over "
        f"{number(len(spikes.inputs))} inputs, in networks that had run for a while; bars are "
        "standard errors."
    )
    if decided is not None:
        caption += (
            f" Accuracy is that on {number(decided.inputs)} inputs, each shown from time 0 on to "
            "networks with any potentials between reset and threshold."
        )
    return Drawing("spikes-decision", ". ".join(told) + ".", caption, figure)


def _plot(
    axes: Axes,
    times: Sequence[float],
    values: Sequence[float | None],
    bars: Sequence[float | None],
    aim: float | None,
) -> None:
    shown = [np.nan if value is None else value for value in values]
    errors = [0.0 if bar is None else bar for bar in bars]
    axes.errorbar(times, shown, errors, fmt="o-", ms=4, color=BLUE, ecolor=SLATE, capsize=2)
    if aim is not None:
        axes.axhline(aim, color=SLATE, ls=":", lw=1.4)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
