"""``covary calibrate``."""

from __future__ import annotations

from typing import Annotated

import typer

from covary import runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, Json, RunPath, quoted, reported, say
from covary.cli.options import PerSampleCovariance
from covary.runs.held_out import HeldOut
from covary.runs.uncertainty import NOISE


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
    chosen anew if wanted. Neither test data nor foreign data are looked at.

    Examples:

    - `covary calibrate runs/mnist`
    - `covary calibrate runs/houses --noise per-layer`
    """
    if noise not in NOISE:
        raise typer.BadParameter(f"{noise!r} is not one of {', '.join(NOISE)}.")
    opened = runs.open(run, data_dir=data_dir)
    found = runs.calibrate(opened, covariance=covariance, noise=noise, progress=common.progress)
    if as_json:
        common.show_json(_content(found))
        return
    common.show_table(
        f"{run}: fitted on {found.samples:,} held-out samples",
        ["", "value"],
        [[name, _shown(value)] for name, value in _content(found).items() if name != "samples"],
    )
    for note in found.notes:
        say(f"Note: {note}")
    say(f"See what it changes: covary evaluate {quoted(run)}.")


def _content(found: HeldOut) -> dict[str, object]:
    assert found.calibration is not None
    values = found.calibration.to_dict()
    values.pop("kind")
    noise = None if found.noise is None else list(found.noise)
    return {**values, "noise": noise, "scores": list(found.scores), "samples": found.samples}


def _shown(value: object) -> str:
    if value is None:
        return "as in training"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_shown(each) for each in value) or "none"
    return str(value)
