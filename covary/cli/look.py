"""``covary evaluate``, ``covary calibrate`` and ``covary report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from covary import runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, OodData, RunPath, Seed, quoted, reported, say
from covary.cli.options import PerSampleCovariance
from covary.report.words import contradictions, failing, perfect_measurements, removable, tenths
from covary.runs.config import check_covariance
from covary.runs.records import Numbers
from covary.runs.results import BudgetResult, DistributionResult, Evaluation
from covary.runs.uncertainty import NOISE
from covary.uncertainty.metrics import METRICS
from covary.uncertainty.scores import about


@reported
def evaluate(
    run: RunPath,
    ood: OodData = None,
    covariance: PerSampleCovariance = None,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a trained run on its test data, and on out-of-distribution data.

    Every sample gets a covariance of its own: tracked, which is approximate and cheap, and whose
    agreement with exact ones is measured and printed; full, which is exact; or diagonal, without
    correlations. covary fidelity says how much they differ.

    AUROC is that of telling wrong predictions from right ones (test), or out-of-distribution inputs
    from those of the test set, beside what max-softmax does, which takes no covariance. Numbers go
    to evaluation.json in the folder of the run.

    Examples:

    - `covary evaluate runs/mnist --ood notmnist --ood fashion-mnist`
    - `covary evaluate runs/mnist --covariance full`
    - `covary evaluate runs/houses --json`
    """
    opened = runs.open(run, data_dir=data_dir)
    with common.wrong_use():
        if covariance is not None:
            check_covariance(covariance)
    found = runs.evaluate(
        opened,
        covariance=covariance,
        ood=tuple(ood or ()),
        seed=seed,
        progress=common.progress,
    )
    if as_json:
        common.show_json(found.to_json())
        return
    _show_evaluation(str(run), found)
    say(f"Written to {opened.evaluation_path}. Look at it: covary report {quoted(run)}.")


@reported
def calibrate(
    run: RunPath,
    noise: Annotated[
        str,
        typer.Option(
            "--noise",
            help="Of the calibrated network: keep that of training, or choose one for all layers, "
            f"or per layer ({', '.join(NOISE)}).",
        ),
    ] = "keep",
    covariance: PerSampleCovariance = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit what held-out data say about a run's uncertainty, and keep it with the run.

    On the part of the training data that was held out: temperature and scale of the covariance in
    classification, `var -> scale * var + offset` in regression, and the fitted score of all layers.
    `covary evaluate` does this by itself the first time; this command does it again, with the noise
    chosen anew if wanted. Neither test data nor out-of-distribution data are looked at.

    Examples:

    - `covary calibrate runs/mnist`
    - `covary calibrate runs/houses --noise per-layer`
    """
    if noise not in NOISE:
        raise typer.BadParameter(f"{noise!r} is not one of {', '.join(NOISE)}.")
    opened = runs.open(run, data_dir=data_dir)
    found = runs.calibrate(opened, covariance=covariance, noise=noise, progress=common.progress)
    numbers = found.numbers()
    fitted = {key: getattr(numbers, key) for key in ("temperature", "scale", "offset")}
    content = {key: value for key, value in fitted.items() if value is not None}
    content |= {"noise": found.noise, "scores": tuple(found.scores)}
    if as_json:
        common.show_json(content | {"samples": found.samples})
        return
    content["noise"] = content["noise"] or "as in training"
    common.show_table(
        f"{run}: fitted on {found.samples:,} held-out samples",
        ["", "value"],
        [[name, _shown(value)] for name, value in content.items()],
    )
    for note in found.notes:
        say(f"Note: {note}")
    say(f"See what it changes: covary evaluate {quoted(run)}.")


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


def _show_evaluation(run: str, found: Evaluation) -> None:
    title = f"{run}: {found.task} of {found.dataset}, {found.covariance} covariances"
    fitted, parts = found.calibration, dict(found.parts)
    if isinstance(fitted, DistributionResult):
        _show_metrics(title, {"distributions": fitted.test, "network": parts.pop("test"), **parts})
        said = "Distributions, those of covary predict, were fitted to"
        say(f"{said} {fitted.held_out_samples:,} held-out training samples.")
        for line in failing(fitted):
            say(line)
    else:
        _show_metrics(title, ({"calibrated": fitted.test} if fitted else {}) | parts)
        if fitted is not None:
            say(f"Calibrated on {fitted.held_out_samples:,} held-out training samples.")
    _show_scores(found.scores)
    if found.budget is not None:
        _show_budget(found.budget, found.targets)
    if found.by_target:
        of_targets = fitted.targets if isinstance(fitted, DistributionResult) else ()
        own = {target.name: target.test for target in of_targets}
        alone = {f"{name}, network" if own else name: x for name, x in found.by_target.items()}
        _show_metrics("The same for each target, on its own scale", own | alone)
    for line in (*contradictions(found.told), *(f"Note: {note}" for note in found.notes)):
        say(line)
    if found.separability:
        usual = "right predictions" if found.task == "classification" else "test inputs"
        by_layer = zip(found.layers, *found.separability.values(), strict=True)
        common.show_table(
            f"Separability of entropy from that of {usual}, by layer",
            ["layer", *("wrong" if name == "test" else name for name in found.separability)],
            [[layer, *map(_shown, values)] for layer, *values in by_layer],
        )


def _show_metrics(title: str, columns: Mapping[str, Numbers]) -> None:
    rows = [
        [metric.title, *(_shown(part.get(key, "")) for part in columns.values())]
        for key, metric in METRICS.items()
        if any(key in part for part in columns.values())
    ]
    common.show_table(title, ["", *columns], rows)


def _show_scores(by_part: Mapping[str, Mapping[str, Numbers]]) -> None:
    """What each score finds: errors, and inputs of each out-of-distribution set."""
    test = by_part["test"]
    kind = "auroc" if "auroc" in next(iter(test.values())) else "spearman_error"
    word = "AUROC: wrong" if kind == "auroc" else "rank correlation with |error|"
    others = {name: part for name, part in by_part.items() if name != "test"}
    common.show_table(
        "What each score finds (covary.uncertainty.scores; fitted plain sees no covariance)",
        ["score", word, *(f"AUROC: {name}" for name in others)],
        [
            [
                about(name).title,
                _shown(row[kind]),
                *(_shown(part[name]["auroc"]) for part in others.values()),
            ]
            for name, row in test.items()
        ],
    )


def _show_budget(budget: BudgetResult, targets: Sequence[str]) -> None:
    """What the variance is made of, and what error bars would be with perfect measurements."""
    rows = []
    for source, share in budget.sources.items():
        rows.append([source, tenths(share)])
        if source == "input":
            own = budget.columns.items()
            rows += [[f"... of it, errors of {column}", tenths(part)] for column, part in own]
    common.show_table(
        f"What the variance of the output is made of, on {budget.samples:,} test inputs",
        ["source", "share"],
        rows,
    )
    say(removable(budget))
    if budget.errors is not None:
        for line in perfect_measurements(budget.errors, targets):
            say(line)


def _shown(value: object) -> str:
    """A number, a list of them or a text as a cell of a table."""
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "undefined" if value is None else str(value)
