"""The figure of a comparison with other methods: Comparison -> Drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from covary.compare import Comparison
from covary.compare.comparison import MethodRow, Summary
from covary.compare.methods import CLASSIFICATION, REGRESSION
from covary.report import drawing as draw
from covary.report.words import metric as shown
from covary.report.words import number, squeezed
from covary.uncertainty.metrics import METRICS

_PANELS = 4  # beside each other
_FAR = 4.0  # so many middle halves of the values away, a value is drawn at the edge
_INFERENCE = "inference"
_TIMES = ("fit_seconds", _INFERENCE)  # on logarithmic axes
_TITLES = {"log_likelihood": "NLL", "width_90": "90% width", "spearman_error": "rank corr."}
_TITLES |= {"auroc_errors": "AUROC"}
_RIGHT = (0.85, 0.95)  # coverage with which a narrow 90% interval is a good one


class _Measure(NamedTuple):
    """A number that methods are compared by."""

    name: str
    title: str
    best: str  # "higher", "lower" or the value that it should have
    values: tuple[float, ...]  # of each method; NaN where it was not measured
    stddevs: tuple[float, ...]  # over seeds; 0 of a single one
    eligible: tuple[bool, ...]  # which can be the best

    def winner(self) -> int | None:
        """The place of the best method; None if none was measured."""
        values = np.array(self.values)
        if self.best not in ("higher", "lower"):
            values = np.abs(values - float(self.best.rstrip("%")) / 100)
        known = np.isfinite(values) & self.eligible
        if not known.any():
            return None
        ordered = np.where(known, -values if self.best == "higher" else values, np.inf)
        return int(ordered.argmin())

    def edges(self) -> tuple[float, float]:
        """What the axis shows: all values, but for those that would press the others together."""
        values = np.array(self.values)[np.isfinite(self.values)]
        values = np.log(values) if self.name in _TIMES else values
        lower, middle, upper = np.quantile(values, [0.25, 0.5, 0.75])
        far = _FAR * max(upper - lower, 0.01 * abs(middle))
        low, high = max(values.min(), lower - far), min(values.max(), upper + far)
        pad = 0.08 * (high - low) or 0.05 * abs(middle) or 1.0
        ends = np.array([low - pad, high + pad])
        low, high = (np.exp(ends) if self.name in _TIMES else ends).tolist()
        return low, high


def drawings(comparison: Comparison) -> list[draw.Drawing]:
    """A panel for each measure, a row for each method."""
    rows = list({row.method: row for row in reversed(comparison.rows)}.values())[::-1]
    every = _measures(comparison.task, rows)
    measures = [one for one in every if np.isfinite(one.values).any()]
    return [_dots(comparison, rows, measures)] if measures else []


def _measures(task: str, rows: Sequence[MethodRow]) -> list[_Measure]:
    names = (*CLASSIFICATION, "auroc_errors") if task == "classification" else REGRESSION
    found = []
    for name in (*names, "fit_seconds"):
        every = [row.summary.get(name) or Summary(mean=None, stddev=None, seeds=0) for row in rows]
        values = tuple(np.nan if one.mean is None else one.mean for one in every)
        stddevs = tuple(one.stddev or 0.0 for one in every)
        title, best = _TITLES.get(name, METRICS[name].short), METRICS[name].best
        eligible = tuple(name != "width_90" or _covers(row) for row in rows)
        if name == "log_likelihood":  # with the other sign, as others have it
            best, values = "lower", tuple(-value for value in values)
        found.append(_Measure(name, title, best, values, stddevs, eligible))
    passes = tuple(np.nan if row.inference_cost is None else row.inference_cost for row in rows)
    nothing, all_of_them = (0.0,) * len(rows), (True,) * len(rows)
    found.append(_Measure(_INFERENCE, "passes", "lower", passes, nothing, all_of_them))
    return found


def _covers(row: MethodRow) -> bool:
    """Whether its 90% intervals hold about so many targets."""
    found = row.summary.get("coverage_90")
    return found is not None and found.mean is not None and _RIGHT[0] <= found.mean <= _RIGHT[1]


def _name(method: str) -> str:
    """The name of a method, in a narrow column."""
    return squeezed(method.replace(", calibrated", ", cal."), 27)


@draw.house_style()
def _dots(
    comparison: Comparison, rows: Sequence[MethodRow], measures: Sequence[_Measure]
) -> draw.Drawing:
    lines = -(-len(measures) // _PANELS)
    columns = -(-len(measures) // lines)
    top, grid = draw.grid_of_panels(lines, columns, 0.7 + lines * (0.5 + 0.15 * len(rows)))
    panels = [axes for line in grid for axes in line]
    ours = [row.group in ("mnn", "smsc") for row in rows]
    for place, (axes, measure) in enumerate(zip(panels, measures, strict=False)):
        _panel(axes, measure, ours)
        names = [_name(row.method) for row in rows] if place % columns == 0 else []
        axes.set_yticks(range(len(rows)), names or [""] * len(rows), fontsize=6.5)
    for axes in panels[len(measures) :]:
        axes.set_axis_off()
    handles = [
        draw.swatch("moment networks", draw.BLUE, "", "o"),
        draw.swatch("others", draw.SLATE, "", "o"),
        draw.swatch("best", draw.ORANGE, "", "D"),
    ]
    said = []
    for measure in measures:
        best = measure.winner()
        if best is None:
            continue
        is_share = measure.name in METRICS and METRICS[measure.name].is_share
        value = measure.values[best]
        text = shown(measure.name, value) if is_share else number(value)
        said.append(f"{measure.title} {text} ({rows[best].method})")
    return draw.drawn(
        top, "comparison", columns=3, handles=handles, comparison=comparison, said=said
    )


def _panel(axes: Axes, measure: _Measure, ours: Sequence[bool]) -> None:
    low, high = measure.edges()
    best = measure.winner()
    axes.set(xlim=(low, high), ylim=(len(ours) - 0.4, -0.6))
    if measure.best not in ("higher", "lower"):
        axes.axvline(float(measure.best.rstrip("%")) / 100, color=draw.SLATE, lw=1.0, ls=":")
    for place, (value, bar, own) in enumerate(
        zip(measure.values, measure.stddevs, ours, strict=True)
    ):
        if not np.isfinite(value):
            continue
        colour = draw.ORANGE if place == best else draw.BLUE if own else draw.SLATE
        if low <= value <= high:
            marker = "D" if place == best else "o"
            axes.plot([value - bar, value + bar], [place] * 2, color=colour, lw=1.0)
            axes.plot(value, place, marker, color=colour, ms=3.5)
        else:  # off the axis
            edge, marker = (high, ">") if value > high else (low, "<")
            axes.plot(edge, place, marker, color=colour, ms=4.5, clip_on=False)
    axes.grid(visible=False, axis="y")
    axes.hlines(range(len(ours)), low, high, color=draw.RULE, lw=0.5, zorder=0)
    if measure.name in _TIMES:
        draw.log_axis(axes)
        axes.xaxis.set_major_locator(ticker.LogLocator(numticks=2))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.set_xlim(low, high)
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(2))
    if measure.name in METRICS and METRICS[measure.name].is_share:
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes.tick_params(axis="x", labelsize=6.5)
    axes.set_title(measure.title, loc="left", fontsize=7.5, pad=4)
