"""Figures of moments against simulations of the network that they describe, spiking or not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from covary.report import drawing as draw
from covary.report.words import tenths
from covary.runs.predictions import Array
from covary.runs.results import MeasuredNumber, SpikingVerification, SteadyVerification
from covary.runs.results import VerifiedLayer as Layer
from covary.runs.results import VerifiedSpikingLayer as Neurons

PAIRS, NEURONS = 240, 400  # of one layer that are shown; more hide each other
PANELS = 6  # layers that have a panel of their own, at most
_ERRORS = {name: f"{name} (%)" for name in ("mean", "variance", "covariance")}
_ERRORS |= {"off_diagonal": "covariances of pairs (%)"}
# |rho| up to -> label, colour, marker
_BINS = {
    0.2: ("|\N{GREEK SMALL LETTER RHO}| < 0.2", draw.BLUE, "o"),
    0.5: ("to 0.5", draw.TEAL, "s"),
    0.8: ("to 0.8", draw.AMBER, "D"),
    1.0: ("above", draw.ORANGE, "^"),
}
# What of each layer of neurons is shown, its error, and the factor for what is shown.
_NEURONS = {
    "rate": ("rate (spikes/s)", "rate", 1000.0),
    "fano": ("Fano factor", "fano", 1.0),
    "correlation": ("correlation", "off_diagonal", 1.0),
}
_IN_TIME = {
    "ou-0": ("layers follow at once", draw.BLUE, "o-"),
    "ou-1": ("equal time constants", draw.ORANGE, "s-"),
}
_NONE = np.empty(0)


def drawings(measured: SteadyVerification | SpikingVerification) -> list[draw.Drawing]:
    """Everything that was stored, from the dynamics to the errors of each layer."""
    if isinstance(measured, SpikingVerification):
        return [neurons(measured), course(measured)]
    found, arrays = [], measured.arrays
    traced = [layer for layer in measured.layers if f"{layer.name}/trace" in arrays]
    if traced and "times" in arrays:
        found.append(dynamics(measured, _spread(traced, 3)))
    if f"{measured.output.name}/sampled_mean" in arrays:
        found.append(moments(measured))
    if measured.output.units > 1 and "output/covariance" in arrays:
        found.append(covariances(measured))
    found.append(errors(measured))
    paired = [layer for layer in measured.layers if arrays.get(f"{layer.name}/pairs", _NONE).size]
    if paired:
        found.append(pairs_of_units(measured, _spread(paired, PANELS)))
    return [*found, in_time(measured)]


def _spread(layers: Sequence[Layer], most: int) -> list[Layer]:
    """The first, the last, and some between them."""
    chosen = np.unique(np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int))
    return [layers[i] for i in chosen]


@draw.house_style()
def dynamics(verification: SteadyVerification, layers: Sequence[Layer]) -> draw.Drawing:
    """An input, and what some units of some layers do in time."""
    image = _image(verification.arrays.get("input", _NONE))
    widths = [1.0] if image is None else [1.0, 3.4]
    height = 0.7 + 1.2 * len(layers)
    top, panels = draw.grid_of_panels(len(layers), len(widths), height, widths=widths)
    times = verification.arrays["times"]
    for (*left, axes), layer in zip(panels, layers, strict=True):
        for beside in left:
            beside.set_axis_off()
        trace = verification.arrays[f"{layer.name}/trace"][:, : len(draw.COLOURS)]
        for unit, colour in zip(trace.T, draw.COLOURS, strict=False):
            axes.plot(times, unit, color=colour, lw=0.9)
        draw.name_panel(axes, f"{layer.name}: {trace.shape[1]} of {layer.units} units")
        draw.few_ticks(axes, "y")
        axes.tick_params(labelbottom=layer is layers[-1])
    panels[-1][-1].set_xlabel("time (time constants)")
    if image is not None:
        cmap = "gray_r" if image.ndim == 2 else None
        panels[0][0].imshow(image, cmap=cmap, interpolation="nearest")
        draw.name_panel(panels[0][0], "input")
    return draw.drawn(top, "verification-dynamics", layers=layers, times=times)


def _image(inputs: Array) -> Array | None:
    """The first input as an image, if it is one."""
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    return np.asarray(inputs[0, 0] if inputs.shape[1] == 1 else np.moveaxis(inputs[0], 0, -1))


@draw.house_style()
def moments(verification: SteadyVerification) -> draw.Drawing:
    """Means and variances of outputs: analytic against simulated ones."""
    top, (panels,) = draw.grid_of_panels(1, 2, 3.0)
    output, said = verification.output, []
    for axes, key in zip(panels, ("mean", "variance"), strict=True):
        names = [f"{output.name}/{name}" for name in (key, f"sampled_{key}", f"{key}_error")]
        analytic, sampled, error = (verification.arrays[name].ravel() for name in names)
        draw.against(axes, "", analytic, sampled, 2 * error, ms=4)
        axes.set(xlabel=f"{key} by moments", ylabel=f"{key} by simulation")
        said.append(f"{key} {tenths(getattr(output.steady, key).value)}")
    return draw.drawn(top, "verification-moments", inputs=verification.inputs, said=said)


@draw.house_style()
def covariances(verification: SteadyVerification) -> draw.Drawing:
    """The covariance of the output for one input: by moments, simulated, and their difference."""
    top, (panels,) = draw.grid_of_panels(1, 3, 2.7)
    analytic, sampled, error = (
        verification.arrays[f"output/{name}"]
        for name in ("covariance", "sampled_covariance", "covariance_error")
    )
    most = float(max(np.abs(analytic).max(), np.abs(sampled).max())) or 1.0
    matrices = {"moments": analytic, "simulation": sampled, "difference": sampled - analytic}
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        shown = axes.imshow(matrix, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(xticks=[], yticks=[])
        draw.name_panel(axes, name)
    ticks, place = MaxNLocator(5), "horizontal"
    top.figure.colorbar(shown, ax=panels, orientation=place, aspect=45, pad=0.06, ticks=ticks)
    name = "verification-covariance"
    return draw.drawn(top, name, most=most, matrices=matrices, error=error)


@draw.house_style()
def errors(verification: SteadyVerification) -> draw.Drawing:
    """Errors of every layer, with what sampling alone would make of exact moments."""
    top, grid = draw.grid_of_panels(2, 2, 4.6)
    layers, said = verification.layers, []
    for axes, (key, title) in zip([*grid[0], *grid[1]], _ERRORS.items(), strict=True):
        values = [getattr(layer.steady, key) for layer in layers]
        _bars(axes, values, [key != "mean" and bool(layer.poor) for layer in layers], 100.0)
        floors = [100 * (value.floor or 0.0) for value in values]
        axes.plot(floors, "_", color=draw.SLATE, ms=15, mew=2)
        axes.set_ylim(bottom=0)
        draw.name_panel(axes, title)
        said.append(f"{title}: {', '.join(tenths(value.value) for value in values)}")
    for axes in grid[1]:
        axes.set_xlabel("layer")
    handles = [draw.swatch("error, noise taken out", draw.BLUE, "", "s")]
    handles += [draw.swatch("noise alone", draw.SLATE)]
    name = "verification-errors"
    return draw.drawn(top, name, handles=handles, measured=verification, said=said)


def _bars(axes: Axes, values: Sequence[MeasuredNumber], poor: Sequence[bool], scale: float) -> None:
    """A bar for each layer, by its number, the last one as output."""
    count = len(values)
    heights = [scale * (value.value or 0.0) for value in values]
    bars = [scale * (value.bar or 0.0) for value in values]
    colours = [draw.ORANGE if each else draw.BLUE for each in poor]
    axes.bar(range(count), heights, 0.62, color=colours, yerr=bars, ecolor=draw.SLATE, capsize=2)
    axes.grid(visible=False, axis="x")
    draw.few_ticks(axes, "y")
    shown = range(0, count - 1, max(1, count // 8))
    axes.set_xticks([*shown, count - 1], [*(str(i + 1) for i in shown), "out"])
    axes.set_xlim(-0.6, count - 0.4)


@draw.house_style()
def pairs_of_units(verification: SteadyVerification, layers: Sequence[Layer]) -> draw.Drawing:
    """Covariances of pairs of units, analytic against simulated, by how correlated inputs are."""
    columns = min(2, len(layers))
    rows = -(-len(layers) // columns)
    top, grid = draw.grid_of_panels(rows, columns, 0.9 + 1.9 * rows)
    panels = [axes for row in grid for axes in row]
    for axes, layer in zip(panels, layers, strict=False):
        pooled = verification.arrays[f"{layer.name}/pairs"].reshape(-1, 4)
        analytic, sampled, _, rho = pooled[draw.some(len(pooled), PAIRS)].T
        bins = np.digitize(np.abs(rho), list(_BINS)[:-1])
        for i, (_, colour, marker) in enumerate(_BINS.values()):
            own = bins == i
            axes.plot(analytic[own], sampled[own], marker, ms=3, mew=0, alpha=0.75, color=colour)
        draw.identity(axes, analytic, sampled)
        draw.few_ticks(axes)
        draw.name_panel(axes, layer.name)
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    for axes in panels[len(layers) - columns : len(layers)]:
        axes.set_xlabel("covariance by moments")
    for axes in panels[::columns]:
        axes.set_ylabel("by simulation")
    said = [f"{layer.name} {tenths(layer.steady.off_diagonal.value)}" for layer in layers]
    handles = [draw.swatch(label, colour, "", marker) for label, colour, marker in _BINS.values()]
    name = "verification-pairs"
    return draw.drawn(top, name, handles=handles, columns=4, most=PAIRS, said=said)


@draw.house_style()
def in_time(verification: SteadyVerification) -> draw.Drawing:
    """Variance of networks in time, of that of the steady state, and differences of entropy."""
    axes, below = draw.canvas(4.4, rows=(1.0, 1.0))
    layers, said = verification.layers, []
    for name, (label, colour, style) in _IN_TIME.items():
        shares = [layer.simulations[name].variance_share for layer in layers]
        values = [np.nan if share.value is None else share.value for share in shares]
        bars = [share.bar or 0.0 for share in shares]
        draw.points(axes, range(len(layers)), values, bars, colour, fmt=style, ms=5, label=label)
        said.append(f"{label}: {', '.join(f'{value:.2f}' for value in values)}")
    axes.axhline(1.0, color=draw.SLATE, ls=":", lw=1.2, zorder=0)
    axes.set_ylim(bottom=0)
    gaps = [layer.steady.entropy for layer in layers]
    _bars(below, gaps, [bool(layer.poor) for layer in layers], 1.0)
    below.axhline(0.0, color=draw.SLATE, lw=0.8)
    below.set(ylabel="entropy gap (nats)", xlabel="layer")
    return draw.drawn(axes, "verification-time", said=said)


@draw.house_style()
def neurons(spikes: SpikingVerification) -> draw.Drawing:
    """Rates, Fano factors and correlations of each layer, by moments against simulated ones."""
    layers = spikes.layers[:1] + spikes.layers[1:][-1:]
    top, panels = draw.grid_of_panels(len(_NEURONS), len(layers), 1.0 + 1.75 * len(_NEURONS))
    said: dict[str, list[str]] = {layer.name: [] for layer in layers}
    for row, (key, (label, measure, scale)) in zip(panels, _NEURONS.items(), strict=True):
        for axes, layer in zip(row, layers, strict=True):
            analytic, sampled, error = scale * _neurons(spikes, layer, key)
            colour = draw.ORANGE if key == "rate" and key in layer.poor else draw.BLUE
            name = f"{layer.name}: {label}"
            draw.against(axes, name, analytic, sampled, error, colour=colour, ms=2.5)
            said[layer.name].append(f"{key} {tenths(layer.errors[measure].value)}")
        row[0].set_ylabel("by simulation")
    for axes in panels[-1]:
        axes.set_xlabel("by moments")
    told = [f"{name}: {', '.join(errors)}" for name, errors in said.items()]
    return draw.drawn(top, "spikes-neurons", most=NEURONS, spikes=spikes, said=told)


def _neurons(spikes: SpikingVerification, layer: Neurons, key: str) -> Array:
    """(3, p) by moments, sampled, and its standard error, of neurons or pairs of them."""
    if key == "correlation":
        values = spikes.arrays[f"{layer.name}/pairs"].reshape(-1, 3).T
    else:
        names = (key, f"sampled_{key}", f"{key}_error")
        values = np.stack([spikes.arrays[f"{layer.name}/{name}"].ravel() for name in names])
    known = np.isfinite(values).all(axis=0)
    if key == "fano":
        # Of neurons that hardly ever fired, nothing is known.
        known &= spikes.arrays[f"{layer.name}/sampled_rate"].ravel() * spikes.window > 0.2
    places = np.flatnonzero(known)
    return np.asarray(values[:, places[draw.some(len(places), NEURONS)]])


@draw.house_style()
def course(spikes: SpikingVerification) -> draw.Drawing:
    """Accuracy and entropy against time."""
    decided, entropy = spikes.decisions, spikes.entropy
    panels = draw.canvas(4.3 if decided else 2.9, rows=(1.0,) * (2 if decided else 1))
    curves = [(panels[-1], entropy.times, entropy.simulated, entropy.bar, entropy.moments)]
    if decided is not None:
        curves.append((panels[0], decided.times, decided.accuracy, decided.bar, decided.moments))
    for axes, times, values, bars, aim in curves:
        shown = [np.nan if value is None else value for value in values]
        spread = [bar or 0.0 for bar in bars]
        draw.points(axes, times, shown, spread, fmt="o-", ms=4, ecolor=draw.SLATE, capsize=2)
        if aim is not None:
            axes.axhline(aim, color=draw.SLATE, ls=":", lw=1.4)
        draw.log_axis(axes)
    if decided is not None:
        panels[0].set_ylabel("accuracy")
        draw.percentages(panels[0], "y")
    panels[-1].set(ylabel="entropy (nats)", xlabel="time (ms, logarithmic)")
    handles = [draw.swatch("spiking network", draw.BLUE, "-", "o")]
    handles += [draw.swatch("moments", draw.SLATE, ":")]
    return draw.drawn(panels[0], "spikes-decision", handles=handles, spikes=spikes)
