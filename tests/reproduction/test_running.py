"""Results of experiments: what is measured again, what is kept, and what is not replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduction import page
from reproduction.experiment import SCALES, Measured, Part, seeds
from reproduction.running import reproduce
from reproduction.store import ResultError, load
from reproduction.workshop import Workshop
from tests.reproduction.trials import trial, workshop
from tests.test_cli import strict_json


def test_an_experiment_goes_on_where_it_was_cut_short(tmp_path):
    done = []

    def measure(part: Part, _workshop: Workshop) -> Measured:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append((part.label, part.seed))
        return Measured({"number": 1.0}, {})

    with pytest.raises(KeyboardInterrupt):
        reproduce(trial(measure), "paper", workshop(tmp_path), results=tmp_path)
    assert load(tmp_path, "trial") is None

    def rest(part: Part, _workshop: Workshop) -> Measured:
        done.append((part.label, part.seed))
        return Measured({"number": 1.0}, {})

    reproduce(trial(rest), "paper", workshop(tmp_path), results=tmp_path)
    assert done == [(label, seed) for label in ("small", "large") for seed in range(3)]


def test_parts_of_other_settings_are_measured_again(tmp_path):
    reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path)
    larger = dict.fromkeys(SCALES, seeds("small", 3, size=7))
    record = reproduce(trial(**larger), "quick", workshop(tmp_path), results=tmp_path)
    assert [part["metrics"]["number"] for part in record["parts"]] == [70.0, 71.0, 72.0]


def test_what_was_measured_in_another_way_is_measured_again(tmp_path):
    reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path)
    otherwise = trial(lambda part, _: Measured({"number": 0.0}, {}))
    record = reproduce(otherwise, "quick", workshop(tmp_path), results=tmp_path)
    assert record["parts"][0]["metrics"]["number"] == 10.0  # nobody said so
    later = replace(otherwise, revision=1)
    record = reproduce(later, "quick", workshop(tmp_path), results=tmp_path)
    assert {part["metrics"]["number"] for part in record["parts"]} == {0.0}
    assert page._section(later, record).verdict == "does not hold; quick"
    assert page._section(otherwise, record).verdict == "measured in another way before"


def test_parts_that_were_left_out_are_named_as_missing(tmp_path):
    record = reproduce(trial(), "paper", workshop(tmp_path), results=tmp_path, only=["small"])
    assert {part["label"] for part in record["parts"]} == {"small"}
    assert record["missing"] == [{"label": "large", "seed": seed} for seed in range(3)]
    with pytest.raises(ValueError, match="'large', 'small' at scale paper, and none 'medium'"):
        reproduce(trial(), "paper", workshop(tmp_path), results=tmp_path, only=["medium"])
    record = reproduce(trial(), "paper", workshop(tmp_path), results=tmp_path)
    assert record["missing"] == []
    assert len(record["parts"]) == 6


def test_results_of_a_larger_scale_are_not_lost(tmp_path):
    reproduce(trial(), "paper", workshop(tmp_path), results=tmp_path)
    with pytest.raises(ResultError, match="results at scale paper, which those at scale smoke"):
        reproduce(trial(), "smoke", workshop(tmp_path), results=tmp_path)
    reproduce(trial(), "smoke", workshop(tmp_path), results=tmp_path, overwrite=True)
    assert load(tmp_path, "trial")["scale"] == "smoke"


def test_parts_that_are_left_out_stay_as_they_are_in_the_results(tmp_path):
    # A tuple, which a file gives back as a list.
    before = trial(paper=(*seeds("small", 3, size=1), *seeds("large", 3, size=2, more=(1, 2))))
    first = reproduce(before, "paper", workshop(tmp_path), results=tmp_path)
    elsewhere = Workshop(folder=tmp_path / "elsewhere")
    again = reproduce(before, "paper", elsewhere, results=tmp_path, only=["small"])
    assert again["missing"] == []
    assert [each["parts"] for each in again["sittings"]] == [6, 3]
    assert again["parts"][3:] == load(tmp_path, "trial")["parts"][3:] == first["parts"][3:]
    now = trial(paper=(*seeds("small", 3, size=1), *seeds("large", 3, size=2, more=(3,))))
    changed = reproduce(now, "paper", elsewhere, results=tmp_path, only=["small"])
    assert changed["missing"] == [{"label": "large", "seed": seed} for seed in range(3)]


def test_seeds_can_be_measured_one_by_one(tmp_path):
    def places(record):
        return [(part["label"], part["seed"]) for part in record["parts"]]

    shop = workshop(tmp_path)
    record = reproduce(trial(), "quick", shop, results=tmp_path, only=["small"], seeds=[1])
    assert places(record) == [("small", 1)]
    assert {"label": "small", "seed": 0} in record["missing"]
    record = reproduce(trial(), "quick", workshop(tmp_path / "b"), results=tmp_path, seeds=[0])
    assert places(record) == [("small", 0), ("small", 1), ("large", 0)]
    with pytest.raises(ValueError, match="such parts of seeds 0, 1, 2 at scale quick, and none 7"):
        reproduce(trial(), "quick", shop, results=tmp_path, seeds=[7])


def test_results_are_not_replaced_by_fewer_parts(tmp_path):
    before = trial(paper=(*seeds("small", 3, size=(1, 2)), *seeds("large", 3, size=2)))
    before = replace(before, measure=lambda part, _: Measured({"number": 1.0}, {}))
    reproduce(before, "paper", workshop(tmp_path), results=tmp_path)
    measured_anew = replace(before, revision=1)
    elsewhere = Workshop(folder=tmp_path / "elsewhere")
    with pytest.raises(ResultError, match="has 3 parts that these results lack"):
        reproduce(measured_anew, "paper", elsewhere, results=tmp_path, only=["small"])
    assert len(load(tmp_path, "trial")["parts"]) == 6


def test_results_say_how_they_were_made(tmp_path):
    reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path)
    record = strict_json((tmp_path / "trial.json").read_text())
    assert record["seeds"] == [0, 1, 2]
    assert record["config"] == [
        {"label": "small", "settings": {"size": 1}},
        {"label": "large", "settings": {"size": 2}},
    ]
    assert record["parts"][0]["series"] == {"points": [0.333333]}
    assert {"command", "versions", "git_commit", "started", "seconds"} <= set(record)


@pytest.mark.parametrize("content", ["", "{}", '{"experiment": "other"}', "[1]", '{"experiment": '])
def test_a_file_that_is_no_result_is_said_to_be_none(tmp_path, content):
    (tmp_path / "trial.json").write_text(content)
    with pytest.raises(ResultError, match=r"is not as `python -m reproduction run trial` writes"):
        load(tmp_path, "trial")
    assert reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path, overwrite=True)
    assert load(tmp_path, "trial")["scale"] == "quick"
