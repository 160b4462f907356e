"""``covary compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covary.cli import common, options
from covary.cli.common import DataDir, Debug, Json, reported, say
from covary.cli.options import NETWORK, option
from covary.data import describe
from covary.runs.compare import compare as compare_methods
from covary.runs.compare import method_names
from covary.runs.compare_metrics import ood_key
from covary.runs.compare_training import CompareConfig
from covary.runs.config import DataConfig
from covary.training import Silent, terminal_or_lines

_OTHERS = "Methods compared with"
_TASKS = ("classification", "regression")
_USUAL = CompareConfig()


@reported
def compare(
    data: options.Data,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder.", show_default="runs/compare-DATA"),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option("--ood", help="Foreign data, known sets or tables; with commas, or repeated."),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds",
            help="How many (3 is 0, 1 and 2), or which, such as 0,1,5; each trains all networks "
            "anew.",
        ),
    ] = "3",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            help="What to compare with: "
            + "; ".join(f"{task}: {', '.join(method_names(task)[1:])}" for task in _TASKS)
            + ". With commas, or repeated; not given: all.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison in the folder, if any.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the comparison in the folder.")
    ] = False,
    hidden: options.Hidden = None,
    trunk: options.Trunk = None,
    activation: Annotated[
        str | None,
        option(
            NETWORK,
            "--activation",
            "Of all networks; conventional ones have relu in place of heaviside.",
        ),
    ] = None,
    noise: options.Noise = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    schedule: options.Schedule = None,
    validation: options.Validation = 0.1,
    split: options.Split = 0,
    target: Annotated[
        list[str] | None,
        option("Tables", "--target", "Column of a table to predict; repeat for several."),
    ] = None,
    members: Annotated[
        int, option(_OTHERS, "--members", "Networks of a deep ensemble.", min=1)
    ] = _USUAL.members,
    mc_dropout: Annotated[
        float, option(_OTHERS, "--mc-dropout", "Probability of Monte Carlo dropout.")
    ] = _USUAL.dropout,
    samples: Annotated[
        int, option(_OTHERS, "--samples", "Dropout masks per prediction.", min=1)
    ] = _USUAL.samples,
    epsilon: Annotated[
        float, option(_OTHERS, "--epsilon", "Size of the attack, in ranges of a pixel.")
    ] = _USUAL.epsilon,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a moment neural network and what it is compared with, and measure them alike.

    Same widths, same data, same budget: a conventional network, Monte Carlo dropout, a deep
    ensemble and a Bayesian last layer; in regression also networks with a variance of their own.
    What needs fitting beyond the weights is fitted on held-out training data. Numbers are averages
    over the seeds, with standard deviations. All is kept in the folder: with --resume, what was
    trained or measured is not done again, also where there are more seeds, methods or foreign data.

    Examples:

    - `covary compare mnist --ood notmnist,fashion-mnist`
    - `covary compare energy --split 3 --seeds 5`
    - `covary compare digits --methods plain,ensemble --epochs 20 --json`
    - `covary compare houses.csv --target price --resume`
    """
    chosen = {
        "hidden": common.numbers(hidden, int, "--hidden"),
        "trunk": trunk,
        "activation": activation,
        "noise": common.numbers(noise, float, "--noise"),
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "weight_decay": weight_decay,
        "schedule": schedule,
    }
    with common.wrong_use():
        if resume and overwrite:
            raise ValueError("--resume goes on with it, --overwrite replaces it: choose one.")
        is_table = DataConfig(name=data).is_table
        if is_table and not target:
            raise ValueError(f"Which column of {data} is to be predicted? Say --target NAME.")
        if not is_table and not 0 <= split < max(1, describe(data).splits):
            raise ValueError(f"{data} has splits 0 to {max(1, describe(data).splits) - 1}.")
        known = {name for task in _TASKS for name in method_names(task)}
        unknown = [name for name in _listed(methods) if name not in known]
        if unknown:
            raise ValueError(
                f"Unknown method {unknown[0]!r}; known are {', '.join(sorted(known))}."
            )
        data_config = DataConfig(
            name=str(Path(data).resolve()) if is_table else data,
            split=split,
            validation=validation,
            target=tuple(target or ()),
        )
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
        chosen=chosen,
        settings=settings,
        data_dir=data_dir,
        resume=resume,
        overwrite=overwrite,
        say=say,
        display=Silent if as_json else lambda: terminal_or_lines(common.voice),
    )
    if as_json:
        common.show_json(result)
        return
    _show(result)
    for note in result["notes"]:
        say(f"Note: {note}")
    say(f"Written to {folder / 'compare.json'}.")


def _listed(values: list[str] | None) -> tuple[str, ...]:
    """``["a,b", "c"]`` -> (a, b, c)."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(part for part in parts if part)


def _show(result: dict[str, Any]) -> None:
    """Two tables: what each method predicts and costs, and what each score finds."""
    classify = result["task"] == "classification"
    over = f"{len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else "1 seed"
    predicts = (
        {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
        if classify
        else {"rmse": "RMSE", "log_likelihood": "log-likelihood", "coverage_95": "95% coverage"}
    )
    methods = {row["method"]: row for row in result["rows"]}
    common.show_table(
        f"{result['dataset']}, {over}: predictions, and cost in those of the plain network",
        ["", *predicts.values(), "training", "inference"],
        [
            [
                name,
                *(_shown(row["summary"].get(key)) for key in predicts),
                *(_times(row[key]) for key in ("training_cost", "inference_cost")),
            ]
            for name, row in methods.items()
        ],
    )
    finds = {
        "auroc_errors": "errors",
        "spearman_error": "|error|, Spearman",
        **{ood_key(part): part for part in result["ood"]},
        "attack_awareness": "attacks",
        "aurc": "AURC",
    }
    there = result["rows"][0]["summary"]
    finds = {key: title for key, title in finds.items() if key in there}
    common.show_table(
        f"{result['dataset']}, {over}: what scores find (AUROC, if nothing else is said)",
        ["", "score", *finds.values()],
        [
            [row["method"], row["score"], *(_shown(row["summary"].get(key)) for key in finds)]
            for row in result["rows"]
        ],
        left=2,
    )


def _shown(found: dict[str, float | None] | None) -> str:
    """An average with its standard deviation, in as many digits as fit their size."""
    if found is None or found["mean"] is None:
        return "undefined"
    mean, spread = found["mean"], found["stddev"]
    digits = 5 if abs(mean) < 0.02 else 3 if abs(mean) < 100 else 1
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _times(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f}"
