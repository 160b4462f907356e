"""``covary fidelity``: what it measures, what it writes, what it says."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import covary
from covary.cli.probe import _advice, _percent
from covary.data import DataError
from covary.models import plain
from covary.runs import (
    DataConfig,
    ModelConfig,
    Run,
    RunConfig,
    RunError,
    costs,
    measure_fidelity,
)
from covary.runs.results import FidelityResult, PartAgreement, Representation
from covary.runs.samples import load_data
from covary.runs.tracking import fidelity_of
from covary.training import TrainingConfig
from tests import commands
from tests.commands import trained_run
from tests.test_files import ORIGIN

QUICK = {"epochs": 2, "hidden": (24, 16, 12), "batch_size": 128, "activation": "relu"}
KINDS = [
    "full",
    "tracked:0",
    "tracked:12",
    "tracked:16",
    "shared",
    "diagonal",
]


def trained(path, name: str = "digits", **chosen) -> Run:
    return trained_run(path, name, **QUICK | chosen)


command = partial(commands.covary, "fidelity")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Run:
    """A run and its fidelity, processes for memory and all."""
    run = trained(tmp_path_factory.mktemp("runs") / "digits")
    measure_fidelity(run, samples=10_000, batch_size=100)
    return run


@pytest.fixture
def no_processes(monkeypatch) -> None:
    """Seconds saved where memory does not matter."""
    monkeypatch.setattr(costs, "peak_memory", lambda *_: 1.5)


def by_name(run: Run) -> dict[str, Any]:
    result = json.loads(run.fidelity_path.read_text(), parse_constant=pytest.fail)
    return {kind["name"]: kind for kind in result["representations"]}


def test_the_file_has_all_that_was_measured(measured):
    result = json.loads(measured.fidelity_path.read_text(), parse_constant=pytest.fail)
    assert list(by_name(measured)) == KINDS
    assert result["chosen"] in KINDS
    assert (result["dataset"], result["task"]) == ("digits", "classification")
    assert (result["batch"], result["parts"], result["seed"]) == (100, ["test"], 0)
    assert {"weights", "command", "versions", "git_commit", "platform", "seconds"} <= result.keys()
    for kind in result["representations"]:
        assert kind["time_over_plain"] > 0
        assert kind["peak_memory_mb"] >= 0
        expected = {"samples", "mean", "variance", "covariance", "rank", "argmax"}
        assert kind["parts"]["test"].keys() == expected
        assert kind["parts"]["test"]["samples"] == 899


def test_exact_covariances_agree_with_themselves(measured):
    found = by_name(measured)["full"]["parts"]["test"]
    assert (found["mean"], found["variance"], found["covariance"]) == (0, 0, 0)
    assert found["rank"] == pytest.approx(1)
    assert found["argmax"] == 0


def test_errors_are_those_of_the_networks(measured):
    dataset, _ = load_data(DataConfig(name="digits"))
    net = measured.network()
    with torch.no_grad():
        exact = covary.with_covariance(net, "full")(dataset.x_test)
        other = covary.with_covariance(net, "tracked:12")(dataset.x_test)
    found = by_name(measured)["tracked:12"]["parts"]["test"]
    for key, value, truth in (
        ("mean", other.mean, exact.mean),
        ("covariance", other.covariance_matrix, exact.covariance_matrix),
    ):
        gap, size = ((value - truth).flatten(1).norm(dim=1), truth.flatten(1).norm(dim=1))
        assert found[key] == pytest.approx((gap / size).mean().item(), rel=1e-2)
    expected = (other.mean.argmax(1) != exact.mean.argmax(1)).double().mean().item()
    assert found["argmax"] == pytest.approx(expected, abs=2e-3)


def test_more_exact_layers_are_more_exact(measured):
    errors = [by_name(measured)[name]["parts"]["test"]["covariance"] for name in KINDS]
    full, none, some, all_, _, diagonal = errors
    assert full <= all_ < some < none < diagonal


def test_entropies_of_every_sample_are_stored(measured):
    stored = np.load(measured.path / "fidelity.npz", allow_pickle=False)
    assert list(stored) == [f"test/{name}" for name in KINDS]
    for name, kind in by_name(measured).items():
        entropy = stored[f"test/{name}"]
        assert entropy.shape == (899,)
        assert entropy.dtype == np.float32
        expected = spearmanr(stored["test/full"], entropy).statistic
        assert kind["parts"]["test"]["rank"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("no_processes")
def test_tracking_is_measured_first_where_it_is_missing(tmp_path):
    run = trained(tmp_path / "run")
    assert fidelity_of(run.network()) is None
    assert "kept in model.safetensors" in measure_fidelity(run, samples=50).notes[0]
    assert fidelity_of(run.network()) is not None
    result = measure_fidelity(run, samples=50)
    assert result.notes == ()
    assert result.chosen == fidelity_of(run.network()).named("tracked")
    run.clear()
    assert not any(path.name.startswith("fidelity") for path in run.path.iterdir())


@pytest.mark.usefixtures("no_processes")
def test_the_width_of_the_run_is_among_those_compared(tmp_path):
    run = trained(tmp_path / "run", covariance="tracked:14")
    result = measure_fidelity(run, samples=50)
    assert result.chosen == "tracked:14"
    assert "tracked:14" in [kind.name for kind in result.representations]


@pytest.mark.usefixtures("no_processes")
def test_samples_are_so_many_and_chosen_by_the_seed(measured, tmp_path):
    copy = Run(shutil.copytree(measured.path, tmp_path / "copy"))

    def entropies(seed: int) -> np.ndarray:
        result = measure_fidelity(copy, samples=40, batch_size=16, seed=seed)
        assert result.representations[0].parts["test"].samples == 40
        return np.load(copy.path / "fidelity.npz")["test/full"]

    np.testing.assert_array_equal(entropies(0), entropies(0))
    assert not np.array_equal(entropies(0), entropies(1))


@pytest.mark.usefixtures("no_processes")
def test_ood_inputs_are_a_part_of_their_own(tmp_path, monkeypatch):
    run = trained(tmp_path / "run")
    dataset, _ = load_data(DataConfig(name="digits"))
    ood = replace(dataset, name="noise", x_test=torch.randint(0, 256, (70, 1, 8, 8)).byte())
    monkeypatch.setattr(covary.data, "load", lambda name, **_: ood if name == "noise" else dataset)
    result = measure_fidelity(run, ood=["noise"], samples=60)
    assert result.parts == ("test", "noise")
    parts = result.representations[-1].parts
    assert parts["noise"].samples == parts["test"].samples == 60
    assert parts["noise"].covariance != parts["test"].covariance
    assert np.load(run.path / "fidelity.npz")["noise/shared"].shape == (60,)


def test_ood_inputs_of_another_shape_are_refused(measured):
    with pytest.raises(DataError, match=r"shape \(2,\), the network takes \(1, 8, 8\)"):
        measure_fidelity(measured, ood=["two-moons"])
    assert command(measured.path, "--ood", "two-moons", code=1).startswith("error: two-moons has")


@pytest.mark.usefixtures("no_processes")
def test_a_regression_has_no_largest_mean(tmp_path):
    run = trained(tmp_path / "run", "diabetes", covariance="tracked")
    said = command(run.path, "--samples", "40")
    assert "class" not in said
    assert by_name(run)["tracked:0"]["parts"]["test"]["argmax"] is None


@pytest.mark.usefixtures("no_processes")
def test_a_person_sees_tables_and_one_sentence_of_advice(tmp_path):
    run = trained(tmp_path / "run")
    said = command(run.path, "--samples", "60", "--batch-size", "32")
    for name in KINDS:
        assert f"│ {name} " in said
    assert said.count(" * ") == 2  # what tracked uses, in two tables
    assert "What a batch of 32 costs" in said
    assert said.count("Take ") == 1
    assert "Note: Tracked covariances were never measured here" in said
    result = json.loads(command(run.path, "--samples", "60", "--json"), parse_constant=pytest.fail)
    assert result == json.loads(run.fidelity_path.read_text())


def test_what_cannot_be_compared_is_said(tmp_path, measured):
    assert "holds no run" in command(tmp_path, code=1)
    (tmp_path / "config.toml").write_text(measured.config_path.read_text())
    assert "has no weights yet" in command(tmp_path, code=1)
    command(measured.path, "--samples", "1", code=2)
    command(measured.path, "--batch-size", "0", code=2)


def kind(name: str, time: float, *found: tuple[float | None, float]) -> Representation:
    """With the rank and the error of the covariance for each part."""
    parts = {
        str(i): PartAgreement(9, 0.0, 0.0, error, rank, None)
        for i, (rank, error) in enumerate(found)
    }
    return Representation(name, time, None, parts)


FULL = kind("full", 100.0, (1.0, 0.0))
SHARED = kind("shared", 3.0, (1.0, 0.0))


def advice(*kinds: Representation, chosen: str = "tracked") -> str:
    found = FidelityResult(
        **ORIGIN,
        dataset="a",
        weights="",
        task="classification",
        batch=1,
        parts=("0", "1"),
        representations=(FULL, SHARED, *kinds),
        chosen=chosen,
    )
    return _advice(found, "runs/a")


def test_advice_is_the_cheapest_that_agrees():
    """Shared covariances are never advised: samples would depend on their neighbours."""
    coarse = kind("tracked", 10.0, (0.98, 0.2))
    fine = kind("tracked:8", 20.0, (0.999, 0.0))
    said = advice(coarse, fine, chosen=fine.name)
    assert said.startswith("Take tracked:8: 5.0 times faster than full")
    assert said.endswith("(covary evaluate runs/a --covariance tracked).")
    assert "--covariance tracked:8" in advice(coarse, fine, chosen="tracked")
    same = kind("diagonal", 5.0, (None, 0.01))  # equal entropies everywhere have no rank
    assert advice(coarse, fine, same).startswith("Take diagonal: 20.0 times faster")


def test_advice_is_exact_where_nothing_else_will_do():
    assert "cheaper agrees too little" in advice(kind("tracked", 10.0, (0.5, 0.01)))
    assert "cheaper agrees too little" in advice(kind("tracked", 10.0, (1.0, 0.5)))
    assert "nothing is cheaper" in advice(kind("tracked", 200.0, (1.0, 0.0)))
    misled_by_ood_inputs = kind("tracked", 10.0, (1.0, 0.0), (0.7, 0.02))
    assert advice(misled_by_ood_inputs).startswith("Take full")


def test_errors_are_shown_without_exponents():
    shown = [_percent(value) for value in (None, 0.0, 1e-7, 0.00123, 0.0123, 0.123, 1.5, 300.0)]
    assert shown == ["undefined", "0%", "<0.01%", "0.12%", "1.2%", "12%", "150%", ">1000%"]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_plain_network_is_the_same_without_noise(task):
    shape = (1, 3, 4) if task == "classification" else (12,)
    model = ModelConfig(
        hidden=(9, 7),
        noise=(0.0,),
        batch_norm=True,
        dropout=0.2,
        task=task,
        input_shape=shape,
        outputs=3,
    )
    net = model.build()
    for layer in net.modules():
        if isinstance(layer, covary.nn.BatchNorm1d):
            nn.init.uniform_(layer.running_mean)
            nn.init.uniform_(layer.running_var)
    if task == "regression":
        net.rescale.load_state_dict({"shift": torch.arange(3.0), "scale": torch.arange(1.0, 4.0)})
    x = torch.randint(0, 256, (5, *shape)).to(torch.uint8 if model.is_image else torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(plain(net)(x), net.eval()(x).mean)


def wide_run(path: Path) -> Run:
    """Weights that nobody trained, wide enough for their covariances to be seen in memory."""
    model = ModelConfig(hidden=(160, 128), input_shape=(40,), outputs=3)
    data = DataConfig(name="digits")
    config = RunConfig(data=data, model=model, training=TrainingConfig())
    path.joinpath("config.toml").write_text(config.to_toml())
    Run(path).save_network(model.build())
    return Run(path)


def test_memory_is_that_of_the_covariances_alone(tmp_path):
    """The process that measures begins small, however much this one holds."""
    run, batch = wide_run(tmp_path), 512
    full, diagonal = (costs.peak_memory(run, name, batch) for name in ("full", "diagonal"))
    matrices = batch * 128 * 128 * 4 / 1e6
    assert full is not None
    assert diagonal is not None
    assert matrices < full < 5 * matrices
    assert diagonal < matrices / 4


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(costs, "_STATUS", tmp_path / "none")
    assert costs.peak() > 10
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows: importing it fails
    assert costs.peak() is None
    assert costs.above_idle(wide_run(tmp_path), "full", 2) is None


def test_a_failed_measurement_of_memory_says_why(tmp_path):
    with pytest.raises(RunError, match=r"full covariances take could not be .*holds no run"):
        costs.peak_memory(Run(tmp_path), "full", 2)
