"""``covary verify``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from covary import report
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, RunPath, Seed, quoted, reported, say
from covary.runs import Run
from covary.runs import verify as verify_run
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
    result = verify_run(
        Run(run),
        samples=samples,
        copies=copies,
        duration=duration,
        decisions=decisions,
        data_dir=data_dir,
        seed=seed,
        progress=common.progress,
    )
    figures = report.write_verification(run)
    if as_json:
        common.show_json(result)
        return
    spiking = result["kind"] == "spiking"
    if spiking:
        _show_spikes(result)
        if result["decisions"] is not None:
            _show_decisions(result["decisions"])
    else:
        _show_errors(result)
        _show_simulations(result)
    if any(layer["poor"] for layer in result["layers"]):
        what = "Rates are more than 5%, or Fano factors or covariances more than 10% off"
        if not spiking:
            what = f"Covariances are more than {result['limit']:.0%} off"
        say(f"* {what}, beyond doubt.")
    for note in result["notes"]:
        say(f"Note: {note}")
    path = Run(run).spikes_path if spiking else Run(run).verification_path
    say(f"Written to {path}, and figures to {figures}.")
    say(f"See them on one page: covary report {quoted(run)}")


def _show_errors(result: dict[str, Any]) -> None:
    count = len(result["inputs"])
    common.show_table(
        f"Moments against a simulation, {count} inputs: errors in %, entropy in nats",
        ["layer", *_COLUMNS.values(), "entropy"],
        [
            [
                layer["name"] + (" *" if layer["poor"] else ""),
                *(_error(layer["simulations"]["steady"][key]) for key in _COLUMNS),
                _plus_minus(layer["simulations"]["steady"]["entropy"], "+"),
            ]
            for layer in result["layers"]
        ],
    )


def _show_simulations(result: dict[str, Any]) -> None:
    common.show_table(
        "The simulation: its own noise in %, variance in time (steady = 1)",
        ["layer", "units", "mean", "covariance", "samples", "at once", "equal tau"],
        [
            [
                layer["name"],
                str(layer["units"]),
                _percent(layer["simulations"]["steady"]["mean"]["floor"]),
                _percent(layer["simulations"]["steady"]["covariance"]["floor"]),
                _count(layer["simulations"]["steady"]["effective_samples"]),
                *(
                    _plus_minus(layer["simulations"][name]["variance_share"])
                    for name in ("ou-0", "ou-1")
                ),
            ]
            for layer in result["layers"]
        ],
    )


def _show_spikes(result: dict[str, Any]) -> None:
    count = len(result["inputs"])
    common.show_table(
        f"Moments against spikes, {count} inputs: errors in %",
        ["layer", "spikes/s", "Fano", "rate ±", "Fano ±", "covar. ±", "pairs ±"],
        [
            [
                layer["name"] + (" *" if layer["poor"] else ""),
                f"{1000 * layer['mean_rate']:.1f}",
                "none" if layer["mean_fano"] is None else f"{layer['mean_fano']:.2f}",
                *(
                    _error(layer["errors"][key])
                    for key in ("rate", "fano", "covariance", "off_diagonal")
                ),
            ]
            for layer in result["layers"]
        ],
    )


def _show_decisions(decided: dict[str, Any]) -> None:
    common.show_table(
        f"{decided['inputs']} decisions; moments: {100 * decided['moments']:.1f}% right",
        ["after (ms)", "right (%)", "as the moments (%)"],
        [
            [f"{time:g}", f"{100 * right:.1f}±{100 * bar:.1f}", f"{100 * agrees:.1f}"]
            for time, right, bar, agrees in zip(
                decided["times"],
                decided["accuracy"],
                decided["bar"],
                decided["agreement"],
                strict=True,
            )
        ],
    )


def _error(error: dict[str, float | None]) -> str:
    value, bar = error["value"], error["bar"]
    if value is None or bar is None:
        return "undefined"
    decimals = 2 if bar < 0.0005 else 1 if bar < 0.05 else 0
    return f"{100 * value:.{decimals}f}±{100 * bar:.{decimals}f}"


def _percent(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.2f}"


def _count(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f}"


def _plus_minus(value: dict[str, Any], sign: str = "") -> str:
    if value["value"] is None or value["bar"] is None:
        return "undefined"
    return f"{value['value']:{sign}.2f}±{value['bar']:.2f}"
