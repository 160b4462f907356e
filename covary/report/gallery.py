"""The inputs that a network was most and least certain of, to be looked at."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from covary.report.reading import Part, Results
from covary.report.words import number, percent, plus_minus
from covary.runs.predictions import Array
from covary.uncertainty import metrics

EACH = 8  # of one row
FEATURES = 16  # columns of a table


@dataclass(frozen=True)
class Item:
    """One input with what was said to it: an image (a data URI), or the row of a table."""

    index: int
    truth: str  # empty if unknown
    prediction: str
    probability: str  # of a classification
    entropy: str
    verdict: str  # "right", "wrong", "within 95%", "outside 95%", or empty if unknown
    bad: bool
    image: str
    alt: str
    cells: tuple[str, ...]  # truth and prediction under ``Gallery.columns``
    values: tuple[str, ...]  # the row


@dataclass(frozen=True)
class Row:
    """Items under one heading, the most telling first."""

    title: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Gallery:
    """The rows of one part."""

    part: str
    rows: tuple[Row, ...]
    has_truth: bool
    columns: tuple[str, ...]  # what is true and predicted, as columns of a table
    features: tuple[str, ...]  # names of the values of a row; empty for images
    more: int  # values of a row left out


def galleries(results: Results) -> list[Gallery]:
    """One gallery for each part that stored inputs."""
    return [
        gallery
        for part in results.parts.values()
        if len(part.input_index) and (gallery := _gallery(results, part)).rows
    ]


def _gallery(results: Results, part: Part) -> Gallery:
    if results.is_classification and part.label is not None:
        kinds = [("right", part.right), ("wrong", ~part.right)]
    else:
        kinds = [("", np.ones(len(part), dtype=bool))]
    rows = []
    for certain in (True, False):
        for kind, chosen in kinds:
            shown = _extreme(part, chosen, certain=certain)
            title = f"{'Most' if certain else 'Least'} certain{f', {kind}' if kind else ''}"
            if len(shown):
                rows.append(Row(title, tuple(_item(results, part, place) for place in shown)))
    width = 0 if results.image_shape else int(np.prod(part.input.shape[1:]))
    names = tuple(
        results.features[i] if i < len(results.features) else f"column {i + 1}"
        for i in range(min(width, FEATURES))
    )
    has_truth = part.label is not None or part.target is not None
    return Gallery(
        part=part.name,
        rows=tuple(rows),
        has_truth=has_truth,
        columns=_columns(results, has_truth),
        features=names,
        more=max(0, width - FEATURES),
    )


def _columns(results: Results, has_truth: bool) -> tuple[str, ...]:
    if results.is_classification:
        return (*(("True",) if has_truth else ()), "Predicted", "Max-softmax")
    several = results.test.mean.shape[1] > 1
    names = [
        f" {results.target_name(i)}" if several else "" for i in range(results.test.mean.shape[1])
    ]
    return tuple(
        f"{word}{name}" for name in names for word in (("True", "Predicted")[not has_truth :])
    )


def _extreme(part: Part, chosen: Array, *, certain: bool) -> Array:
    """Places in ``part.input`` of samples from the certain or uncertain half of ``chosen``."""
    members = np.flatnonzero(chosen)
    order = members[np.argsort(part.entropy[members], kind="stable")]
    rank = {int(sample): place for place, sample in enumerate(order)}
    half = len(order) / 2
    stored = [
        (rank[int(sample)], place)
        for place, sample in enumerate(part.input_index)
        if int(sample) in rank and (rank[int(sample)] < half) == certain
    ]
    return np.array([place for _, place in sorted(stored, reverse=not certain)][:EACH], dtype=int)


def _item(results: Results, part: Part, place: int) -> Item:
    index = int(part.input_index[place])
    describe = _classified if results.is_classification else _regressed
    truths, predictions, probability, verdict = describe(results, part, index)
    truth, prediction = "; ".join(truths), "; ".join(predictions)
    shown = part.input[place]
    is_image = results.image_shape is not None
    pairs = zip(truths, predictions, strict=True) if truths else ((said,) for said in predictions)
    return Item(
        index=index,
        truth=truth,
        prediction=prediction,
        probability=probability,
        entropy=number(float(part.entropy[index])),
        verdict=verdict,
        bad=verdict in ("wrong", "outside 95%"),
        image=_data_uri(shown) if is_image else "",
        alt=f"Input {index}: predicted {prediction}" + (f", truly {truth}" if truth else ""),
        cells=(*(cell for pair in pairs for cell in pair), *([probability] if probability else [])),
        values=() if is_image else tuple(number(v.item()) for v in shown.reshape(-1)[:FEATURES]),
    )


def _classified(results: Results, part: Part, index: int) -> tuple[list[str], list[str], str, str]:
    """Truth, prediction, probability and verdict."""
    prediction = [results.class_name(int(part.prediction[index]))]
    probability = percent(float(part.confidence[index]))
    if part.label is None:
        return [], prediction, probability, ""
    truth = [results.class_name(int(part.label[index]))]
    return truth, prediction, probability, "right" if part.right[index] else "wrong"


def _regressed(results: Results, part: Part, index: int) -> tuple[list[str], list[str], str, str]:
    """Truth and prediction of each target, nothing, and verdict."""
    stddev = part.stddev[index]
    predictions = [
        plus_minus(float(mean), float(spread))
        for mean, spread in zip(part.mean[index], stddev, strict=True)
    ]
    if part.target is None:
        return [], predictions, "", ""
    reach = metrics.normal_quantile(0.95) * stddev
    outside = bool((np.abs(part.error[index]) > reach).any())
    truths = [number(float(value)) for value in part.target[index]]
    return truths, predictions, "", "outside 95%" if outside else "within 95%"


def _data_uri(image: Array) -> str:
    """(C, H, W) pixels as a PNG; floats are stretched to their own range."""
    if image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        image = (255 * (image.astype(float) - low) / (high - low or 1.0)).astype(np.uint8)
    # Of an unusual number of channels the first is shown.
    pixels = np.moveaxis(image, 0, -1) if image.shape[0] == 3 else image[0]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
