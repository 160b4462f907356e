"""``covary.export`` and ``covary export``: files that give the same without covary."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import covary as library
from benchmarks.residual_cnn import ResidualCNN
from covary import runs
from covary.serving import Exported, ExportError, Predictor, export_run
from tests.architectures_images import VisionTransformer
from tests.commands import covary, trained_run

INPUTS = 1000
ACTIVATIONS = ("relu", "heaviside", "gelu", "lif")
# Loads each file and writes what it gives; whoever imports covary there gets an error.
_PROGRAM = """
import sys
sys.modules["covary"] = None
import numpy as np
for path in sys.argv[1:]:
    with np.load(path + ".npz") as file:
        given = dict(file)
    if path.endswith(".onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession(path)
        found = session.run(None, {each.name: given[each.name] for each in session.get_inputs()})
        found = dict(zip([each.name for each in session.get_outputs()], found))
    else:
        import torch
        program = torch.export.load(path).module()
        found = program(*map(torch.from_numpy, given.values()))
        found = {name: value.numpy() for name, value in found.items()}
    np.savez(path + ".out.npz", **found)
"""


@pytest.fixture(autouse=True)
def _no_record_of_tracing(monkeypatch):
    """pytest would keep all that torch writes down for its own developers: half of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)


def elsewhere(*files: tuple[Exported, dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each file gives for these inputs in a process that cannot import covary."""
    for exported, inputs in files:
        arrays: dict[str, Any] = {name: x.numpy() for name, x in inputs.items()}
        np.savez(f"{exported.path}.npz", **arrays)
    paths = [str(exported.path) for exported, _ in files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, *paths], check=True, env=environment
    )
    found = []
    for path in paths:
        with np.load(f"{path}.out.npz") as file:
            found.append({name: torch.from_numpy(value) for name, value in file.items()})
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To 1e-4 of the largest number of each output."""
    assert list(found) == list(expected)
    for name, wanted in expected.items():
        assert found[name].dtype == wanted.dtype
        assert wanted.abs().max() > 0
        atol = 1e-4 * float(wanted.abs().max())
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=atol)


def moments(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        out = net(x)
        return {"mean": out.mean, "covariance": out.covariance_matrix}


def mlp(activation: str, covariance: str) -> tuple[nn.Module, Tensor]:
    """A network of three layers that is tracked, and 1,000 inputs."""
    torch.manual_seed(0)
    size, noise = (20.0, 2.0) if activation == "lif" else (1.0, 0.2)  # neurons need a drive
    net = library.mlp([20, 80, 24, 4], activation=activation, noise=noise, covariance=covariance)
    x = size * torch.randn(INPUTS, 20)
    if covariance == "tracked":
        library.track(net.eval(), x[:64])
    return net.eval(), x


def check_mlp(folder: Path, cases: list[tuple[str, str, str]]) -> None:
    made = []
    for activation, covariance, ending in cases:
        net, x = mlp(activation, covariance)
        path = folder / f"{activation}-{covariance}.{ending}"
        made.append((library.export(net, path, x[:7]), {"x": x}, net))
    found = elsewhere(*(each[:2] for each in made))
    for values, (_, given, net) in zip(found, made, strict=True):
        assert_same(values, moments(net, given["x"]))


def test_networks_give_the_same_without_covary(tmp_path):
    check_mlp(tmp_path, [("relu", "tracked", "onnx"), ("lif", "full", "pt2")])


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
@pytest.mark.parametrize("covariance", ["full", "tracked", "diagonal", "shared"])
def test_all_networks_give_the_same_without_covary(tmp_path, covariance, ending):
    check_mlp(tmp_path, [(activation, covariance, ending) for activation in ACTIVATIONS])


def test_a_converted_residual_network_gives_the_same_without_covary(tmp_path):
    torch.manual_seed(0)
    net = library.convert(ResidualCNN().eval(), noise=0.1)
    x = torch.randn(INPUTS, 1, 28, 28)
    library.track(net, x[:64])
    path = tmp_path / "cnn.onnx"
    exported = library.export(net, path, x[:3])
    (found,) = elsewhere((exported, {"x": x}))
    parts = [moments(net, some) for some in x.split(100)]
    assert_same(found, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    assert exported.outputs == {"mean": (-1, 10), "covariance": (-1, 10, 10)}


@pytest.mark.slow
def test_a_converted_model_that_attends(tmp_path):
    torch.manual_seed(0)
    net = library.convert(VisionTransformer().eval(), noise=0.05)
    x = torch.randn(9, 1, 12, 12)
    library.track(net, x)
    assert library.export(net, tmp_path / "net.pt2", x).difference < 1e-4


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table with a column of errors, and runs of a regression and a classification of it."""
    folder = tmp_path_factory.mktemp("export")
    random = np.random.default_rng(0)
    rows = 1600
    frame = pd.DataFrame({"age": random.uniform(0, 99, rows), "tax": random.normal(size=rows)})
    frame["city"] = random.choice(["Oslo", "Bonn"], rows)
    frame["tax_error"] = random.uniform(0.1, 0.5, rows)
    frame["price"] = frame["age"] + 30 * frame["tax"] + 9 * random.normal(size=rows)
    frame["kind"] = np.where(frame["price"] > 50, "dear", "low")
    frame.to_csv(folder / "houses.csv", index=False)
    for target, other in (("price", "kind"), ("kind", "price")):
        errors = ("--error", "tax=tax_error") if target == "price" else ("--drop", "tax_error")
        covary(
            "train", folder / "houses.csv", "--target", target, "--drop", other, *errors,
            "--epochs", 3, "--out", folder / target,
        )  # fmt: skip
    return folder, frame


@pytest.fixture(scope="module")
def exported(table):
    """Both runs as files, and their predictors."""
    folder, _ = table
    files = {"price": folder / "price.pt2", "kind": folder / "kind.onnx"}
    return {
        name: (export_run(folder / name, path), Predictor.load(folder / name))
        for name, path in files.items()
    }


def test_a_table_run_predicts_the_same_without_covary(table, exported):
    _, frame = table
    made = []
    for found, predictor in exported.values():
        (chunk,) = predictor.read(frame[:INPUTS])
        inputs = {"x": torch.from_numpy(chunk.x)}
        inputs |= {} if chunk.std is None else {"error": torch.from_numpy(chunk.std)}
        made.append((found, inputs))
    numbers, classes = elsewhere(*made)
    said, chosen = (predictor(frame[:INPUTS]) for _, predictor in exported.values())
    for name in ("prediction", "std", "novelty"):
        np.testing.assert_allclose(numbers[name].flatten(), said[name], rtol=1e-4, atol=1e-6)
    names = np.array(json.loads(exported["kind"][0].metadata["classes"]))
    best, place = classes["probability"].max(1)
    np.testing.assert_array_equal(names[place], chosen["prediction"])
    np.testing.assert_allclose(best, chosen["probability"], rtol=1e-4)
    np.testing.assert_allclose(classes["uncertainty"], chosen["uncertainty"], rtol=1e-4, atol=1e-9)


def test_metadata_say_what_goes_in_and_comes_out(table, exported):
    import onnxruntime

    folder, _ = table
    session = onnxruntime.InferenceSession(exported["kind"][0].path)
    known = session.get_modelmeta().custom_metadata_map
    assert known == exported["kind"][0].metadata
    assert known["covary_version"] == library.__version__
    assert known["model_digest"] == runs.open(folder / "kind").weights
    assert known["opset"] == "18"
    assert json.loads(known["classes"]) == ["dear", "low"]
    assert json.loads(known["features"])[:2] == ["age", "tax"]
    assert json.loads(known["inputs"]) == {"x": {"shape": [-1, 4], "type": "float64"}}
    assert set(json.loads(known["answer_up_to"])) == {"uncertainty", "novelty"}
    assert [each.shape for each in session.get_inputs()] == [["batch", 4]]
    assert str(folder) not in str(known)
    extra = {"covary.json": ""}
    torch.export.load(exported["price"][0].path, extra_files=extra)
    metadata = json.loads(extra["covary.json"])
    assert metadata == exported["price"][0].metadata
    assert json.loads(metadata["targets"]) == ["price"]
    assert list(json.loads(metadata["inputs"])) == ["x", "error"]


def test_a_run_of_images_takes_bytes(tmp_path):
    trained_run(tmp_path / "digits", "digits", epochs=1, hidden=(20, 12))
    printed = covary("export", tmp_path / "digits", tmp_path / "digits.pt2")
    assert "x (batch, 1, 8, 8)" in " ".join(printed.split())
    assert "128" in printed  # batches that were timed
    program = torch.export.load(tmp_path / "digits.pt2").module()
    images = torch.randint(0, 256, (6, 1, 8, 8)).to(torch.uint8)
    found, said = program(images), Predictor.load(tmp_path / "digits")(images.numpy())
    np.testing.assert_allclose(found["uncertainty"], said["uncertainty"], rtol=1e-4)
    np.testing.assert_allclose(found["novelty"], said["novelty"], rtol=1e-4, atol=1e-6)


def test_tracked_networks_export_by_torch_alone():
    """A user's own torch.export, with a batch of any size."""
    net, x = mlp("relu", "tracked")

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.net(x)
            return out.mean, out.covariance_matrix

    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Pair().eval(), (x[:5],), dynamic_shapes=shapes, strict=False)
    for batch in (1, 9):
        got = dict(zip(("mean", "covariance"), program.module()(x[:batch]), strict=True))
        assert_same(got, moments(net, x[:batch]))


def small() -> nn.Module:
    return library.mlp([3, 4, 2], noise=0.1).eval()


def test_what_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch):
    x, there = torch.rand(4, 3), tmp_path / "there.pt2"
    there.write_text("mine")
    (tmp_path / "folder.onnx").mkdir()
    refused = [
        ("net.h5", r"ends in \.onnx or \.pt2; got .*net\.h5"),
        ("there.pt2", "exists already"),
        ("folder.onnx", "is a folder"),
    ]
    for name, message in refused:
        with pytest.raises(ExportError, match=message):
            library.export(small(), tmp_path / name, x)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'covary\[export\]'"):
        library.export(small(), tmp_path / "net.onnx", x)
    assert there.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.onnx", "there.pt2"]


def test_networks_that_cannot_be_exported_say_why(tmp_path):
    x, path = torch.rand(4, 3), tmp_path / "net.pt2"
    with pytest.raises(ExportError, match=r"net\.eval\(\)"):
        library.export(small().train(), path, x)
    with pytest.raises(ExportError, match="an example of each input"):
        library.export(small(), path)
    with pytest.raises(ExportError, match="one of covariance, std"):
        library.export(small(), path, x, outputs="entropy")
    with pytest.raises(ExportError, match=r"covary\.track\(net, inputs\)"):
        library.export(library.convert(nn.Linear(3, 2).eval(), noise=0.1), path, x)

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if len(x) > 2 else x

    net = library.convert(Looking().eval(), noise=0.1)
    library.track(net, x)
    with pytest.raises(ExportError, match="size of the batch"):
        library.export(net, path, x)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_double_precision_goes_into_pt2_alone(tmp_path):
    net, x = small().double(), torch.rand(4, 3, dtype=torch.float64)
    assert library.export(net, tmp_path / "net.pt2", x).difference < 1e-12
    with pytest.raises(ExportError, match=r"(?s)ONNX \(opset 18\) .* net\.float\(\)"):
        library.export(net, tmp_path / "net.onnx", x)


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"mine")

    def fails(_program: object, file: object, **_: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", fails)
    with pytest.raises(OSError, match=r"No space left .*net\.pt2"):
        library.export(small(), path, torch.rand(4, 3), overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["net.pt2"]
    assert path.read_bytes() == b"mine"


def test_the_command_refuses_in_a_sentence(table, tmp_path):
    folder, _ = table
    run = folder / "kind"

    def error(*arguments: object) -> str:
        return " ".join(covary("export", *arguments, code=1).split())

    assert "ends in .onnx, .pt2 or .nir; got" in error(run, tmp_path / "net.bin")
    assert "has no --outputs" in error(run, tmp_path / "net.nir", "--outputs", "std")
    assert "--spike-width) belongs to a .nir file" in error(
        run, tmp_path / "n.pt2", "--spike-width", 1
    )
    assert "one of predictions, covariance, std" in error(run, tmp_path / "n.pt2", "--outputs", "x")
    assert "holds no run" in error(tmp_path, tmp_path / "net.pt2")
    trained_run(tmp_path / "run", "digits", epochs=1, hidden=(8,))
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "not trained to its end" in error(tmp_path / "run", tmp_path / "net.pt2")
