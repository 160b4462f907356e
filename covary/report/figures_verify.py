"""Figures of moments against simulations of the network that they describe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from covary.report.drawing import (
    AMBER,
    BLUE,
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
from covary.report.panels import grid_of_panels, identity, name_panel, said
from covary.report.words import number
from covary.runs.predictions import Array
from covary.runs.results import EntropyGap, RelativeError, Verification
from covary.runs.results import VerifiedLayer as Layer

SHOWN = 240  # pairs of one layer; more hide each other
PANELS = 6  # layers that have a panel of their own, at most
_COLOURS = (BLUE, ORANGE, TEAL, PURPLE, AMBER, SLATE)
# |rho| up to -> colour, marker
_BINS = ((0.2, BLUE, "o"), (0.5, TEAL, "s"), (0.8, AMBER, "D"), (1.0, ORANGE, "^"))
_BIN_LABELS = ("|\N{GREEK SMALL LETTER RHO}| < 0.2", "to 0.5", "to 0.8", "above")


def drawings(verification: Verification) -> list[Drawing]:
    """Everything that was stored, from the dynamics to the errors of each layer."""
    found = []
    traced = [layer for layer in verification.layers if verification.of(layer, "trace") is not None]
    if traced and "times" in verification.arrays:
        found.append(dynamics(verification, _spread(traced, 3)))
    if verification.of(verification.output, "sampled_mean") is not None:
        found.append(moments(verification))
    if verification.output.units > 1 and "output/covariance" in verification.arrays:
        found.append(covariances(verification))
    found.append(errors(verification))
    paired = [
        layer
        for layer in verification.layers
        if (pairs := verification.of(layer, "pairs")) is not None and pairs.size
    ]
    if paired:
        found.append(pairs_of_units(verification, _spread(paired, PANELS)))
    found.append(in_time(verification))
    return found


def _spread(layers: Sequence[Layer], most: int) -> list[Layer]:
    """The first, the last, and some between them."""
    chosen = np.unique(np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int))
    return [layers[i] for i in chosen]


@styled
def dynamics(verification: Verification, layers: Sequence[Layer]) -> Drawing:
    """An input, and what some units of some layers do in time."""
    image = _image(verification.arrays.get("input"))
    widths = [1.0] if image is None else [1.0, 3.4]
    figure, top, panels = grid_of_panels(
        len(layers), len(widths), 0.7 + 1.2 * len(layers), widths=widths
    )
    times = verification.arrays["times"]
    for (*left, axes), layer in zip(panels, layers, strict=True):
        for beside in left:
            beside.set_axis_off()
        trace = verification.of(layer, "trace")
        assert trace is not None
        for unit, colour in zip(trace.T, _COLOURS, strict=False):
            axes.plot(times, unit, color=colour, lw=0.9)
        name_panel(axes, f"{layer.name}: {min(len(trace.T), len(_COLOURS))} of {layer.units} units")
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(labelbottom=layer is layers[-1])
    panels[-1][-1].set_xlabel("time (time constants)")
    if image is not None:
        shown = panels[0][0]
        shown.imshow(image, cmap="gray_r" if image.ndim == 2 else None, interpolation="nearest")
        name_panel(shown, "input")
    head(top, "Dynamics of the stochastic network", handles=[])
    listed = ", ".join(layer.name for layer in layers)
    alt = f"Signals of some units of {listed} over {times[-1]:.0f} time constants, for one input."
    caption = (
        "Signals h(x) of the units that vary most, with the equal time constants of the paper's "
        "equation: deeper layers change more slowly, as each averages over the one before it."
    )
    return Drawing("verification-dynamics", alt, caption, figure)


def _image(inputs: Array | None) -> Array | None:
    """The first input as an image, if it is one."""
    if inputs is None or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    first = inputs[0]
    return np.asarray(first[0] if len(first) == 1 else np.moveaxis(first, 0, -1))


@styled
def moments(verification: Verification) -> Drawing:
    """Means and variances of outputs: analytic against simulated ones."""
    figure, top, (panels,) = grid_of_panels(1, 2, 3.0)
    output = verification.output
    told = []
    for axes, key in zip(panels, ("mean", "variance"), strict=True):
        analytic = verification.of(output, key)
        sampled = verification.of(output, f"sampled_{key}")
        error = verification.of(output, f"{key}_error")
        assert analytic is not None
        assert sampled is not None
        assert error is not None
        axes.errorbar(
            analytic.ravel(),
            sampled.ravel(),
            2 * error.ravel(),
            fmt="o",
            ms=4,
            mew=0,
            alpha=0.75,
            color=BLUE,
            ecolor=SLATE,
            elinewidth=0.9,
        )
        identity(axes, analytic, sampled)
        axes.set_xlabel(f"{key} by moments")
        axes.set_ylabel(f"{key} by simulation")
        told.append(f"{key} {said(getattr(output.steady, key))}")
    head(top, f"Outputs for {_inputs(verification)}", handles=[])
    alt = f"Outputs by moments against simulated ones. Relative errors: {', '.join(told)}."
    caption = (
        "Each dot is one output unit for one input, with twice its Monte-Carlo standard error; on "
        "the dotted line moments are exact."
    )
    return Drawing("verification-moments", alt, caption, figure)


@styled
def covariances(verification: Verification) -> Drawing:
    """The covariance of the output for one input: by moments, simulated, and their difference."""
    figure, top, (panels,) = grid_of_panels(1, 3, 2.7)
    analytic = verification.arrays["output/covariance"]
    sampled = verification.arrays["output/sampled_covariance"]
    most = float(max(np.abs(analytic).max(), np.abs(sampled).max())) or 1.0
    names = ("moments", "simulation", "difference")
    for axes, matrix, name in zip(
        panels, (analytic, sampled, sampled - analytic), names, strict=True
    ):
        shown = axes.imshow(matrix, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([])
        name_panel(axes, name)
    bar = figure.colorbar(shown, ax=panels, orientation="horizontal", aspect=45, pad=0.06)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    head(top, "Covariance of the output, one input", handles=[])
    largest = float(np.abs(sampled - analytic).max())
    alt = (
        f"Covariance matrices of {len(analytic)} outputs by moments and by simulation, on one "
        f"scale. Elements reach {number(most)}, differences {number(largest)}."
    )
    error = float(verification.arrays["output/covariance_error"].max())
    caption = (
        f"On one scale of colours. Elements reach {number(most)}; the largest difference is "
        f"{number(largest)}, and the Monte-Carlo error {number(error)} at most."
    )
    return Drawing("verification-covariance", alt, caption, figure)


@styled
def errors(verification: Verification) -> Drawing:
    """Errors of every layer, with what sampling alone would make of exact moments."""
    figure, top, grid = grid_of_panels(2, 2, 4.6)
    panels = [axes for row in grid for axes in row]
    layers = verification.layers
    places = np.arange(len(layers))
    titles = {
        "mean": "mean (%)",
        "variance": "variance (%)",
        "covariance": "covariance (%)",
        "off_diagonal": "covariances of pairs (%)",
    }
    told = []
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        values = [getattr(layer.steady, key) for layer in layers]
        colours = [ORANGE if layer.poor and key != "mean" else BLUE for layer in layers]
        _bars(axes, places, values, colours, 100.0)
        floors = [100 * (value.floor or 0.0) for value in values]
        axes.plot(places, floors, "_", color=SLATE, ms=15, mew=2)
        axes.set_ylim(bottom=0)
        name_panel(axes, title)
        _ticks(axes, len(layers))
        told.append(f"{title}: {', '.join(said(value) for value in values)}")
    for axes in panels[2:]:
        axes.set_xlabel("layer")
    head(
        top,
        "Errors of moments by layer",
        handles=[swatch("error, noise taken out", BLUE, "", "s"), swatch("noise alone", SLATE)],
        columns=2,
    )
    alt = f"Relative errors of moments by layer, the output last. {'; '.join(told)}."
    caption = (
        "Relative errors (Frobenius norm) over inputs, with Monte-Carlo standard errors. The grey "
        "dash is the error that exact moments would seem to have, for the noise of sampling; it is "
        "taken out of the bars, in quadrature."
    )
    if any(layer.poor for layer in layers):
        caption += (
            f" Orange layers have covariances more than {verification.limit:.0%} off, beyond doubt."
        )
    return Drawing("verification-errors", alt, caption, figure)


def _bars(
    axes: Axes,
    places: Array,
    values: Sequence[RelativeError | EntropyGap],
    colours: Sequence[str],
    scale: float,
) -> None:
    heights = [scale * (value.value or 0.0) for value in values]
    bars = [scale * (value.bar or 0.0) for value in values]
    axes.bar(places, heights, 0.62, color=colours, yerr=bars, ecolor=SLATE, capsize=2)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MaxNLocator(3))


def _ticks(axes: Axes, count: int) -> None:
    """Layers by their number, the last one as output."""
    step = max(1, count // 8)
    shown = [i for i in range(count - 1) if i % step == 0]
    axes.set_xticks([*shown, count - 1], [*(str(i + 1) for i in shown), "out"])
    axes.set_xlim(-0.6, count - 0.4)


@styled
def pairs_of_units(verification: Verification, layers: Sequence[Layer]) -> Drawing:
    """Covariances of pairs of units, analytic against simulated, by how correlated inputs are."""
    columns = min(2, len(layers))
    rows = -(-len(layers) // columns)
    figure, top, grid = grid_of_panels(rows, columns, 0.9 + 1.9 * rows)
    panels = [axes for row in grid for axes in row]
    for axes, layer in zip(panels, layers, strict=False):
        stored = verification.of(layer, "pairs")
        assert stored is not None
        pooled = stored.reshape(-1, 4)
        chosen = np.random.default_rng(0).permutation(len(pooled))[:SHOWN]
        analytic, sampled, _, rho = pooled[chosen].T
        below = 0.0
        for above, colour, marker in _BINS:
            within = (np.abs(rho) >= below) & ((np.abs(rho) < above) | (above == 1.0))
            axes.plot(
                analytic[within], sampled[within], marker, ms=3, mew=0, alpha=0.75, color=colour
            )
            below = above
        identity(axes, analytic, sampled)
        name_panel(axes, layer.name)
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(layers) - columns) : len(layers)]:
        axes.set_xlabel("covariance by moments")
    for axes in panels[::columns]:
        axes.set_ylabel("by simulation")
    handles = [
        swatch(label, colour, "", marker)
        for label, (_, colour, marker) in zip(_BIN_LABELS, _BINS, strict=True)
    ]
    head(top, "Covariances of pairs of units", handles=handles, columns=4)
    alt = "Covariances of pairs of units by moments against simulated ones: relative errors " + (
        ", ".join(f"{layer.name} {said(layer.steady.off_diagonal)}" for layer in layers)
    )
    caption = (
        f"Up to {SHOWN} pairs of each layer, half of them those with the largest covariances; "
        "colours tell how correlated the pair's inputs are "
        "before the activation. Linear response keeps the first power of that correlation."
    )
    return Drawing("verification-pairs", f"{alt}.", caption, figure)


@styled
def in_time(verification: Verification) -> Drawing:
    """Variance of networks in time, of that of the steady state, and differences of entropy."""
    figure, (axes, below) = canvas(4.4, rows=(1.0, 1.0))
    layers = verification.layers
    places = np.arange(len(layers))
    looks = {"ou-0": ("at once", BLUE, "o"), "ou-1": ("equal time constants", ORANGE, "s")}
    told = []
    for name, (label, colour, marker) in looks.items():
        shares = [layer.simulations[name].variance_share for layer in layers]
        values = [np.nan if share.value is None else share.value for share in shares]
        bars = [share.bar or 0.0 for share in shares]
        axes.errorbar(
            places,
            values,
            bars,
            fmt=f"{marker}-",
            ms=5,
            color=colour,
            label=f"layers follow {label}" if name == "ou-0" else label,
        )
        told.append(f"{label}: {', '.join(f'{value:.2f}' for value in values)}")
    axes.axhline(1.0, color=SLATE, ls=":", lw=1.2, zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("variance, steady = 1")
    colours = [ORANGE if layer.poor else BLUE for layer in layers]
    _bars(below, places, [layer.steady.entropy for layer in layers], colours, 1.0)
    below.axhline(0.0, color=SLATE, lw=0.8)
    below.set_ylabel("entropy gap (nats)")
    below.set_xlabel("layer")
    _ticks(below, len(layers))
    head(axes, "Variance in time, and entropies", columns=2)
    alt = f"Variance of each layer in time over that of the steady state. {'; '.join(told)}."
    caption = (
        "Above: networks in time. With equal time constants each layer averages over the noise of "
        "those before it, so that less of it arrives; moments describe layers that follow at once. "
        "Below: simulated entropy less that of the moments, in the directions that have more than "
        "a thousandth of the largest variance."
    )
    return Drawing("verification-time", alt, caption, figure)


def _inputs(verification: Verification) -> str:
    count = len(verification.inputs)
    return "one input" if count == 1 else f"{count} inputs"
