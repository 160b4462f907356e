"""``covary reproduce`` and the pages of ``covary report --reproduction``, as they are typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from covary import experiments
from covary.experiments import EXPERIMENTS, Measured
from covary.report.reproduction import page
from covary.report.reproduction.figures import FIGURES, TABLES
from tests.test_cli import covary, strict_json

RESULTS = Path(__file__).parent.parent / "results" / "reproduction"


def unwrapped(said: str) -> str:
    """What a message says, without the box that it is in."""
    return " ".join(said.replace("│", " ").split())


def test_the_command_line_says_what_there_is(tmp_path):
    rows = strict_json(covary("reproduce", "--list", "--results", tmp_path, "--json"))
    assert [row["name"] for row in rows] == [experiment.name for experiment in EXPERIMENTS]
    assert "none yet" in covary("reproduce", "--list", "--results", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "There is no experiment 'nonsense'"),
        ([], "Which experiment?"),
        (["sensitivity", "--all"], "name none beside it"),
        (["sensitivity", "--scale", "huge"], "Scales are smoke, quick, paper"),
        (["sensitivity", "--only", "nothing"], "has parts without labels at scale quick"),
        (["sensitivity", "--results", __file__], "cannot be a folder"),
    ],
)
def test_wrong_use_is_said_to_be_wrong(arguments, says):
    assert says in " ".join(covary("reproduce", *arguments, code=2).replace("│", " ").split())


def test_a_report_is_of_a_run_or_of_the_reproduction(tmp_path):
    for arguments in (["report"], ["report", tmp_path, "--reproduction"]):
        said = " ".join(covary(*arguments, code=2).replace("│", " ").split())
        assert "A report is of a run (covary report RUN), or of --reproduction." in said


@pytest.fixture
def rows(monkeypatch):
    """Put other experiments in the place of all; each takes no time, one fails."""

    def fails(_part, _workshop):
        raise RuntimeError("There is no such data.")

    def put(*names: str, failing: str = ""):
        known = [
            replace(
                experiments.get(name),
                measure=fails if name == failing else lambda part, _: Measured({}, {}),
            )
            for name in names
        ]
        monkeypatch.setattr(experiments, "names", lambda: list(names))
        monkeypatch.setattr(experiments, "get", lambda name: known[names.index(name)])
        monkeypatch.setattr("covary.cli.reproduce._draw", lambda *_: None)

    return put


def test_when_one_of_several_fails_the_others_are_measured(tmp_path, rows):
    rows("sensitivity", "mechanism", "activations", failing="mechanism")
    where = ("--scale", "smoke", "--results", tmp_path, "--out", tmp_path / "work")
    said = unwrapped(covary("reproduce", "--all", *where, code=1))
    assert "1 of 3 experiments failed. mechanism: There is no such data." in said
    assert {path.stem for path in tmp_path.glob("*.json")} == {"sensitivity", "activations"}


def test_all_of_them_are_those_that_no_larger_scale_has(tmp_path, rows):
    rows("sensitivity", "activations")
    where = ("--results", tmp_path, "--out", tmp_path / "work")
    covary("reproduce", "activations", "--scale", "paper", *where)
    said = unwrapped(covary("reproduce", "activations", "--scale", "smoke", *where, code=2))
    assert "(--results trial), or say --overwrite" in said
    said = unwrapped(covary("reproduce", "--all", "--scale", "smoke", *where))
    assert f"activations is left out: {tmp_path} has it at scale paper." in said
    assert experiments.load(tmp_path, "activations")["scale"] == "paper"
    assert experiments.load(tmp_path, "sensitivity")["scale"] == "smoke"


def test_pages_of_a_trial_stay_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for there in ("nowhere", __file__):
        said = unwrapped(covary("report", "--reproduction", "--results", there, code=2))
        assert "has no results of experiments" in said
    assert not list(tmp_path.iterdir())
    trial = tmp_path / "trial"
    trial.mkdir()
    (trial / "sensitivity.json").write_bytes((RESULTS / "sensitivity.json").read_bytes())
    covary("report", "--reproduction", "--results", trial)
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]
    assert (trial / "reproduction.html").exists()
    assert (trial / "reproduction.md").exists()


def test_what_stands_between_backticks_is_code():
    assert page._with_code("At `quick`, a < b.") == "At <code>quick</code>, a &lt; b."


MEASURED = [each.name for each in EXPERIMENTS if (RESULTS / f"{each.name}.json").exists()]


@pytest.mark.parametrize("name", MEASURED)
def test_figures_and_tables_can_be_of_some_labels(name):
    record = experiments.load(RESULTS, name)
    for label in {part["label"] for part in record["parts"]}:
        some = {**record, "parts": [part for part in record["parts"] if part["label"] == label]}
        for made in (FIGURES, TABLES):
            if name in made:
                assert made[name](some) is not None


@pytest.mark.parametrize("name", [name for name in MEASURED if name in FIGURES])
def test_legends_keep_away_from_axes_and_edges(name):
    """A handle that lies on an axis looks like data."""
    figure = FIGURES[name](experiments.load(RESULTS, name)).figure
    edge = figure.bbox.padded(-2)
    inside = [(axes.get_legend(), axes.bbox.padded(-2)) for axes in figure.axes]
    for legend, room in [*inside, *((each, edge) for each in figure.legends)]:
        if legend is not None:
            box = legend.get_window_extent()
            assert room.x0 < box.x0 < box.x1 < room.x1
            assert room.y0 < box.y0 < box.y1 < room.y1
