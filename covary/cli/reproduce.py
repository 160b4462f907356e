"""``covary reproduce``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, quoted, reported, say
from covary.training import Silent, StoppedError, terminal_or_lines

if TYPE_CHECKING:
    from covary.experiments import Experiment


@reported
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Experiments; see --list.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them, in order.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Name them and stop.")] = False,
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
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of networks, kept parts and figures.")
    ] = Path("runs/reproduce"),
    results: Annotated[
        Path, typer.Option("--results", help="Folder of the results, NAME.json.")
    ] = Path("results/reproduction"),
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
    """Reproduce a figure or table of the paper: from data to results and figure.

    Results go to RESULTS/NAME.json and the figure, drawn from that file alone, to
    OUT/SCALE/figures/. Networks that several experiments use are trained once. Whatever is cut
    short goes on with the same command.

    Examples:

    - `covary reproduce --list`
    - `covary reproduce mechanism --scale paper`
    - `covary reproduce uci --scale paper --jobs 2`
    - `covary reproduce mnist-relu ood-notmnist --scale quick --results trial`
    - `covary reproduce --all --scale smoke --results trial`
    """
    # Not at the top: `covary --help` can do without.
    from covary import experiments
    from covary.experiments.running import check_labels
    from covary.experiments.store import check_replaceable

    if listed:
        _list(experiments.EXPERIMENTS, results, as_json=as_json)
        return
    with common.wrong_use():
        if every and names:
            raise ValueError("--all is all of them: name none beside it.")
        if not every and not names:
            raise ValueError("Which experiment? Name one or more (--list has them), or say --all.")
        if scale not in experiments.SCALES:
            raise ValueError(f"Scales are {', '.join(experiments.SCALES)}; got {scale!r}.")
        chosen = [experiments.get(name) for name in (experiments.names() if every else names or ())]
        for experiment in chosen:
            check_labels(experiment, scale, only or ())
        if every and not overwrite:
            chosen = [each for each in chosen if not _surpassed(results, each.name, scale)]
        for experiment in chosen:
            check_replaceable(results, experiment.name, scale, overwrite=overwrite)
        for folder in (results, out):
            _make(folder)
    workshop = experiments.Workshop(
        folder=out / scale,
        data_dir=data_dir,
        display=lambda: Silent() if as_json else terminal_or_lines(common.voice),
        progress=common.progress,
        say=say,
    )
    records, failed = [], {}
    for experiment in chosen:
        try:
            record = experiments.reproduce(
                experiment,
                scale,
                workshop,
                results=results,
                only=only or (),
                overwrite=overwrite,
                jobs=jobs,
            )
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
        if not as_json:
            _show(experiment, record)
        _draw(record, out / scale / "figures")
        say(f"Written to {results / experiment.name}.json.")
    if as_json:
        common.show_json(records)
    elif records:
        say(f"The whole comparison: covary report --reproduction --results {quoted(results)}.")
    if failed:
        each = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise RuntimeError(f"{len(failed)} of {len(chosen)} experiments failed. {each}")


def _surpassed(results: Path, name: str, scale: str) -> bool:
    """Whether there are results of a larger scale; says so."""
    from covary.experiments import SCALES, load

    found = load(results, name)
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


def _list(known: Sequence[Experiment], results: Path, *, as_json: bool) -> None:
    from covary.experiments import ResultError, load
    from covary.report.reproduction.words import duration

    rows: list[dict[str, str]] = []
    for experiment in known:
        try:
            record = load(results, experiment.name)
            scale = record["scale"] if record else "none yet"
        except ResultError:
            record, scale = None, "unreadable"
        rows.append(
            {
                "name": experiment.name,
                "paper": experiment.paper,
                "title": experiment.title,
                "scale": scale,
                "time": duration(record["seconds"] + record["training_seconds"]) if record else "",
                "verdict": experiment.verdict(record) if record else "",
            }
        )
    if as_json:
        common.show_json(rows)
        return
    common.show_table(
        f"Experiments, and what {results} has of them",
        ["name", "what", "results", "took", "verdict"],
        [[row[key] for key in ("name", "title", "scale", "time", "verdict")] for row in rows],
        left=5,
    )


def _show(experiment: Experiment, record: Mapping[str, Any]) -> None:
    from covary.report.reproduction.words import judged

    common.results.print(f"{experiment.name} at scale {record['scale']}: {experiment.title}")
    for row in (judged(claim, record) for claim in experiment.claims):
        common.results.print(
            f"- {row.says}\n"
            f"  {row.verdict}: {row.ours}"
            + (f"; counts if {row.counts}" if row.counts else "")
            + (f"; published: {row.claim.published}" if row.claim.published else "")
            + (f". {row.why}" if row.why else ""),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _draw(record: Mapping[str, Any], folder: Path) -> None:
    from covary.report.reproduction import draw

    drawn = draw(record, folder)
    if drawn is not None:
        say(f"The figure is {drawn}.")
