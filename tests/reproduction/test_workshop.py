"""Networks that several experiments use are trained once, and measured once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from covary.runs import RunError
from reproduction.experiment import SCALES, Measured, Part, seeds
from reproduction.running import reproduce
from reproduction.workshop import Network, Workshop
from tests.reproduction.trials import trial


def test_networks_are_trained_once_and_measured_once(tmp_path):
    told = []
    shop = Workshop(folder=tmp_path, say=told.append)
    network = Network(
        name="small",
        data="quadrants",
        settings={"hidden": (4,), "epochs": 2},
        keep=(1, 2),
        limit=64,
    )
    run = shop.trained(network, 0)
    assert run.kept_epochs() == [1, 2]
    assert run.config.training.seed == 0
    assert shop.trained(json.loads(json.dumps(network.to_dict())), 0).path == run.path
    assert len(told) == 1

    counted = []

    def measure() -> dict[str, float]:
        counted.append(1)
        return {"number": float("nan")}

    seconds = shop.training_seconds({"one": {"network": network.to_dict()}, "size": 3}, 0)
    assert list(seconds) == ["small-0"]
    assert seconds["small-0"] > 0

    for settings in ({"a": (1, 2)}, {"a": [1, 2]}, {"a": [1]}):
        assert shop.remembered(run, "number", settings, measure) == {"number": None}
    assert len(counted) == 2
    assert len(shop.reused) == 1

    assert replace(shop, revision=1).remembered(run, "number", {"a": [1]}, measure)
    assert len(counted) == 3

    with pytest.raises(RunError, match="has not kept its weights after epochs 3"):
        shop.trained(replace(network, keep=(1, 3)), 0)


def test_a_head_stands_behind_the_trunk_that_there_is(tmp_path):
    settings = {"trunk": "lenet", "hidden": (4,), "epochs": 1}
    whole = Network(name="whole", data="digits", settings=settings, limit=64)
    head = replace(whole, name="head", trunk_of=whole)
    told: list[str] = []
    Workshop(folder=tmp_path / "here", say=told.append).trained(head, 0)
    assert len(told) == 2
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Workshop(folder=tmp_path / "there", say=told.append)
    moved.trained(head, 0)
    assert len(told) == 2  # neither is trained again
    (tmp_path / "there" / "head-0" / "model.safetensors").unlink()
    moved.trained(head, 0)
    assert len(told) == 3  # goes on from what is kept of it
    for name in ("model.safetensors", "checkpoint.safetensors"):
        (tmp_path / "there" / "head-0" / name).unlink()
    moved.trained(head, 0)
    assert len(told) == 4  # was cut short before anything was kept
    shutil.rmtree(tmp_path / "there" / "whole-0")
    longer = replace(whole, settings={**settings, "epochs": 2})
    with pytest.raises(RunError, match="head-0 was trained behind another trunk than"):
        moved.trained(replace(head, trunk_of=longer), 0)


def test_a_part_is_measured_again_when_its_network_is_another(tmp_path):
    shop, counted = Workshop(folder=tmp_path / "work"), []
    network = Network(name="small", data="quadrants", settings={"hidden": (4,), "epochs": 1})

    def measure(part: Part, workshop: Workshop) -> Measured:
        workshop.trained(part.settings["network"], part.seed)
        counted.append(1)
        return Measured({"number": 1.0}, {})

    parts = dict.fromkeys(SCALES, seeds("", 1, network=network.to_dict()))
    experiment = trial(measure=measure, **parts)
    for _ in range(2):
        record = reproduce(experiment, "quick", shop, results=tmp_path)
    assert len(counted) == 1
    assert "weights" not in record["parts"][0]
    other = shop.trained(replace(network, name="other"), 1)
    shutil.copy(other.model_path, shop.folder / "small-0" / "model.safetensors")
    reproduce(experiment, "quick", shop, results=tmp_path)
    assert len(counted) == 2


def test_a_limit_takes_some_samples_of_each_part(tmp_path):
    shop = Workshop(folder=tmp_path)
    network = Network(name="few", data="digits", settings={"hidden": (4,), "epochs": 1}, limit=50)
    run = shop.trained(network, 3)
    environment = json.loads((run.path / "environment.json").read_text())
    kept = environment["training_samples"] + environment["validation_samples"]
    assert (kept, environment["test_samples"]) == (50, 50)
