"""``python -m reproduction`` as it is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from reproduction import catalogue
from reproduction.catalogue import EXPERIMENTS
from reproduction.experiment import Measured
from reproduction.figures import FIGURES
from reproduction.reading import completed
from reproduction.store import load
from tests.reproduction.trials import RESULTS, ROOT, command
from tests.test_cli import strict_json


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
        record = completed(experiment, record, results)
        for claim in experiment.claims:
            there = {part.label for part in experiment.parts["smoke"]}
            assert claim.values(record) or not there & set(claim.labels or there), (
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
    assert html.read_text().count("<section") == len(EXPERIMENTS) + 2
