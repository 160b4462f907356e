"""The inputs that a network was most and least certain of, to be looked at."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from covary.report.reading import Part, Results
from covary.report.words import number, plus_minus
from covary.runs.predictions import Array

EACH = 8  # of one row
FEATURES = 16  # columns of a table


@dataclass(frozen=True, eq=False)
class Item:
    """One input with what was said to it."""

    index: int
    input: Array
    truths: list[str]  # of each target; empty if unknown
    predictions: list[str]
    bad: bool  # wrong, or outside of its 95% interval


def items(results: Results, part: Part) -> dict[str, list[Item]]:
    """By heading, the most telling inputs of a part first; empty if it stored none."""
    kinds = {"": np.ones(len(part), dtype=bool)}
    if part.label is not None:
        kinds = {", right": part.right, ", wrong": ~part.right}
    describe = _classified if results.is_classification else _regressed
    found = {}
    for certain in (True, False):
        for kind, chosen in kinds.items():
            places = _extreme(part, chosen, certain=certain)
            indices = [(int(part.input_index[place]), part.input[place]) for place in places]
            title = f"{'Most' if certain else 'Least'} certain{kind}"
            found[title] = [Item(i, shown, *describe(results, part, i)) for i, shown in indices]
    return {title: row for title, row in found.items() if row}


def features(results: Results, part: Part) -> list[str]:
    """Names of the columns of a table, all of them; none of images."""
    width = 0 if results.evaluation.image_shape else int(np.prod(part.input.shape[1:]))
    known = results.evaluation.features[:width]
    return [*known, *(f"column {i + 1}" for i in range(len(known), width))]


def _extreme(part: Part, chosen: Array, *, certain: bool) -> list[int]:
    """Places in ``part.input`` of samples from the certain or uncertain half of ``chosen``."""
    members = np.flatnonzero(chosen)
    order = members[np.argsort(part.entropy[members], kind="stable")]
    middle = -(-len(order) // 2)
    half = order[:middle] if certain else order[middle:][::-1]
    places = {int(sample): place for place, sample in enumerate(part.input_index)}
    return [places[sample] for sample in half.tolist() if sample in places][:EACH]


def _classified(results: Results, part: Part, index: int) -> tuple[list[str], list[str], bool]:
    said = [results.class_name(int(part.prediction[index]))]
    if part.label is None:
        return [], said, False
    return [results.class_name(int(part.label[index]))], said, not part.right[index]


def _regressed(_results: Results, part: Part, index: int) -> tuple[list[str], list[str], bool]:
    part = part.calibrated
    mean, stddev = part.mean[index].tolist(), part.stddev[index]
    said = [plus_minus(*pair) for pair in zip(mean, stddev.tolist(), strict=True)]
    if part.target is None:
        return [], said, False
    truths = [number(value) for value in part.target[index].tolist()]
    return truths, said, not part.holds(0.95)[index].all()


def data_uri(image: Array) -> str:
    """(C, H, W) pixels as a PNG; floats are stretched to their own range."""
    if image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        image = (255 * (image.astype(float) - low) / (high - low or 1.0)).astype(np.uint8)
    # Of an unusual number of channels the first is shown.
    pixels = np.moveaxis(image, 0, -1) if image.shape[0] == 3 else image[0]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
