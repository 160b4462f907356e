"""``covary verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from covary import report, runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, RunPath, Seed, quoted, reported, say
from covary.runs.results import (
    Decisions,
    EntropyGap,
    RelativeError,
    SpikingVerification,
    Verification,
    WithBar,
)
from covary.stochastic.statistics import GROUPS

_Copies = Annotated[
    int | None,
    typer.Option(
        "--copies",
        min=2 * GROUPS,
        help=f"Draws for each input, or spiking networks: a multiple of {GROUPS}.",
        show_default="65536, or 64 that spike",
    ),
]
_COLUMNS = {
    "mean": "mean",
    "variance": "variance",
    "covariance": "covariance",
    "off_diagonal": "pairs",
}


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
        if result.decisions is not None:
            _show_decisions(result.decisions)
        what = "Rates are more than 5%, or Fano factors or covariances more than 10% off"
        poor, path = any(layer.poor for layer in result.layers), opened.spikes_path
    else:
        _show_errors(result)
        _show_simulations(result)
        what = f"Covariances are more than {result.limit:.0%} off"
        poor, path = any(layer.poor for layer in result.layers), opened.verification_path
    if poor:
        say(f"* {what}, beyond doubt.")
    for note in result.notes:
        say(f"Note: {note}")
    say(f"Written to {path}, and figures to {figures}.")
    say(f"See them on one page: covary report {quoted(run)}")


def _show_errors(result: Verification) -> None:
    count = len(result.inputs)
    common.show_table(
        f"Moments against a simulation, {count} inputs: errors in %, entropy in nats",
        ["layer", *_COLUMNS.values(), "entropy"],
        [
            [
                layer.name + (" *" if layer.poor else ""),
                *(_error(getattr(layer.steady, key)) for key in _COLUMNS),
                _plus_minus(layer.steady.entropy, "+"),
            ]
            for layer in result.layers
        ],
    )


def _show_simulations(result: Verification) -> None:
    common.show_table(
        "The simulation: its own noise in %, variance in time (steady = 1)",
        ["layer", "units", "mean", "covariance", "samples", "at once", "equal tau"],
        [
            [
                layer.name,
                str(layer.units),
                _percent(layer.steady.mean.floor),
                _percent(layer.steady.covariance.floor),
                _count(layer.steady.effective_samples),
                *(_plus_minus(layer.simulations[name].variance_share) for name in ("ou-0", "ou-1")),
            ]
            for layer in result.layers
        ],
    )


def _show_spikes(result: SpikingVerification) -> None:
    count = len(result.inputs)
    common.show_table(
        f"Moments against spikes, {count} inputs: errors in %",
        ["layer", "spikes/s", "Fano", "rate ±", "Fano ±", "covar. ±", "pairs ±"],
        [
            [
                layer.name + (" *" if layer.poor else ""),
                f"{1000 * layer.mean_rate:.1f}",
                "none" if layer.mean_fano is None else f"{layer.mean_fano:.2f}",
                *(
                    _error(layer.errors[key])
                    for key in ("rate", "fano", "covariance", "off_diagonal")
                ),
            ]
            for layer in result.layers
        ],
    )


def _show_decisions(decided: Decisions) -> None:
    common.show_table(
        f"{decided.inputs} decisions; moments: {100 * decided.moments:.1f}% right",
        ["after (ms)", "right (%)", "as the moments (%)"],
        [
            [f"{time:g}", f"{100 * right:.1f}±{_percent(bar, 1)}", f"{100 * agrees:.1f}"]
            for time, right, bar, agrees in zip(
                decided.times,
                decided.accuracy,
                decided.bar,
                decided.agreement,
                strict=True,
            )
        ],
    )


def _error(error: RelativeError) -> str:
    value, bar = error.value, error.bar
    if value is None or bar is None:
        return "undefined"
    decimals = 2 if bar < 0.0005 else 1 if bar < 0.05 else 0
    return f"{100 * value:.{decimals}f}±{100 * bar:.{decimals}f}"


def _percent(value: float | None, decimals: int = 2) -> str:
    return "undefined" if value is None else f"{100 * value:.{decimals}f}"


def _count(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f}"


def _plus_minus(value: WithBar | EntropyGap, sign: str = "") -> str:
    if value.value is None or value.bar is None:
        return "undefined"
    return f"{value.value:{sign}.2f}±{value.bar:.2f}"
