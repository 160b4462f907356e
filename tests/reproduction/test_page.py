"""Stored results, and the figures, tables and page that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from reproduction import page, store
from reproduction.catalogue import EXPERIMENTS, get
from reproduction.experiment import FAILS, HOLDS, PARTLY, SCALES, UNDECIDED, seeds
from reproduction.figures import FIGURES, TABLES
from reproduction.reading import read
from reproduction.running import reproduce
from reproduction.store import load
from tests.reproduction.trials import RESULTS, ROOT, trial, workshop


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_stored_result_is_what_would_be_measured_now(name):
    """Its settings and revision are those of the experiment, and each of its parts is kept.

    Or its revision is an earlier one that lacks something, and is shown until there is more.
    """
    experiment, record = get(name), load(RESULTS, name)
    now = {
        "revision": experiment.revision,
        "scale": record["scale"],
        "config": store.configuration(experiment, record["scale"]),
    }
    assert all(each in now["config"] for each in record["config"])
    assert list(store.carried(record, now, experiment.earlier).values()) == record["parts"]
    verdict = experiment.verdict(read(RESULTS, experiment))
    assert verdict.startswith((HOLDS, PARTLY, FAILS, UNDECIDED))


def test_the_page_is_that_of_the_stored_results(tmp_path):
    """No number is on the page that is not in a file of results, and none is out of date."""
    made = {name: tmp_path / name for name in ("reproduction.md", "README.md")}
    page.write(
        RESULTS,
        markdown=made["reproduction.md"],
        html=tmp_path / "page.html",
        readme=made["README.md"],
    )
    for name, folder in (("reproduction.md", "docs"), ("README.md", "reproduction")):
        stored = (ROOT / folder / name).read_text(encoding="utf-8")
        assert stored == made[name].read_text(encoding="utf-8"), "run `python -m reproduction page`"
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


def test_what_stands_between_backticks_is_code():
    assert page._with_code("At `quick`, a < b.") == "At <code>quick</code>, a &lt; b."


MEASURED = [each.name for each in EXPERIMENTS if (RESULTS / f"{each.name}.json").exists()]


@pytest.mark.parametrize("name", MEASURED)
def test_figures_and_tables_can_be_of_some_labels(name):
    record = read(RESULTS, get(name))
    # Of label plain there is an accuracy, and nothing to draw.
    for label in {part["label"] for part in record["parts"]} - {"plain"}:
        some = {**record, "parts": [part for part in record["parts"] if part["label"] == label]}
        for made in (FIGURES, TABLES):
            if name in made:
                assert made[name](some) is not None


@pytest.mark.parametrize("name", [name for name in MEASURED if name in FIGURES])
def test_legends_keep_away_from_axes_and_edges(name):
    """A handle that lies on an axis looks like data."""
    figure = FIGURES[name](read(RESULTS, get(name))).figure
    edge = figure.bbox.padded(-2)
    inside = [(axes.get_legend(), axes.bbox.padded(-2)) for axes in figure.axes]
    for legend, room in [*inside, *((each, edge) for each in figure.legends)]:
        if legend is not None:
            box = legend.get_window_extent()
            assert room.x0 < box.x0 < box.x1 < room.x1
            assert room.y0 < box.y0 < box.y1 < room.y1


def test_the_network_in_time_shows_every_layer_that_is_stored():
    record = read(RESULTS, get("network-relu"))
    times = record["parts"][0]["series"]["times"]
    layers = {name: [[float(i) for i, _ in enumerate(times)]] * 2 for name in ("a", "b", "output")}
    for traces, names in (
        ({"trace_by_layer": layers}, ["output", "2", "1"]),
        ({"trace": layers["output"]}, None),
    ):
        parts = [
            {**part, "series": {key: each for key, each in series.items() if "trace" not in key}}
            for part in record["parts"]
            for series in [{**part["series"]}]
        ]
        for part in parts:
            part["series"] |= traces
        drawn = FIGURES["network-relu"]({**record, "parts": parts})
        axes = next(each for each in drawn.figure.axes if "in time" in each.get_title(loc="left"))
        assert len(axes.lines) == (6 if names else 2)
        if names:
            assert [label.get_text() for label in axes.get_yticklabels()] == names
        assert ("every layer" in drawn.caption) == bool(names)


def test_entropy_under_attack_stands_beside_strange_inputs():
    """Panel b of the figure about sharing is of the networks of fgsm."""
    record = read(RESULTS, get("shared-ood"))
    with_attacks, without = (
        FIGURES["shared-ood"](each) for each in (record, {**record, "beside": {}})
    )
    titles = [axes.get_title(loc="left") for axes in with_attacks.figure.axes]
    assert "b  entropy under attack" in titles
    assert "under attack by FGSM" in with_attacks.caption
    assert "attack" not in without.caption


@pytest.mark.parametrize("name", MEASURED)
def test_claims_read_numbers_that_are_measured(name):
    """Of a number that no part has there would be no verdict, and nobody would miss it."""
    experiment, record = get(name), read(RESULTS, get(name))
    for claim in experiment.claims:
        if claim.needs:  # numbers of other results, which may be lacking
            continue
        minus = (claim.minus,) if isinstance(claim.minus, str) else claim.minus
        others = set() if isinstance(minus, Mapping) else {each for each in minus if each}
        about = [
            part for part in record["parts"] if not claim.labels or part["label"] in claim.labels
        ]
        found = [part for part in about if {claim.metric} | others <= set(part["metrics"])]
        assert found or not about, f"No part of {name} has {claim.metric} and {others}."
