"""Errors and foreign photographs by score: a table, and what each tells and costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from covary.report.drawing import BLUE, ORANGE, SLATE, TEAL, Drawing, log_axis, swatch
from reproduction.experiments.photographs import FOREIGN, NETWORKS, label_of
from reproduction.experiments.photographs_measures import SCORES
from reproduction.figures.layout import Record, ShownTable, composed, letter, panels
from reproduction.figures.theory import labelled

_NONE = "-"
_TITLES = {"residual": "residual", "lenet5": "mixed LeNet5", "vgg13": "mixed VGG13"}
_SETS = {"svhn": "SVHN", "cifar100": "CIFAR-100"}
_COLUMNS = {
    "auroc errors": "AUROC, errors",
    "fpr95 errors": "FPR at 95%, errors",
    "auroc foreign": "AUROC, foreign",
    "fpr95 foreign": "FPR at 95%, foreign",
    "auroc corrupted": "AUROC, corrupted",
    "auroc held-out errors": "AUROC, held-out errors",
}
_COLOURS = {"auroc errors": SLATE, "auroc foreign": BLUE, "auroc corrupted": ORANGE}
_SHAPES = {"auroc errors": "D", "auroc foreign": "o", "auroc corrupted": "s"}
_WORDS = {
    "auroc errors": "errors",
    "auroc foreign": "foreign images",
    "auroc corrupted": "corrupted held-out images",
}


def _measured(record: Record) -> list[tuple[str, list[Record]]]:
    """What is measured, by a title for it."""
    places = [(network, foreign) for network in NETWORKS for foreign in FOREIGN]
    found = {
        f"{_TITLES[network]}, {_SETS[foreign]}": labelled(record, label_of(network, foreign))
        for network, foreign in places
    }
    return [(title, parts) for title, parts in found.items() if parts]


def _numbers(parts: Sequence[Record], metric: str) -> list[float]:
    found = [part["metrics"].get(metric) for part in parts]
    return [value for value in found if value is not None]


def _mean(parts: Sequence[Record], metric: str, digits: str) -> str:
    values = _numbers(parts, metric)
    return format(statistics.fmean(values), digits) if values else _NONE


def table(record: Record) -> ShownTable:
    """Every score of every network: what it tells, what it costs."""
    rows = []
    for title, parts in _measured(record):
        for name in parts[0]["series"]["scores"]:
            rows.append(
                [
                    f"{title}: {SCORES[name].title}",
                    *(_mean(parts, f"{key}, {name}", ".3f") for key in _COLUMNS),
                    _mean(parts, f"time, {name}", ".2f"),
                    _mean(parts, f"megabytes, {name}", ".2f"),
                ]
            )
    sizes = "; ".join(
        f"{title}: accuracy {_mean(parts, 'accuracy', '.2f')}%, corrupted images are told best by "
        f"{_titles(parts, 'chosen')}, foreign ones by {_titles(parts, 'best')}, the conventional "
        f"pass takes {_mean(parts, 'milliseconds per image', '.2f')} ms per image"
        for title, parts in _measured(record)
    )
    return ShownTable(
        ["", *_COLUMNS.values(), "time", "MB"],
        rows,
        "Errors: wrong against right test images. Foreign: the OOD set against all test images. "
        "FPR at 95%: the share of the latter that is flagged where 95% of the former are. "
        "Corrupted: against clean held-out images, averages over seven corruptions; held-out "
        "errors: wrong against right among those. Time: of a pass and the score, over the "
        "conventional pass; the machine had other work, and ratios are good to a tenth or two. MB: "
        f"kept besides the network. {sizes}.",
    )


def _titles(parts: Sequence[Record], key: str) -> str:
    return " or ".join(dict.fromkeys(SCORES[part["series"][key]].title for part in parts))


@composed
def by_score(record: Record) -> Drawing:
    """A row of panels for each network and OOD set: AUROC of each score, and its time."""
    measured = _measured(record)
    figure, axes = panels(len(measured), 2, height=0.8 + 2.9 * len(measured))
    said = []
    for row, (title, parts) in enumerate(measured):
        names = parts[0]["series"]["scores"]
        told, costs = axes[2 * row], axes[2 * row + 1]
        letter(told, "acegik"[row], title)
        letter(costs, "bdfhjl"[row], "time")
        said += _told(told, parts, names, title)
        said += _costs(costs, parts, names, title)
    handles: list[Line2D] = [
        *(swatch(words, _COLOURS[key], "", _SHAPES[key]) for key, words in _WORDS.items()),
        swatch("time", TEAL, "", "o"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Drawing(
        name=record["experiment"],
        alt="; ".join(said) + "." if said else "Nothing was measured.",
        caption="Left: AUROC of each score for wrong against right test images, foreign against "
        "all test images, and corrupted against clean held-out ones (averages over seven "
        "corruptions), a mark for each seed; dotted is chance. Right: time of a pass and the "
        "score, over that of the conventional pass.",
        figure=figure,
    )


def _told(axes: Axes, parts: Sequence[Record], names: Sequence[str], title: str) -> list[str]:
    said = []
    for place, name in enumerate(names):
        for key, colour in _COLOURS.items():
            values = _numbers(parts, f"{key}, {name}")
            axes.plot(values, [place] * len(values), _SHAPES[key], color=colour, ms=4.5, alpha=0.85)
        numbers = (f"{_WORDS[key]} {_mean(parts, f'{key}, {name}', '.3f')}" for key in _COLOURS)
        said.append(f"{title}, {SCORES[name].title}: {', '.join(numbers)}")
    axes.axvline(0.5, color=SLATE, lw=0.9, ls=":")
    _by_name(axes, [SCORES[name].title for name in names])
    axes.set_xlabel("AUROC")
    return said


def _costs(axes: Axes, parts: Sequence[Record], names: Sequence[str], title: str) -> list[str]:
    said = []
    for place, name in enumerate(names):
        values = _numbers(parts, f"time, {name}")
        axes.plot(values, [place] * len(values), "o", color=TEAL, ms=4.5, alpha=0.85)
        said.append(f"{title}, time of {SCORES[name].title} {_mean(parts, f'time, {name}', '.2f')}")
    axes.axvline(1.0, color=SLATE, lw=0.9, ls=":")
    _by_name(axes, [""] * len(names))
    log_axis(axes)
    axes.set_xlabel("times the conventional pass")
    return said


def _by_name(axes: Axes, titles: Sequence[str]) -> None:
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.set_yticks(range(len(titles)), titles, fontsize=8)
    axes.tick_params(axis="y", length=0)


FIGURES: dict[str, Callable[[Record], Drawing]] = {"ood-photographs": by_score}
TABLES: dict[str, Callable[[Record], ShownTable]] = {"ood-photographs": table}
