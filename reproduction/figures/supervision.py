"""Supervised covariances beside unsupervised ones: a table, and by how much they differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from covary.report.drawing import BLUE, ORANGE, PURPLE, SLATE, TEAL, Drawing, swatch
from reproduction.experiments.supervision import (
    ELBO,
    IMAGES,
    LIKELIHOOD,
    LOSSES,
    SETS,
    SMUC,
    SQUARED,
    STEPS,
    SUPERVISED,
    TRACE,
)
from reproduction.figures.layout import Record, ShownTable, composed, letter, panels, plain_ticks

_NONE = "-"
_COLOURS = {SMUC: SLATE, SQUARED: PURPLE, TRACE: BLUE, LIKELIHOOD: ORANGE, ELBO: TEAL}
_SHAPES = {SMUC: "D", SQUARED: "v", TRACE: "o", LIKELIHOOD: "s", ELBO: "^"}
_HEADS = {
    SMUC: "SMUC",
    SQUARED: "SMUC, squared error",
    TRACE: "SMSC, trace",
    LIKELIHOOD: "SMSC, likelihood",
    ELBO: "SMSC, ELBO",
}
# Numbers of a set, and of images, in words, with the digits that they are shown with.
_OF_SETS = {
    "log-likelihood": ("log-likelihood", 2),
    "calibrated": ("log-likelihood, calibrated", 2),
    "rmse": ("RMSE", 3),
    "rank": ("rank correlation of errors and deviations", 2),
}
_OF_IMAGES = {
    "accuracy": ("accuracy (%)", 2),
    "log-likelihood": ("log-likelihood, calibrated", 3),
    "separability": ("separability of errors", 2),
    "auroc errors": ("AUROC of errors, entropy", 3),
    "auroc errors, max-softmax": ("AUROC of errors, max-softmax", 3),
    "auroc foreign": ("AUROC of notMNIST, entropy", 3),
}


def table(record: Record) -> ShownTable:
    """Every number of every loss."""
    rows = []
    for name in SETS:
        if part := _of(record, name):
            rows += _rows(part, name, _OF_SETS)
    if part := _of(record, IMAGES):
        rows += _rows(part, "MNIST", _OF_IMAGES)
    for name in STEPS:
        if part := _of(record, name):
            rows += _cost_rows(part, name)
    return ShownTable(
        ["", *(_HEADS[loss] for loss in LOSSES)],
        rows,
        "Means, and standard errors over splits (regression) or standard deviations over seeds "
        "(MNIST) in brackets. Log-likelihoods in nats per sample, of targets on their own scale; "
        "calibrated: of variances a C + b (regression), or of a temperature and a scale of the "
        "covariance (MNIST), fitted to held-out data. SMUC is trained on squared error "
        "(regression) or cross-entropy (MNIST). Noise and rate are chosen for each column alike. "
        "Time and memory of a training step, as so many times those of SMUC.",
    )


def _rows(part: Record, title: str, numbers: dict[str, tuple[str, int]]) -> list[list[str]]:
    return [
        [f"{title}: {words}", *(_cell(part, loss, key, digits) for loss in LOSSES)]
        for key, (words, digits) in numbers.items()
    ]


def _cell(part: Record, loss: str, key: str, digits: int) -> str:
    values = _column(part, loss, key)
    if not values:
        return _NONE
    per = math.sqrt(len(values)) if part["label"] in SETS else 1.0
    spread = statistics.stdev(values) / per if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ({spread:.{digits}f})"


def _cost_rows(part: Record, title: str) -> list[list[str]]:
    found = []
    for kind, unit, factor in (("time", "ms", 1e3), ("memory", "MB", 1.0)):
        own = part["series"]["seconds" if kind == "time" else "megabytes"][SMUC]
        cells = [_times(part, f"{kind} of {loss}") for loss in SUPERVISED]
        first = f"1 ({factor * own:.3g} {unit})" if own is not None else _NONE
        found.append([f"{title}: {kind}", first, _NONE, *cells])
    return found


def _times(part: Record, metric: str) -> str:
    value = part["metrics"].get(metric)
    return _NONE if value is None else f"{value:.2f}"


def _of(record: Record, label: str) -> Record | None:
    return next((part for part in record["parts"] if part["label"] == label), None)


def _column(part: Record, loss: str, key: str) -> list[float]:
    """A number split by split, or seed by seed; nothing if it was not measured."""
    found = part["series"].get(loss, {}).get(key, [])
    return [value for value in found if value is not None]


@composed
def comparison(record: Record) -> Drawing:
    """By how much SMUC is above SMSC on each set; what classifiers tell apart; costs."""
    sets = [name for name in SETS if _of(record, name)]
    figure, axes = panels(2, 2, height=5.4)
    said = []
    for axis, key, name, title in (
        (axes[0], "log-likelihood", "a", "regression, as trained"),
        (axes[1], "calibrated", "b", "regression, calibrated"),
    ):
        letter(axis, name, title)
        said += _differences(axis, record, sets, key)
        axis.set_xlabel("nats of SMUC above SMSC")
    letter(axes[2], "c", "MNIST, by entropy")
    said += _told_apart(axes[2], _of(record, IMAGES))
    letter(axes[3], "d", "a training step")
    said += _costs(axes[3], record)
    filled, hollow = (
        Line2D([], [], color=SLATE, ls="", marker="o", ms=5, mfc=face, label=label)
        for face, label in ((SLATE, "c: errors, d: time"), ("none", "c: notMNIST, d: memory"))
    )
    handles = [swatch(_HEADS[loss], _COLOURS[loss], "", _SHAPES[loss]) for loss in LOSSES]
    figure.legend(handles=[*handles, filled, hollow], loc="outside lower center", ncols=4)
    return Drawing(
        name=record["experiment"],
        alt="; ".join(said) + "." if said else "Nothing was measured.",
        caption="a: log-likelihood per sample of SMUC less that of SMSC, by three losses, further "
        "right is better for SMUC; averages over splits with a standard error of the difference. "
        "b: the same of variances a C + b that were fitted to held-out data. c: AUROC by the "
        "entropy of the output, of wrong against right answers (filled) and of letters against "
        "digits that are answered right (hollow), a mark for each seed. d: time (filled) and peak "
        "memory (hollow) of a training step, as so many times those of SMUC.",
        figure=figure,
    )


def _differences(axes: Axes, record: Record, sets: Sequence[str], key: str) -> list[str]:
    said = []
    for place, name in enumerate(sets):
        part = _of(record, name)
        assert part is not None
        own = _column(part, SMUC, key)
        for shift, loss in zip((-0.22, 0.0, 0.22), SUPERVISED, strict=True):
            other = _column(part, loss, key)
            gaps = [one - two for one, two in zip(own, other, strict=True)]
            mean = statistics.fmean(gaps)
            error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            axes.errorbar(
                mean,
                place + shift,
                xerr=error,
                fmt=_SHAPES[loss],
                color=_COLOURS[loss],
                ms=4.5,
                lw=1,
            )
            said.append(f"{name}, {key}, SMUC above {_HEADS[loss]} by {mean:.2f}")
    axes.axvline(0.0, color=SLATE, lw=0.9, ls=":")
    axes.set_ylim(max(len(sets), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(sets)), sets)
    axes.tick_params(axis="y", length=0)
    return said


def _told_apart(axes: Axes, part: Record | None) -> list[str]:
    said = []
    for place, loss in enumerate(LOSSES):
        for key, face in (("auroc errors", _COLOURS[loss]), ("auroc foreign", "none")):
            values = _column(part, loss, key) if part else []
            axes.plot(
                values,
                [place] * len(values),
                _SHAPES[loss],
                color=_COLOURS[loss],
                mfc=face,
                ms=5,
                alpha=0.85,
            )
            if values:
                said.append(f"{_HEADS[loss]}, {key} {statistics.fmean(values):.3f}")
    axes.set_ylim(len(LOSSES) - 0.5, -0.5)
    axes.set_yticks(range(len(LOSSES)), [_HEADS[loss] for loss in LOSSES])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("AUROC")
    return said


def _costs(axes: Axes, record: Record) -> list[str]:
    said = []
    steps = [name for name in STEPS if _of(record, name)]
    for place, name in enumerate(steps):
        part = _of(record, name)
        assert part is not None
        for shift, loss in zip((-0.22, 0.0, 0.22), SUPERVISED, strict=True):
            for kind, face in (("time", _COLOURS[loss]), ("memory", "none")):
                value = part["metrics"].get(f"{kind} of {loss}")
                if value is None:
                    continue
                axes.plot(
                    [value], [place + shift], _SHAPES[loss], color=_COLOURS[loss], mfc=face, ms=5
                )
                said.append(f"{name}, {kind} of {_HEADS[loss]} {value:.2f} times that of SMUC")
    axes.axvline(1.0, color=SLATE, lw=0.9, ls=":")
    axes.set_ylim(max(len(steps), 1) - 0.5, -0.5)
    shown = [name.removeprefix("step of ").replace("-196-96-48-24-", "-...-") for name in steps]
    axes.set_yticks(range(len(steps)), shown)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("times SMUC")
    plain_ticks(axes, "x")
    return said


FIGURES: dict[str, Callable[[Record], Drawing]] = {"supervision": comparison}
TABLES: dict[str, Callable[[Record], ShownTable]] = {"supervision": table}
