"""Predictor: columns or images in, predictions with their uncertainty and a flag out."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from covary import runs
from covary.budget import Budget
from covary.data import Chunk, DataError, ImageSchema, Schema, read_images, read_rows
from covary.data.columns import shortened, with_nearest
from covary.data.rows import UNSEEN
from covary.files import FileError, read_json, write_json
from covary.inputs import in_batches
from covary.moments import Moments
from covary.progress import Steps
from covary.runs.directory import FORMAT
from covary.runs.row_model import Answers, ClassHead, RowModel, TargetHead, row_model
from covary.uncertainty.answering import (
    prediction_sets,
    threshold_of_coverage,
    threshold_of_risk,
)
from covary.uncertainty.predictive import Predictive

Columns = dict[str, NDArray[Any]]
ANSWER, ASK = "answer", "ask someone"
COVERAGE = 0.9  # of rows that are answered, if nothing is said
# Rows like those of training that count as being on the data.
_ON_THE_DATA = 0.99
_OFF = ": off the data"  # behind the name of a column
# What is chosen when a predictor is loaded, and the file that keeps it.
_CHOSEN = "predictor.json"
_NUMBERS, _OTHERS = ("level", "threshold", "limit"), ("conformal", "promise", "unseen")
# Behind a promise that is none.
_NO_HELP = " So these rows do not show that the flag helps."
CHUNK, _IMAGES = 65536, 4096  # rows and images at a time; whole numbers of the model's batches


@dataclass(frozen=True, eq=False)
class Predictor:
    """Rows of a table, or images -> predictions, how sure they are, and whether to ask someone.

    Made by ``Predictor.load``. It can be pickled, and needs neither the run nor its data then.

    What comes out, arrays (n,) by name. Of a regression: ``prediction``, ``std``, ``low`` and
    ``high``, of several targets each with the target behind it (``std_price``). Of a
    classification: ``prediction``, the label as a text; ``probability``, its own; ``set``, the
    labels to reckon with, between ``|`` (``labels_of`` has them as a list); ``uncertainty``, the
    probability that another one is true.
    Of both: ``novelty``, the distance from the training data in standard deviations of a column or
    pixel (0 is inside); ``flag``, ``"answer"`` or ``"ask someone"``; ``reason``, why to ask, or
    empty.

    Rows off the data, and rows that have what training did not have (an unseen category, a missing
    value, another value in a constant column), are always to be asked. The latter have a novelty of
    1 at least, and are as unsure as that makes them.

    Attributes:
        schema: of the run's table, or of its images.
        model: what says it.
        level: the share of the targets in their intervals, or of the labels in their sets.
        conformal: whether intervals are corrected by held-out rows. Sets always are.
        threshold: the uncertainty up to which rows are answered.
        limit: the novelty up to which they are.
        promise: what the flag promises, in words, by rows that training did not see.
        unseen: ``"flag"`` rows with a category that training did not have, or ``"error"``.

    Examples:
        >>> import covary
        >>> predictor = covary.Predictor.load("runs/houses")  # doctest: +SKIP
        >>> predictor({"income": [3.2], "rooms": [5]})["std"]  # doctest: +SKIP
    """

    schema: Schema | ImageSchema
    model: RowModel
    level: float
    conformal: bool
    threshold: float
    limit: float
    promise: str
    unseen: str = "flag"

    @classmethod
    def load(
        cls,
        run: Path | str,
        *,
        level: float = 0.9,
        conformal: bool = False,
        risk: float | None = None,
        coverage: float | None = None,
        unseen: str = "flag",
        data_dir: str | None = None,
        progress: Steps | None = None,
    ) -> Predictor:
        """The predictor of a run of a table or of images.

        The first time, it is fitted to what training held out; and if that is little, to what
        networks say of training rows that were trained without them (docs/table.md).

        Args:
            run: the folder.
            level: the share of targets in their intervals, or of labels in their sets.
            conformal: correct intervals so that the level would have held for held-out rows.
            risk: answer as many rows as possible with at most this share of errors among them
                (classification).
            coverage: answer this share of rows, the surest ones; 0.9 if neither is said.
            unseen: what becomes of a row with a category that training did not have: ``"flag"`` it,
                or ``"error"``, which names column and value and refuses all rows.
            data_dir: where data are looked for first.
            progress: wraps batches, given a name, to show how far it is.
        """
        if not 0 < level < 1:
            raise ValueError(f"The level is a share between 0 and 1, got {level}.")
        if risk is not None and coverage is not None:
            raise ValueError("Rows are answered by risk or by coverage, not by both: choose one.")
        if unseen not in UNSEEN:
            raise ValueError(f"unseen must be one of {', '.join(UNSEEN)}, got {unseen!r}.")
        opened = runs.open(run, data_dir=data_dir)
        if opened.schema is None and opened.images is None:
            raise runs.RunError(
                f"{opened.path} is no run of a table of yours or of images "
                f"({opened.config.data.name}), and these are what can be predicted."
            )
        if not opened.model_path.exists():
            raise runs.RunError(
                f"{opened.path} is not trained to its end. Go on with it first: the same covary "
                "train command, with --resume."
            )
        if risk is not None and not opened.classifies:
            raise ValueError(
                "A risk is a share of wrong classes, and this run predicts numbers: choose a "
                "coverage."
            )
        model = row_model(opened, progress=progress)
        novelty, uncertainty, error = (
            each.numpy() for each in (model.seen_novelty, model.seen_uncertainty, model.seen_error)
        )
        limit = threshold_of_coverage(novelty, _ON_THE_DATA)
        inside = novelty <= limit
        if risk is not None:
            threshold = threshold_of_risk(uncertainty[inside], error[inside, 0] > 0, risk)
        else:
            known = np.where(inside, uncertainty, np.inf)
            threshold = threshold_of_coverage(known, COVERAGE if coverage is None else coverage)
        schema = opened.schema or opened.images
        assert schema is not None
        promise = _promise(schema, error, inside & (uncertainty <= threshold))
        return cls(schema, model, level, conformal, threshold, limit, promise, unseen)

    def __repr__(self) -> str:
        targets = ", ".join(self.schema.targets) if isinstance(self.schema, Schema) else "images"
        return f"Predictor({targets}, level={self.level:g}, promise={self.promise!r})"

    def __call__(self, given: Mapping[str, Any] | NDArray[Any]) -> Columns:
        """Predictions of n rows or images.

        Args:
            given: arrays (n,) by the names of the run's columns, or a data frame; others are not
                used. Or, for a run of images, an array of them as ``covary.data.read_images`` takes
                it.
        """
        found = [self.of_chunk(chunk) for chunk in self.read(given)]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    def frame(self, rows: Any, *, keep: Sequence[str] | None = None) -> Any:
        """A data frame of n rows -> the same rows with predictions as further columns.

        For engines that hand out frames: ``map_batches`` of Ray Data, ``mapInPandas`` of Spark,
        ``map_partitions`` of Dask. A frame of no rows gives one of no rows, with all columns.

        Args:
            rows: a data frame of pandas, with the columns of the run's table.
            keep: the columns that stand before the predictions; all of them if None.
        """
        found = self(rows) if len(rows) else type(rows)(self(self.example()))[:0]
        wanted = list(rows.columns) if keep is None else list(keep)
        if absent := [name for name in wanted if name not in rows.columns]:
            told = with_nearest(absent, list(rows.columns))
            raise DataError(f"There is no column {told} to keep.")
        kept = rows[wanted]
        check_not_taken(kept.columns, found)
        return kept.assign(**{name: found[name] for name in found})

    def example(self) -> Columns:
        """One row that the run takes, by column: averages, and the first of the categories."""
        if not isinstance(self.schema, Schema):
            raise DataError("An example is one of a table's rows, and the run is of images.")
        found: Columns = {name: column.example() for name, column in self.schema.inputs.items()}
        return found | {name: np.zeros(1) for name in self.schema.errors.values()}

    def save(self, folder: Path | str) -> None:
        """Write what it needs into a new folder, whole or not at all; ``restored`` reads it.

        Plain files: safetensors, JSON and toml. The folder is a run, without its data and results:
        ``Predictor.load`` takes it too, and chooses level and flag anew.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileError(f"{folder} is there already. Remove it, or choose another folder.")
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
        try:
            unfinished.mkdir(parents=True)
            table = self.schema if isinstance(self.schema, Schema) else None
            self.model.save(unfinished, table)
            numbers = {name: repr(getattr(self, name)) for name in _NUMBERS}  # infinite ones, too
            others = {name: getattr(self, name) for name in _OTHERS}
            write_json(unfinished / _CHOSEN, {"format": FORMAT, **numbers, **others})
            unfinished.replace(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    @classmethod
    def restored(cls, folder: Path | str) -> Predictor:
        """The predictor that ``save`` wrote, with the level and flag that it had."""
        path, remedy = Path(folder) / _CHOSEN, "Save the predictor again (covary.Predictor.save)."
        found = read_json(path, remedy)
        if found.get("format") != FORMAT:
            raise FileError(
                f"{path} has format {found.get('format')!r}, and this covary reads format "
                f"{FORMAT!r}. Update covary, or save the predictor again."
            )
        try:
            chosen: dict[str, Any] = {name: float(found[name]) for name in _NUMBERS}
            return replace(cls.load(folder), **chosen, **{name: found[name] for name in _OTHERS})
        except (KeyError, TypeError) as error:
            raise FileError(f"{path} is damaged: {error!r}. {remedy}") from error

    @property
    def things(self) -> str:
        """What is predicted, in a word: rows or images."""
        return "rows" if isinstance(self.schema, Schema) else "images"

    def read(
        self, source: Any, *, chunk: int | None = None, array: str = "", **of_table: Any
    ) -> Iterator[Chunk]:
        """New rows or images, a chunk at a time.

        Args:
            source: what ``covary.data.read_rows`` or ``covary.data.read_images`` takes.
            chunk: so many at a time; 65,536 rows or about 4,096 images if None.
            array: that of the images, in an npz file with several.
            of_table: further options of ``read_rows``.
        """
        is_path = isinstance(source, str | os.PathLike)
        if isinstance(self.schema, Schema):
            path = Path(source) if is_path else Path()
            takes = "The run is of a table, and takes a csv, JSON lines or parquet file"
            if array:
                raise DataError(f"{takes}, which has no array {array!r} to choose (--array).")
            if is_path and (path.is_dir() or path.suffix.lower() in (".png", ".npz")):
                kind = "a folder" if path.is_dir() else f"a {path.suffix[1:].lower()} file"
                raise DataError(f"{takes}; {source} is {kind}.")
            rows = source if is_path or hasattr(source, "read") else dict(source)
            options = {"chunk": chunk or CHUNK, "unseen": self.unseen, **of_table}
            return read_rows(rows, self.schema, **options)
        if not is_path and (hasattr(source, "read") or isinstance(source, Mapping)):
            got = "columns" if isinstance(source, Mapping) else "a stream"
            raise DataError(
                f"The run is of images, and takes a folder of PNG files, an npz file or an array; "
                f"got {got}."
            )
        size = self.model.batch * max(1, _IMAGES // self.model.batch)
        return read_images(source, self.schema, chunk=chunk or size, array=array)

    def of_chunk(self, chunk: Chunk) -> Columns:
        """The same for rows that are read already."""
        return self.of_answers(chunk, self.answers(chunk))

    def answers(self, chunk: Chunk) -> list[Answers]:
        """What the model says of rows that are read already, a batch at a time."""
        given, unusual = self._given(chunk)
        size = self.model.batch
        each = zip(in_batches(given, size), in_batches(unusual, size), strict=True)
        return [self.model(some, is_strange) for some, is_strange in each]

    def variance_parts(self, chunk: Chunk) -> Budget:
        """What the variances of rows that are read already are made of: ``RowModel`` has it."""
        return self.model.variance_parts(*self._given(chunk))

    @staticmethod
    def _given(chunk: Chunk) -> tuple[Any, torch.Tensor]:
        """Inputs of the model (n, ...), with their errors, and (n,) which rows are unusual."""
        x = torch.from_numpy(chunk.x)
        given = x if chunk.std is None else Moments.of(x, std=torch.from_numpy(chunk.std))
        return given, torch.from_numpy(chunk.unusual)

    def of_answers(self, chunk: Chunk, batches: list[Answers]) -> Columns:
        """The columns of rows, from what the model says of them (``answers``)."""
        parts = [self._said(answers) for answers in batches]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        uncertainty, novelty = (
            torch.cat([getattr(each, name) for each in batches]).numpy()
            for name in ("uncertainty", "novelty")
        )
        if self.schema.classes:
            found["uncertainty"] = uncertainty
        reasons = self._reasons(chunk, uncertainty, novelty)
        flag = np.where(reasons == "", ANSWER, ASK)
        novelty = np.maximum(novelty, chunk.unusual)
        return {**found, "novelty": novelty, "flag": flag, "reason": reasons}

    def _said(self, answers: Answers) -> Columns:
        """Predictions and what is beside them, of one batch."""
        if isinstance(answers.said, Predictive):
            return self._numbers(answers.said)
        assert isinstance(self.model.head, ClassHead)
        classes, probability = np.array(self.schema.classes, object), answers.said
        best = probability.argmax(1)
        inside = prediction_sets(probability, self.model.head.strange.numpy(), self.level)
        # There are far fewer different sets than rows.
        kinds, which = np.unique(inside, axis=0, return_inverse=True)
        names = np.array([_joined(classes[kind]) for kind in kinds], object)
        return {
            "prediction": classes[best],
            "probability": probability[np.arange(len(best)), best],
            "set": names[which],
        }

    def _numbers(self, said: Predictive) -> Columns:
        assert isinstance(self.model.head, TargetHead)
        if self.conformal:
            ends = said.conformal_interval(self.level, self.model.head.far.numpy())
        else:
            ends = said.interval(self.level)
        found = dict(
            zip(("prediction", "std", "low", "high"), (said.mean(), said.std(), *ends), strict=True)
        )
        if said.is_one_target:
            return found
        assert isinstance(self.schema, Schema)
        return {
            f"{name}_{target}": values[:, i]
            for i, target in enumerate(self.schema.targets)
            for name, values in found.items()
        }

    def _reasons(
        self, chunk: Chunk, uncertainty: NDArray[np.float64], novelty: NDArray[np.float64]
    ) -> NDArray[Any]:
        """(n,) why to ask someone; empty where there is no reason."""
        found = np.where(uncertainty <= self.threshold, "", "unsure").astype(object)
        off = np.flatnonzero(novelty > self.limit)
        if isinstance(self.schema, ImageSchema):
            found[off] = "off the data"
        elif len(off):
            inputs = self.model.net[0](torch.from_numpy(chunk.x[off])).double()
            seen = self.model.novelty
            beyond, column = torch.maximum(inputs - seen.high, seen.low - inputs).max(1)
            names = np.array(self.schema.features, object)[column.numpy()]
            is_alone = (beyond - seen.slack).numpy() > self.limit
            found[off] = np.where(is_alone, names + _OFF, "off the data, combined")
        for row, reason in chunk.reasons.items():
            # Which says by itself why a row is unlike others, but for a column that is off.
            found[row] = f"{reason}; {found[row]}" if found[row].endswith(_OFF) else reason
        return found


def _joined(labels: Iterable[str]) -> str:
    return "|".join(re.sub(r"[\\|]", r"\\\g<0>", label) for label in labels)


def labels_of(names: str) -> list[str]:
    r"""The labels of a ``set``: ``"no|yes"`` -> no, yes.

    Where a label itself has a ``|`` or a backslash, another backslash stands before it.

    Examples:
        >>> labels_of(r"cat\|dog|cow")
        ['cat|dog', 'cow']
    """
    found = re.findall(r"(?:\\.|[^\\|])+", names, re.DOTALL)
    return [re.sub(r"\\(.)", r"\1", one, flags=re.DOTALL) for one in found]


def check_not_taken(columns: Iterable[str], found: Columns) -> None:
    """Refuse columns of a table that have a name of the predictions."""
    if taken := [name for name in columns if name in found]:
        raise DataError(
            f"The table has {shortened(map(repr, taken))}, which predictions are called, too; "
            "rename it, or name the columns to keep (--keep)."
        )


def _promise(
    schema: Schema | ImageSchema, error: NDArray[np.float64], answered: NDArray[np.bool_]
) -> str:
    """What the flag promises, by held-out rows: their errors (n, t), and which are answered."""
    things = "rows" if isinstance(schema, Schema) else "images"
    told = (
        f"Of {len(error):,} {things} that training did not see, {answered.mean():.1%} are answered"
    )
    if not answered.any():
        return f"{told}: no threshold keeps the risk."
    if isinstance(schema, ImageSchema) or schema.classes:
        found, every = error[answered].mean(), error.mean()
        return (
            f"{told}; of these {found:.1%} are wrong, of all {every:.1%}."
            f"{_NO_HELP if found >= every > 0 and not answered.all() else ''}"
        )
    sizes, helps = [], answered.all()
    for name, own in zip(schema.targets, error.T, strict=True):
        found, every = (math.sqrt((each**2).mean()) for each in (own[answered], own))
        sizes.append(f"{name} {found:.4g}, of all {every:.4g}")
        helps |= found < every or every == 0
    return (
        f"{told}; root mean squared error of these: {'; '.join(sizes)}.{'' if helps else _NO_HELP}"
    )
