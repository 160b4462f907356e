"""Figures of a regression: Results -> Drawing, one for each target where they differ."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import PercentFormatter

from covary.report.curves import Curve
from covary.report.drawing import (
    BLUE,
    DASHES,
    FOREIGN,
    ORANGE,
    SLATE,
    Drawing,
    canvas,
    head,
    styled,
    swatch,
)
from covary.report.reading import Results
from covary.report.words import number, percent, short
from covary.runs.predictions import Array
from covary.uncertainty import metrics

SHOWN = 200  # points; more hide each other's bars
LEVELS = (0.5, 0.9, 0.95)


def _named(results: Results, title: str, column: int) -> tuple[str, str]:
    """The title, with the target where there are several, and what goes on the figure's name."""
    if results.test.calibrated is not results.test:
        title = f"{title} (calibrated)"
    if results.test.mean.shape[1] == 1:
        return title, ""
    return f"{title}: {short(results.target_name(column))}", f"-{column + 1}"


@styled
def predicted_against_true(results: Results, column: int) -> Drawing:
    """Predictions with 90% intervals; what falls outside is marked."""
    test = results.test.calibrated
    total = len(test)
    if test.target is None:
        raise TypeError("predicted_against_true needs a part with targets.")
    chosen = np.sort(np.random.default_rng(0).permutation(total)[:SHOWN])
    true, mean = test.target[chosen, column], test.mean[chosen, column].astype(float)
    bar = metrics.normal_quantile(0.9) * test.stddev[chosen, column]
    inside = np.abs(mean - true) <= bar
    figure, (axes,) = canvas(3.7)
    ends = np.array([min(true.min(), mean.min()), max(true.max(), mean.max())])
    axes.plot(ends, ends, ":", color=SLATE)
    for own, colour, marker in ((inside, BLUE, "o"), (~inside, ORANGE, "D")):
        axes.errorbar(
            true[own],
            mean[own],
            yerr=bar[own],
            fmt=marker,
            ms=3.2,
            color=colour,
            alpha=0.75,
            elinewidth=0.7,
        )
    axes.set_xlabel(f"true {short(results.target_name(column))}")
    axes.set_ylabel(f"predicted {short(results.target_name(column))}")
    title, suffix = _named(results, "Predicted against true", column)
    handles = [
        swatch(f"90% interval holds it ({int(inside.sum())})", BLUE, "-", "o"),
        swatch(f"does not ({int((~inside).sum())})", ORANGE, "-", "D"),
    ]
    head(axes, title, handles=handles)
    rmse = float(np.sqrt((test.error[:, column] ** 2).mean()))
    number_shown = f"{number(len(chosen))} of {number(total)}" if len(chosen) < total else "All"
    alt = (
        f"{title}, with 90% intervals: RMSE {number(rmse)}; of the {number(len(chosen))} inputs "
        f"shown, {int(inside.sum())} intervals hold the true value."
    )
    caption = f"{number_shown} test inputs. The dotted line is a perfect prediction."
    return Drawing(f"predictions{suffix}", alt, caption, figure)


@styled
def interval_coverage(results: Results) -> Drawing:
    """How many intervals hold the truth, against how many should."""
    test = results.test
    figure, (axes,) = canvas(3.7)
    axes.plot([0, 1], [0, 1], ":", color=SLATE, label="ideal")
    levels = np.linspace(0.02, 0.98, 49)
    said = []
    columns = range(test.mean.shape[1])
    shown = test.calibrated
    for column in columns:
        error, stddev = shown.error[:, column], shown.stddev[:, column]
        colour = (BLUE, *FOREIGN)[column % 5]
        if shown is not test:
            raw = test.error[:, column], test.stddev[:, column]
            before = [metrics.interval_coverage(*raw, level) for level in levels]
            label = "before calibration" if column == 0 else None
            axes.plot(levels, before, ":", color=colour, lw=1.0, alpha=0.8, label=label)
        held = [metrics.interval_coverage(error, stddev, level) for level in levels]
        marked = [metrics.interval_coverage(error, stddev, level) for level in LEVELS]
        alone = "calibrated intervals" if shown is not test else "intervals, not calibrated"
        name = short(results.target_name(column)) if len(columns) > 1 else alone
        axes.plot(levels, held, DASHES[column % 4], color=colour, label=name)
        axes.plot(LEVELS, marked, "o", color=colour, ms=5)
        said.append(
            (f"{name}: " if len(columns) > 1 else "")
            + ", ".join(
                f"{percent(float(share))} at {level:.0%}"
                for share, level in zip(marked, LEVELS, strict=True)
            )
        )
    axes.set_xlabel("nominal coverage")
    axes.set_ylabel("targets within the interval")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    head(axes, "Coverage of intervals", columns=3)
    alt = f"Coverage of central intervals against nominal. {'; '.join(said)}."
    caption = f"Found: {'; '.join(said)}. Below the dotted line, intervals are too narrow."
    return Drawing("coverage", alt, caption, figure)


@styled
def residuals(results: Results, column: int) -> Drawing:
    """Errors in units of their own predicted standard deviation, against a standard Gaussian."""
    test = results.test.calibrated
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = -test.error[:, column] / test.stddev[:, column]
    scaled = scaled[~np.isnan(scaled)]
    reach = 5.0
    edges = np.linspace(-reach, reach, 41)
    heights, _ = np.histogram(np.clip(scaled, -reach, reach), edges)
    density = heights / max(len(scaled), 1) / np.diff(edges)
    figure, (axes,) = canvas(3.3)
    axes.stairs(density, edges, fill=True, color=BLUE, alpha=0.3)
    axes.stairs(density, edges, color=BLUE, lw=1.2, label=f"test ({number(len(scaled))})")
    grid = np.linspace(-reach, reach, 201)
    gaussian = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    axes.plot(grid, gaussian, "--", color=ORANGE, label="standard Gaussian")
    axes.set_xlabel("(true \N{MINUS SIGN} predicted) / predicted standard deviation")
    axes.set_ylabel("density")
    title, suffix = _named(results, "Standardised residuals", column)
    head(axes, title)
    inner = scaled[np.isfinite(scaled)]
    outside = int((np.abs(scaled) > reach).sum())
    spread = "none finite, as no deviation is predicted"
    if len(inner):
        mean, deviation = number(float(inner.mean())), number(float(inner.std()))
        spread = f"mean {mean}, standard deviation {deviation}"
    alt = f"{title}: {spread} (0 and 1 would be right); {outside} beyond {reach:.0f} deviations."
    caption = f"Here: {spread}. Wider than the Gaussian means that the network is too sure."
    if outside:
        caption += f" {number(outside)} beyond \N{PLUS-MINUS SIGN}5 are in the outermost bins."
    return Drawing(f"residuals{suffix}", alt, caption, figure)


@styled
def spread_against_error(results: Results, column: int) -> Drawing:
    """RMSE of inputs with like predicted standard deviations: the reliability of a regression."""
    test = results.test.calibrated
    stddev, error = test.stddev[:, column], test.error[:, column]
    bins = np.array_split(np.argsort(stddev, kind="stable"), min(10, max(1, len(test) // 10)))

    def root_mean_square(values: Array) -> float:
        return float(np.sqrt((values**2).mean()))

    predicted = [root_mean_square(stddev[own]) for own in bins]
    found = [root_mean_square(error[own]) for own in bins]
    figure, (axes,) = canvas(3.3)
    top = 1.08 * max(*predicted, *found)
    axes.plot([0, top], [0, top], ":", color=SLATE, label="ideal")
    axes.plot(predicted, found, "o-", color=BLUE, ms=4.5, label="groups of like inputs")
    axes.set_xlim(0, 1.08 * max(predicted) or 1.0)
    axes.set_ylim(0, 1.08 * max(found) or 1.0)
    axes.set_xlabel("predicted standard deviation")
    axes.set_ylabel("RMSE")
    title, suffix = _named(results, "Error by predicted spread", column)
    head(axes, title)
    alt = (
        f"{title}: RMSE goes from {number(found[0])} where the predicted standard deviation is "
        f"{number(predicted[0])} to {number(found[-1])} where it is {number(predicted[-1])}."
    )
    caption = (
        f"Test inputs in {len(bins)} groups of equal size, by predicted standard deviation. Above "
        "the dotted line errors are larger than predicted."
    )
    return Drawing(f"spread{suffix}", alt, caption, figure)


@styled
def risk_coverage(results: Results, curve: Curve, column: int) -> Drawing:
    """RMSE of the answered inputs against how many are answered."""
    rmse = np.sqrt(curve.risk)
    figure, (axes,) = canvas(3.6)
    axes.plot(curve.coverage, rmse, color=BLUE, label="predicted standard deviation")
    axes.axhline(rmse[-1], color=SLATE, lw=1.0, ls="-.", label="refusing at random")
    axes.set_xlabel("inputs answered, the most certain first")
    axes.set_ylabel("RMSE of the answered")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(0, 1)
    settled = rmse[curve.coverage > 0.05].max(initial=0.0)
    axes.set_ylim(0, 1.15 * max(rmse[-1], settled) or 1.0)
    title, suffix = _named(results, "Error of the answered inputs", column)
    head(axes, title)
    half = int(np.searchsorted(curve.coverage, 0.5))
    alt = (
        f"{title}: RMSE {number(float(rmse[-1]))} when all are answered, "
        f"{number(float(rmse[half]))} for the most certain {percent(curve.coverage[half])}."
    )
    return Drawing(f"risk-coverage{suffix}", alt, "", figure)
