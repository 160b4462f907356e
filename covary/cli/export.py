"""``covary export``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from covary import runs
from covary.cli import common
from covary.cli.common import DataDir, Debug, RunPath, printable, quoted, reported, say
from covary.nn import Standardize
from covary.runs import RunError
from covary.serving.exporting import FORMATS, Exported, check_path
from covary.serving.exporting_runs import RUN_OUTPUTS, export_run
from covary.stochastic import Chain, save_nir

# Batch sizes at which network and file are timed.
_SIZES = (1, 128)


@reported
def export(
    run: RunPath,
    out: Annotated[
        Path, typer.Argument(metavar="FILE", help="To write: name.onnx, name.pt2 or name.nir.")
    ],
    outputs: Annotated[
        str,
        typer.Option(
            "--outputs",
            help=f"Of .onnx and .pt2: {', '.join(RUN_OUTPUTS[:-1])} or {RUN_OUTPUTS[-1]}.",
            show_default="predictions where the run has them",
        ),
    ] = "",
    latency: Annotated[
        bool,
        typer.Option("--latency/--no-latency", help="Measure how long network and file take."),
    ] = True,
    spike_width: Annotated[
        float | None,
        typer.Option(
            "--spike-width",
            help="Of .nir, for simulators in which a spike is 1 for a step (snnTorch, Norse): "
            "their step, in seconds. Not given: spikes are pulses of integral 1.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if there is one.")
    ] = False,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Write a run to a file that other programs load without covary; its ending says which.

    - `.onnx`: for onnxruntime and its kind. `.pt2`: for `torch.export.load`. Raw inputs go in; mean
      and covariance, predictions and the distance from the training data come out.
    - `.nir`: the spiking network behind a run trained with `--activation lif`, for neuromorphic
      tools. Batch norm is folded into the weights. What NIR has no place for (refractory periods,
      noise) stands in its metadata; covary.stochastic.from_nir reads it back.

    Examples:

    - `covary export runs/mnist model.onnx`
    - `covary export runs/houses model.pt2 --outputs std`
    - `covary export runs/spiking net.nir --spike-width 1e-3`
    """
    check_path(out, overwrite=overwrite, formats=(*FORMATS, ".nir"))
    if out.suffix.lower() == ".nir":
        if outputs:
            raise RunError("A .nir file holds spiking neurons and has no --outputs to choose.")
        _to_nir(run, out, spike_width)
    else:
        if spike_width is not None:
            raise RunError("A step of spikes (--spike-width) belongs to a .nir file.")
        sizes = _SIZES if latency else ()
        found = export_run(
            run, out, outputs=outputs, overwrite=overwrite, latency=sizes, data_dir=data_dir
        )
        _describe(found)
    typer.echo(printable(str(out)))


def _describe(found: Exported) -> None:
    """What was written, and how fast it is."""

    def shown(values: dict[str, tuple[int, ...]]) -> str:
        shapes = {name: str(shape).replace("-1", "batch") for name, shape in values.items()}
        return ", ".join(f"{name} {shape}" for name, shape in shapes.items())

    say(f"Takes {shown(found.inputs)}; gives {shown(found.outputs)}.")
    say(f"Differs from the network by at most {found.difference:.0e} of the largest output.")
    if found.latency:
        rows = [
            [str(size), f"{net:.2f}", f"{file:.2f}"] for size, (net, file) in found.latency.items()
        ]
        common.show_table("Milliseconds, this machine", ["batch", "covary", "file"], rows)
    say(f"Wrote {quoted(found.path)}.")


def _to_nir(run: Path, out: Path, spike_width: float | None) -> None:
    """The spiking network behind a run, as NIR."""
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
