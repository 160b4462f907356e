"""Tables of the documentation, drawn from results/benchmarks/*.json and never typed by hand.

    python -m benchmarks.tables

A page says ``<!-- table: name -->`` where a table goes; everything up to ``<!-- end -->`` is
replaced. A test fails when a page and the stored results differ.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import on_paper, tables_networks
from benchmarks.cells import markdown, percent
from benchmarks.results import ROOT, load, save
from covary.compare.table_models import TABLE_MODELS
from covary.uncertainty.metrics import METRICS
from covary.uncertainty.scores import SCORES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def speed() -> str:
    steps = load("bench")["training step"]
    return markdown(
        ["training step", "times the plain network", "times faster than the literal equations"],
        [
            [name, f"{row['over plain']:.1f}", f"{row['literal over it']:.1f}"]
            for name, row in steps.items()
        ],
    )


def growth(quantity: str) -> str:
    table = load("bench")[quantity]
    names = list(next(iter(table.values())))
    return markdown(
        [quantity, *names],
        [
            [value, *(f"{row[name]:.1f}" for name in names)]
            for value, row in sorted(table.items(), key=lambda item: int(item[0]))
        ],
    )


def sampling() -> str:
    return markdown(
        [
            "network",
            "noise",
            "test accuracy",
            "mean, average error",
            "covariance, average error",
            "covariance, worst error",
        ],
        [
            [
                row["network"],
                f"{row['noise']:g}",
                "untrained" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
                percent(row["mean error"]),
                percent(row["covariance error"]),
                percent(row["worst covariance error"]),
            ]
            for row in load("against_sampling")["networks"]
        ],
    )


def quadrature() -> str:
    rows = load("quadrature_accuracy")
    sigmas = list(next(iter(rows.values())))
    return markdown(
        ["activation, nodes", *(f"s = {sigma}" for sigma in sigmas)],
        [[name, *(f"{row[sigma]:.0e}" for sigma in sigmas)] for name, row in rows.items()],
    )


def demo() -> str:
    measured = load("digits")
    return markdown(
        ["test digits", *(f"{name} network" for name in measured)],
        [
            [quantity, *(f"{numbers[quantity]:.3f}" for numbers in measured.values())]
            for quantity in next(iter(measured.values()))
        ],
    )


def training() -> str:
    measured = load("training")
    epochs = measured["epoch over plain"]
    outside = measured["outside forward, backward and optimizer"]
    table = measured["table"]
    rows = [
        [f"epoch, {kind} covariance, over that of the plain network", f"{epochs[kind]:.1f}"]
        for kind in ("diagonal", "shared", "full")
    ]
    rows += [
        [f"time outside forward, backward and optimizer, {kind}", percent(outside[kind])]
        for kind in ("shared", "full")
    ]
    size = f"csv of {table['rows']:,} rows, {table['columns']} columns"
    rows.append([f"{size}: peak memory", f"{table['peak memory of the process, MB']:,} MB"])
    rows.append([f"{size}: rows per second, training", f"{table['rows per second, training']:,}"])
    rows.append(
        [
            f"{size}: rows per second, file to trained network",
            f"{table['rows per second, from file to trained']:,}",
        ]
    )
    return markdown(["training loop", "measured"], rows)


def replicas() -> str:
    return markdown(
        ["UCI set", "splits", "times faster together", "largest difference of predictions"],
        [
            [
                row["dataset"],
                str(row["splits"]),
                f"{row['times faster']:.1f}",
                f"{max(row['difference of means'], row['difference of stddevs']):.0e} deviations",
            ]
            for row in load("replicas")
        ],
    )


def tracked() -> str:
    rows = []
    for activation, row in load("tracked")["networks"].items():
        for name, parts in row["agreement"].items():
            chosen = name == row["chosen"]
            time = row["over plain"]["tracked" if chosen else name] if _timed(row, name) else None
            rows.append(
                [
                    f"{activation}, {'**' + name + '**' if chosen else name}",
                    "" if time is None else f"{time:.1f}",
                    *(f"{part['rank']:.4f}" for part in parts.values()),
                    *(percent(part["covariance"]) for part in parts.values()),
                    *(percent(part["mean"]) for part in parts.values()),
                ]
            )
        rows.append([f"{activation}, full", f"{row['over plain']['full']:.0f}", *[""] * 6])
    columns = ["rank of entropy", "error of the covariance", "error of the mean"]
    return markdown(
        [
            "network, covariance",
            "time",
            *(f"{c}, {p}" for c in columns for p in ("test", "notMNIST")),
        ],
        rows,
    )


def _timed(row: dict[str, Any], name: str) -> bool:
    return name == row["chosen"] or name in row["over plain"]


def inference() -> str:
    networks = load("tracked")["networks"]
    one = next(iter(networks.values()))
    parallel = next(key for key in one if key.endswith("threads"))
    threads = {"over plain": "1 thread", parallel: parallel.removeprefix("over plain, ")}
    columns = [(name, key) for name in networks for key in threads]
    return markdown(
        ["with the output's covariance", *(f"{name}, {threads[key]}" for name, key in columns)],
        [
            [way, *(f"{networks[name][key][way]:.1f}" for name, key in columns)]
            for way in one["over plain"]
        ],
    )


def by_width(quantity: str) -> str:
    table = load("tracked")[quantity]
    names = ("diagonal", "tracked", "full")
    return markdown(
        ["width", "weights", *names],
        [
            [
                width,
                f"{row['weights']:,}",
                *(f"{row[name]:.1f}" if name in row else "" for name in names),
            ]
            for width, row in table.items()
        ],
    )


def parity() -> str:
    return markdown(
        ["network, seed", "covariance in training", "test accuracy", "separability of errors"],
        [
            [
                f"{row['activation']}, {row['seed']}",
                row["covariance"],
                f"{row['accuracy']:.4f}",
                f"{row['separability of errors']:.3f}",
            ]
            for row in load("parity")
        ],
    )


def tracking_probe() -> str:
    rows = load("tracking_probe")
    layers = range(len(rows[0]["error of log corrections, by layer"]))
    return markdown(
        [
            "samples, units, momentum",
            "step over plain",
            *(f"error, layer {layer + 2}" for layer in layers),
        ],
        [
            [
                f"{row['samples']}, {row['units']}, {row['momentum']:g}",
                f"{row['step over plain']:.1f}",
                *(f"{error:.3f}" for error in row["error of log corrections, by layer"]),
            ]
            for row in rows
        ],
    )


def tracking_trials() -> str:
    networks = load("tracking_trials")["networks"]
    columns = [f"{name}, {what}" for name in networks for what in ("rank", "covariance error")]
    rows = []
    for same in zip(*(network["trials"] for network in networks.values()), strict=True):
        passes = same[0]["passes"]
        cells = [same[0]["scheme"], "" if passes is None else f"{passes:.1f}"]
        for row in same:
            parts = (row["test"], row["notmnist"])
            cells.append(" / ".join(f"{part['rank']:.4f}" for part in parts))
            cells.append(" / ".join(percent(part["covariance"]) for part in parts))
        rows.append(cells)
    cost = "multiplications, in plain passes"
    return markdown(["on test digits / on letters", cost, *columns], rows)


def _spread(value: dict[str, Any] | None, digits: int = 3) -> str:
    """Mean over seeds, and their standard deviation."""
    if value is None or value["mean"] is None:
        return ""
    deviation = value["stddev"]
    text = f"{value['mean']:.{digits}f}"
    return text if not deviation else f"{text} ± {deviation:.{digits}f}"


def compare_mnist() -> str:
    found = load("uncertainty")["mnist"]["compare"]
    columns = {
        "accuracy": ("accuracy", 4),
        "nll": ("NLL", 4),
        "ece": ("ECE", 4),
        "auroc_errors": ("AUROC, errors", 3),
        **{f"auroc_ood_{name}": (f"AUROC, {name}", 3) for name in found["ood"]},
        "aurc": ("AURC x 1000", 2),
        "attack_awareness": ("AUROC, attacked", 3),
    }
    rows = []
    for row in found["rows"]:
        cells = [f"{row['method']}: {row['score'].replace('_', ' ')}"]
        for key, (_, digits) in columns.items():
            value = row["summary"].get(key)
            if key == "aurc" and value:
                value = {name: number and 1000 * number for name, number in value.items()}
            cells.append(_spread(value, digits))
        cost = row["inference_cost"]
        cells += [f"{row['training_cost']:.1f}", "" if cost is None else f"{cost:.1f}"]
        rows.append(cells)
    titles = [title for title, _ in columns.values()]
    return markdown(["method: score", *titles, "training", "inference"], rows)


def scores_of(network: str) -> str:
    evaluation = load("uncertainty")[network]["evaluation"]
    parts = list(evaluation["auroc"])
    names = {"test": "errors"}
    return markdown(
        ["AUROC of the score", *(names.get(part, part) for part in parts)],
        [
            [
                score.replace("_", " "),
                *(_spread(evaluation["auroc"][part][score]) for part in parts),
            ]
            for score in evaluation["auroc"]["test"]
        ],
    )


def separability_of(network: str) -> str:
    evaluation = load("uncertainty")[network]["evaluation"]
    parts = evaluation["separability"]
    names = {"test": "wrong from right predictions"}
    return markdown(
        ["separability of entropy, layer", *(names.get(part, part) for part in parts)],
        [
            [layer, *(_spread(parts[part][i], 2) for part in parts)]
            for i, layer in enumerate(evaluation["layers"])
        ],
    )


def calibration_of(network: str) -> str:
    found = load("uncertainty")[network]["evaluation"]["calibration"]
    words = {"nll": "NLL", "brier": "Brier", "ece": "ECE", "adaptive_ece": "adaptive ECE"}
    return markdown(
        ["test digits", "softmax of the mean", "calibrated expected softmax"],
        [
            [words[key], _spread(row["before"], 4), _spread(row["after"], 4)]
            for key, row in found.items()
        ],
    )


def uci() -> str:
    """Log-likelihoods by data set, and under which recipe and prediction."""
    lines = load("uci_calibrated")["table"]
    sets = list(dict.fromkeys(line["dataset"] for line in lines))
    kinds = list(dict.fromkeys((line["recipe"], line["kind"]) for line in lines))
    cells = {
        (line["recipe"], line["kind"], line["dataset"]): (
            f"{line['log-likelihood']:.3f} ± {line['standard error']:.3f}"
        )
        for line in lines
    }
    return markdown(
        ["recipe: prediction", *sets],
        [
            [f"{recipe}: {kind}", *(cells.get((recipe, kind, name), "") for name in sets)]
            for recipe, kind in kinds
        ],
    )


def tables_accuracy(quantity: str, digits: int) -> str:
    """A number of each set and method, on average over the splits, with its standard error."""
    sets = load("tables_accuracy")["sets"]
    titles = {name: model.title for name, model in TABLE_MODELS["regression"].items()}
    titles = {"moment": "MomentRegressor", **titles}
    there = [method for method in titles if any(method in found for found in sets.values())]

    # Of the regressor's means.
    more = {"ours, if all were known": "spearman_known"} if quantity == "spearman_error" else {}

    def cell(found: dict[str, Any], method: str, quantity: str = quantity) -> str:
        value = found.get(method, {}).get(quantity)
        if value is None:
            return ""
        error = found[method].get(f"{quantity}_error")
        return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")

    title = METRICS[quantity].title
    return markdown(
        [title, *(titles[method] for method in there), *more],
        [
            [
                name,
                *(cell(found, method) for method in there),
                *(cell(found, "moment", key) for key in more.values()),
            ]
            for name, found in sets.items()
        ],
    )


def tables_uci() -> str:
    """Log-likelihood of the thorough regressor by set, beside the highest that are known."""

    def cited(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = []
    for name, found in load("tables_uci")["sets"].items():
        error = found.get("log_likelihood_error")
        own = f"{found['log_likelihood']:.3f}" + ("" if error is None else f" ± {error:.3f}")
        known = cited(found["best_known"]), cited(found["tabpfn"])
        rows.append([name, str(found["splits"]), own, *known])
    titles = ["", "splits", "MomentRegressor, thorough", "highest known", "TabPFN, as cited"]
    return markdown(titles, rows)


def likelihood() -> str:
    """Log-likelihood and rank correlation by set, of networks and ensembles of either loss."""
    sets = load("likelihood")["sets"]
    methods = list(next(iter(sets.values())))
    rows = []
    for method in methods:
        every = [found[method] for found in sets.values()]
        cells = [f"{row['log_likelihood']:.2f}, {row['spearman_error']:.2f}" for row in every]
        seconds = statistics.fmean(row["fit_seconds"] for row in every)
        rows.append([method, *cells, f"{seconds:.1f}"])
    return markdown(["", *sets, "seconds"], rows)


def tables_far() -> str:
    """How many times as large error bars are off the data, beside those of a Gaussian process."""
    sets = load("tables_far")["sets"]
    far = [key for key in next(iter(sets.values())) if key.isdigit()]
    rows = [
        [
            name,
            *(f"{found[key]['moment']:,.0f} / {found[key]['gp']:.1f}" for key in far),
            f"{min(found[key]['known off the data'] for key in far):.0%}",
            f"{found['known off the data, inside']:.1%}",
        ]
        for name, found in sets.items()
    ]
    heads = [f"{key} deviations off: ours / Gaussian process" for key in far]
    return markdown(["set", *heads, "known to be off, at least", "inside"], rows)


def tables_speed() -> str:
    """Seconds of a fit, beside those of quantile boosting."""

    def cell(found: dict[str, Any], method: str) -> str:
        return f"{found[method]['seconds']:.1f} ({found[method]['processor seconds']:.1f})"

    rows = [
        [
            f"{int(count):,}",
            cell(found, "moment"),
            cell(found, "boosting"),
            f"{found['moment']['processor seconds'] / found['boosting']['processor seconds']:.2f}",
            f"{found['peak MB']:,.0f}",
            f"{found['threads']}, {found['load before']:.1f}",
        ]
        for count, found in load("tables_speed")["rows"].items()
    ]
    heads = ["rows", "MomentRegressor, seconds (of processors)", "quantile boosting", "ratio"]
    return markdown([*heads, "MB at most", "threads, load of the machine"], rows)


def attacks() -> str:
    """Accuracy against epsilon: FGSM on the whole test set, the others on fewer."""
    found = load("uncertainty")["heaviside"]
    whole, some = found["attack, whole test set"], found["attack"]
    rows = whole["rows"] + [row for row in some["rows"] if not row["attack"].endswith("fgsm")]
    kinds = list(dict.fromkeys((row["attack"], row["network"], row["samples"]) for row in rows))
    accuracy = {(row["attack"], row["network"], row["epsilon"]): row["accuracy"] for row in rows}
    return markdown(
        ["attack, network, digits", *(f"{epsilon:g}" for epsilon in whole["epsilons"])],
        [
            [
                f"{attack}, {network}, {samples:,}",
                *(f"{accuracy[attack, network, each]:.3f}" for each in whole["epsilons"]),
            ]
            for attack, network, samples in kinds
        ],
    )


def awareness() -> str:
    """What entropy does on attacked inputs of the undefended network."""
    rows = [
        row
        for row in load("uncertainty")["heaviside"]["attack, whole test set"]["rows"]
        if row["attack"] == "fgsm" and row["network"] == "as trained"
    ]
    lines = {
        "entropy, average": lambda row: f"{row['entropy']['mean']:.2f}",
        "entropy, median": lambda row: f"{row['entropy']['median']:.2f}",
        "AUROC against clean inputs: entropy": lambda row: f"{row['auroc']['entropy']:.3f}",
        "AUROC against clean inputs: max-softmax": lambda row: f"{row['auroc']['max_softmax']:.3f}",
    }
    return markdown(
        ["FGSM, epsilon", *(f"{row['epsilon']:g}" for row in rows)],
        [[name, *(cell(row) for row in rows)] for name, cell in lines.items()],
    )


def sampling_cost() -> str:
    found = load("sampling_cost")
    names = list(next(iter(found.values()))["over plain"])
    return markdown(
        ["a batch of 128, forward passes of the plain network", *found],
        [
            [name, *(f"{threads['over plain'][name]:.1f}" for threads in found.values())]
            for name in names
        ],
    )


def flips() -> str:
    found = load("flips")
    draws, rows = found["draws"], []
    for sigma, row in found["noise"].items():
        for kind, each in row["covariances"].items():
            off = each["decision without noise"]
            rows.append(
                [
                    f"noise {sigma}, {kind}",
                    f"{found['over plain'][kind]:.1f}",
                    *(f"{off[key]:.3f}" for key in ("average", "largest")),
                    f"{off['bias']:+.3f}",
                    f"{off['rank']:.3f}",
                    f"{each['draws of the same error']:,}",
                    f"{each['decision of the mean']['average']:.3f}",
                ]
            )
        passes = f"{draws * found['over plain']['one draw']:,.0f}"
        own = f"{row['error of the draws']:.3f}"
        rows.append([f"noise {sigma}, {draws:,} draws", passes, own, *[""] * 5])
    return markdown(
        [
            "noise, covariance",
            "plain passes",
            "difference, average",
            "largest",
            "bias",
            "rank",
            "draws of the same error",
            "decision of the mean, average",
        ],
        rows,
    )


def flip_causes() -> str:
    noise = load("flips")["noise"]
    ways = {"formula": "formula", "Gaussian": "draws of the Gaussian"}
    return markdown(
        ["bias", *(f"noise {sigma}, {way}" for sigma in noise for way in ways.values())],
        [
            [
                cause,
                *(
                    f"{row['causes'][cause][way]['bias']:+.3f}"
                    for row in noise.values()
                    for way in ways
                ),
            ]
            for cause in next(iter(noise.values()))["causes"]
        ],
    )


def dropout() -> str:
    rows = load("dropout")["networks"]

    def error(name: str, what: str) -> list[str]:
        return [tables_networks.error_of(row["errors"][name][what]) for row in rows.values()]

    lines = {f"error of the variance, {name}": error(name, "variance") for name in _DROPOUT_WAYS}
    for masks in next(iter(rows.values()))["error of the variance"]:
        found = [row["error of the variance"][masks] for row in rows.values()]
        lines[f"error of the variance, {masks}"] = [percent(each) for each in found]
    lines |= {
        f"error of the covariance, {name}": error(name, "covariance") for name in _DROPOUT_WAYS
    }
    lines |= {f"error of the mean, {name}": error(name, "mean") for name in _DROPOUT_WAYS}
    lines["error of the mean, the network without masks"] = [
        percent(row["error of the mean without masks"]) for row in rows.values()
    ]
    for name in next(iter(rows.values()))["over plain"]:
        lines[f"passes of the plain network, {name}"] = [
            f"{row['over plain'][name]:.1f}" for row in rows.values()
        ]
    return markdown(
        ["trained with dropout", *(f"p = {rate}" for rate in rows)],
        [[name, *cells] for name, cells in lines.items()],
    )


def dropout_in_short() -> str:
    rows = load("dropout")["networks"]
    masks = ("12 masks", "30 masks")

    def line(name: str, title: str) -> list[str]:
        found = [
            row["error of the variance"][name]
            if name in masks
            else row["errors"][name]["variance"]["value"]
            for row in rows.values()
        ]
        passes = sorted(round(row["over plain"][name]) for row in rows.values())
        span = dict.fromkeys((passes[0], passes[-1]))
        return [title, *map(percent, found), " to ".join(map(str, span))]

    return markdown(
        ["error of the variance", *(f"p = {rate}" for rate in rows), "plain passes"],
        [
            line("tracked", "**no masks, tracked covariance**"),
            line("full", "no masks, full covariance"),
            *(line(name, name) for name in masks),
        ],
    )


def sources() -> str:
    rows = load("sources")["networks"]
    names = max((row["errors"] for row in rows.values()), key=len)
    lines = []
    for name in names:
        found = [row["errors"].get(name) for row in rows.values()]
        cells = [
            "" if each is None else tables_networks.error_of(each["variance"]) for each in found
        ]
        lines.append([name, *cells])
    for name in next(iter(rows.values()))["over noise"]:
        times = [f"{row['over noise'][name]:.2f}" for row in rows.values()]
        lines.append([f"time over that with noise alone: {name}", *times])
    return markdown(["error of the variance", *rows], lines)


_DROPOUT_WAYS = ("full", "tracked", "converted")


def all_scores() -> str:
    return markdown(
        ["score", "what it is", "", "looks at"],
        [[f"`{each.name}`", each.meaning, each.formula, each.needs] for each in SCORES.values()],
        left=True,
    )


def all_metrics() -> str:
    return markdown(
        ["name in results", "title", "what it is", "best"],
        [[f"`{each.name}`", each.title, each.meaning, each.best] for each in METRICS.values()],
        left=True,
    )


def predicting() -> str:
    return markdown(
        [
            "task",
            "written as",
            "rows",
            "rows per second",
            "MB at most",
            "of them before the first row",
        ],
        [
            [
                row["task"],
                row["format"],
                f"{row['rows']:,}",
                f"{round(row['rows per second'], -3):,.0f}",
                f"{row['peak MB']:.0f}",
                f"{row['idle MB']:.0f}",
            ]
            for row in load("predicting")
        ],
    )


def lake() -> str:
    measured = load("lake")
    ways = list(measured["turns"][0])
    rows = []
    for way in ways:
        cells = [way, f"{on_paper.ratio(measured, 'rows per second', way):.2f}"]
        cells.append(f"{1 / on_paper.ratio(measured, 'seconds', way):.2f}")
        load_before = statistics.median(turn[way]["load before"] for turn in measured["turns"])
        rows.append([*cells, f"{load_before:.1f}"])
    size = f"{measured['rows']:,} rows in {measured['files']} files, {measured['cores']} cores"
    header = [size, "rows per second, once at work", "from start to end", "load before, by others"]
    return markdown(header, rows)


def rows_on_paper() -> str:
    header = ["10^9 rows", "rows per second of a core", "core hours"]
    header += [f"minutes on {on_paper.WORKERS} workers", "dollars"]
    return markdown(
        header,
        [
            [
                f"{row['task']}, {row['format']}",
                f"{round(row['rows per second'], -3):,.0f}",
                f"{row['core hours']:.1f}",
                f"{row['minutes on all workers']:.1f}",
                f"{row['dollars']:.2f}",
            ]
            for row in on_paper.rows()
        ],
    )


def images_on_paper() -> str:
    return markdown(
        ["10^8 images", "passes", "core hours", "hours of a GPU", "dollars on GPUs"],
        [
            [
                row["what"],
                f"{row['passes']:.1f}",
                f"{row['core hours']:,.0f}",
                f"{row['gpu hours']:,.0f}",
                f"{row['dollars']:,.0f}",
            ]
            for row in on_paper.images()
        ],
    )


def serving() -> str:
    found = load("serving")
    capacity, sustained, most = found["capacity"], found["sustained"], found["too much"]
    rows = [
        (f"as fast as answers come, {name}", capacity[name]) for name in ("batched", "one by one")
    ]
    rows.append((f"80% of the first, for {sustained['minutes']:g} min", sustained))
    rows.append(("three times the first, offered", most))
    return markdown(
        [
            "load",
            "requests per second",
            "answers per second",
            "p50, ms",
            "p99, ms",
            "refused (429)",
            "errors",
        ],
        [
            [
                name,
                f"{row['sent per second']:,.0f}",
                f"{row['per second']:,.0f}",
                f"{row['p50 ms']:.0f}",
                f"{row['p99 ms']:.0f}",
                percent(row["statuses"].get("429", 0) / row["requests"]),
                f"{row['requests'] - sum(row['statuses'].get(s, 0) for s in ('200', '429')):,}",
            ]
            for name, row in rows
        ],
    )


def serving_fuzz() -> str:
    found = load("serving_fuzz")
    kinds = list(next(iter(found.values()))["outcomes"])
    rows = []
    for kind in kinds:
        counts: Counter[str] = Counter()
        for each in found.values():
            counts.update(each["outcomes"][kind])
        told = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        rows.append([kind, f"{sum(counts.values()):,}", told])
    return markdown(["requests", "sent", "answers"], rows)


def exported() -> str:
    ways = [f"{way}, {batch}" for way in ("onnx", "pt2") for batch in (1, 128)]
    return markdown(
        ["network", *ways, "largest difference"],
        [
            [row["network"], *(f"{row[way]:.2f}" for way in ways), f"{row['difference']:.0e}"]
            for row in load("export")
        ],
    )


def compiled() -> str:
    found = {(row["covariance"], row["batch"], row["use"]): row for row in load("compiled")}
    uses = list(dict.fromkeys((use, batch) for _, batch, use in found))
    names = [f"{use.replace('_', ' ')}, batch {batch}" for use, batch in uses]
    rows = [
        [kind, *(f"{found[kind, batch, use]['ratio']:.2f}" for use, batch in uses)]
        for kind in dict.fromkeys(kind for kind, _, _ in found)
    ]
    return markdown(["covariance", *names], rows)


TABLES: dict[str, Callable[[], str]] = {
    "lake": lake,
    "rows on paper": rows_on_paper,
    "images on paper": images_on_paper,
    "scores": all_scores,
    "metrics": all_metrics,
    "verification": tables_networks.verification,
    "spiking": tables_networks.spiking,
    "lif": tables_networks.lif,
    "converted speed": tables_networks.converted_speed,
    "converted fidelity": tables_networks.converted_fidelity,
    "converted memory": tables_networks.converted_memory,
    "pretrained cost": tables_networks.pretrained_cost,
    "pretrained corruptions": tables_networks.pretrained_corruptions,
    "pretrained shifts": tables_networks.pretrained_shifts,
    "pretrained separation": tables_networks.pretrained_separation,
    "molecules": tables_networks.molecules,
    "pendulum": tables_networks.pendulum,
    "posterior": tables_networks.posterior,
    "sampling cost": sampling_cost,
    "flips": flips,
    "flip causes": flip_causes,
    "dropout": dropout,
    "dropout in short": dropout_in_short,
    "sources": sources,
    "uci": uci,
    "attacks": attacks,
    "awareness": awareness,
    "compare mnist": compare_mnist,
    "scores mnist": lambda: scores_of("mnist"),
    "scores fashion": lambda: scores_of("fashion"),
    "separability mnist": lambda: separability_of("mnist"),
    "calibration mnist": lambda: calibration_of("mnist"),
    "demo": demo,
    "tables likelihood": lambda: tables_accuracy("log_likelihood", 3),
    "tables crps": lambda: tables_accuracy("crps", 3),
    "tables coverage": lambda: tables_accuracy("coverage_90", 3),
    "tables far": tables_far,
    "tables uci": tables_uci,
    "likelihood": likelihood,
    "tables speed": tables_speed,
    "tables rank": lambda: tables_accuracy("spearman_error", 2),
    "predicting": predicting,
    "serving": serving,
    "serving fuzz": serving_fuzz,
    "export": exported,
    "compiled": compiled,
    "training": training,
    "replicas": replicas,
    "speed": speed,
    "speed by width": lambda: growth("width"),
    "speed by batch": lambda: growth("batch"),
    "sampling": sampling,
    "quadrature": quadrature,
    "tracked": tracked,
    "inference": inference,
    "inference by width": lambda: by_width("inference by width"),
    "training step by width": lambda: by_width("training step by width"),
    "parity": parity,
    "tracking probe": tracking_probe,
    "tracking trials": tracking_trials,
}
_PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with every table as the stored results have it."""
    return _PLACE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def publish(
    name: str,
    command: str,
    seed: int | None,
    measured: Any,
    *,
    shown: Sequence[Callable[[], str]] = (),
    broken: Sequence[str] = (),
) -> None:
    """Save a measurement, show tables of it, fill those of the pages, and tell broken promises."""
    path = save(name, command, seed, measured)
    for table in shown:
        print(f"\n{table()}\n")
    print(f"saved {path.relative_to(ROOT)}")
    main()
    if broken:
        sys.exit("Not as promised: " + "; ".join(broken))


def publish_sets(
    name: str,
    sets: Sequence[str],
    measured: Callable[[str], Any],
    broken_promises: Callable[[dict[str, Any]], Sequence[str]],
    *,
    seed: int,
    table: str,
    **settings: Any,
) -> None:
    """Measure the sets that the command line names, all by default, and publish them."""
    parser = argparse.ArgumentParser(description=f"Measure {name}, set by set.")
    parser.add_argument("--sets", nargs="*", default=sets, choices=sets)
    every = {each: measured(each) for each in parser.parse_args().sets}
    publish(
        name,
        f"python -m benchmarks.{name}",
        seed,
        {**settings, "sets": every},
        shown=[TABLES[table]],
        broken=broken_promises(every),
    )


def main() -> None:
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"updated {Path(page).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
