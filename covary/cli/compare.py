"""``covary compare``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.cli import common, options
from covary.cli.common import DataDir, Debug, Json, reported, say
from covary.cli.options import NETWORK, option
from covary.compare import CompareConfig, Comparison, Summary, method_names
from covary.compare import compare as compare_methods
from covary.compare.groups import check_methods
from covary.compare.metrics import ood_key
from covary.data import describe
from covary.nn.fidelity import Row as FidelityRow
from covary.runs.config import PER_SAMPLE, DataConfig
from covary.training import Silent, terminal_or_lines
from covary.uncertainty.metrics import METRICS

_OTHERS = "Methods compared with"
_TASKS = ("classification", "regression")
_USUAL = CompareConfig()


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
        help="What to compare with: "
        + "; ".join(f"{task}: {', '.join(method_names(task)[1:])}" for task in _TASKS)
        + ". With commas, or repeated; not given: all.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the comparison in the folder, if any.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the comparison in the folder.")
]
Activation = Annotated[
    str | None,
    option(
        NETWORK,
        "--activation",
        "Of all networks; conventional ones have relu in place of heaviside.",
    ),
]
CovarianceKind = Annotated[
    str,
    option(
        NETWORK,
        "--covariance",
        f"How the moment network holds its own when measured: {', '.join(PER_SAMPLE)}.",
    ),
]
Target = Annotated[
    list[str] | None,
    option("Tables", "--target", "Column of a table to predict; repeat for several."),
]
Ensemble = Annotated[int, option(_OTHERS, "--members", "Networks of a deep ensemble.", min=1)]
McDropout = Annotated[float, option(_OTHERS, "--mc-dropout", "Probability of Monte Carlo dropout.")]
Masks = Annotated[int, option(_OTHERS, "--samples", "Dropout masks per prediction.", min=1)]
Epsilon = Annotated[
    float, option(_OTHERS, "--epsilon", "Size of the attack, in ranges of a pixel.")
]


@reported
def compare(
    data: options.Data,
    out: Out = None,
    ood: Ood = None,
    seeds: Seeds = "3",
    methods: Methods = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    hidden: options.Hidden = None,
    trunk: options.Trunk = None,
    activation: Activation = None,
    noise: options.Noise = None,
    covariance: CovarianceKind = "tracked",
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    schedule: options.Schedule = None,
    validation: options.Validation = 0.1,
    split: options.Split = 0,
    target: Target = None,
    members: Ensemble = _USUAL.members,
    mc_dropout: McDropout = _USUAL.dropout,
    samples: Masks = _USUAL.samples,
    epsilon: Epsilon = _USUAL.epsilon,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a moment neural network and what it is compared with, and measure them alike.

    Same widths, same data, same budget: a conventional network, Monte Carlo dropout, a deep
    ensemble and a Bayesian last layer; in regression also networks with a variance of their own.
    What needs fitting beyond the weights is fitted on held-out training data. Numbers are averages
    over the seeds, with standard deviations. All is kept in the folder: with --resume, what was
    trained or measured is not done again, also where there are more seeds, methods or
    out-of-distribution data. The moment network tracks its covariance, and how close that is to
    exact ones is printed; --covariance full computes exact ones.

    Examples:

    - `covary compare mnist --ood notmnist,fashion-mnist`
    - `covary compare energy --split 3 --seeds 5`
    - `covary compare digits --methods plain,ensemble --epochs 20 --json`
    - `covary compare houses.csv --target price --resume`
    """
    network: dict[str, Any] = {"trunk": trunk, "activation": activation}
    network["hidden"] = common.numbers(hidden, int, "--hidden")
    network["noise"] = common.numbers(noise, float, "--noise")
    training = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "schedule": schedule}
    with common.wrong_use():
        if resume and overwrite:
            raise ValueError("--resume goes on with it, --overwrite replaces it: choose one.")
        check_methods(_listed(methods))
        data_config = _data_config(data, split, validation, target or ())
        settings = CompareConfig(
            members=members, dropout=mc_dropout, samples=samples, epsilon=epsilon
        )
    folder = out or Path("runs") / f"compare-{Path(data).name.split('.')[0]}"
    result = compare_methods(
        data_config,
        out=folder,
        ood=_listed(ood),
        seeds=common.seeds(seeds, "--seeds"),
        methods=_listed(methods),
        covariance=covariance,
        chosen={**network, **training, "weight_decay": weight_decay},
        settings=settings,
        data_dir=data_dir,
        resume=resume,
        overwrite=overwrite,
        say=say,
        display=Silent if as_json else lambda: terminal_or_lines(common.voice),
    )
    if as_json:
        common.show_json(result.to_json())
    else:
        _show(result)
        say("\n".join([_covariance(result), *(f"Note: {note}" for note in result.notes)]))
        say(f"Written to {folder / 'compare.json'}.")


def _data_config(data: str, split: int, validation: float, target: Sequence[str]) -> DataConfig:
    is_table = DataConfig(name=data).is_table
    if is_table and not target:
        raise ValueError(f"Which column of {data} is to be predicted? Say --target NAME.")
    if not is_table and not 0 <= split < max(1, describe(data).splits):
        raise ValueError(f"{data} has splits 0 to {max(1, describe(data).splits) - 1}.")
    name = str(Path(data).resolve()) if is_table else data
    return DataConfig(name=name, split=split, validation=validation, target=tuple(target))


def _listed(values: list[str] | None) -> tuple[str, ...]:
    """``["a,b", "c"]`` -> (a, b, c)."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(part for part in parts if part)


def _show(result: Comparison) -> None:
    """Two tables: what each method predicts and costs, and what each score finds."""
    over = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "1 seed"
    classify = result.task == "classification"
    predicts = ("accuracy", "nll", "ece") if classify else ("rmse", "log_likelihood", "coverage_95")
    methods = {row.method: row for row in result.rows}
    common.show_table(
        f"{result.dataset}, {over}: predictions, and cost in those of the plain network",
        ["", *(METRICS[key].short for key in predicts), "training", "inference"],
        [
            [
                name,
                *(_shown(row.summary.get(key)) for key in predicts),
                *(_times(cost) for cost in (row.training_cost, row.inference_cost)),
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
            [row.method, row.score, *(_shown(row.summary.get(key)) for key in finds)]
            for row in result.rows
        ],
        left=2,
    )


def _covariance(result: Comparison) -> str:
    """How the moment network held its covariance, and how good that is where it was tracked."""
    found = [
        FidelityRow(
            each.exact_width,
            math.nan if each.rank is None else each.rank,
            math.inf if each.error is None else each.error,
        )
        for each in result.fidelity.values()
    ]
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


def _times(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f}"
