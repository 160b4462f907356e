"""Stored results, and the figures, tables and page that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from reproduction import page, store
from reproduction.catalogue import EXPERIMENTS, get
from reproduction.experiment import FAILS, HOLDS, PARTLY, SCALES, seeds
from reproduction.figures import FIGURES, TABLES
from reproduction.running import reproduce
from reproduction.store import load
from tests.reproduction.trials import RESULTS, ROOT, trial, workshop


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


def test_the_page_says_what_is_missing_and_what_is_outdated(tmp_path):
    parts = (*seeds("a b", 2, size=1), *seeds("c", 1, size=2))
    before = trial(**dict.fromkeys(SCALES, parts))
    record = reproduce(before, "paper", workshop(tmp_path), results=tmp_path, only=["a b"])
    section = page._section(before, record)
    assert section.command == "python -m reproduction run trial --scale paper --only 'a b'"
    assert section.missing == "c (1)"
    assert section.rest == "python -m reproduction run trial --scale paper --only c"
    assert not section.outdated
    now = trial(**dict.fromkeys(SCALES, (*seeds("a b", 2, size=5), *seeds("c", 1, size=2))))
    assert page._section(now, record).outdated


def test_what_stands_between_backticks_is_code():
    assert page._with_code("At `quick`, a < b.") == "At <code>quick</code>, a &lt; b."


MEASURED = [each.name for each in EXPERIMENTS if (RESULTS / f"{each.name}.json").exists()]


@pytest.mark.parametrize("name", MEASURED)
def test_figures_and_tables_can_be_of_some_labels(name):
    record = load(RESULTS, name)
    for label in {part["label"] for part in record["parts"]}:
        some = {**record, "parts": [part for part in record["parts"] if part["label"] == label]}
        for made in (FIGURES, TABLES):
            if name in made:
                assert made[name](some) is not None


@pytest.mark.parametrize("name", [name for name in MEASURED if name in FIGURES])
def test_legends_keep_away_from_axes_and_edges(name):
    """A handle that lies on an axis looks like data."""
    figure = FIGURES[name](load(RESULTS, name)).figure
    edge = figure.bbox.padded(-2)
    inside = [(axes.get_legend(), axes.bbox.padded(-2)) for axes in figure.axes]
    for legend, room in [*inside, *((each, edge) for each in figure.legends)]:
        if legend is not None:
            box = legend.get_window_extent()
            assert room.x0 < box.x0 < box.x1 < room.x1
            assert room.y0 < box.y0 < box.y1 < room.y1


@pytest.mark.parametrize("name", MEASURED)
def test_claims_read_numbers_that_are_measured(name):
    """Of a number that no part has there would be no verdict, and nobody would miss it."""
    experiment, record = get(name), load(RESULTS, name)
    for claim in experiment.claims:
        minus = (claim.minus,) if isinstance(claim.minus, str) else claim.minus
        others = set() if isinstance(minus, Mapping) else {each for each in minus if each}
        about = [
            part for part in record["parts"] if not claim.labels or part["label"] in claim.labels
        ]
        read = [part for part in about if {claim.metric} | others <= set(part["metrics"])]
        assert read or not about, f"No part of {name} has {claim.metric} and {others}."
