"""Log-likelihoods of regression sets: the published tables beside ours, and the same as dots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from covary.report.drawing import BLUE, ORANGE, PURPLE, SLATE, TEAL, Drawing, swatch
from reproduction.experiments.uci import calibrated, closer, without_emergent
from reproduction.figures.layout import Record, ShownTable, composed, letter, panels
from reproduction.published import uci as published
from reproduction.published.uci import (
    BEST_OF_ALL,
    BEST_OF_MOMENTS,
    OTHERS,
    OWN,
    PublishedRow,
)

TITLES = {
    "boston-housing": "boston",
    "concrete": "concrete",
    "kin8nm": "kin8nm",
    "energy": "energy",
    "power-plant": "power",
    "protein": "protein",
    "wine-quality-red": "wine",
    "yacht": "yacht",
}
# Its variance, in words.
_FACTORS = {
    "own": "factor a of the emergent variance",
    "spread": "factor b of the spread of the members",
    "rest": "constant c",
}
# The columns: sets, and those with logarithms of their targets.
_RAW = list(published.SETS)
_LOGS = [f"{name}, log targets" for name in published.LOG_TARGETS]
_HEAD = ["", *(TITLES[name] for name in _RAW)]
_HEAD += [f"log {TITLES[name]}" for name in published.LOG_TARGETS]
_NEGLIGIBLE = 1e-3
_ABOUT_THE_SAME = 0.02
NOT_RUN = "not run"
_NONE = "-"
# Our rows by the paper's recipe, by what they are called in results.
_RECIPE = {**{key: row.method for key, row in OWN.items()}, "best": "best on held-out data"}
# Our rows by our recipe.
_OURS = {
    "calibrated": "calibrated ensemble",
    "constant variance": "ensemble, constant variance",
    "one network": "one network, calibrated",
}


def table(record: Record) -> ShownTable:
    """The paper's two tables, ours by the same recipe, and our calibrated ensembles."""
    rows = [[f"{row.method}, published", *_published(row)] for row in (*OTHERS, *OWN.values())]
    for key, words in _RECIPE.items():
        cells = [_measured(record, label, key) for label in (*_RAW, *_LOGS)]
        rows.append([f"{words}, ours", *cells])
    cells = [_measured(record, closer(label), "best", none=_NONE) for label in (*_RAW, *_LOGS)]
    rows.append([f"{_RECIPE['best']} among closer noises, ours (does not count)", *cells])
    reached = [_reached(record, label) for label in (*_RAW, *_LOGS)]
    rows.append([f"splits on which {_RECIPE['best']} reaches the paper's best cell", *reached])
    for key, words in _OURS.items():
        cells = [_measured(record, calibrated(name), key) for name in _RAW]
        rows.append([f"{words}, ours", *cells, *[_NONE] * len(_LOGS)])
    rows += [[words, *cells, *[_NONE] * len(_LOGS)] for words, cells in _compared(record)]
    for key, words in _FACTORS.items():
        cells = [_factor(record, calibrated(name), key) for name in _RAW]
        rows.append([f"calibrated ensemble: {words}", *cells, *[_NONE] * len(_LOGS)])
    for words, best in (("moment propagation", BEST_OF_MOMENTS), ("any method", BEST_OF_ALL)):
        cells = [f"{best[name]:.2f}" for name in _RAW]
        rows.append([f"best known, {words}", *cells, *[_NONE] * len(_LOGS)])
    for words, best in (("moments", BEST_OF_MOMENTS), ("of any method", BEST_OF_ALL)):
        lost = [_distance(record, name, best[name]) for name in _RAW]
        rows.append([f"calibrated ensemble above best known {words}", *lost, *[_NONE] * len(_LOGS)])
    return ShownTable(
        _HEAD,
        rows,
        "Log-likelihood per sample (nats), on the scale of the target. Published: mean and the "
        "number in brackets as printed, which the paper calls a standard deviation; ours: mean and "
        "standard error over the published splits (20; 5 for protein). R: ReLU, H: Heaviside. The "
        "last two columns are of log-transformed targets: log y for yacht, log(1 + y) for "
        "protein, some of whose targets are 0. The paper's own cells of these two sets are of "
        "such targets, and so stand there. References: "
        + "; ".join(f"{row.method} [{row.citation}]" for row in OTHERS)
        + ". "
        + _above_best_known()
        + _without_covariance(record),
    )


def _compared(record: Record) -> list[tuple[str, list[str]]]:
    """Ensembles with and without the emergent variance, on the splits that have both."""
    labels = [without_emergent(name) for name in _RAW]
    kinds = ("calibrated", "without emergent variance")
    scores = [[by_split(record, label, kind) for kind in kinds] for label in labels]
    gains = [[a - b for a, b in zip(*pair, strict=True)] for pair in scores]
    counts = [str(len(each)) if each else NOT_RUN for each in gains]
    return [
        ("some of the first splits: how many", counts),
        ("there, calibrated ensemble, ours", [_mean_and_error(each) for each, _ in scores]),
        (
            "there, without the emergent variance (a = 0), ours",
            [_mean_and_error(each) for _, each in scores],
        ),
        ("there, added by the emergent variance", [_mean_and_error(each) for each in gains]),
    ]


def _above_best_known() -> str:
    """Cells of the paper's table that what we hold for the best known does not take in."""
    found = [
        f"{method} on {TITLES[name]} ({mean:.2f})"
        for name in published.SETS
        for method, mean in published.above_best_of_moments(name).items()
    ]
    if not found:
        return ""
    return (
        f"As the paper prints it, {', '.join(found)} is higher than what we compare with as best "
        "known of moment propagation. "
    )


def _without_covariance(record: Record) -> str:
    """On which sets the calibrated ensemble owes little to the covariance, in words."""
    unused, constant = [], []
    for name in published.SETS:
        factors = _column(record, calibrated(name), "calibrated", "own")
        ours, plain = (
            by_split(record, calibrated(name), row) for row in ("calibrated", "constant variance")
        )
        if factors and max(factors) < _NEGLIGIBLE:
            unused.append(TITLES[name])
        if ours and statistics.fmean(plain) > statistics.fmean(ours) - _ABOUT_THE_SAME:
            constant.append(TITLES[name])
    said = ""
    if unused:
        said += f"The emergent variance has no part in the calibrated one on {', '.join(unused)}. "
    if constant:
        said += (
            f"On {', '.join(constant)} a constant variance is as likely as the calibrated one "
            f"(within {_ABOUT_THE_SAME}), or more. "
        )
    return said.strip()


def _published(row: PublishedRow) -> list[str]:
    """Cells of a published row: raw targets, then logarithms."""

    def cell(name: str, *, wanted: bool) -> str:
        logarithm = row.log_targets and name in published.LOG_TARGETS
        found = row.cells[name]
        return f"{found.mean:.2f} ({found.bracket:.2f})" if logarithm == wanted else _NONE

    raw = [cell(name, wanted=False) for name in published.SETS]
    return [*raw, *(cell(name, wanted=True) for name in published.LOG_TARGETS)]


def part_of(record: Record, label: str) -> Record | None:
    """The part of that label; None if it was not measured."""
    return next((part for part in record["parts"] if part["label"] == label), None)


def by_split(record: Record, label: str, row: str) -> list[float]:
    """Log-likelihoods of a row, split by split; none if it was not measured."""
    return _column(record, label, row, "log-likelihood")


def _column(record: Record, label: str, row: str, key: str) -> list[float]:
    """A number of a row, split by split; nothing if it was not measured."""
    part = part_of(record, label)
    if part is None or row not in part["series"]:
        return []
    return list(part["series"][row][key])


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 of one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _measured(record: Record, label: str, row: str, *, none: str = NOT_RUN) -> str:
    return _mean_and_error(by_split(record, label, row), none=none)


def _mean_and_error(values: Sequence[float], *, none: str = NOT_RUN) -> str:
    return f"{statistics.fmean(values):.2f} ({standard_error(values):.2f})" if values else none


def _reached(record: Record, label: str) -> str:
    """On how many splits our best is as high as the paper's best cell, which is a mean of some."""
    name, _, logarithm = label.partition(",")
    if (name in published.LOG_TARGETS) != bool(logarithm):
        return _NONE
    values = by_split(record, label, "best")
    if not values:
        return NOT_RUN
    return f"{sum(value >= published.best_own(name) for value in values)} of {len(values)}"


def _distance(record: Record, name: str, best: float) -> str:
    values = by_split(record, calibrated(name), "calibrated")
    return f"{statistics.fmean(values) - best:+.2f}" if values else NOT_RUN


def _factor(record: Record, label: str, key: str) -> str:
    """A factor of the calibrated variance, on average over splits."""
    values = _column(record, label, "calibrated", key)
    return f"{statistics.fmean(values):.2g}" if values else NOT_RUN


@composed
def likelihoods(record: Record) -> Drawing:
    """A panel for each set: published methods and the paper's own cell, and ours."""
    shown = [
        name
        for name in published.SETS
        if part_of(record, name) is not None or part_of(record, calibrated(name)) is not None
    ] or list(published.SETS)
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = panels(lines, columns, height=0.7 + 2.35 * lines)
    said = []
    for place, (name, each) in enumerate(zip(shown, axes, strict=False)):
        letter(each, "abcdefgh"[place], TITLES[name])
        said.append(_panel(each, record, name, names=place % columns == 0))
    for empty in axes[len(shown) :]:
        empty.axis("off")
    handles = [
        swatch("published, others", SLATE, "", "o"),
        swatch("published, the paper's MNN", ORANGE, "", "D"),
        swatch("ours, the paper's recipe", BLUE, "", "o"),
        swatch("ours, calibrated", TEAL, "", "s"),
        swatch("best known of moment propagation", PURPLE, "--"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3)
    return Drawing(
        name=record["experiment"],
        alt="Log-likelihoods by set. " + "; ".join(said) + ".",
        caption="Log-likelihood per sample on raw targets, further right is better; bars are one "
        "standard error over splits (ours) or the published number in brackets. The paper's own "
        "cells for protein and yacht are of log-transformed targets and left out. Dots that would "
        "be far to the left of all others stand at the edge as arrows.",
        figure=figure,
    )


def _panel(axes: Axes, record: Record, name: str, *, names: bool) -> str:
    """Rows from published to ours; what was drawn, in words."""
    rows: list[tuple[str, float, float, str, str]] = [
        (row.method, *row.cells[name], SLATE, "o") for row in OTHERS
    ]
    if name not in published.LOG_TARGETS:
        own = max(OWN.values(), key=lambda row: row.cells[name].mean)
        rows.append(("paper, best", *own.cells[name], ORANGE, "D"))
    else:
        rows.append(("paper, best", math.nan, 0.0, ORANGE, "D"))
    for words, label, key, colour, marker in (
        ("MNN (R)", name, "MNN relu", BLUE, "o"),
        ("MNN (H)", name, "MNN heaviside", BLUE, "o"),
        ("best held out", name, "best", BLUE, "o"),
        ("one, calibrated", calibrated(name), "one network", TEAL, "s"),
        ("calibrated", calibrated(name), "calibrated", TEAL, "s"),
    ):
        values = by_split(record, label, key)
        mean = statistics.fmean(values) if values else math.nan
        rows.append((words, mean, standard_error(values), colour, marker))
    known = sorted(mean for _, mean, *_ in rows if math.isfinite(mean))
    best, middle = known[-1], known[len(known) // 2]
    # A network that failed must not leave the rest on one line.
    left = max(known[0], best - 4 * max(best - middle, 0.05))
    for place, (_, mean, error, colour, marker) in enumerate(rows):
        if mean < left:
            axes.plot([left], [place], "<", color=colour, ms=6)
        else:
            axes.errorbar(mean, place, xerr=error, fmt=marker, color=colour, ms=4.5, lw=1)
    axes.axvline(BEST_OF_MOMENTS[name], color=PURPLE, ls="--", lw=0.9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows] if names else [])
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("log-likelihood (nats)")
    numbers = ", ".join(f"{words} {mean:.2f}" for words, mean, *_ in rows if math.isfinite(mean))
    return f"{TITLES[name]}: {numbers}"


FIGURES: dict[str, Callable[[Record], Drawing]] = {"uci": likelihoods}
TABLES: dict[str, Callable[[Record], ShownTable]] = {"uci": table}
