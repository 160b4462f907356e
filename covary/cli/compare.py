"""``covary compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covary.cli import common, options
from covary.cli.common import DataDir, Debug, Json, reported, say
from covary.cli.options import NETWORK, Chosen, configured, option, taken
from covary.compare import CompareConfig, Comparison, Summary, method_names
from covary.compare import compare as compare_methods
from covary.compare.groups import check_methods
from covary.compare.methods import CLASSIFICATION, REGRESSION, ood_key
from covary.runs.config import PER_SAMPLE_HELP, Choices, DataConfig, ModelConfig
from covary.training import Silent, TrainingConfig, terminal_or_lines
from covary.uncertainty.metrics import METRICS
from covary.uncertainty.scores import about

_METHODS = "; ".join(
    f"{task}: {', '.join(method_names(task)[1:])}" for task in ("classification", "regression")
)
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder.", show_default="runs/compare-DATA")
]
Ood = Annotated[
    list[str] | None,
    typer.Option(
        "--ood", help="Out-of-distribution data, known sets or tables; with commas, or repeated."
    ),
]
Seeds = Annotated[
    str,
    typer.Option(
        "--seeds",
        help="How many (3 is 0, 1 and 2), or which, such as 0,1,5; each trains all networks anew.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        help=f"What to compare with: {_METHODS}. With commas, or repeated; not given: all.",
    ),
]
CovarianceKind = Annotated[
    str,
    option(
        NETWORK,
        "--covariance",
        f"How the moment network's covariance is stored when measured: {PER_SAMPLE_HELP}.",
    ),
]


@reported
@configured(
    ModelConfig,
    TrainingConfig,
    DataConfig,
    CompareConfig,
    defaults=[DataConfig, CompareConfig],
    # Other networks have no trained trunk, and take no errors of inputs; of dropout and covariance
    # there are options of its own.
    without={ModelConfig: ("trunk_from", "dropout", "covariance"), DataConfig: ("errors",)},
)
def compare(
    data: options.Data,
    chosen: Chosen,
    out: Out = None,
    ood: Ood = None,
    seeds: Seeds = "3",
    methods: Methods = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    covariance: CovarianceKind = "tracked",
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a moment neural network and what it is compared with, and measure them alike.

    Same widths, same data, same budget: a conventional network, Monte Carlo dropout, a deep
    ensemble, a Bayesian last layer and posteriors of all weights; in regression also networks with
    a variance of their own.
    What needs fitting beyond the weights is fitted on held-out training data. Numbers are averages
    over the seeds, with standard deviations. All is kept in the folder: with --resume, what was
    trained or measured is not done again, also where there are more seeds, methods or
    out-of-distribution data. The moment network tracks its covariance, and how close that is to
    exact ones is printed; --covariance full computes exact ones.

    Examples:

    - `covary compare mnist --ood notmnist,fashion-mnist`
    - `covary compare energy --split 3 --seeds 5`
    - `covary compare digits --methods plain,ensemble --epochs 20 --json`
    - `covary compare houses.csv --target price --missing mean --resume`
    """
    with common.wrong_use():
        existing = options.existing_of(resume=resume, overwrite=overwrite)
        check_methods(_listed(methods))
        data_config = options.data_config(data, chosen)
        settings = CompareConfig(**taken(CompareConfig, chosen))
    folder = out or Path("runs") / f"compare-{Path(data).name.split('.')[0]}"
    result = compare_methods(
        data_config,
        out=folder,
        ood=_listed(ood),
        seeds=common.seeds(seeds, "--seeds"),
        methods=_listed(methods),
        covariance=covariance,
        chosen=Choices(**chosen),
        settings=settings,
        data_dir=data_dir,
        existing=existing,
        say=say,
        display=Silent if as_json else lambda: terminal_or_lines(common.voice),
    )
    if as_json:
        common.show_json(result.to_json())
    else:
        _show(result)
        say("\n".join([_covariance(result), *(f"Note: {note}" for note in result.notes)]))
        say(f"Written to {folder / 'compare.json'}.")


def _listed(values: list[str] | None) -> tuple[str, ...]:
    """``["a,b", "c"]`` -> (a, b, c)."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(part for part in parts if part)


def _show(result: Comparison) -> None:
    """Three tables: how good predictions are, what they cost, and what each score finds."""
    over = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "1 seed"
    classify = result.task == "classification"
    # The rank of errors stands with what scores find.
    predicts = CLASSIFICATION if classify else REGRESSION[:-1]
    methods, fit = {row.method: row for row in result.rows}, METRICS["fit_seconds"]
    common.show_table(
        f"{result.dataset}, {over}: predictions",
        ["", *(METRICS[key].short for key in predicts)],
        [
            [name, *(_shown(row.summary.get(key)) for key in predicts)]
            for name, row in methods.items()
        ],
    )
    common.show_table(
        f"{result.dataset}, {over}: cost in those of the plain network, and seconds",
        ["", "training", "inference", fit.short],
        [
            [
                name,
                common.decimal(row.training_cost, 1, "unknown"),
                common.decimal(row.inference_cost, 1, "unknown"),
                _shown(row.summary.get(fit.name)),
            ]
            for name, row in methods.items()
        ],
    )
    finds = {
        **{key: METRICS[key].short for key in ("auroc_errors", "spearman_error")},
        **{ood_key(part): part for part in result.ood},
        **{key: METRICS[key].short for key in ("attack_awareness", "aurc")},
    }
    there = result.rows[0].summary
    finds = {key: title for key, title in finds.items() if key in there}
    common.show_table(
        f"{result.dataset}, {over}: what scores find (AUROC, if nothing else is said)",
        ["", "score", *finds.values()],
        [
            [row.method, about(row.score).title, *(_shown(row.summary.get(key)) for key in finds)]
            for row in result.rows
        ],
        left=2,
    )


def _covariance(result: Comparison) -> str:
    """How the moment network stored its covariance, and how good that is where it was tracked."""
    found = [each.row() for each in result.fidelity.values()]
    if not found:
        return f"MNN: {result.covariance} covariances."
    worst = max(found, key=lambda row: row.error)
    of = f", worst of {len(found)} seeds" if len(found) > 1 else ""
    said = f"MNN: tracked covariances; against exact ones, on training inputs{of}: {worst}."
    return f"{said} That is poor: take --covariance full." if worst.is_poor else said


def _shown(found: Summary | None) -> str:
    """An average with its standard deviation, in as many digits as fit their size."""
    if found is None or found.mean is None:
        return "undefined"
    digits = 5 if abs(found.mean) < 0.02 else 3 if abs(found.mean) < 100 else 1
    spread = "" if found.stddev is None else f" ± {found.stddev:.{digits}f}"
    return f"{found.mean:.{digits}f}{spread}"
