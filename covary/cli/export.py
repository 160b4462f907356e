"""``covary export``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from covary import runs
from covary.cli.common import Debug, RunPath, printable, quoted, reported, say
from covary.nn import Standardize
from covary.runs import RunError
from covary.stochastic import Chain, save_nir


@reported
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="To write, such as net.nir.")],
    spike_width: Annotated[
        float | None,
        typer.Option(
            "--spike-width",
            help="For simulators in which a spike is 1 for a step (snnTorch, Norse): their step, "
            "in seconds. Not given: spikes are pulses of integral 1.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if there is one.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the spiking network behind a run to a file that neuromorphic tools read (NIR).

    For runs trained with `--activation lif`. Batch norm is folded into the weights. What NIR has no
    place for (refractory periods, noise) stands in its metadata; covary.stochastic.from_nir reads
    it back as a moment neural network, and other people's networks too.

    Examples:

    - `covary export runs/mnist net.nir`
    - `covary export runs/mnist net.nir --spike-width 1e-3`
    """
    if out.exists() and not overwrite:
        raise RunError(f"{out} exists already. Replace it (--overwrite) or choose another name.")
    chain = Chain.of(runs.open(run).network())
    standardize = [layer for layer in chain.trunk if isinstance(layer, Standardize)]
    others = [layer for layer in chain.trunk if not isinstance(layer, Standardize)]
    if any(True for layer in others for _ in layer.parameters()):
        raise RunError(f"{run} has a trunk of ordinary layers, which no spiking neurons stand for.")
    out.parent.mkdir(parents=True, exist_ok=True)
    save_nir(replace(chain, trunk=nn.Sequential()), out, spike_width=spike_width)
    for layer in standardize:
        if layer.shift.numel() == 1:
            inputs = f"(x - {layer.shift.item():g}) / {layer.scale.item():g}, flattened"
        else:
            inputs = "(x - shift) / scale, as standardize of the run's model.safetensors has them"
        say(f"Inputs of the file are {inputs}.")
    widths = "-".join(str(stage.weight.shape[1]) for stage in chain.stages)
    say(f"Wrote {widths}-{len(chain.stages[-1].weight)} to {quoted(out)}.")
    typer.echo(printable(str(out)))
