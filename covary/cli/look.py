"""``covary evaluate`` and ``covary report``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, Seed, quoted, reported, say
from covary.runs import Run
from covary.runs import evaluate as measure

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
_WORDS = {
    "samples": "samples",
    "accuracy": "accuracy",
    "nll": "negative log-likelihood (nats)",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "entropy": "entropy (nats)",
    "entropy_right": "entropy, right predictions (nats)",
    "entropy_wrong": "entropy, wrong predictions (nats)",
    "auroc_entropy": "AUROC: entropy",
    "auroc_max_softmax": "AUROC: max-softmax",
    "aurc_entropy": "area under risk-coverage: entropy",
    "aurc_max_softmax": "area under risk-coverage: max-softmax",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
    "log_likelihood": "log-likelihood",
    "coverage_50": "targets within 50% intervals",
    "coverage_90": "targets within 90% intervals",
    "coverage_95": "targets within 95% intervals",
    "width_90": "average width of 90% intervals",
    "spearman_error": "rank correlation of |error| and deviation",
}


@reported
def evaluate(
    run: RunPath,
    ood: Annotated[
        list[str] | None,
        typer.Option("--ood", help="Foreign data: a known set or a table; repeat for several."),
    ] = None,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a trained run on its test data, and on foreign data.

    Every sample gets a covariance of its own. AUROC is that of telling wrong predictions from right
    ones (test), or foreign inputs from those of the test set, beside what max-softmax does, which
    takes no covariance. Numbers go to evaluation.json in the folder of the run.

    Examples:

    - `covary evaluate runs/mnist --ood notmnist --ood fashion-mnist`
    - `covary evaluate runs/houses --json`
    """
    evaluation = measure(
        Run(run), ood=tuple(ood or ()), data_dir=data_dir, seed=seed, progress=common.progress
    )
    if as_json:
        common.show_json(evaluation)
        return
    parts = evaluation["parts"]
    keys = [key for key in _WORDS if any(key in part for part in parts.values())]
    common.show_table(
        f"{run}: {evaluation['task']} of {evaluation['dataset']}",
        ["", *parts],
        [[_WORDS[key], *(_number(part, key) for part in parts.values())] for key in keys],
    )
    if evaluation["by_target"]:
        common.show_table(
            "The same for each target, in its own units",
            ["", *evaluation["by_target"]],
            [
                [_WORDS[key], *(_number(one, key) for one in evaluation["by_target"].values())]
                for key in _WORDS
                if key in parts["test"]
            ],
        )
    for line in _warnings(parts):
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
        Path | None, typer.Option("--out", "-o", help="The page.", show_default="RUN/report.html")
    ] = None,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one page that shows what a run is unsure of: a single file that opens anywhere.

    Figures also go to the folder figures/ beside it, as PNG and SVG. A run that was not evaluated
    since it was trained is evaluated first, on its test data.

    Example:

    - `covary report runs/mnist`
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


def _warnings(parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Where the network's doubt says the opposite of what it should."""
    for name, part in parts.items():
        what = "wrong predictions" if name == "test" else f"inputs of {name}"
        for key, score in (("auroc_entropy", "entropy"), ("auroc_max_softmax", "max-softmax")):
            if (part.get(key) or 1.0) < 0.5:
                yield f"Note: by {score} it is surer of {what} than of the rest (AUROC below 0.5)."
    if (parts["test"].get("spearman_error") or 0.0) < 0:
        yield "Note: deviations are larger where errors are smaller (negative rank correlation)."


def _number(part: dict[str, Any], key: str) -> str:
    if key not in part:
        return ""
    return f"{part[key]:,}" if key == "samples" else _decimal(part[key])


def _decimal(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
