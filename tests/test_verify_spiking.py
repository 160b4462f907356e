"""``covary verify`` and ``covary export`` of networks of spiking neurons."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import covary
from covary import report
from covary.files import FileError
from covary.report import figures_verify
from covary.report import page as pages
from covary.runs import Run, RunError, verify
from covary.runs import spikes as verify_spiking
from covary.runs.results import (
    Decisions,
    MeasuredNumber,
    SpikingEntropy,
    SpikingVerification,
    VerifiedSpikingLayer,
)
from covary.runs.samples import load_data
from covary.runs.spikes import sentences
from covary.stochastic import from_nir
from tests import commands, report_runs
from tests.report_runs import Page
from tests.test_files import ORIGIN
from tests.test_verify import run_of

LIF_MODEL: dict[str, Any] = {
    "activation": "lif",
    "hidden": (16, 12),
    "noise": (0.2, 4.5, 4.5),
    "batch_norm": True,
}
QUICK: dict[str, Any] = {"samples": 2, "copies": 64, "duration": 200.0, "decisions": 20}
BRIEF: dict[str, Any] = {"samples": 1, "copies": 32, "duration": 200.0, "decisions": 3}
OPTIONS = [f"--{key}={value}" for key, value in BRIEF.items()]


@pytest.fixture(scope="module", autouse=True)
def coarse():
    """Longer steps, and fewer before spikes count: a second, not ten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_spiking, "DT", 0.5)
        patch.setattr(verify_spiking, "BURN_IN", 50.0)
        yield


command = commands.covary


def stored(run: Run) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.spikes_path.read_text(), parse_constant=pytest.fail)
    return content


def balanced(run: Run, net: torch.nn.Sequential) -> Run:
    """The run with statistics of its inputs in batch norm, as training leaves them."""
    data = load_data(run.config.data, data_dir=None, seed=0)[0]
    net.train()
    with torch.no_grad():
        for _ in range(150):  # until nothing is left of the statistics that it started with
            net(data.x[:200])
    run.save_network(net.eval())
    return run


@pytest.fixture(scope="module")
def verified(tmp_path_factory, coarse) -> Run:
    run = balanced(*run_of(tmp_path_factory.mktemp("runs") / "digits", **LIF_MODEL))
    verify(run, **QUICK)
    return run


def test_neurons_fire_as_their_moments_say(verified):
    result = stored(verified)
    assert result["kind"] == "spiking"
    assert [layer["name"] for layer in result["layers"]] == ["activation1", "activation2"]
    for layer in result["layers"]:
        rate = layer["errors"]["rate"]
        assert "rate" not in layer["poor"]
        assert rate["value"] < 0.05
        assert 0 < rate["floor"] < 0.1
        assert layer["errors"]["fano"]["value"] < 0.3
        assert 0.3 < layer["mean_fano"] < 1.5
        assert layer["silent"] < 0.1
        assert layer["saturated"] == 0
    first = verified.spikes
    rates = first.arrays[f"{first.layers[0].name}/rate"]
    assert rates.shape == (2, 16)
    sampled, error = (
        first.arrays[f"{first.layers[0].name}/{key}"] for key in ("sampled_rate", "rate_error")
    )
    assert np.mean(((sampled - rates) / error) ** 2) < 3


def test_decisions_and_entropies_come_in_time(verified):
    result = stored(verified)
    decided, entropy = result["decisions"], result["entropy"]
    assert decided["inputs"] == 20
    assert decided["times"] == entropy["times"]
    assert decided["times"][-1] == 200
    # Nobody trained it, but in the end it decides as its moments do, more often than at first.
    assert decided["agreement"][-1] > decided["agreement"][0]
    assert decided["agreement"][-1] > 0.3
    assert abs(entropy["simulated"][-1] - entropy["moments"]) < 1.5


def test_regular_trains_are_said_to_be_no_white_noise(tmp_path):
    model = LIF_MODEL | {"noise": (0.0, 0.05, 0.05)}
    run, net = run_of(tmp_path / "run", **model)
    with torch.no_grad():
        for norm in (net.batch_norm1, net.batch_norm2):
            norm.bias.fill_(1.0)  # above threshold, by itself
            norm.weight.fill_(1.0)
    result = verify(balanced(run, net), **(BRIEF | {"decisions": 0, "duration": 400.0})).to_json()
    assert result["decisions"] is None
    first, second = result["layers"]
    assert "rate" not in first["poor"]
    assert second["poor"][0] == "rate"
    note = result["notes"][-1]
    assert note.startswith("activation2: rates are ")
    assert "fires by the clock (Fano factor 0." in note
    assert "with more noise (--noise)" in note


def made_up(
    *layers: VerifiedSpikingLayer, decisions: Decisions | None = None
) -> SpikingVerification:
    return SpikingVerification(
        **ORIGIN,
        dataset="digits",
        weights="",
        task="classification",
        activation="lif",
        noise=(0.2,),
        inputs=(0,),
        copies=64,
        duration=1000.0,
        limit=0.05,
        burn_in=100.0,
        window=200.0,
        dt=0.25,
        layers=layers,
        entropy=SpikingEntropy((), (), (), None),
        decisions=decisions,
    )


def test_covariances_that_are_off_are_said_with_the_reason():
    errors = {key: MeasuredNumber(0.2, 0.01, 0.01) for key in ("fano", "covariance")}
    errors["rate"] = MeasuredNumber(0.01, 0.001, 0.001)
    layer = VerifiedSpikingLayer(
        name="two",
        units=8,
        neuron={"v_th": 20.0, "v_res": 0.0},
        poor=("covariance",),
        pairs=((3, 5, -0.7),),
        jump=8.0,
        mean_rate=0.1,
        mean_fano=1.0,
        silent=0.0,
        saturated=0.0,
        errors=errors,
    )
    (note,) = sentences(made_up(layer))
    assert note.startswith("two: rates are right, but Fano factors are 20% and covariances")
    assert "|rho| = 0.70 (neurons 3 and 5)" in note
    strong = sentences(made_up(layer, replace(layer, poor=("rate",))))[1]
    assert "A spike moves it by 8.0 mV here, of 20 mV" in strong
    unclear = errors | {"rate": MeasuredNumber(0.01, 0.03, 0.001)}
    said = sentences(made_up(replace(layer, poor=(), errors=unclear)))[0]
    assert "two (rates more than 5% off?)" in said
    assert "cannot be told" in said


def test_a_regression_has_spikes_and_no_decisions(tmp_path):
    model = LIF_MODEL | {"input_shape": (10,), "outputs": 1, "task": "regression"}
    run = balanced(*run_of(tmp_path / "run", "diabetes", **model))
    result = verify(run, **BRIEF).to_json()
    assert result["decisions"] is None
    assert np.isfinite(result["entropy"]["simulated"][-1])


def test_what_is_said_of_decisions():
    decided = Decisions(500, 3, 0.5, (10.0, 100.0), (0.5, 0.97), (0.0, 0.0), (0.5, 0.97), 0.98)
    assert "within 2 points of them after 100 ms" in sentences(made_up(decisions=decided))[-1]
    slow = replace(decided, accuracy=(0.5, 0.9))
    assert "Simulate for longer" in sentences(made_up(decisions=slow))[-1]


def test_the_seed_decides_it_all(verified, tmp_path):
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    brief = BRIEF | {"decisions": 0}
    once, again, other = (verify(copy, **brief, seed=seed).layers for seed in (0, 0, 1))
    assert once == again
    assert once != other


def test_a_person_sees_tables_that_fit_a_terminal(verified, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_verification", lambda run: run.path / "figures")
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    said = command("verify", copy.path, *OPTIONS)
    table = [line for line in said.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, table)) <= 80
    for words in ("spikes/s", "activation2", "decisions; moments", "spikes.json"):
        assert words in said
    said = command("verify", copy.path, *OPTIONS, "--decisions=0", "--json")
    assert json.loads(said, parse_constant=pytest.fail) == stored(copy)
    assert "windows of 200 ms" in command("verify", copy.path, "--duration=50", code=1)


# Figures and the page


@pytest.fixture(scope="module")
def shown(verified, tmp_path_factory) -> Run:
    """A run that was evaluated, with spikes of its network."""
    folder = tmp_path_factory.mktemp("shown")
    return report_runs.concrete_with(folder, verified.path / "spikes.json")


def test_figures_say_what_they_show(verified, tmp_path):
    found = verified.spikes
    drawn = {drawing.name: drawing for drawing in figures_verify.drawings(found)}
    assert list(drawn) == ["spikes-neurons", "spikes-decision"]
    error = stored(verified)["layers"][0]["errors"]["rate"]["value"]
    assert f"activation1: rate {100 * error:.1f}%" in drawn["spikes-neurons"].alt
    assert "after 200 ms" in drawn["spikes-decision"].alt
    copy = Run(shutil.copytree(verified.path, tmp_path / "copy"))
    folder = report.write_verification(copy.path)
    assert len(list(folder.glob("spikes-*.png"))) == 2
    copy.clear()
    assert not list(copy.path.rglob("spikes*"))


def test_the_page_has_the_spikes(shown, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "save", lambda *_: None)
    page = Page(report.write(shown.path, out=tmp_path / "page.html"))
    source = re.search(r'<section id="verification">.*?</section>', page.source, re.DOTALL)
    assert source is not None
    assert re.findall(r'<th scope="row">(\w+)', source[0]) == ["activation1", "activation2"]
    assert "spiking network" in source[0]
    assert len(re.findall(r'<figure id="figure-spikes-', source[0])) == 2


def test_files_that_are_not_as_written_are_refused(shown, tmp_path):
    copy = Run(shutil.copytree(shown.path, tmp_path / "copy"))
    content = stored(copy)
    del content["layers"][0]["mean_rate"]
    copy.spikes_path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"spikes\.json, key 'layers\.*\[0\]\.mean_rate': missing"):
        report.read(copy.path)


# Export


def test_a_run_leaves_as_a_file_that_comes_back(verified, tmp_path):
    path = tmp_path / "net.nir"
    said = command("export", verified.path, path)
    assert "(x - 127.5) / 127.5" in said
    assert "64-16-12-10" in said
    again, net = from_nir(path), covary.with_covariance(verified.network(), "full").eval()
    x = load_data(verified.config.data, data_dir=None, seed=0)[0].x_test[:3]
    out = again(x.flatten(1).float() / 127.5 - 1)
    torch.testing.assert_close(out.mean, net(x).mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.variance, net(x).variance, rtol=1e-3, atol=1e-6)
    before = path.read_bytes()
    assert "--overwrite" in command("export", verified.path, path, code=1)
    assert path.read_bytes() == before
    command("export", verified.path, path, "--overwrite", "--spike-width", "1e-3")
    assert path.read_bytes() != before


def test_only_spiking_runs_leave(tmp_path):
    run, _ = run_of(tmp_path / "relu")
    assert "'lif'" in command("export", run.path, tmp_path / "net.nir", code=1)
    assert not (tmp_path / "net.nir").exists()
    assert "holds no run" in command("export", tmp_path, tmp_path / "net.nir", code=1)


def test_a_rate_needs_no_trunk(tmp_path):
    with pytest.raises(ValueError, match="images without a trunk"):
        run_of(tmp_path / "run", **(LIF_MODEL | {"poisson": True, "trunk": "lenet"}))
    poisson, _ = run_of(tmp_path / "poisson", **(LIF_MODEL | {"poisson": True}))
    assert poisson.network().standardize.scale == 255
    with pytest.raises(RunError):
        Run(tmp_path / "nothing").network()
