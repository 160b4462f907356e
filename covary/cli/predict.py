"""``covary predict``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from covary import runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, RunPath, quoted, reported, say
from covary.data.rows import UNSEEN
from covary.serving import FileOptions, PredictedTable, Predictor, predict_files, predict_table
from covary.serving.folders import TABLES, is_many
from covary.serving.predictor import COVERAGE
from covary.serving.writing import FORMATS

_KEEP = ("all", "none")
_SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))  # at the end of a folder's name


Tables = Annotated[
    list[str],
    typer.Argument(
        metavar="TABLE...",
        help="New rows: a .csv, .tsv, .jsonl or .parquet file, or - for standard input. New "
        "images: a folder of .png files, with its sub-folders, or an .npz file. Many files: "
        "their names, a folder of tables, or a pattern in quotes, such as 'lake/*.parquet'.",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        help="File of the predictions, or - for standard output; of many files a folder.",
        show_default="predictions.csv",
    ),
]
Level = Annotated[
    float,
    typer.Option(
        "--level", min=0, max=1, help="Share of targets in intervals, or of labels in sets."
    ),
]
Conformal = Annotated[bool, typer.Option("--conformal", help="Correct intervals by held-out rows.")]
Risk = Annotated[
    float | None,
    typer.Option(
        "--risk",
        min=0,
        max=1,
        help="Answer as many rows as possible with at most this share of errors (classification).",
    ),
]
Coverage = Annotated[
    float | None,
    typer.Option(
        "--coverage",
        min=0,
        max=1,
        help="Answer this share of rows, the surest ones.",
        show_default=str(COVERAGE),
    ),
]
Unseen = Annotated[
    str,
    typer.Option(
        "--unseen",
        help="Rows with a category that training did not have: flag (ask someone, with a wider "
        "error bar), or error.",
    ),
]
Keep = Annotated[
    str,
    typer.Option(
        "--keep", help="Columns of TABLE to write too: all, none, or names with commas between."
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"Of the predictions: {', '.join(FORMATS)}.",
        show_default="by the name, csv for -",
    ),
]
InputFormat = Annotated[
    str, typer.Option("--input-format", help="Of TABLE.", show_default="found out, csv for -")
]
Encoding = Annotated[str, typer.Option("--encoding", help="Of TABLE, if it is csv or JSON lines.")]
Delimiter = Annotated[
    str | None,
    typer.Option("--delimiter", help="Of TABLE, if it is csv.", show_default="found out"),
]
ImageArray = Annotated[
    str,
    typer.Option(
        "--array", help="That of the images, in an .npz file.", show_default="if there is one alone"
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if there is one.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Of many files: predict those that are not done.")
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", help="Of many files: local, one after the other, or ray, on a cluster of it."
    ),
]


@reported
def predict(
    run: RunPath,
    tables: Tables,
    out: Out = None,
    level: Level = 0.9,
    conformal: Conformal = False,
    risk: Risk = None,
    coverage: Coverage = None,
    unseen: Unseen = "flag",
    keep: Keep = "all",
    form: Format = "",
    input_format: InputFormat = "",
    encoding: Encoding = "utf-8",
    delimiter: Delimiter = None,
    array: ImageArray = "",
    overwrite: Overwrite = False,
    resume: Resume = False,
    engine: Engine = "local",
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict new rows or images, with how sure each prediction is, and when to ask someone.

    Regression: prediction, std, low, high. Classification: prediction, probability, set (of labels,
    with | between them), uncertainty. Both: novelty (the distance from the training data in
    standard deviations of a column, 0 inside), flag (answer, or ask someone) and reason.

    Rows off the data, and rows with what training did not have (an unseen category, a missing
    value), are always to be asked. The rest is answered by --coverage or --risk, as chosen on rows
    that training did not see; what that promises is printed. If TABLE has the target, predictions
    are compared with it.

    Of images, a column `file` has the path in the folder, or `image` the place in the array of an
    .npz file: uint8 (n, channels, height, width), channels last, or without channels if they are
    grey; or floating point numbers from 0 to 1.

    Rows and images are read in chunks, so TABLE may be larger than memory. Of many files each gets
    a file of predictions with its name, in the folder --out.

    Examples:

    - `covary predict runs/houses new.csv --out predictions.csv`
    - `covary predict runs/houses new.parquet --out predictions.parquet --keep id --conformal`
    - `covary predict runs/patients new.csv --risk 0.05`
    - `covary predict runs/digits scans/ --out predictions.csv`
    - `cat new.csv | covary predict runs/houses - --out - --keep none`
    - `covary predict runs/houses monday.csv tuesday.csv --out scored/`
    - `covary predict runs/houses 'lake/*.parquet' --out scored/`
    - `covary predict runs/houses 'lake/*.parquet' --out scored/ --engine ray`
    """
    _check_use(out, level, risk, coverage, unseen, as_json)
    source = _source(tables, out)
    opened = runs.open(run)
    if not opened.predictor_path.exists():
        again = "once" if opened.is_writable else "and not kept, as the run is read-only"
        of_few = "" if opened.classifies else " If these are few, five more networks are trained."
        say(f"Fitting to data that training did not see, {again}.{of_few}")
    predictor = Predictor.load(
        run, level=level, conformal=conformal, risk=risk, coverage=coverage, unseen=unseen,
        data_dir=data_dir, progress=common.progress,
    )  # fmt: skip
    how = FileOptions(
        keep=keep if keep in _KEEP else tuple(name.strip() for name in keep.split(",")),
        format=form,
        source_format=input_format or ("csv" if source == "-" else ""),
        encoding=encoding,
        delimiter=delimiter,
        array=array,
    )
    is_named = not isinstance(source, str)
    many = is_named or (source != "-" and is_many(str(source), predictor))
    out = _checked_out(out, many, is_named, engine, resume)
    found = _written(predictor, source, out, how, many, engine, overwrite, resume)
    if as_json:
        common.show_json({**asdict(found), "promise": predictor.promise})
        return
    _show(found, predictor)
    if out != "-":
        say(f"Written to {quoted(Path(out))}.")


def _written(
    predictor: Predictor,
    source: str | list[str],
    out: str,
    how: FileOptions,
    many: bool,
    engine: str,
    overwrite: bool,
    resume: bool,
) -> PredictedTable:
    """Predict one file or many, and show how far it is."""
    with _rows_shown(predictor.things) as progress:
        if many or not isinstance(source, str):
            return predict_files(
                predictor, source, Path(out), how=how, engine=engine, overwrite=overwrite,
                resume=resume, progress=progress,
            )  # fmt: skip
        return predict_table(
            predictor,
            sys.stdin.buffer if source == "-" else source,
            sys.stdout.buffer if out == "-" else Path(out),
            format=how.format,
            overwrite=overwrite,
            progress=progress,
            **how.options(),
        )


def _source(tables: list[str], out: str | None) -> str | list[str]:
    """The one table, folder or pattern, or the names of files whose predictions go to a folder."""
    if len(tables) > 1:
        return tables
    # A pattern that the shell has found one file for.
    is_one_of_many = Path(tables[0]).is_file() and (out or "").endswith(_SEPARATORS)
    return tables if is_one_of_many else tables[0]


def _checked_out(out: str | None, many: bool, is_named: bool, engine: str, resume: bool) -> str:
    """Where predictions go; options that are for many files alone are refused for one."""
    if many:
        if out in (None, "-"):
            raise typer.BadParameter("Predictions of many files go to a folder: --out scored/.")
        assert out is not None
        if is_named and out.lower().endswith(TABLES) and not Path(out).exists():
            raise typer.BadParameter(
                f"Predictions of many files go to a folder, and {out} is the name of a file."
            )
        return out
    if resume or engine != "local":
        used = "--resume" if resume else f"--engine {engine}"
        raise typer.BadParameter(
            f"{used} is for many files: their names, a folder of tables, or a pattern in quotes "
            "('lake/*.csv')."
        )
    return out or "predictions.csv"


def _check_use(
    out: str | None,
    level: float,
    risk: float | None,
    coverage: float | None,
    unseen: str,
    as_json: bool,
) -> None:
    """Options that do not go together, and values that none can have."""
    if as_json and out == "-":
        raise typer.BadParameter("--json and --out - both write to standard output: choose one.")
    check_answering(level, risk, coverage)
    if unseen not in UNSEEN:
        raise typer.BadParameter(
            f"{unseen!r} is none of {', '.join(UNSEEN)}.", param_hint="--unseen"
        )


def check_answering(level: float, risk: float | None, coverage: float | None) -> None:
    """Options that choose what is answered."""
    if not 0 < level < 1:
        raise typer.BadParameter(f"{level:g} is not above 0 and below 1.", param_hint="--level")
    if coverage == 0:
        raise typer.BadParameter("0 is not above 0 and at most 1.", param_hint="--coverage")
    if risk is not None and coverage is not None:
        raise typer.BadParameter("--risk and --coverage both choose the rows to answer: give one.")


def _show(found: PredictedTable, predictor: Predictor) -> None:
    if not found.rows:
        say("All files were predicted already.")
        return
    share = f"{found.answered / found.rows:.1%}"
    things = predictor.things if found.rows > 1 else predictor.things[:-1]
    say(f"{found.rows:,} {things}, {share} to answer, the rest to ask about.")
    say(f"The flag: {predictor.promise}")
    for name, scores in found.scores.items():
        told = ", ".join(
            f"{key} {value:.1%}" if key.startswith(("wrong", "in ")) else f"{key} {value:.4g}"
            for key, value in scores.items()
            if key != "rows"
        )
        say(f"Against the target, {name} rows ({scores['rows']:,}): {told}.")


@contextmanager
def _rows_shown(things: str) -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many rows or images are done, and how many in a second."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn(f"{{task.completed:,.0f}} {things}{{task.fields[rate]}}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=common.voice, transient=True, disable=not common.voice.is_terminal
    ) as bar:
        rows, started = bar.add_task("", rate=""), time.monotonic()

        def advance(count: int) -> None:
            done = bar.tasks[0].completed + count
            rate = done / max(1e-9, time.monotonic() - started)
            bar.update(rows, advance=count, rate=f", {rate:,.0f} {things}/s")

        yield advance
