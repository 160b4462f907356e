"""Accuracy on images: the paper's table beside ours, and the same as a figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from covary.report.drawing import BLUE, ORANGE, SLATE, Drawing, swatch
from reproduction.experiments.images import (
    ACTIVATIONS,
    KINDS,
    borrowed,
    label_of,
)
from reproduction.figures.layout import Record, ShownTable, composed, letter, panels
from reproduction.published.images import CITED, OWN, SHARED

_TITLES = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
_NONE = "-"
_NOT_RUN = "not run"
_SAME = " [M]"
_AGAIN = "Hollow: no networks of their own, but those of MNN, evaluated without correlations. "
_RINGS = "Rings: networks of the same seeds, trained with one covariance per sample. "


def table(record: Record) -> ShownTable:
    """Accuracy of MNN and dMNN, ours and published, beside the methods that the paper cites."""
    columns = [(kind, activation) for activation in ACTIVATIONS for kind in KINDS]
    methods = list(CITED["mnist"])
    same = _same(record)
    rows = []
    for data, title in _TITLES.items():
        labels = [label_of(data, kind, activation) for kind, activation in columns]
        cells = [_parts(record, label) for label in labels]
        published = [OWN[data][f"{kind} {activation}"] for kind, activation in columns]
        cited = [CITED[data][method] for method in methods]
        blank = [_NONE] * len(methods)
        rows.append([f"{title}, published", *published, *cited])
        own = [
            _accuracy(parts) + (_SAME if parts and label in same else "")
            for label, parts in zip(labels, cells, strict=True)
        ]
        rows.append([f"{title}, ours", *own, *blank])
        if any(cells):
            rows += [[f"{title}, {name}", *map(of, cells), *blank] for name, of in _EXTRAS.items()]
        as_they_are = [_parts(record, label_of(data, *cell, as_they_are=True)) for cell in columns]
        if any(as_they_are):
            plain = [_accuracy(parts) if parts else _NONE for parts in as_they_are]
            rows.append([f"{title}, ours, no crops or flips", *plain, *blank])
    return ShownTable(
        ["", *(_heading(kind, activation) for kind, activation in columns), *methods],
        rows,
        "Test accuracy in percent, with standard deviations in brackets (published: over 20 runs) "
        "where there is more than one run. R: ReLU, H: Heaviside. VarOut, DVI and VBP are numbers "
        "that the paper cites. Below ours: the mean log-likelihood of the label, and the AUROC of "
        "wrong against right predictions by the output's entropy and by max-softmax. "
        f"{_SAME.strip()}: the networks of MNN, evaluated without correlations.",
    )


def shared_table(record: Record) -> ShownTable:
    """Accuracy after training with one covariance per mini-batch, ours and published."""
    rows = []
    for data, title in _TITLES.items():
        cells = [_parts(record, label_of(data, "MNN", activation)) for activation in ACTIVATIONS]
        published = [SHARED[data][f"MNN {activation}"] for activation in ACTIVATIONS]
        rows.append([f"{title}, published", *published])
        rows.append([f"{title}, ours", *map(_accuracy, cells)])
        if any(cells):
            beside = [_accuracy(parts, "accuracy_per_sample") for parts in cells]
            rows.append([f"{title}, ours, one covariance per sample", *beside])
    return ShownTable(
        ["", *(_heading("MNN", activation) for activation in ACTIVATIONS)],
        rows,
        "Test accuracy in percent after training with one covariance per mini-batch, with standard "
        "deviations in brackets (published: over 20 runs) where there is more than one run; and of "
        "networks with the same seeds that were trained with one covariance per sample. R: ReLU, "
        "H: Heaviside.",
    )


def _same(record: Record) -> set[str]:
    """The labels of cells without networks of their own."""
    return {each["label"] for each in record["config"] if borrowed(each["settings"])}


def _heading(kind: str, activation: str) -> str:
    return f"{kind} ({activation[0].upper()})"


def _parts(record: Record, label: str) -> list[Record]:
    return [part for part in record["parts"] if part["label"] == label]


def _values(parts: Sequence[Record], metric: str) -> list[float]:
    return [value for part in parts if (value := part["metrics"].get(metric)) is not None]


def _accuracy(parts: Sequence[Record], metric: str = "accuracy") -> str:
    values = _values(parts, metric)
    if not values:
        return _NOT_RUN
    mean = f"{statistics.fmean(values):.2f}"
    return (
        mean if len(values) == 1 else f"{mean} ({statistics.stdev(values):.2f}), {len(values)} runs"
    )


def _average(parts: Sequence[Record], metric: str) -> str:
    values = _values(parts, metric)
    return f"{statistics.fmean(values):.3f}" if values else _NONE


_EXTRAS: dict[str, Callable[[Sequence[Record]], str]] = {
    "log-likelihood": lambda parts: _average(parts, "log_likelihood"),
    "AUROC of entropy": lambda parts: _average(parts, "auroc_entropy"),
    "AUROC of max-softmax": lambda parts: _average(parts, "auroc_max_softmax"),
}


@composed
def accuracies(record: Record) -> Drawing:
    """Ours, a dot for each network, beside what was published, by data set."""
    shared = record["experiment"] == "image-accuracy-shared"
    published = SHARED if shared else OWN
    measured = {part["label"].split()[0] for part in record["parts"]}
    shown = [data for data in _TITLES if data in measured]
    figure, axes = panels(1, len(shown), height=2.6 if shared else 3.4)
    same = _same(record)
    said = []
    for place, (data, each) in enumerate(zip(shown, axes, strict=True)):
        letter(each, "abcd"[place], _TITLES[data])
        names = [*published[data]] if shared else [*published[data], *CITED[data]]
        for row, name in enumerate(names):
            cell = published[data].get(name) or CITED[data][name]
            _published(each, row, cell, ORANGE if name in published[data] else SLATE)
            parts = _parts(record, f"{data} {name}")
            found, beside = _values(parts, "accuracy"), _values(parts, "accuracy_per_sample")
            face = "none" if f"{data} {name}" in same else BLUE
            each.plot(found, [row] * len(found), "o", color=BLUE, mfc=face, ms=4.5, alpha=0.8)
            each.plot(beside, [row] * len(beside), "o", color=BLUE, ms=8, mfc="none", mew=0.8)
            if found:
                mean = f"{statistics.fmean(found):.2f}"
                again = " (MNN's networks)" if f"{data} {name}" in same else ""
                said.append(f"{_TITLES[data]} {name} {mean}{again}, published {cell}")
        each.set_ylim(len(names) - 0.5, -0.5)
        each.set_yticks(range(len(names)), [_short(name) for name in names] if place == 0 else [])
        each.tick_params(axis="y", length=0)
        each.locator_params(axis="x", nbins=4)
        each.set_xlabel("test accuracy (%)")
    hollow = any(part["label"] in same for part in record["parts"])
    handles = [
        swatch("ours, a network each", BLUE, "", "o"),
        *([_ring("ours, MNN's networks again", 4.5)] if hollow else []),
        *([_ring("ours, one covariance per sample", 8.0)] if shared else []),
        swatch("the paper's", ORANGE, "", "D"),
        *([] if shared else [swatch("cited by the paper", SLATE, "", "D")]),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Drawing(
        name=record["experiment"],
        alt="Test accuracy in percent: " + "; ".join(said) + ".",
        caption="Test accuracy of mixed networks behind a modified LeNet5"
        f"{', trained with one covariance per mini-batch' if shared else ''}: ours beside the "
        "published averages, whose bars are standard deviations over 20 runs. "
        f"{_AGAIN if hollow else ''}{_RINGS if shared else ''}Each panel has a scale of its own.",
        figure=figure,
    )


def _ring(label: str, size: float) -> Line2D:
    entry = swatch(label, BLUE, "", "o")
    entry.set_markersize(size)
    entry.set_markerfacecolor("none")
    return entry


def _published(axes: Axes, row: int, cell: str, colour: str) -> None:
    mean, deviation = cell.replace("(", "").replace(")", "").split()
    axes.errorbar(
        float(mean), row, xerr=float(deviation), fmt="D", color=colour, ms=4, capsize=2, lw=1
    )


def _short(name: str) -> str:
    kind, _, activation = name.partition(" ")
    return _heading(kind, activation) if activation else kind


TABLES: dict[str, Callable[[Record], ShownTable]] = {
    "image-accuracy": table,
    "image-accuracy-shared": shared_table,
}
FIGURES: dict[str, Callable[[Record], Drawing]] = dict.fromkeys(TABLES, accuracies)
