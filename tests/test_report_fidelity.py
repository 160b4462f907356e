"""Cheaper covariances beside the exact one, as fidelity.json has them, and notes of caution."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from scipy import stats

from covary import report
from covary.files import FileError
from covary.report import drawing, words
from tests import report_runs
from tests.report_fidelity import CHOSEN, WAYS, add_fidelity
from tests.report_runs import Page


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A classification with a OOD set, a regression, and a run that was not compared."""
    root = tmp_path_factory.mktemp("runs")
    made = {
        "images": report_runs.mnist(root),
        "regression": report_runs.two_targets(root),
        "without": report_runs.flawless(root),
    }
    return {name: Page(report.write(run)) for name, run in made.items()}


compared = pytest.mark.parametrize("name", ["images", "regression"])


def stored(page):
    return json.loads((page.path.parent / "fidelity.json").read_text(encoding="utf-8"))


def section(page):
    """The source of the section, empty if there is none."""
    found = re.search(r'<section id="fidelity">.*?</section>', page.source, re.DOTALL)
    return found[0] if found else ""


def table(page):
    """Row name -> (mark, cells), and the titles of the columns."""
    source = section(page)
    titles = re.findall(r'<th scope="col" class="n[^"]*">(.*?)</th>', source)
    rows = {}
    for row in re.findall(r"<tr[^>]*><th scope=\"row\">.*?</tr>", source):
        heading = re.search(r'row">(.*?)(?: <span class="mark">(.*?)</span>)?</th>', row)
        assert heading is not None
        cells = [cell.replace("&gt;", ">") for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        rows[heading[1]] = (heading[2], [cell.replace("&lt;", "<") for cell in cells])
    return titles, rows


def drawn(page):
    return {
        path.stem for path in (page.path.parent / "figures").iterdir() if "fidelity" in path.stem
    }


@compared
def test_the_table_has_the_numbers_of_the_file(name, pages):
    content = stored(pages[name])
    titles, rows = table(pages[name])
    measures = ["mean", "variance", "covariance", "rank", "argmax"]
    if content["task"] == "regression":
        measures.remove("argmax")
    assert len(titles) == 2 + len(measures) * len(content["parts"])
    assert list(rows) == list(WAYS)
    for way in content["representations"]:
        _, cells = rows[way["name"]]
        expected = [words.amount(way["time_over_plain"]), words.amount(way["peak_memory_mb"])]
        for part in content["parts"]:
            found = way["parts"][part]
            expected += [words.fidelity(measure, found[measure]) for measure in measures]
        assert cells == expected
    assert {way: mark for way, (mark, _) in rows.items() if mark} == {
        "full": "exact",
        CHOSEN: "chosen",
    }


def test_other_classes_are_for_classification_alone(pages):
    assert "other class" in section(pages["images"])
    assert "other class" not in section(pages["regression"]).lower()


@compared
def test_legends_have_spearman_of_the_stored_entropies(name, pages):
    page = pages[name]
    parts = stored(page)["parts"]
    with np.load(page.path.parent / "fidelity.npz") as entropies:
        for i, part in enumerate(parts):
            suffix = f"-{i + 1}" if len(parts) > 1 else ""
            figure = page.path.parent / "figures" / f"fidelity-entropy{suffix}.svg"
            text = figure.read_text(encoding="utf-8")
            for way in (CHOSEN, "diagonal"):
                exact, other = entropies[f"{part}/full"], entropies[f"{part}/{way}"]
                found = words.rank(float(stats.spearmanr(exact, other).statistic))
                assert f"{way}: rank correlation {found}" in text
            assert "shared" not in text, "it has no covariance for each sample"


def test_the_cost_figure_names_every_representation(pages):
    figure = pages["images"].path.parent / "figures" / "fidelity-cost.svg"
    text = figure.read_text(encoding="utf-8")
    for name in WAYS:
        assert f">{name}</text>" in text
    (alt,) = re.findall(r'aria-label="(Rank correlation[^"]*)"', pages["images"].source)
    for time in ("151", "6.2", "9.8", "4.1", "2.4"):
        assert f"at {time}" in alt


def test_a_comparison_has_a_place_on_the_page(pages):
    page = pages["images"]
    assert "Fidelity" in page.texts("h2")
    assert "#fidelity" in [attributes.get("href") for _, attributes, _ in page.all("a")]
    assert drawn(page) == {"fidelity-entropy-1", "fidelity-entropy-2", "fidelity-cost"}
    assert "covary fidelity runs/mnist" in page.texts("pre")[0].splitlines()
    assert "covary fidelity RUN" not in page.source


def test_without_a_comparison_the_page_says_how_to_make_one(pages):
    page = pages["without"]
    assert "Fidelity" not in page.texts("h2") + page.texts("a")
    assert page.texts("code") == ["covary fidelity RUN", "covary verify RUN"]
    assert drawn(page) == set()


@pytest.fixture
def small(tmp_path):
    return add_fidelity(report_runs.flawless(tmp_path))


def edit(run, file, change):
    """Store other content of a file of JSON."""
    content = json.loads((run / file).read_text(encoding="utf-8"))
    change(content)
    (run / file).write_text(json.dumps(content), encoding="utf-8")


def edit_entropies(run, change):
    arrays = dict(np.load(run / "fidelity.npz"))
    change(arrays)
    np.savez(run / "fidelity.npz", **arrays)


def test_a_comparison_of_other_weights_is_left_out(small):
    edit(small, "evaluation.json", lambda content: content.update(weights="of other weights"))
    page = Page(report.write(small))
    assert not table(page)[1]
    assert drawn(page) == set()
    assert "left out" in section(page)
    assert "covary fidelity runs/flawless" in section(page)
    assert "covary fidelity" not in page.texts("pre")[0]


def test_without_entropies_the_rest_is_shown(small):
    (small / "fidelity.npz").unlink()
    page = Page(report.write(small))
    assert drawn(page) == {"fidelity-cost"}
    assert list(table(page)[1]) == list(WAYS)


def test_undefined_numbers_are_dashes(small):
    def forget(content):
        for way in content["representations"]:
            if way["name"] == "shared":
                way["parts"]["test"]["rank"] = None
                way["peak_memory_mb"] = float("nan")

    edit(small, "fidelity.json", forget)
    page = Page(report.write(small))
    _, cells = table(page)[1]["shared"]
    assert cells.count(words.NOTHING) == 2
    assert "nothing is ranked: shared." in " ".join(page.texts("figcaption"))


def test_entropies_that_are_not_finite_are_left_out(small):
    edit_entropies(small, lambda arrays: arrays["test/diagonal"].__setitem__(slice(30), -np.inf))
    captions = " ".join(Page(report.write(small)).texts("figcaption"))
    assert "170 of 200 inputs" in captions
    assert "30 inputs without a finite entropy are left out" in captions
    edit_entropies(small, lambda arrays: arrays["test/full"].fill(-np.inf))
    assert "0 of 200 inputs" in " ".join(Page(report.write(small)).texts("figcaption"))


def test_names_cannot_break_the_section(small):
    name = "a/b <i>$x"
    text = (small / "fidelity.json").read_text(encoding="utf-8")
    (small / "fidelity.json").write_text(text.replace('"test"', f'"{name}"'), encoding="utf-8")
    edit_entropies(
        small,
        lambda arrays: arrays.update({f"{name}/{way}": arrays[f"test/{way}"] for way in WAYS}),
    )
    page = Page(report.write(small))
    assert not page.open
    assert page.all("i") == []
    assert drawn(page) == {"fidelity-entropy", "fidelity-cost"}
    assert f"{name} (200 inputs)" in page.texts("th")


def test_files_that_cannot_be_read(small):
    edit_entropies(small, lambda arrays: arrays.update({"test/diagonal": np.zeros(3)}))
    with pytest.raises(FileError, match="entropies of 3 and 200 inputs for test"):
        report.write(small)
    (small / "fidelity.npz").write_bytes(b"PK nonsense")
    with pytest.raises(FileError, match=r"fidelity\.npz is not a readable npz file"):
        report.write(small)
    (small / "fidelity.npz").unlink()
    edit(small, "fidelity.json", lambda content: content["representations"][2].pop("name"))
    with pytest.raises(FileError, match=r"\[2\]\.name': missing.* Run `covary fidelity .*` again"):
        report.write(small)
    (small / "fidelity.json").write_text("{", encoding="utf-8")
    with pytest.raises(FileError, match="is not JSON"):
        report.write(small)


# Doubt that points the wrong way


def test_doubt_that_points_the_wrong_way_is_said_where_it_is_shown(tmp_path):
    run = report_runs.table(tmp_path)
    note = "Note: by entropy it is surer of wrong predictions than of the rest (AUROC below 0.5)."
    assert note not in Page(report.write(run)).texts("p")
    edit(run, "evaluation.json", lambda content: content["parts"]["test"].update(auroc_entropy=0.3))
    assert Page(report.write(run)).texts("p").count(note) == 2, "the summary and all metrics"


def test_the_worst_doubt_is_a_contradiction():
    assert len(list(words.contradictions({"test": {"auroc_entropy": 0.0}}))) == 1
    assert not list(words.contradictions({"test": {"auroc_entropy": 0.5, "spearman_error": None}}))


def test_an_approximate_evaluation_is_said_to_be_one(tmp_path):
    run = report_runs.flawless(tmp_path)
    more = {"covariance": "tracked:24", "notes": ["That is poor."]}
    edit(run, "evaluation.json", lambda content: content.update(more))
    page = Page(report.write(run))
    assert "tracked:24 (shared in training)" in page.texts("dd")
    assert "Note on the evaluation: That is poor." in page.texts("p")


def test_no_two_ways_look_alike():
    assert len({drawing.look(number) for number in range(20)}) == 20


def test_entropies_are_compared_where_they_are_finite(tmp_path):
    run = report_runs.table(tmp_path)
    test = report.read(run).test
    test.entropy[:] = np.where(test.right, -57.0, -97.0)
    test.entropy[np.flatnonzero(~test.right)[0]] = -np.inf
    assert not words.wrong_ones_have_more_entropy(test)
    test.entropy[:] = np.where(test.right, -57.0, -47.0)
    test.entropy[np.flatnonzero(test.right)[0]] = -np.inf
    assert words.wrong_ones_have_more_entropy(test)
