"""The house rules: imports point one way, the core needs torch alone, examples in docs run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import (
    converted,
    lif,
    parity,
    replicas,
    results,
    sampling_cost,
    spiking,
    summary,
    tables,
    tracked,
    training,
    uncertainty,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "covary"
AROUND = {"reproduction", "benchmarks", "examples", "tests"}

# Lower rooms know nothing of higher ones; rooms of one floor know nothing of each other.
LIBRARY = [
    {"settings", "linalg", "files"},
    {"covariance", "activations"},
    {"moments"},
    {"nn"},
    {"models", "inputs", "sources", "progress", "measuring"},
    {"varying"},
    {"rules"},
    {"passes"},
    {"measurements"},
    {"convert"},
    {"graph_tracking", "recording"},
    {"attacks", "data", "training", "uncertainty"},
    {"replicas", "stochastic", "tracking"},
    {"baselines", "verification"},
    {"estimators", "runs"},
    {"report"},
    {"cli"},
    {"__main__"},
]
REPRODUCTION = [
    {"published", "workshop"},
    {"experiment"},
    {"store", "words"},
    {"experiments"},
    {"catalogue", "measuring"},
    {"figures", "running"},
    {"page"},
    {"cli"},
    {"__main__"},
]
FLOORS = {"covary": LIBRARY, "reproduction": REPRODUCTION}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, by its full name, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path.name}: write imports in full"
            assert node.level == 0, f"{path.name}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def place(path: Path) -> tuple[str, str]:
    """The package and the room that a file is in."""
    package, room = path.relative_to(ROOT).parts[:2]
    return package, room.removesuffix(".py")


SOURCES = sorted(
    path
    for package in FLOORS
    for path in (ROOT / package).rglob("*.py")
    if place(path)[1] != "__init__"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package, room = place(path)
    floors = FLOORS[package]
    floor = next((i for i, rooms in enumerate(floors) if room in rooms), None)
    assert floor is not None, f"{room} has no floor; give it one here and in docs/architecture.md"
    allowed = set.union({room}, *floors[:floor])
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == package:
            assert parts[1] in allowed, f"{room} must not import {parts[1]}"


def test_the_library_does_without_what_is_around_it():
    for path in PACKAGE.rglob("*.py"):
        known = {name.split(".")[0] for name in imports(path)}
        assert not known & AROUND, f"{path.relative_to(ROOT)} must not import {known & AROUND}"


def test_the_core_needs_torch_and_numpy_alone():
    code = """
import sys, torch, numpy.polynomial, torch.distributions, torch.utils._pytree
before = {name.split(".")[0] for name in sys.modules}
import covary
print(*{name.split(".")[0] for name in sys.modules} - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) - set(sys.stdlib_module_names) == {"covary"}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_documents_run(page, monkeypatch, tmp_path):
    """The python blocks of a page, one after the other, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_in_documents_are_the_stored_results(page):
    text = page.read_text(encoding="utf-8")
    assert text == tables.filled(text), "run `python -m benchmarks.tables`"


def test_stored_measurements_keep_the_promises():
    assert summary.broken_promises(results.load("bench")) == []
    assert training.broken_promises(results.load("training")) == []
    assert tracked.broken_promises(results.load("tracked")) == []
    assert converted.broken_promises(results.load("converted")) == []
    assert parity.broken_promises(results.load("parity")) == []
    assert sampling_cost.broken_promises(results.load("sampling_cost")) == []
    assert uncertainty.broken_promises(results.load("uncertainty")) == []
    assert lif.broken_promises(results.load("lif")) == []
    assert spiking.broken_promises(results.load("spiking")) == []
    for row in results.load("replicas"):
        assert row["times faster"] >= replicas.LEAST_TIMES_FASTER
        assert max(row["difference of means"], row["difference of stddevs"]) < 1e-4
    for row in results.load("against_sampling")["networks"]:
        if row["network"].startswith("relu"):
            assert row["mean error"] < 0.01
            assert row["covariance error"] < (0.03 if row["noise"] == 0.2 else 0.08)


def test_code_cites_equations_that_exist():
    theory = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    numbered = set(re.findall(r"\\tag\{(\d+)\}", theory))
    cited = set()
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        for group in re.findall(r"theory\.md,\s+eqs?\.\s+([^.;:\n]*\d\)?)", source):
            cited |= set(re.findall(r"\d+", group))
    assert cited, "the pattern finds no citation at all"
    assert cited <= numbered
