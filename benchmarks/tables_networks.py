"""Tables of networks that were simulated: in the steady state, in time, spiking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.cells import markdown, percent
from benchmarks.results import load


def error_of(error: dict[str, float]) -> str:
    """A relative error and its standard error."""
    return f"{percent(error['value'])} ± {percent(error['bar'])}"


def verification() -> str:
    rows = []
    for network, found in load("verification").items():
        for layer in found["layers"]:
            steady = layer["simulations"]["steady"]
            gap = steady["entropy"]
            rows.append(
                [
                    f"{network}, {layer['name']}{' *' if layer['poor'] else ''}",
                    *(error_of(steady[key]) for key in ("mean", "variance", "covariance")),
                    f"{gap['value']:+.2f} ± {gap['bar']:.2f}",
                    *(
                        f"{layer['simulations'][name]['variance_share']['value']:.2f}"
                        for name in ("ou-0", "ou-1")
                    ),
                ]
            )
    return markdown(
        [
            "layer (* poor)",
            "mean",
            "variance",
            "covariance",
            "entropy gap, nats",
            "variance in time, at once",
            "equal time constants",
        ],
        rows,
    )


def spiking() -> str:
    found = load("spiking")
    names = {name: name.replace("-", " ") for name in found} | {"regular": "noise 0.2"}

    def of(name: str, time: float) -> str:
        decided = found[name]["spikes"]["decisions"]
        return f"{decided['accuracy'][decided['times'].index(time)]:.3f}"

    def layers(name: str, key: str) -> str:
        listed = found[name]["spikes"]["layers"]
        return ", ".join(error_of(layer["errors"][key]) for layer in listed)

    def scores(name: str, part: str, score: str) -> str:
        return f"{found[name]['auroc'][part][score]:.3f}"

    lines: dict[str, Callable[[str], str]] = {
        "test accuracy, moments": lambda name: f"{found[name]['accuracy']:.4f}",
        "entropy, right / wrong predictions": lambda name: " / ".join(
            f"{found[name]['entropy'][key]:.2f}" for key in ("right", "wrong")
        ),
        "separability of errors by layer": lambda name: ", ".join(
            f"{value:.2f}" for value in found[name]["separability"]
        ),
        "AUROC of entropy / max-softmax, errors": lambda name: " / ".join(
            scores(name, "test", score) for score in ("entropy", "max_softmax")
        ),
        "AUROC of entropy / max-softmax, notMNIST": lambda name: " / ".join(
            scores(name, "notmnist", score) for score in ("entropy", "max_softmax")
        ),
        "Fano factors by layer": lambda name: ", ".join(
            f"{layer['mean_fano']:.2f}" for layer in found[name]["spikes"]["layers"]
        ),
        "error of rates by layer": lambda name: layers(name, "rate"),
        "error of covariances by layer": lambda name: layers(name, "covariance"),
        "500 test digits: accuracy of moments": lambda name: (
            f"{found[name]['spikes']['decisions']['moments']:.3f}"
        ),
        **{
            f"of spikes after {time} ms": (lambda name, time=time: of(name, time))  # type: ignore[misc]
            for time in (50, 100, 500, 1000)
        },
    }
    return markdown(
        ["784-392-96-10 on MNIST", *names.values()],
        [[label, *(cell(name) for name in names)] for label, cell in lines.items()],
    )


def lif() -> str:
    found = load("lif")["times faster"]
    ranges = list(next(iter(found.values())))
    kinds = list(next(iter(found.values()))[ranges[0]])
    return markdown(
        ["times faster", *(f"{kind}, {where} inputs" for where in ranges for kind in kinds)],
        [
            [threads, *(f"{row[where][kind]:.1f}" for where in ranges for kind in kinds)]
            for threads, row in found.items()
        ],
    )


def converted_speed() -> str:
    found = load("converted")
    columns = [
        (threads, way) for threads in found["over plain"] for way in ("averaged", "propagated")
    ]
    names = {way: f"{way} (chosen)" if way == found["chosen"] else way for _, way in columns}
    first = found["over plain"]["1 thread"][found["chosen"]]
    return markdown(
        [
            "a batch of 128, passes of the plain network",
            *(f"{names[way]}, {threads}" for threads, way in columns),
        ],
        [
            [row, *(f"{found['over plain'][threads][way][row]:.1f}" for threads, way in columns)]
            for row in first
        ],
    )


def converted_fidelity() -> str:
    found = load("converted")
    ranks, errors = found["rank of entropy"], found["errors"]
    parts = {"test": "test", "mnist": "MNIST", "notmnist": "notMNIST"}
    return markdown(
        [
            "variances",
            *(f"rank of entropy, {name}" for name in parts.values()),
            *(f"error of the {what}, noise {noise}" for noise in errors for what in _MOMENTS),
        ],
        [
            [
                f"{way} ({chosen})" if (chosen := _chosen(errors, way)) else way,
                *(f"{ranks[way][part]:.4f}" for part in parts),
                *(
                    error_of(row[way][what]) if way in row else ""
                    for row in errors.values()
                    for what in _MOMENTS
                ),
            ]
            for way in ranks
        ],
    )


_MOMENTS = ("mean", "variance", "covariance")


def _chosen(errors: dict[str, Any], way: str) -> str:
    """At which noise ``variances="auto"`` takes this way, in words."""
    at = [noise for noise, row in errors.items() if row["chosen"] == way]
    return f"chosen at noise {' and '.join(at)}" if at else ""


def converted_memory() -> str:
    return markdown(
        ["ResNet-18, 32 x 32 images", "batch", "peak memory", "seconds"],
        [
            [what, str(row["batch"]), f"{row['MB']:,} MB", f"{row['seconds']:.0f}"]
            for what, row in load("converted")["memory"].items()
        ],
    )


def pretrained_cost() -> str:
    found = load("efficientnet_lite0")
    errors = found["errors against draws"]
    times = found["passes"]
    return markdown(
        ["EfficientNet-Lite0", "measured"],
        [
            ["photographs classified rightly", f"{found['right']} of {found['photographs']}"],
            ["largest difference of outputs, noise 0", f"{found['difference without noise']:.1g}"],
            [
                f"means, noise {found['noise']:g}: passes of the plain network",
                _passes(times["forward"]),
            ],
            [
                "means and the covariance of five classes: passes",
                _passes(times["forward and five classes"]),
            ],
            ["peak memory of the process", f"{found['peak memory, GB']:.1f} GB"],
            *(
                [f"error of the {key}, against {found['draws']} draws", error_of(errors[key])]
                for key in ("mean", "variance", "covariance")
            ),
        ],
    )


def pretrained_corruptions() -> str:
    found = load("efficientnet_lite0")
    rows = {"none": found["clean"]} | {
        f"{kind}, {strength}": row
        for kind, strengths in found["corruptions"].items()
        for strength, row in strengths.items()
    }
    return markdown(
        [
            "corruption",
            "change probability",
            "1 - largest softmax",
            "wrong, plain network",
            "wrong, with noise",
        ],
        [
            [
                name,
                *(f"{row[key]:.2f}" for key in ("change", "softmax", "wrong", "wrong with noise")),
            ]
            for name, row in rows.items()
        ],
    )


def pretrained_separation() -> str:
    found = load("efficientnet_lite0")
    plain = f"{found['wrong']} errors of the plain network"
    names = {
        "change": f"change probability, {plain}",
        "softmax": f"1 - largest softmax, {plain}",
        "difference": "difference of the two",
        "own": f"change probability, {found['wrong with noise']} errors with noise",
    }
    return markdown(
        [f"over {found['images']} images", "AUROC", "95% interval"],
        [
            [
                name,
                f"{found['auroc'][key]['value']:.3f}",
                f"{found['auroc'][key]['low']:.3f} to {found['auroc'][key]['high']:.3f}",
            ]
            for key, name in names.items()
        ],
    )


def pretrained_shifts() -> str:
    found = load("efficientnet_lite0")
    return markdown(
        [
            "corruption",
            "plain outputs",
            "means by moments",
            f"scatter of {found['shift draws']} draws",
        ],
        [
            [name, *(percent(row[key]) for key in ("plain", "means", "scatter"))]
            for name, row in found["shifts"].items()
        ],
    )


def _passes(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def posterior() -> str:
    measured = load("posterior")
    found = measured["summary"]
    costs = measured["costs"]
    passes = {
        **costs,
        "plain, trained with dropout": costs["plain"],
        "posterior, trained with dropout": costs["posterior, averaged"],
    }
    metrics = {
        "nll": "NLL", "nll_held_out": "held-out NLL", "ece": "ECE", "auroc_errors": "AUROC, errors",
        "auroc_ood_notmnist": "AUROC, notmnist", "auroc_ood_fashion-mnist": "AUROC, fashion-mnist",
    }  # fmt: skip
    digits = {"nll": 4, "nll_held_out": 4, "ece": 4}

    def cell(row: dict[str, dict[str, float]], metric: str) -> str:
        places = digits.get(metric, 3)
        return f"{row[metric]['mean']:.{places}f} ± {row[metric]['stddev']:.{places}f}"

    return markdown(
        ["method: score", *metrics.values(), "inference"],
        [
            [
                name.replace("_", " "),
                *(cell(row, metric) for metric in metrics),
                f"{passes[name.split(':')[0]]:.1f}" if name.split(":")[0] in passes else "",
            ]
            for name, row in found.items()
        ],
    )


def molecules() -> str:
    found = load("molecules")["ranks"]
    ways = list(found["all"])
    cells = {part: [row[way] for way in ways] for part, row in found.items()}
    return markdown(
        ["displacement", *ways, f"{ways[0]}, with the spread"],
        [
            [
                part,
                *(f"{one['with the error']:.2f}" for one in row),
                f"{row[0]['with the spread']:.2f}",
            ]
            for part, row in cells.items()
        ],
    )


def pendulum() -> str:
    found = load("pendulum")["errors"]
    return markdown(
        [
            "error of the first state, step",
            "deviation over drawn, median",
            "least",
            "most",
            "inside 95% intervals, network",
            "pendulum",
            "Gaussian drawn anew: least",
            "inside",
        ],
        [
            [
                f"{error}, {step}",
                *(f"{row[name]:.2f}" for name in ("median", "least", "most")),
                *(f"{row[name]:.1%}" for name in ("inside", "inside, pendulum")),
                f"{ways['drawn anew'][step]['least']:.2f}",
                f"{ways['drawn anew'][step]['inside']:.1%}",
            ]
            for error, ways in found.items()
            for step, row in ways["moments"].items()
        ],
    )
