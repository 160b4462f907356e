"""Experiments as rows of data, and when their claims hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from reproduction import words
from reproduction.catalogue import EXPERIMENTS, get
from reproduction.experiment import (
    FAILS,
    HOLDS,
    PARTLY,
    SCALES,
    UNDECIDED,
    Claim,
    Measured,
    overall,
)
from reproduction.figures import FIGURES, TABLES
from reproduction.running import reproduce
from reproduction.workshop import Workshop
from tests.reproduction.trials import trial, workshop


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
    agreeing = sum(claim.agrees(value) for value in claim.values(record))
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
        ([HOLDS, UNDECIDED], HOLDS),
        ([HOLDS, PARTLY, UNDECIDED], PARTLY),
        ([HOLDS, UNDECIDED, UNDECIDED], UNDECIDED),
        ([HOLDS, FAILS, UNDECIDED], UNDECIDED),
        ([FAILS, FAILS, UNDECIDED], FAILS),
        ([UNDECIDED], UNDECIDED),
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
    record = {"scale": "quick", "parts": parts}
    of_two = Claim(says="", metric="ours", minus="theirs", least=2.0)
    assert of_two.values(record) == [2.0, None]
    assert of_two.verdict(record) == "holds partly"
    of_largest = Claim(says="", metric="ours", minus=("theirs", "others"), least=0.0)
    assert of_largest.values(record) == [2.0, None]
    by_label = Claim(says="", metric="ours", minus={"small": 2.5, "large": 4.0}, least=0.0)
    assert by_label.values(record) == [0.5, -1.0]


def test_a_part_stands_in_for_another_until_that_is_measured():
    parts = [{"label": label, "metrics": {"ours": float(len(label))}} for label in ("all", "first")]
    claim = Claim(
        says="", metric="ours", label=("all", "first"), instead={"all": "first"}, least=4.0
    )
    assert claim.values({"parts": parts[1:]}) == [5.0]
    assert claim.values({"parts": parts}) == [3.0]
    assert claim.values({"parts": parts[:1]}) == [3.0]


def test_a_claim_that_cannot_fail_is_none():
    with pytest.raises(ValueError, match="bound"):
        Claim(says="Something.", metric="number")


def test_nothing_is_said_of_claims_at_scale_smoke(tmp_path):
    record = reproduce(trial(), "smoke", workshop(tmp_path), results=tmp_path)
    assert trial().verdict(record) == "not judged (smoke)"


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


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_experiments_are_rows_of_data(experiment):
    assert re.fullmatch(r"[a-z0-9-]+", experiment.name)
    assert experiment.claims
    for scale in SCALES:
        for part in experiment.parts[scale]:
            json.dumps(part.settings, allow_nan=False)
        labels = {part.label for part in experiment.parts[scale]}
        if scale == "paper":
            for claim in experiment.claims:
                theirs = get(claim.of).parts[scale] if claim.of else ()
                assert {*claim.labels} <= ({part.label for part in theirs} or labels)
    assert experiment.name in FIGURES or experiment.name in TABLES


def test_names_are_there_once():
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
