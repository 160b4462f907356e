"""The commands of ``python -m reproduction``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, quoted, reported, say
from covary.training import Silent, StoppedError, terminal_or_lines
from reproduction import catalogue, reading, store, words
from reproduction.experiment import SCALES, Experiment
from reproduction.running import check_chosen
from reproduction.running import reproduce as measure_and_write
from reproduction.workshop import Workshop

RESULTS = Path("results/reproduction")

app = typer.Typer(
    name="reproduction",
    help="Every figure and table of the paper: measure it again, and compare it with what the "
    "paper says.",
    epilog="Run it from the root of the repository. Start with `python -m reproduction list`, "
    "then `python -m reproduction run mechanism --scale smoke --results trial`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.command("list")
@reported
def list_experiments(
    results: Annotated[
        Path, typer.Option("--results", help="Folder of the results, NAME.json.")
    ] = RESULTS,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Name every experiment, and say what there is of it: scale, time and verdict.

    Examples:

    - `python -m reproduction list`
    - `python -m reproduction list --results trial --json`
    """
    rows = [_row(experiment, results) for experiment in catalogue.EXPERIMENTS]
    if as_json:
        common.show_json(rows)
        return
    common.show_table(
        f"Experiments, and what {results} has of them",
        ["name", "in the paper", "results", "took", "verdict"],
        [[row[key] for key in ("name", "paper", "scale", "time", "verdict")] for row in rows],
        left=5,
    )


def _row(experiment: Experiment, results: Path) -> dict[str, str]:
    """An experiment in the list, with what a folder of results has of it."""
    try:
        record = reading.read(results, experiment)
        scale = record["scale"] if record else "none yet"
    except store.ResultError:
        record, scale = None, "unreadable"
    return {
        "name": experiment.name,
        "paper": experiment.paper,
        "title": experiment.title,
        "scale": scale,
        "time": words.duration(record["seconds"] + record["training_seconds"]) if record else "",
        "verdict": experiment.verdict(record) if record else "",
    }


@app.command()
@reported
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Experiments; `list` names them."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them, in order.")] = False,
    scale: Annotated[
        str,
        typer.Option(
            "--scale",
            help="smoke (seconds: does it run?), quick (minutes to hours) or paper (its sizes).",
        ),
    ] = "quick",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Measure only the parts of this label; repeat for several."),
    ] = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option("--seed", help="Measure only the parts of this seed; repeat for several."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of networks, kept parts and figures.")
    ] = Path("runs/reproduce"),
    results: Annotated[
        Path, typer.Option("--results", help="Folder of the results, NAME.json.")
    ] = RESULTS,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Measure so many parts at a time.")
    ] = 1,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace results of a larger scale, of more parts, or unreadable."
        ),
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a figure or table of the paper again: from data to results and figure.

    Results go to RESULTS/NAME.json and the figure, drawn from that file alone, to
    OUT/SCALE/figures/. Networks that several experiments use are trained once. Whatever is cut
    short goes on with the same command.

    Examples:

    - `python -m reproduction run mechanism --scale paper`
    - `python -m reproduction run uci --scale paper --jobs 2`
    - `python -m reproduction run mnist-relu --scale paper --only 'printed, shared' --seed 1`
    - `python -m reproduction run mnist-relu ood-notmnist --scale quick --results trial`
    - `python -m reproduction run --all --scale smoke --results trial`
    """
    with common.wrong_use():
        chosen = _chosen(names or (), scale, only or (), seeds or (), every=every)
        chosen = _replaceable(chosen, scale, results, every=every, overwrite=overwrite)
        for folder in (results, out):
            _make(folder)
    workshop = _workshop(out / scale, data_dir, silent=as_json)
    measure = partial(
        measure_and_write,
        scale=scale,
        workshop=workshop,
        results=results,
        only=only or (),
        seeds=seeds or (),
        overwrite=overwrite,
        jobs=jobs,
    )
    figures = out / scale / "figures"
    records, failed = _measured(chosen, measure, results, figures, show=not as_json, debug=debug)
    if as_json:
        common.show_json(records)
    elif records:
        where = "" if results == RESULTS else f" --results {quoted(results)}"
        say(f"The whole comparison: python -m reproduction page{where}")
    if failed:
        each = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise RuntimeError(f"{len(failed)} of {len(chosen)} experiments failed. {each}")


def _workshop(folder: Path, data_dir: str | None, *, silent: bool) -> Workshop:
    """A folder for networks, whose trainings are shown unless it is to be silent."""
    return Workshop(
        folder=folder,
        data_dir=data_dir,
        display=lambda: Silent() if silent else terminal_or_lines(common.voice),
        progress=common.progress,
        say=say,
    )


def _chosen(
    names: Sequence[str], scale: str, only: Sequence[str], seeds: Sequence[int], *, every: bool
) -> list[Experiment]:
    """The experiments that were asked for; what cannot be asked for is refused."""
    if every and names:
        raise ValueError("--all is all of them: name none beside it.")
    if not every and not names:
        raise ValueError("Which experiment? Name one or more (`list` has them), or say --all.")
    if scale not in SCALES:
        raise ValueError(f"Scales are {', '.join(SCALES)}; got {scale!r}.")
    chosen = [catalogue.get(name) for name in (catalogue.names() if every else names)]
    for experiment in chosen:
        check_chosen(experiment, scale, only, seeds)
    return chosen


def _replaceable(
    chosen: Sequence[Experiment], scale: str, results: Path, *, every: bool, overwrite: bool
) -> list[Experiment]:
    """Without those of which there are better results, of --all; if one was named, an error."""
    left_out = every and not overwrite
    kept = [each for each in chosen if not (left_out and _surpassed(results, each.name, scale))]
    for experiment in kept:
        store.check_replaceable(results, experiment.name, scale, overwrite=overwrite)
    return kept


def _measured(
    chosen: Sequence[Experiment],
    measure: Callable[[Experiment], dict[str, Any]],
    results: Path,
    figures: Path,
    *,
    show: bool,
    debug: bool,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure, show and draw one after another: their records, and errors of those that failed."""
    records, failed = [], {}
    for experiment in chosen:
        try:
            record = measure(experiment)
        except (StoppedError, KeyboardInterrupt) as stopped:
            said = str(stopped) or "Interrupted."
            say(f"{said} What is done is kept: go on with the same command.")
            raise typer.Exit(130) from None
        except (ValueError, RuntimeError, OSError) as error:
            if debug or len(chosen) == 1:
                raise
            # The others may go well, overnight.
            failed[experiment.name] = str(error)
            say(f"{experiment.name} failed: {error}")
            continue
        records.append(record)
        complete = reading.completed(experiment, record, results)
        if show:
            _show(experiment, complete)
        _draw(complete, figures)
        say(f"Written to {results / experiment.name}.json.")
    return records, failed


def _surpassed(results: Path, name: str, scale: str) -> bool:
    """Whether there are results of a larger scale; says so."""
    found = store.load(results, name)
    if found is None or SCALES.index(found["scale"]) <= SCALES.index(scale):
        return False
    say(f"{name} is left out: {results} has it at scale {found['scale']}.")
    return True


def _make(folder: Path) -> None:
    """Before any work is done for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be a folder: {error.strerror}.") from error


def _show(experiment: Experiment, record: Mapping[str, Any]) -> None:
    common.results.print(f"{experiment.name} at scale {record['scale']}: {experiment.title}")
    for row in (words.judged(claim, record) for claim in experiment.claims):
        common.results.print(
            f"- {row.says}\n"
            f"  {row.verdict}{f' ({row.rests})' if row.rests else ''}: {row.ours}"
            + (f"; counts if {row.counts}" if row.counts else "")
            + (f"; published: {row.claim.published}" if row.claim.published else "")
            + (f". {row.why}" if row.why else ""),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _draw(record: Mapping[str, Any], folder: Path) -> None:
    from reproduction.figures import draw  # which loads matplotlib

    drawn = draw(record, folder)
    if drawn is not None:
        say(f"The figure is {drawn}.")


@app.command()
@reported
def page(
    results: Annotated[
        Path | None,
        typer.Option("--results", help="Folder of the results.", show_default=str(RESULTS)),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            help="The page as Markdown.",
            show_default="docs/reproduction.md, or RESULTS/reproduction.md",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The page as HTML.",
            show_default="runs/reproduction.html, or RESULTS/reproduction.html",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the page of the reproduction: every figure and table of the paper beside ours.

    It is written twice: as Markdown, with figures beside it, and as a file of HTML that holds its
    figures. How each experiment is run and how long it takes goes to reproduction/README.md. Pages
    of results that are in another folder (--results) go to that folder.

    Examples:

    - `python -m reproduction page`
    - `python -m reproduction page --results trial`
    """
    # The page of a trial does not replace the one that belongs to the repository.
    readme = Path("reproduction/README.md") if results is None and markdown is None else None
    markdown = markdown or (results or Path("docs")) / "reproduction.md"
    out = out or (results or Path("runs")) / "reproduction.html"
    results = results or RESULTS
    with common.wrong_use():
        if not any(store.path_of(results, name).exists() for name in catalogue.names()):
            raise ValueError(
                f"{results} has no results of experiments. Which folder has them (--results)? "
                "`python -m reproduction run` makes them."
            )
    from reproduction.page import write  # which loads matplotlib

    write(results, markdown=markdown, html=out, readme=readme)
    if as_json:
        common.show_json({"report": str(out), "markdown": str(markdown)})
        return
    say(f"The page is {markdown}, and as HTML {out}: {out.resolve().as_uri()}")
