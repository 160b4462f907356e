"""``covary evaluate`` and ``covary report``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from covary import runs
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
from covary.runs.config import check_covariance
from covary.runs.records import Numbers
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

    Every sample gets a covariance of its own: tracked, which is approximate and cheap, and whose
    agreement with exact ones is measured and printed; full, which is exact; or diagonal, without
    correlations. covary fidelity says how much they differ.

    AUROC is that of telling wrong predictions from right ones (test), or foreign inputs from those
    of the test set, beside what max-softmax does, which takes no covariance. Numbers go to
    evaluation.json in the folder of the run.

    Examples:

    - `covary evaluate runs/mnist --ood notmnist --ood fashion-mnist`
    - `covary evaluate runs/mnist --covariance full`
    - `covary evaluate runs/houses --json`
    """
    opened = runs.open(run, data_dir=data_dir)
    with common.wrong_use():
        if covariance is not None or exact_width is not None:
            check_covariance(covariance or "tracked", exact_width, opened.config.model)
    found = runs.evaluate(
        opened,
        covariance=covariance,
        exact_width=exact_width,
        ood=tuple(ood or ()),
        seed=seed,
        progress=common.progress,
    )
    if as_json:
        common.show_json(found.to_json())
        return
    columns = {} if found.calibration is None else {"calibrated": found.calibration.test}
    columns |= found.parts
    _show_metrics(f"{run}: {found.task} of {found.dataset}, {found.held} covariances", columns)
    if found.calibration is not None:
        say(f"Calibrated on {found.calibration.held_out_samples:,} held-out training samples.")
    _show_scores(found.scores)
    if found.by_target:
        _show_metrics("The same for each target, in its own units", found.by_target)
    for line in contradictions(found.parts):
        say(line)
    for note in found.notes:
        say(f"Note: {note}")
    if found.separability:
        usual = "right predictions" if found.task == "classification" else "test inputs"
        against = {name: "wrong" if name == "test" else name for name in found.separability}
        common.show_table(
            f"Separability of entropy from that of {usual}, by layer",
            ["layer", *against.values()],
            [
                [layer, *(_decimal(values[i]) for values in found.separability.values())]
                for i, layer in enumerate(found.layers)
            ],
        )
    say(f"Written to {opened.evaluation_path}. Look at it: covary report {quoted(run)}.")


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

    opened = runs.open(run, data_dir=data_dir)
    if not (opened.is_current(opened.evaluation) and opened.predictions_path.exists()):
        say("Not evaluated since it was trained: measuring it on its test data first.")
        runs.evaluate(opened, seed=seed, progress=common.progress)
    page = write(opened, out=out)
    if as_json:
        common.show_json({"report": str(page)})
        return
    say(f"The report is {page}. Open it in a browser: {page.resolve().as_uri()}")


def _show_metrics(title: str, columns: Mapping[str, Numbers]) -> None:
    rows = [
        [metric.title, *(_number(part, key) for part in columns.values())]
        for key, metric in METRICS.items()
        if any(key in part for part in columns.values())
    ]
    common.show_table(title, ["", *columns], rows)


def _show_scores(by_part: Mapping[str, Mapping[str, Numbers]]) -> None:
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


def _number(part: Numbers, key: str) -> str:
    if key not in part:
        return ""
    return f"{part[key]:,}" if key == "samples" else _decimal(part[key])


def _decimal(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
