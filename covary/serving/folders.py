"""Predictions for many files: a file of predictions for each, in a folder of their own.

A file is the unit of work. It is written whole or not at all, so that whatever is killed, by
whichever engine, leaves whole files and can go on with the rest.
"""

from __future__ import annotations

import glob
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covary.data import DataError, Schema
from covary.data.columns import shortened
from covary.data.locking import locked
from covary.data.table_files import open_table
from covary.files import read_json, write_json
from covary.serving import on_ray
from covary.serving.predictor import Predictor
from covary.serving.tables import FileOptions, PredictedTable, Work
from covary.serving.writing import format_of

ENGINES = ("local", "ray")
# Readers of a folder of tables (pyarrow, Spark, Dask) pass over names that begin so.
SETTINGS = "_predictions.json"
PREDICTOR = "_predictor"  # for the workers of a cluster, while they are at work
_SUFFIXES = {"csv": ".csv", "jsonl": ".jsonl", "parquet": ".parquet"}
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".parquet")


def is_many(source: str, predictor: Predictor) -> bool:
    """Whether this names many files: a pattern, or, where rows are wanted, a folder."""
    if Path(source).exists():
        return Path(source).is_dir() and isinstance(predictor.schema, Schema)
    return glob.has_magic(source)


def predict_files(
    predictor: Predictor,
    source: str | Sequence[str],
    out: Path,
    *,
    how: FileOptions = FileOptions(),  # noqa: B008 - it does not change
    engine: str = "local",
    overwrite: bool = False,
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
) -> PredictedTable:
    """Write predictions for each of many files, to a file of the same name in a folder.

    Args:
        predictor: what predicts.
        source: a pattern such as ``"lake/*.parquet"`` (``**`` stands for any folders), or a folder,
            whose tables are taken, those in its sub-folders included; or the paths of files.
        out: the folder of the predictions. A file has the place in it that it has below the part of
            ``source`` without a pattern, or below the folder that holds all files.
        how: how they are read and written.
        engine: ``"local"``, one file after the other; or ``"ray"``, on the cluster of Ray, whose
            machines have to see ``source`` and ``out`` under the same paths.
        overwrite: replace predictions that are there.
        resume: leave predictions that are there, and predict the rest. They have to be of the same
            model and options, which ``_predictions.json`` in the folder says.
        progress: called with numbers of rows that are done.

    Returns:
        What came of the files that were predicted now.
    """
    if engine not in ENGINES:
        raise DataError(f"The engine must be one of {', '.join(ENGINES)}, got {engine!r}.")
    if overwrite and resume:
        raise DataError("Predictions are gone on with or replaced, not both: choose one.")
    if engine == "ray":
        on_ray.require()
    every = works(source, out, how)
    check_columns(predictor, every, how)
    try:
        with locked(out, wait=False):
            made_by = _settings(predictor, how)
            work = _left(every, out, made_by, overwrite, resume)
            for path in (left for each in every for left in _unfinished(each)):
                path.unlink()  # of a process that was killed
            found = merged(_ENGINES[engine](predictor, work, out, how, progress))
            write_json(out / SETTINGS, made_by)
            return found
    except BlockingIOError:
        raise DataError(
            f"Another process writes predictions to {out}. Wait for it, or choose another folder."
        ) from None


def works(source: str | Sequence[str], out: Path, how: FileOptions) -> list[Work]:
    """All files of a source, and their predictions; refused if any would be lost."""
    base, files = _found(source) if isinstance(source, str) else _named_each(source)
    pattern = source if isinstance(source, str) else ""
    is_folder = bool(pattern) and Path(pattern).is_dir()
    if not files:
        if is_folder:
            raise DataError(
                "The run is of a table, and takes a csv, JSON lines or parquet file; "
                f"{source} is a folder without any, nor are there any in its sub-folders."
            )
        raise DataError(f"No file matches {source}. Check the pattern, and quote it in a shell.")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, where predictions of many are a folder: name one.")
    inside = is_folder or "**" in pattern  # sub-folders are read, too
    if out.resolve() == base.resolve() or (inside and base.resolve() in out.resolve().parents):
        raise DataError(
            f"{out} is where the files are read from ({base}); predictions go to a folder that is "
            "not read: choose another one (--out)."
        )
    found = [Work(path, out / _named(path.relative_to(base), how)) for path in files]
    names: dict[Path, Path] = {}
    for each in found:
        if each.out in names:
            raise DataError(
                f"{names[each.out]} and {each.source} would both be written to {each.out}. Predict "
                "them apart, or leave out --format."
            )
        names[each.out] = each.source
    sources = {each.source.resolve() for each in found}
    for each in found:
        if each.out.resolve() in sources:
            raise DataError(
                f"Predictions of {each.source} would be written to {each.out}, which is one of the "
                "tables: choose another folder (--out)."
            )
    return found


def _found(source: str) -> tuple[Path, list[Path]]:
    """The part of a source without a pattern, and the files, in the order of their names."""
    if Path(source).is_dir():
        base = Path(source)
        every: Iterable[Path] = (x for x in base.rglob("*") if x.name.lower().endswith(TABLES))
    else:
        parts = Path(source).parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        base = Path(*parts[:fixed])
        every = base.glob("/".join(parts[fixed:]))
    hidden = (".", "_")
    return base, sorted(
        path
        for path in every
        if path.is_file() and not any(x.startswith(hidden) for x in path.relative_to(base).parts)
    )


def _named_each(sources: Sequence[str]) -> tuple[Path, list[Path]]:
    """The folder that holds all of these files, and the files."""
    if not sources:
        raise DataError("No file is named: name some, or a folder or pattern.")
    # Links are not followed: a file has the place that its name says.
    files = list(dict.fromkeys(Path(os.path.abspath(each)) for each in sources))  # noqa: PTH100
    for path in files:
        if not path.is_file():
            raise DataError(
                f"Of several tables each is a file, and {path} is none: name files alone, or one "
                "folder or pattern."
            )
    try:
        return Path(os.path.commonpath([path.parent for path in files])), files
    except ValueError:
        raise DataError("The tables are on several drives: predict those of each apart.") from None


def _named(path: Path, how: FileOptions) -> Path:
    """The name of the predictions: that of the file, if they have its format."""
    ending = next((each for each in TABLES if path.name.lower().endswith(each)), "")
    if ending and how.format in ("", format_of(path)):
        return path
    stem = path.name[: len(path.name) - len(ending)]
    return path.with_name(stem + _SUFFIXES[how.format or "csv"])


def check_columns(predictor: Predictor, every: Sequence[Work], how: FileOptions) -> None:
    """Refuse, before anything is written, files that lack columns or would differ in them."""
    if not isinstance(predictor.schema, Schema):
        if pictures := [each.source for each in every if each.source.suffix.lower() == ".png"]:
            raise DataError(
                f"{pictures[0]} and others would get a file of predictions each: name their folder."
            )
        return
    first: set[str] = set()
    for each in every:
        predictor.read(
            each.source,
            format=how.source_format,
            encoding=how.encoding,
            delimiter=how.delimiter,
        )
        table = open_table(
            each.source,
            form=how.source_format,
            encoding=how.encoding,
            delimiter=how.delimiter,
        )
        columns = set(table.columns)
        if isinstance(how.keep, tuple):
            columns &= set(how.keep)
        elif how.keep == "none":
            continue
        if each is every[0]:
            first = columns
        if columns != first:
            told = shortened(map(repr, sorted(columns ^ first)))
            raise DataError(
                f"{each.source} and {every[0].source} have different columns: {told}. Write those "
                "that all have (--keep NAMES, or --keep none), or predict the files apart."
            )


def _settings(predictor: Predictor, how: FileOptions) -> dict[str, Any]:
    """What decides predictions: the model, its flag, and what is written."""
    return {
        "weights": predictor.model.about["weights"],
        **{name: getattr(predictor, name) for name in ("level", "conformal", "unseen")},
        "threshold": repr(predictor.threshold),
        "keep": list(how.keep) if isinstance(how.keep, tuple) else how.keep,
        "format": how.format,
    }


def _left(
    every: list[Work], out: Path, made_by: dict[str, Any], overwrite: bool, resume: bool
) -> list[Work]:
    """The files to predict, after a look at what is in the folder; keeps what they are made by."""
    there = [each for each in every if each.out.exists()]
    if there and not (overwrite or resume):
        raise DataError(
            f"{len(there)} of {len(every)} files of predictions are in {out} already, the first is "
            f"{there[0].out}. Go on with the rest (--resume), replace them (--overwrite), or "
            "choose another folder (--out)."
        )
    settings = out / SETTINGS
    if there and resume:
        before = read_json(settings, "Predict all again: --overwrite.")
        if before.get("replacing"):
            raise DataError(
                f"{out} has old and new predictions: an --overwrite did not come to its end. "
                "Replace them all (--overwrite)."
            )
        if differences := [name for name, value in made_by.items() if before.get(name) != value]:
            raise DataError(
                f"{out} has predictions with other settings ({', '.join(differences)}). Go on with "
                "the model and options of the first time, or replace them (--overwrite)."
            )
        return [each for each in every if not each.out.exists()]
    # Until all are replaced, nobody could tell the old ones from the new.
    write_json(settings, made_by | {"replacing": bool(there)})
    return every


def _unfinished(work: Work) -> Iterator[Path]:
    """What processes that were killed have left of a file of predictions."""
    return work.out.parent.glob(f".{glob.escape(work.out.name)}.*.unfinished")


def _one_after_the_other(
    predictor: Predictor,
    work: Sequence[Work],
    out: Path,
    how: FileOptions,
    progress: Callable[[int], None] | None,
) -> Iterator[PredictedTable]:
    for done, each in enumerate(work):
        try:
            yield each.done(predictor, how, progress=progress)
        except DataError as error:
            raise DataError(told_rest(str(error), done, len(work))) from error


def _on_ray(
    predictor: Predictor,
    work: Sequence[Work],
    out: Path,
    how: FileOptions,
    progress: Callable[[int], None] | None,
) -> Iterator[PredictedTable]:
    if not work:
        return
    shutil.rmtree(kept := out / PREDICTOR, ignore_errors=True)  # of a process that was killed
    try:
        predictor.save(kept)
        # Workers end before others may write to the folder, also after a problem.
        with closing(on_ray.predicted(kept, work, how)) as every:
            for done, found in enumerate(every):
                if isinstance(found, str):
                    raise DataError(told_rest(found, done, len(work)))
                if progress is not None:
                    progress(found.rows)
                yield found
    finally:
        shutil.rmtree(kept, ignore_errors=True)
    # What a worker that was killed was about to write; another one has written it since.
    for path in (left for each in work for left in _unfinished(each)):
        path.unlink()


_ENGINES = {"local": _one_after_the_other, "ray": _on_ray}


def told_rest(problem: str, done: int, total: int) -> str:
    """A problem with one of the files, and what became of the others."""
    return (
        f"{problem} {done} of {total} files are predicted; when this one is mended or moved away, "
        "--resume goes on with the rest."
    )


@dataclass
class _Sums:
    """Scores of some tables, to be averaged over all their rows."""

    rows: int = 0
    values: dict[str, float] = field(default_factory=dict)


def merged(summaries: Iterable[PredictedTable]) -> PredictedTable:
    """What came of several tables, as of one."""
    whole, sums = PredictedTable(), dict[str, _Sums]()
    for each in summaries:
        whole.rows += each.rows
        whole.answered += each.answered
        for part, scores in each.scores.items():
            some, rows = sums.setdefault(part, _Sums()), int(scores["rows"])
            some.rows += rows
            for name, value in scores.items():
                power = 2 if name.startswith("root") else 1
                some.values[name] = some.values.get(name, 0.0) + rows * value**power
    for part, some in sums.items():
        means = {name: value / some.rows for name, value in some.values.items() if name != "rows"}
        whole.scores[part] = {"rows": some.rows} | {
            name: math.sqrt(value) if name.startswith("root") else value
            for name, value in means.items()
        }
    return whole
