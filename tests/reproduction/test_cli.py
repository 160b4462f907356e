"""``python -m reproduction`` as it is typed, and the figures and pages that it makes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reproduction import EXPERIMENTS, catalogue, load, page
from reproduction.cli import app
from reproduction.experiment import Measured
from reproduction.figures import FIGURES, TABLES
from tests.test_cli import strict_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "reproduction"


def command(*arguments: object, code: int = 0) -> str:
    """Run a command in this process; its output, errors included."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def unwrapped(said: str) -> str:
    """What a message says, without the box that it is in."""
    return " ".join(said.replace("│", " ").split())


def test_the_command_line_says_what_there_is(tmp_path):
    rows = strict_json(command("list", "--results", tmp_path, "--json"))
    assert [row["name"] for row in rows] == [experiment.name for experiment in EXPERIMENTS]
    assert "none yet" in command("list", "--results", tmp_path)


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
    assert says in " ".join(command("run", *arguments, code=2).replace("│", " ").split())


@pytest.fixture
def rows(monkeypatch):
    """Put other experiments in the place of all; each takes no time, one fails."""

    def fails(_part, _workshop):
        raise RuntimeError("There is no such data.")

    def put(*names: str, failing: str = ""):
        known = [
            replace(
                catalogue.get(name),
                measure=fails if name == failing else lambda part, _: Measured({}, {}),
            )
            for name in names
        ]
        monkeypatch.setattr(catalogue, "names", lambda: list(names))
        monkeypatch.setattr(catalogue, "get", lambda name: known[names.index(name)])
        monkeypatch.setattr("reproduction.cli._draw", lambda *_: None)

    return put


def test_when_one_of_several_fails_the_others_are_measured(tmp_path, rows):
    rows("sensitivity", "mechanism", "activations", failing="mechanism")
    where = ("--scale", "smoke", "--results", tmp_path, "--out", tmp_path / "work")
    said = unwrapped(command("run", "--all", *where, code=1))
    assert "1 of 3 experiments failed. mechanism: There is no such data." in said
    assert {path.stem for path in tmp_path.glob("*.json")} == {"sensitivity", "activations"}


def test_all_of_them_are_those_that_no_larger_scale_has(tmp_path, rows):
    rows("sensitivity", "activations")
    where = ("--results", tmp_path, "--out", tmp_path / "work")
    command("run", "activations", "--scale", "paper", *where)
    said = unwrapped(command("run", "activations", "--scale", "smoke", *where, code=2))
    assert "(--results trial), or say --overwrite" in said
    said = unwrapped(command("run", "--all", "--scale", "smoke", *where))
    assert f"activations is left out: {tmp_path} has it at scale paper." in said
    assert load(tmp_path, "activations")["scale"] == "paper"
    assert load(tmp_path, "sensitivity")["scale"] == "smoke"


def test_several_processes_measure_for_the_command_of_a_clone(tmp_path):
    """They find the package as the command does, which is run from the root of the repository."""
    what = ("run", "activations", "--scale", "smoke", "--jobs", "2")
    where = ("--results", str(tmp_path), "--out", str(tmp_path / "work"))
    subprocess.run(
        [sys.executable, "-m", "reproduction", *what, *where],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    record = load(tmp_path, "activations")
    assert record["command"].startswith("python -m reproduction run activations --scale smoke")
    assert record["sittings"][0]["jobs"] == 2


def test_pages_of_a_trial_stay_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for there in ("nowhere", __file__):
        said = unwrapped(command("page", "--results", there, code=2))
        assert "has no results of experiments" in said
    assert not list(tmp_path.iterdir())
    trial = tmp_path / "trial"
    trial.mkdir()
    (trial / "sensitivity.json").write_bytes((RESULTS / "sensitivity.json").read_bytes())
    command("page", "--results", trial)
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]
    assert (trial / "reproduction.html").exists()
    assert (trial / "reproduction.md").exists()


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
