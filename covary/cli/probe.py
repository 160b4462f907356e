"""Commands that put a run to the test: ``covary fidelity``, ``verify`` and ``attack``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import typer

from covary import report, runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, OodData, RunPath, Seed, decimal, reported, say
from covary.cli.options import Chosen, configured
from covary.covariance import class_name, exact_units
from covary.nn.fidelity import FidelityRow
from covary.runs.attack import AttackConfig, attack_run
from covary.runs.config import PER_SAMPLE
from covary.runs.results import (
    Attack,
    AttackRow,
    FidelityResult,
    MeasuredNumber,
    Representation,
    SpikingVerification,
    SteadyVerification,
)
from covary.stochastic.comparison import ERRORS
from covary.stochastic.statistics import GROUPS

_ERRORS = ("mean", "variance", "covariance")
_OF_SPIKES = ("rate", "fano", "covariance", "off_diagonal")
_Copies = Annotated[
    int | None,
    typer.Option(
        "--copies",
        min=2 * GROUPS,
        help=f"Draws for each input, or spiking networks: a multiple of {GROUPS}.",
        show_default="65536, or 64 that spike",
    ),
]


@reported
def fidelity(
    run: RunPath,
    ood: OodData = None,
    samples: Annotated[
        int, typer.Option("--samples", min=2, help="Inputs of each part, at most.")
    ] = 1000,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples that are computed together.")
    ] = 128,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the ways to store a run's covariance: how exact they are, and what they cost.

    Each is compared with exact covariances (full), on test inputs and on out-of-distribution ones:
    relative errors of mean, variance and covariance, Spearman's rank correlation of entropies, and
    how often another class is predicted. Time is that of a forward pass with the covariances of a
    batch, as a multiple of the plain network's; memory is the peak for such a batch. Numbers go to
    fidelity.json in the folder of the run.

    Examples:

    - `covary fidelity runs/mnist --ood notmnist`
    - `covary fidelity runs/houses --samples 200 --json`
    """
    opened = runs.open(run, data_dir=data_dir)
    result = runs.measure_fidelity(
        opened,
        ood=tuple(ood or ()),
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        progress=common.progress,
    )
    if as_json:
        common.show_json(result.to_json())
        return
    for part in result.parts:
        _show_part(f"{run}, {part}", result, part)
    common.show_table(
        f"What a batch of {result.batch} costs",
        ["", "time (plain = 1)", "memory (MB)"],
        [
            [
                _marked(kind, result),
                decimal(kind.time_over_plain, 1, "unknown"),
                decimal(kind.peak_memory_mb, 1, "unknown"),
            ]
            for kind in result.representations
        ],
    )
    say("* is what --covariance tracked uses by itself.")
    for note in result.notes:
        say(f"Note: {note}")
    say(_advice(result, common.quoted(run)))
    say(f"Written to {opened.fidelity_path}.")


def _show_part(title: str, result: FidelityResult, part: str) -> None:
    classify = result.task == "classification"
    rows = []
    for kind in result.representations:
        found = kind.parts[part]
        row = [_marked(kind, result), *(_percent(getattr(found, key)) for key in _ERRORS)]
        row += [decimal(found.rank, 3)]
        rows.append([*row, _percent(found.argmax)] if classify else row)
    samples = result.representations[0].parts[part].samples
    common.show_table(
        f"{title}: errors against exact covariances, {samples:,} samples",
        ["", *_ERRORS, "rank", *(["class"] if classify else [])],
        rows,
    )


def _advice(result: FidelityResult, run: str) -> str:
    """Which representation to take: the cheapest that agrees well enough on every part."""
    kinds = [kind for kind in result.representations if class_name(kind.name) in PER_SAMPLE]
    full = kinds[0]
    good = [kind for kind in kinds if kind is full or _worst(kind).is_good]
    best = min(good, key=_time)
    if best is full:
        cheaper = any(_time(kind) < _time(full) for kind in kinds)
        reason = "what is cheaper agrees too little" if cheaper else "nothing is cheaper here"
        return f"Take full: it is exact, and {reason} (covary evaluate {run} --covariance full)."
    option = "tracked" if best.name == result.chosen else best.name
    times = _time(full) / _time(best)
    return (
        f"Take {best.name}: {times:.1f} times faster than full, {_worst(best)} at worst "
        f"(covary evaluate {run} --covariance {option})."
    )


def _worst(kind: Representation) -> FidelityRow:
    """The lowest rank and largest error of all parts; an unknown error counts as infinite."""
    parts = kind.parts.values()
    ranks = [part.rank for part in parts if part.rank is not None]
    errors = [math.inf if part.covariance is None else part.covariance for part in parts]
    return FidelityRow(exact_units(kind.name) or 0, min(ranks, default=math.nan), max(errors))


def _time(kind: Representation) -> float:
    return math.inf if kind.time_over_plain is None else kind.time_over_plain


def _marked(kind: Representation, result: FidelityResult) -> str:
    return f"{kind.name} *" if kind.name == result.chosen else kind.name


def _percent(value: float | None) -> str:
    if value is None:
        return "undefined"
    if value == 0:
        return "0%"
    if value < 1e-4:
        return "<0.01%"
    if value > 10:
        return ">1000%"
    return f"{100 * value:.{2 if value < 0.01 else 1 if value < 0.1 else 0}f}%"


@reported
def verify(
    run: RunPath,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Test inputs.")] = 4,
    copies: _Copies = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            help="Of networks in time, in time constants; of spiking ones in ms.",
            show_default="60, or 1000 ms",
        ),
    ] = None,
    decisions: Annotated[
        int,
        typer.Option(
            "--decisions", min=0, help="Test inputs for a spiking network to decide on; 0 for none."
        ),
    ] = 500,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Simulate the stochastic network behind a run: are its means and covariances right?

    Noise is drawn and sent through the network again and again, for a few test inputs; the network
    is also simulated in time, as Ornstein-Uhlenbeck processes. Each layer's moments are compared:
    relative errors of mean, variance, covariance and covariances of pairs alone (Frobenius), and
    entropies in nats, with what sampling itself contributes taken out. Layers where linear response
    is poor are named, with the reason.

    Of a network of spiking neurons (`--activation lif`), spikes are simulated: rates, Fano factors
    and covariances of spike counts are compared, and how fast it decides.

    Numbers go to verification.json, or spikes.json, in the folder of the run, figures to its
    figures/, and both into the next covary report.

    Examples:

    - `covary verify runs/mnist`
    - `covary verify runs/mnist --samples 1 --copies 262144 --json`
    - `covary verify runs/mnist-lif --duration 500 --decisions 200`
    """
    opened = runs.open(run, data_dir=data_dir)
    result = runs.verify(
        opened,
        samples=samples,
        copies=copies,
        duration=duration,
        decisions=decisions,
        seed=seed,
        progress=common.progress,
    )
    figures = report.write_verification(opened)
    if as_json:
        common.show_json(result.to_json())
        return
    if isinstance(result, SpikingVerification):
        _show_spikes(result)
        what = "Rates are more than 5%, or Fano factors or covariances more than 10% off"
        path = opened.spikes_path
    else:
        _show_moments(result)
        what = f"Covariances are more than {result.limit:.0%} off"
        path = opened.verification_path
    if any(layer.poor for layer in result.layers):
        say(f"* {what}, beyond doubt.")
    for note in result.notes:
        say(f"Note: {note}")
    say(f"Written to {path}, and figures to {figures}.")
    say(f"See them on one page: covary report {common.quoted(run)}")


def _show_moments(result: SteadyVerification) -> None:
    common.show_table(
        f"Moments against a simulation, {len(result.inputs)} inputs: errors in %, entropy in nats",
        ["layer", "mean", "variance", "covariance", "pairs", "entropy"],
        [
            [
                layer.name + (" *" if layer.poor else ""),
                *(_shown(getattr(layer.steady, key)) for key in ERRORS),
                _shown(layer.steady.entropy, "+"),
            ]
            for layer in result.layers
        ],
    )
    common.show_table(
        "The simulation: its own noise in %, variance in time (steady = 1)",
        ["layer", "units", "mean", "covariance", "samples", "at once", "equal tau"],
        [
            [
                layer.name,
                str(layer.units),
                _hundredths(layer.steady.mean.floor),
                _hundredths(layer.steady.covariance.floor),
                decimal(layer.steady.effective_samples, 0, "none"),
                *(_shown(layer.simulations[name].variance_share) for name in ("ou-0", "ou-1")),
            ]
            for layer in result.layers
        ],
    )


def _show_spikes(result: SpikingVerification) -> None:
    common.show_table(
        f"Moments against spikes, {len(result.inputs)} inputs: errors in %",
        ["layer", "spikes/s", "Fano", "rate ±", "Fano ±", "covar. ±", "pairs ±"],
        [
            [
                layer.name + (" *" if layer.poor else ""),
                f"{1000 * layer.mean_rate:.1f}",
                decimal(layer.mean_fano, 2, "none"),
                *(_shown(layer.errors[key]) for key in _OF_SPIKES),
            ]
            for layer in result.layers
        ],
    )
    decided = result.decisions
    if decided is None:
        return
    columns = (decided.times, decided.accuracy, decided.bar, decided.agreement)
    common.show_table(
        f"{decided.inputs} decisions; moments: {100 * decided.moments:.1f}% right",
        ["after (ms)", "right (%)", "as the moments (%)"],
        [
            [f"{time:g}", f"{100 * right:.1f}±{_hundredths(bar, 1)}", f"{100 * agrees:.1f}"]
            for time, right, bar, agrees in zip(*columns, strict=True)
        ],
    )


def _shown(found: MeasuredNumber, sign: str = "") -> str:
    """A number with its standard error; relative errors, which have a floor, in percent."""
    value, bar, decimals = found.value, found.bar, 2
    if value is None or bar is None:
        return "undefined"
    if found.floor is not None:
        decimals = 2 if bar < 0.0005 else 1 if bar < 0.05 else 0
        value, bar = 100 * value, 100 * bar
    return f"{value:{sign}.{decimals}f}±{bar:.{decimals}f}"


def _hundredths(value: float | None, decimals: int = 2) -> str:
    return decimal(None if value is None else 100 * value, decimals)


@reported
@configured(AttackConfig, defaults=[AttackConfig])
def attack(
    run: RunPath,
    chosen: Chosen,
    seed: Seed = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Attack a classifier: how accurate it stays, and whether it notices.

    FGSM and PGD follow the gradient, Square asks for outputs alone. A Heaviside network is also
    attacked with sigma_1 = sigma_2 = 0, the paper's defence, which hides its gradient; therefore
    attacks that were made on the network as trained are tried on it too (transfer-fgsm,
    transfer-pgd). AUROC says how well attacked inputs are told from clean ones. Numbers go to
    attack.json in the folder of the run.

    Where pixels are taken to go from -1 to 1, as in the paper's code, an epsilon has twice the
    number that it has here.

    Examples:

    - `covary attack runs/mnist`
    - `covary attack runs/mnist --attack fgsm --samples 10000 --no-clip`
    - `covary attack runs/mnist --epsilon 0,0.1,0.3 --json`
    """
    with common.wrong_use():
        config = AttackConfig(**chosen, seed=seed)
    opened = runs.open(run, data_dir=data_dir)
    result = attack_run(opened, config, progress=common.progress)
    if as_json:
        common.show_json(result.to_json())
        return
    for network in result.networks:
        _show_attack(result, network.name)
    for sentence in (*(f"Note: {note}" for note in result.notes), *result.verdict):
        say(sentence)
    say(f"epsilon is in {result.epsilon_scale}.")
    say(f"Written to {opened.attack_path}.")


def _show_attack(result: Attack, network: str) -> None:
    """A table of each measure, epsilons by attacks."""
    rows = [row for row in result.rows if row.network == network]
    for title, shown in _MEASURES.items():
        common.show_table(
            f"{network}: {title}",
            ["epsilon", *result.names(network)],
            [
                [f"{epsilon:g}", *(shown(row) for row in rows if row.epsilon == epsilon)]
                for epsilon in result.epsilons
            ],
        )


def _auroc(row: AttackRow, score: str) -> str:
    # At 0 nothing was attacked, so there is nothing to tell apart.
    return "" if row.epsilon == 0 else decimal(row.auroc[score], 2)


_MEASURES: dict[str, Callable[[AttackRow], str]] = {
    "accuracy": lambda row: decimal(row.accuracy, 3),
    "median entropy (nats)": lambda row: decimal(row.entropy.median, 1),
    "AUROC of entropy": lambda row: _auroc(row, "entropy"),
    "AUROC of max-softmax": lambda row: _auroc(row, "max_softmax"),
}
