"""Experiments: rows of data, what is kept of them, verdicts, and the pages they make."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import linregress

from covary.runs import RunError
from reproduction import (
    EXPERIMENTS,
    SCALES,
    Claim,
    Experiment,
    Measured,
    Network,
    Part,
    ResultError,
    Workshop,
    get,
    load,
    page,
    reproduce,
    store,
    words,
)
from reproduction.experiment import FAILS, HOLDS, PARTLY, overall, seeds
from reproduction.experiments.classifiers import drops
from reproduction.experiments.statistics import histograms, line
from reproduction.figures import FIGURES, TABLES
from tests.reproduction.test_cli import command
from tests.test_cli import strict_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "reproduction"


def trial(measure=None, claims=None, **more) -> Experiment:
    """An experiment of two labels, three seeds each, whose number is 10 * size + seed."""

    def usual(part: Part, _workshop: Workshop) -> Measured:
        return Measured({"number": 10.0 * part.settings["size"] + part.seed}, {"points": [1 / 3]})

    parts = (*seeds("small", 3, size=1), *seeds("large", 3, size=2))
    return Experiment(
        name="trial",
        title="A trial",
        paper="Fig. 0",
        about="Nothing.",
        measure=measure or usual,
        parts=dict.fromkeys(SCALES, parts) | more,
        claims=claims or (Claim(says="It is large.", metric="number", least=11.0),),
    )


def workshop(folder: Path) -> Workshop:
    return Workshop(folder=folder / "work")


@pytest.mark.parametrize(
    ("label", "least", "most", "verdict"),
    [
        ("large", 20.0, None, "holds"),
        ("large", None, 21.0, "holds partly"),
        ("large", None, 20.0, "does not hold"),
        ("large", 30.0, None, "does not hold"),
        ("", 11.0, 21.5, "holds partly"),
        ("", 10.0, 22.0, "holds"),
        ("unknown", 0.0, None, None),
    ],
)
def test_a_claim_holds_in_all_parts_in_half_of_them_or_not(tmp_path, label, least, most, verdict):
    record = reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path)
    claim = Claim(says="", metric="number", label=label, least=least, most=most)
    assert claim.verdict(record) == verdict
    judged = words.judged(claim, record)
    agreeing = sum(claim.agrees(value) for value in claim.values(record["parts"]))
    assert (f", {agreeing} of" in judged.verdict) == (agreeing > 0 and verdict != "holds")
    undecided = replace(claim, untested={"quick": "It is too dark.", "paper": ""})
    assert undecided.verdict(record) is None
    assert words.judged(undecided, record).why == "It is too dark."
    assert undecided.verdict({**record, "scale": "smoke"}) == verdict


@pytest.mark.parametrize(("least", "verdict"), [(12.0, "holds"), (20.0, "does not hold")])
def test_a_claim_about_most_cases_needs_more_than_half_of_them(tmp_path, least, verdict):
    record = reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path)
    claim = Claim(says="", metric="number", least=least, majority=True)
    assert claim.verdict(record) == verdict


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, PARTLY], PARTLY),
        ([HOLDS, FAILS], PARTLY),
        ([PARTLY, PARTLY], PARTLY),
        ([PARTLY, FAILS], FAILS),
        ([HOLDS, FAILS, FAILS], FAILS),
        ([], None),
    ],
)
def test_an_experiment_holds_if_all_of_its_claims_do_partly_if_half_of_them_do(verdicts, together):
    assert overall(verdicts) == together


def test_the_verdict_of_an_experiment_counts_its_claims(tmp_path):
    bounds = (10.0, 11.0, 30.0, 30.0)  # all parts agree, five of six, none, none
    claims = [Claim(says="", metric="number", least=least) for least in bounds]
    record = reproduce(trial(), "quick", workshop(tmp_path), results=tmp_path)
    for count, said in (
        (1, "holds"),
        (2, "holds partly (1 of 2 claims hold, 1 partly)"),
        (3, "holds partly (1 of 3 claims hold, 1 partly)"),
        (4, "does not hold (1 of 4 claims hold, 1 partly)"),
    ):
        assert trial(claims=tuple(claims[:count])).verdict(record) == said


def test_numbers_that_are_not_defined_agree_with_no_claim(tmp_path):
    experiment = trial(measure=lambda part, _: Measured({"number": float("nan")}, {}))
    record = reproduce(experiment, "quick", workshop(tmp_path), results=tmp_path)
    assert record["parts"][0]["metrics"] == {"number": None}
    assert experiment.verdict(record) == "does not hold"
    assert words.spread([None, None]) == "undefined"


def test_a_claim_may_be_about_a_difference():
    parts = [
        {"label": "small", "metrics": {"ours": 3.0, "theirs": 1.0, "others": -4.0}},
        {"label": "large", "metrics": {"ours": 3.0, "theirs": None, "others": 0.0}},
    ]
    of_two = Claim(says="", metric="ours", minus="theirs", least=2.0)
    assert of_two.values(parts) == [2.0, None]
    assert of_two.verdict({"scale": "quick", "parts": parts}) == "holds partly"
    of_largest = Claim(says="", metric="ours", minus=("theirs", "others"), least=0.0)
    assert of_largest.values(parts) == [2.0, None]
    by_label = Claim(says="", metric="ours", minus={"small": 2.5, "large": 4.0}, least=0.0)
    assert by_label.values(parts) == [0.5, -1.0]


def test_a_claim_that_cannot_fail_is_none():
    with pytest.raises(ValueError, match="bound"):
        Claim(says="Something.", metric="number")


def test_nothing_is_said_of_claims_at_scale_smoke(tmp_path):
    record = reproduce(trial(), "smoke", workshop(tmp_path), results=tmp_path)
    assert trial().verdict(record) == "not judged (smoke)"


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
    assert page._section(later, record).verdict == "does not hold"
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


def test_results_are_not_replaced_by_fewer_parts(tmp_path):
    before = trial(paper=(*seeds("small", 3, size=(1, 2)), *seeds("large", 3, size=2)))
    before = replace(before, measure=lambda part, _: Measured({"number": 1.0}, {}))
    reproduce(before, "paper", workshop(tmp_path), results=tmp_path)
    measured_anew = replace(before, revision=1)
    elsewhere = Workshop(folder=tmp_path / "elsewhere")
    with pytest.raises(ResultError, match="has 3 parts that these results lack"):
        reproduce(measured_anew, "paper", elsewhere, results=tmp_path, only=["small"])
    assert len(load(tmp_path, "trial")["parts"]) == 6


def test_what_the_paper_does_not_say_does_not_count(tmp_path):
    claims = (
        Claim(says="It is large.", metric="number", label="large", least=20.0),
        Claim(says="So is the other.", metric="number", label="small", least=20.0, ours=True),
        Claim(says="Here it is.", metric="number", ours=True),
    )
    experiment = trial(claims=claims)
    record = reproduce(experiment, "paper", workshop(tmp_path), results=tmp_path)
    assert experiment.verdict(record) == "holds"
    assert claims[1].verdict(record) == "does not hold"
    assert claims[2].verdict(record) is None
    some = reproduce(
        experiment, "paper", Workshop(folder=tmp_path / "b"), results=tmp_path / "b", only=["small"]
    )
    assert experiment.verdict(some) == "not measured"
    missing = trial(claims=(*claims, Claim(says="", metric="other", least=0.0)))
    assert missing.verdict(record) == "holds, 1 of 2 not tested"


def test_the_page_says_what_is_missing_and_what_is_outdated(tmp_path):
    parts = (*seeds("a b", 2, size=1), *seeds("c", 1, size=2))
    before = trial(**dict.fromkeys(SCALES, parts))
    record = reproduce(before, "paper", workshop(tmp_path), results=tmp_path, only=["a b"])
    section = page._section(before, record)
    assert section.command == "python -m reproduction run trial --scale paper --only 'a b'"
    assert section.missing == "c (1)"
    assert not section.outdated
    now = trial(**dict.fromkeys(SCALES, (*seeds("a b", 2, size=5), *seeds("c", 1, size=2))))
    assert page._section(now, record).outdated


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
    assert run.config().training.seed == 0
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


def test_drops_are_those_of_numbers_that_are_defined():
    known = {"accuracy": [0.5, 0.9], "separability": [0.1, 1.0]}
    series = {
        "with": known | {"separability_by_layer": [0.0, 1.0, 1.5]},
        "without": {"accuracy": [0.4, 0.9], "separability": [None, None]}
        | {"separability_by_layer": [0.0, 0.4, 1.5]},
    }
    found = drops(series)
    assert found["accuracy_drop"] == pytest.approx(0)
    assert found["accuracy_drop_on_the_way"] == pytest.approx(0.05)
    assert np.isnan(found["separability_drop"])
    assert found["separability_drop_last_hidden"] == pytest.approx(0.6)
    assert found["separability_drop_of_layers"] == pytest.approx(0.2)


def test_a_limit_takes_some_samples_of_each_part(tmp_path):
    shop = Workshop(folder=tmp_path)
    network = Network(name="few", data="digits", settings={"hidden": (4,), "epochs": 1}, limit=50)
    run = shop.trained(network, 3)
    environment = json.loads((run.path / "environment.json").read_text())
    kept = environment["training_samples"] + environment["validation_samples"]
    assert (kept, environment["test_samples"]) == (50, 50)


def test_lines_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x = rng.normal(size=20)
    y = 0.5 * x + rng.normal(size=20)
    ours, theirs = line(list(x), list(y)), linregress(x, y)
    assert ours.slope == pytest.approx(theirs.slope)
    assert ours.intercept == pytest.approx(theirs.intercept)
    assert ours.r_squared == pytest.approx(theirs.rvalue**2)
    assert np.isnan(line([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).slope)


def test_histograms_hold_every_sample_of_every_group():
    rng = np.random.default_rng(0)
    many, few = rng.normal(size=5000), rng.normal(5, 1, size=20)
    few[0], many[0] = 1e9, -np.inf
    found = histograms({"many": many, "few": few, "none": np.array([])})
    assert sum(found["shares"]["many"]) == pytest.approx(1)
    assert sum(found["shares"]["few"]) == pytest.approx(1)
    assert sum(found["shares"]["none"]) == 0
    edges = np.array(found["edges"])
    assert edges[0] < -2
    # A group of few samples counts for the range as one of many does.
    assert edges[-1] > 5


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_experiments_are_rows_of_data(experiment):
    assert re.fullmatch(r"[a-z0-9-]+", experiment.name)
    assert experiment.claims
    for scale in SCALES:
        for part in experiment.parts[scale]:
            json.dumps(part.settings, allow_nan=False)
        labels = {part.label for part in experiment.parts[scale]}
        if scale == "paper":
            assert {label for each in experiment.claims for label in each.labels} <= labels
    assert experiment.name in FIGURES or experiment.name in TABLES


def test_names_are_there_once():
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)


@pytest.mark.skipif(
    "COVARY_DATA" not in os.environ,
    reason="needs MNIST, notMNIST, CIFAR-10 and UCI sets in $COVARY_DATA",
)
def test_everything_runs_at_scale_smoke(tmp_path):
    results = tmp_path / "results"
    command("run", "--all", "--scale", "smoke", "--results", results, "--out", tmp_path / "work")
    for experiment in EXPERIMENTS:
        record = load(results, experiment.name)
        assert record is not None
        for claim in experiment.claims:
            there = {part.label for part in experiment.parts["smoke"]}
            assert claim.values(record["parts"]) or not there & set(claim.labels or there), (
                f"{experiment.name} measures no {claim.metric}"
            )
        drawn = tmp_path / "work" / "smoke" / "figures" / f"{experiment.name}.png"
        assert drawn.exists() == (experiment.name in FIGURES)
    markdown, html = tmp_path / "docs" / "reproduction.md", tmp_path / "page.html"
    said = command("page", "--results", results, "--markdown", markdown, "--out", html)
    assert str(markdown) in said
    text = markdown.read_text()
    for experiment in EXPERIMENTS:
        assert f"## {experiment.name}\n" in text
    assert "of other settings" not in text
    assert html.read_text().count("<section") == len(EXPERIMENTS) + 1


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_stored_result_is_what_would_be_measured_now(name):
    """Its settings and revision are those of the experiment, and each of its parts is kept."""
    experiment, record = get(name), load(RESULTS, name)
    now = {
        "revision": experiment.revision,
        "scale": record["scale"],
        "config": store.configuration(experiment, record["scale"]),
    }
    assert record["config"] == now["config"]
    assert list(store.carried(record, now).values()) == record["parts"]
    assert experiment.verdict(record).startswith((HOLDS, PARTLY, FAILS))


def test_the_page_is_that_of_the_stored_results(tmp_path):
    """No number is on the page that is not in a file of results, and none is out of date."""
    page.write(RESULTS, markdown=tmp_path / "reproduction.md", html=tmp_path / "page.html")
    stored = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    made = (tmp_path / "reproduction.md").read_text(encoding="utf-8")
    assert stored == made, "run `python -m reproduction page`"
    figures = Path("figures") / "reproduction"
    ours, theirs = (
        {figure.name for figure in (folder / figures).glob("*.png")}
        for folder in (ROOT / "docs", tmp_path)
    )
    assert ours == theirs


def test_where_a_claim_fails_there_is_a_reason_or_that_none_is_known():
    for section in page.sections(RESULTS):
        for row in section.claims:
            failed = row.verdict.startswith((FAILS, PARTLY)) and not row.claim.goal
            assert row.why or not failed, f"{section.experiment.name}: {row.says}"
