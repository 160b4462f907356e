"""A trained run as it is served: its predictor, what it answers, and what may be asked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from covary import runs
from covary.data import Chunk, Column, Schema
from covary.files import without_nan
from covary.nn import Rescale, Standardize
from covary.runs.row_model import Answers, ClassHead
from covary.serving import Predictor
from covary.serving.predictor import ANSWER, Columns
from covary.uncertainty.answering import prediction_sets
from covary.uncertainty.predictive import Predictive

# Half of the points of a density, and the probability beyond each of its ends.
_POINTS, _TAIL = 61, 0.005
# Files of a run that decide what it says.
_FILES = ("config.toml", "schema.json", "model.safetensors", "calibration.json")


class Question(NamedTuple):
    """Rows that were read by a model, and whether their answers are to be explained."""

    served: Served
    chunk: Chunk
    explained: bool = False


class Reply(NamedTuple):
    """What a request is answered with.

    Attributes:
        body: JSON.
        model: the digest of what gave it.
        rows: how many rows there are.
        asked: for how many of them someone is to be asked.
        novelty: (n,) of each.
        uncertainty: (n,) of each.
    """

    body: bytes
    model: str
    rows: int
    asked: int
    novelty: list[float]
    uncertainty: list[float]


@dataclass(frozen=True, eq=False)
class Served:
    """A run that was loaded whole, and tried.

    Attributes:
        name: of the run's folder.
        digest: of the network's weights.
        predictor: what predicts.
        stamps: of the run's files when they were read.
    """

    name: str
    digest: str
    predictor: Predictor
    stamps: tuple[object, ...]

    @classmethod
    def load(cls, run: Path | str, **options: Any) -> Served:
        """Load a run, as ``Predictor.load`` does, and predict one row with it.

        Files that change meanwhile are an error, so that no model is made of two.
        """
        digest, stamps = runs.open(run).weights, stamps_of(run)
        predictor = Predictor.load(run, **options)
        if stamps_of(run) != stamps:  # the first time, it keeps a calibration that it has fitted
            stamps = stamps_of(run)
            predictor = Predictor.load(run, **options)
        if stamps_of(run) != stamps or runs.open(run).weights != digest:
            raise runs.RunError(f"The files of {run} changed while they were read: load it again.")
        found = cls(Path(run).resolve().name, digest, predictor, stamps)
        (reply,) = found.replies([found.typical()])
        if not all(map(math.isfinite, reply.uncertainty)):
            raise runs.RunError(f"The network of {run} gives no numbers (NaN): train it again.")
        return found

    def typical(self) -> Chunk:
        """A row of averages, or a black image."""
        schema = self.predictor.schema
        if not isinstance(schema, Schema):
            return Chunk(0, np.zeros((1, *schema.shape), np.uint8), None, None, {})
        x = _standardize(self.predictor).shift.double().numpy()[None].copy()
        return Chunk(0, x, np.zeros_like(x) if schema.errors else None, None, {})

    @property
    def held_out(self) -> dict[str, NDArray[np.float64]]:
        """Scores (n,) of rows that training did not see, by name."""
        model = self.predictor.model
        return {
            "novelty": model.seen_novelty.numpy(),
            "uncertainty": model.seen_uncertainty.numpy(),
        }

    def replies(self, chunks: Sequence[Chunk]) -> list[Reply]:
        """The answers to requests, whose rows are computed together."""
        chunk = _joined(chunks)
        return self._replies(chunk, self.predictor.answers(chunk), [len(c.x) for c in chunks])

    def explained(self, chunk: Chunk) -> Reply:
        """The answer to a request of one row, with what explains it."""
        answers = self.predictor.answers(chunk)
        (found,) = self._replies(chunk, answers, [1], explanation=self._explanation(chunk, answers))
        return found

    def _replies(
        self, chunk: Chunk, answers: list[Answers], sizes: list[int], **more: Any
    ) -> list[Reply]:
        columns = self.predictor.of_answers(chunk, answers)
        if isinstance(self.predictor.model.head, ClassHead):
            columns |= _of_classes(self.predictor, answers)
        rows, novelty = _as_rows(columns), columns["novelty"].tolist()
        uncertainty = torch.cat([each.uncertainty for each in answers]).tolist()
        found, start = [], 0
        for size in sizes:
            which = slice(start, start := start + size)
            own = rows[which]
            asked = sum(row["flag"] != ANSWER for row in own)
            body = encoded({"model": self.digest, "predictions": own, **more})
            scores = novelty[which], uncertainty[which]
            found.append(Reply(body, self.digest, size, asked, *scores))
        return found

    def _explanation(self, chunk: Chunk, answers: list[Answers]) -> list[dict[str, Any]]:
        """Of a row: densities of its targets, and what variances are made of."""
        (first, *_) = answers
        parts = self.predictor.variance_parts(chunk)
        schema = self.predictor.schema
        if not isinstance(first.said, Predictive):
            best = int(first.said[0].argmax())
            found: list[dict[str, Any]] = [{"name": schema.classes[best]}]
            places = [best]
        else:
            assert isinstance(schema, Schema)
            places = list(range(len(schema.targets)))
            found = [
                {"name": name, **_density(first.said.of_target(i))}
                for i, name in enumerate(schema.targets)
            ]
        for one, place in zip(found, places, strict=True):
            one["variance"] = {name: part[0, place].item() for name, part in parts.items()}
        return cast(list[dict[str, Any]], without_nan(found))

    def described(self) -> dict[str, Any]:
        """What may be asked, and what the answers mean: as JSON has it."""
        predictor, schema = self.predictor, self.predictor.schema
        found: dict[str, Any] = {
            "run": self.name,
            "model": self.digest,
            "task": "classification" if schema.classes else "regression",
            "level": predictor.level,
            "promise": predictor.promise,
            "limit": predictor.limit,
            "classes": list(schema.classes),
        }
        if not isinstance(schema, Schema):
            return {**found, "kind": "images", "shape": list(schema.shape)}
        targets = [{"name": name} for name in schema.targets]
        if not schema.classes:
            scale = predictor.model.net[-1]
            assert isinstance(scale, Rescale)
            numbers = torch.stack([scale.shift, scale.scale]).double().reshape(2, -1).T.tolist()
            targets = [
                {**one, "mean": mean, "std": std}
                for one, (mean, std) in zip(targets, numbers, strict=True)
            ]
        columns = [_described(column, predictor) for column in schema.inputs.values()]
        return {**found, "kind": "table", "targets": targets, "columns": columns}


def replies(questions: Sequence[Question]) -> list[Reply]:
    """The replies to questions of one kind about one model."""
    served, chunks = questions[0].served, [each.chunk for each in questions]
    return list(map(served.explained, chunks)) if questions[0].explained else served.replies(chunks)


def encoded(content: Any) -> bytes:
    """JSON, in ASCII and without spaces; a number that is not finite is an error."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def stamps_of(run: Path | str) -> tuple[object, ...]:
    """By which a change of the files of a run is known, without reading them."""
    found: list[object] = []
    for name in _FILES:
        try:
            stat = (Path(run) / name).stat()
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one schema, one after the other."""
    if len(chunks) == 1:
        return chunks[0]
    reasons: dict[int, str] = {}
    start = 0
    for chunk in chunks:
        reasons |= {start + row: reason for row, reason in chunk.reasons.items()}
        start += len(chunk.x)
    std = [chunk.std for chunk in chunks if chunk.std is not None]
    # Images are bytes, or floating point numbers on the scale of bytes.
    x = np.concatenate([chunk.x for chunk in chunks])
    return Chunk(0, x, np.concatenate(std) if std else None, None, reasons)


def _of_classes(predictor: Predictor, answers: list[Answers]) -> Columns:
    """Sets of labels as lists, and the probabilities of all classes, for each row."""
    assert isinstance(predictor.model.head, ClassHead)
    classes = predictor.schema.classes
    probability = np.concatenate([np.asarray(each.said) for each in answers])
    inside = prediction_sets(probability, predictor.model.head.strange.numpy(), predictor.level)
    sets, chances = np.empty(len(inside), object), np.empty(len(inside), object)
    for i, (which, row) in enumerate(zip(inside, probability.tolist(), strict=True)):
        sets[i] = [classes[place] for place in np.flatnonzero(which)]
        chances[i] = dict(zip(classes, row, strict=True))
    return {"set": sets, "probabilities": chances}


def _as_rows(columns: Columns) -> list[dict[str, Any]]:
    """An object for each row; null where a number is not finite."""
    values = [
        without_nan(each.tolist()) if each.dtype.kind == "f" else each.tolist()
        for each in columns.values()
    ]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _density(said: Predictive) -> dict[str, list[float]]:
    """The density of one row and target, at values that hold nearly all of it."""
    half = Predictive.joined([said] * _POINTS)
    quantiles = half.ppf(np.linspace(_TAIL, 1 - _TAIL, _POINTS))
    # Quantiles are close to each other where the density is high, and far apart in its tails.
    even = np.linspace(quantiles[0], quantiles[-1], _POINTS)
    x, density = (
        np.concatenate([quantiles, even]),
        np.concatenate([half.pdf(quantiles), half.pdf(even)]),
    )
    order = x.argsort()
    return {"x": x[order].tolist(), "density": density[order].tolist()}


def _standardize(predictor: Predictor) -> Standardize:
    layer = predictor.model.net[0]
    assert isinstance(layer, Standardize)
    return layer


def _described(column: Column, predictor: Predictor) -> dict[str, Any]:
    """What a form has to know of a column: its kind, and the range that training had."""
    found: dict[str, Any] = {"name": column.name, "kind": column.kind}
    if column.kind == "category":
        found["categories"] = list(column.categories)
    elif column.kind in ("number", "date"):
        assert isinstance(predictor.schema, Schema)
        scale, seen = _standardize(predictor), predictor.model.novelty
        place = predictor.schema.features.index(column.name)
        shift, unit = (float(each[place]) for each in (scale.shift, scale.scale))
        low, high = (_rounded(shift + unit * float(end[place])) for end in (seen.low, seen.high))
        found |= {"low": low, "high": high, "typical": _rounded(shift), "std": _rounded(unit)}
        found["whole"] = column.kind == "number" and low.is_integer() and high.is_integer()
        found["hours"] = "hour" in column.parts
    found["missing"] = column.indicator
    if column.error:
        found["error"] = column.error
    return found


def _rounded(value: float) -> float:
    """To the digits that the network's inputs have."""
    return float(f"{value:.6g}")
