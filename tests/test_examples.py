"""Every script of the gallery runs, draws its picture, and stands on the gallery's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import pendulum, results
from examples import __main__ as gallery

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
READERS = (
    "For an engineer with a table",
    "For an engineer with a trained CNN",
    "For an engineer with a learned simulator",
    "For an engineer with several sources of error",
    "For a researcher of uncertainty",
    "For a computational neuroscientist",
)


@pytest.mark.parametrize("name", gallery.SCRIPTS)
def test_a_script_runs_and_draws(name, tmp_path):
    picture = tmp_path / "picture.png"
    assert gallery.run(name, picture, "--quick")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", gallery.SCRIPTS)
def test_a_script_is_short_and_says_for_whom_it_is(name):
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 80
    assert gallery.about(name).startswith(READERS)


@pytest.mark.parametrize("name", gallery.SCRIPTS)
def test_the_page_shows_the_script(name):
    before, after = gallery.section(name, "\0").split("\0")
    assert before in PAGE, "run `python -m examples`"
    assert after in PAGE
    picture = ROOT / "docs" / gallery.FIGURES / f"{name}.png"
    assert picture.stat().st_size < 150_000


def test_error_bars_of_rollouts_hold_as_long_as_the_page_says():
    assert pendulum.broken_promises(results.load("pendulum")) == []


def test_nothing_in_the_folder_is_left_out():
    files = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert files - {"__init__", "__main__"} == {*gallery.SCRIPTS, *gallery.OTHERS}
    assert PAGE.endswith(gallery.others())
