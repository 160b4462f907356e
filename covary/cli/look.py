"""``covary evaluate`` and ``covary report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covary.cli import common
from covary.cli.common import (
    DataDir,
    Debug,
    ForeignData,
    Json,
    RunPath,
    Seed,
    quoted,
    reported,
    say,
)
from covary.cli.options import PerSampleCovariance
from covary.report.words import contradictions
from covary.runs import Run
from covary.runs import evaluate as measure
from covary.runs.config import check_covariance
from covary.uncertainty.metrics import METRICS
from covary.uncertainty.scores import about


@reported
def evaluate(
    run: RunPath,
    ood: ForeignData = None,
    covariance: PerSampleCovariance = None,
    exact_width: Annotated[
        int | None,
        typer.Option(
            "--exact-width",
            min=0,
            help="With tracked covariances: layers of up to so many units have exact variances.",
            show_default="that of the run, or the least that is good enough",
        ),
    ] = None,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a trained run on its test data, and on foreign data.

    Every sample gets a covariance of its own, exact (full), approximate and much cheaper (tracked)
    or without correlations (diagonal); covary fidelity says how much they differ.

    AUROC is that of telling wrong predictions from right ones (test), or foreign inputs from those
    of the test set, beside what max-softmax does, which takes no covariance. Numbers go to
    evaluation.json in the folder of the run.

    Examples:

    - `covary evaluate runs/mnist --ood notmnist --ood fashion-mnist`
    - `covary evaluate runs/mnist --covariance tracked`
    - `covary evaluate runs/houses --json`
    """
    config = Run(run).config()
    with common.wrong_use():
        covariance = check_covariance(covariance, exact_width, config.model)
    evaluation = measure(
        Run(run),
        covariance=covariance,
        exact_width=exact_width,
        ood=tuple(ood or ()),
        data_dir=data_dir,
        seed=seed,
        progress=common.progress,
    )
    if as_json:
        common.show_json(evaluation)
        return
    parts = evaluation["parts"]
    calibrated = evaluation["calibration"]
    columns = {"test": parts["test"]}
    if calibrated:
        columns["calibrated"] = calibrated["test"]
    columns |= parts
    common.show_table(
        f"{run}: {evaluation['task']} of {evaluation['dataset']}, {covariance} covariances",
        ["", *columns],
        _metric_rows(columns),
    )
    if calibrated:
        say(f"Calibrated on {calibrated['held_out_samples']:,} held-out training samples.")
    _show_scores(evaluation["scores"])
    if evaluation["by_target"]:
        common.show_table(
            "The same for each target, in its own units",
            ["", *evaluation["by_target"]],
            _metric_rows(evaluation["by_target"]),
        )
    for line in contradictions(parts):
        say(line)
    for note in evaluation["notes"]:
        say(f"Note: {note}")
    if evaluation["separability"]:
        usual = "right predictions" if "accuracy" in parts["test"] else "test inputs"
        against = {name: "wrong" if name == "test" else name for name in evaluation["separability"]}
        common.show_table(
            f"Separability of entropy from that of {usual}, by layer",
            ["layer", *against.values()],
            [
                [layer, *(_decimal(values[i]) for values in evaluation["separability"].values())]
                for i, layer in enumerate(evaluation["layers"])
            ],
        )
    say(f"Written to {Run(run).evaluation_path}. Look at it: covary report {quoted(run)}.")


@reported
def report(
    run: RunPath,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page.", show_default="RUN/report.html"),
    ] = None,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one page that shows what a run is unsure of: a single file that opens anywhere.

    Figures also go to the folder figures/ beside it, as PNG and SVG. A run that was not evaluated
    since it was trained is evaluated first, on its test data.

    Examples:

    - `covary report runs/mnist`
    - `covary report runs/mnist --out mnist.html`
    """
    from covary.report import write

    Run(run).config()  # a folder that holds no run is said to be none, not to lack an evaluation
    if not Run(run).evaluation_is_current():
        say("Not evaluated since it was trained: measuring it on its test data first.")
        measure(Run(run), data_dir=data_dir, seed=seed, progress=common.progress)
    page = write(run, out=out)
    if as_json:
        common.show_json({"report": str(page)})
        return
    say(f"The report is {page}. Open it in a browser: {page.resolve().as_uri()}")


def _show_scores(by_part: dict[str, dict[str, dict[str, float | None]]]) -> None:
    """What each score finds: errors, and inputs of each foreign set."""
    test = by_part["test"]
    kind = "auroc" if "auroc" in next(iter(test.values())) else "spearman_error"
    foreign = [name for name in by_part if name != "test"]
    word = "AUROC: wrong" if kind == "auroc" else "rank correlation with |error|"
    common.show_table(
        "What each score finds (covary.uncertainty.scores; fitted plain sees no covariance)",
        ["score", word, *(f"AUROC: {name}" for name in foreign)],
        [
            [
                about(name).title,
                _decimal(row[kind]),
                *(_decimal(by_part[part][name]["auroc"]) for part in foreign),
            ]
            for name, row in test.items()
        ],
    )


def _metric_rows(columns: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row for each metric that any column has."""
    return [
        [metric.title, *(_number(one, key) for one in columns.values())]
        for key, metric in METRICS.items()
        if any(key in one for one in columns.values())
    ]


def _number(part: dict[str, Any], key: str) -> str:
    if key not in part:
        return ""
    return f"{part[key]:,}" if key == "samples" else _decimal(part[key])


def _decimal(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
