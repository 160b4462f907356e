"""Exported networks: how long files take in onnxruntime and torch, relative to covary itself.

    python -m benchmarks.export    # about five minutes on one core

Each ratio is of medians of processor time, over passes that take turns; the difference is that of
the file's outputs on 1,000 inputs, relative to the largest of them.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import covary
from benchmarks import tables
from benchmarks.residual_cnn import ResidualCNN
from benchmarks.tracked import medians

SEED, WIDTHS, BATCHES, INPUTS = 0, [784, 392, 196, 10], (1, 128), 1000
MLPS = [("relu", kind) for kind in ("full", "tracked", "diagonal", "shared")]
MLPS += [(name, "tracked") for name in ("heaviside", "gelu", "lif")]


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks by name, and 1,000 inputs of each; weights of no training."""
    found: dict[str, tuple[nn.Module, Tensor]] = {}
    for activation, covariance in MLPS:
        # Neurons fire at a drive of 1 mV per ms and more.
        size, noise = (20.0, 2.0) if activation == "lif" else (1.0, 0.2)
        net = covary.mlp(WIDTHS, activation=activation, noise=noise, covariance=covariance)
        found[f"{activation}, {covariance}"] = net.eval(), torch.randn(INPUTS, WIDTHS[0]) * size
    images = torch.randn(INPUTS, 1, 28, 28)
    converted = covary.convert(ResidualCNN().eval(), noise=0.05)
    found["residual CNN, converted"] = converted, images
    return found


def measure(folder: Path) -> list[dict[str, Any]]:
    """A row for each network."""
    torch.manual_seed(SEED)
    found = []
    for name, (net, x) in networks().items():
        if "tracked" in name or "converted" in name:
            covary.track(net, x[:128])
        files = {"onnx": folder / "net.onnx", "pt2": folder / "net.pt2"}
        for path in files.values():
            covary.export(net, path, x[:16], overwrite=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(files["onnx"], options)
        program = torch.export.load(files["pt2"]).module()
        row: dict[str, Any] = {"network": name, "difference": 0.0}
        for some in x.split(200):
            out, got = net(some), session.run(None, {"x": some.numpy()})
            for wanted, value in zip((out.mean, out.covariance_matrix), got, strict=True):
                gap = (wanted - torch.from_numpy(value)).abs().max() / wanted.abs().max()
                row["difference"] = max(row["difference"], float(gap))
        for batch in BATCHES:
            some = x[:batch]
            ways: dict[str, Any] = {
                "covary": lambda some=some, net=net: net(some).covariance_matrix,
                "onnx": lambda some=some, run=session.run: run(None, {"x": some.numpy()}),
                "pt2": lambda some=some, program=program: program(some),
            }
            with torch.inference_mode():
                times = medians(ways, clock=time.process_time)
            row |= {f"{way}, {batch}": times[way] / times["covary"] for way in ("onnx", "pt2")}
        found.append(row)
        print(row, flush=True)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = measure(Path(folder))
    tables.publish("export", "python -m benchmarks.export", SEED, measured, shown=[tables.exported])


if __name__ == "__main__":
    main()
