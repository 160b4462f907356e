"""The page says what predictions.npz says, needs nothing but itself, and works in a browser."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from covary import report
from covary.files import FileError
from covary.models import lenet
from covary.report import page, refusing, words
from covary.runs import Run
from covary.uncertainty.metrics import METRICS
from tests import report_runs
from tests.browsers import chromium
from tests.report_runs import Page, evaluation, predictions


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made = {name: make(root) for name, make in report_runs.RUNS.items() if name != "images"}
    made["images"] = report_runs.mnist(root, samples=10_000)
    return {name: Page(report.write(run)) for name, run in made.items()}


each_run = pytest.mark.parametrize("name", report_runs.RUNS)


# What is on the page


@each_run
def test_page_is_well_formed(name, pages):
    page = pages[name]
    assert not page.open
    assert len(page.source) < 3e6
    assert page.source.startswith("<!doctype html>")
    assert page.all("html")[0][1]["lang"] == "en"
    assert any(a.get("name") == "viewport" for _, a, _ in page.all("meta"))
    levels = [int(tag[1]) for tag, _, _ in page.all("h1", "h2", "h3", "h4", "h5")]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page.source)
    assert {a or b for a, b in used} <= set(ids)


@each_run
def test_every_picture_has_words_and_a_file(name, pages):
    page = pages[name]
    for _, attributes, _ in page.all("img"):
        assert attributes["alt"]
    labels = [a["aria-label"] for _, a, _ in page.elements if a.get("role") == "img"]
    drawn = [a["id"].removeprefix("figure-") for _, a, _ in page.all("figure")]
    assert len(labels) == len(drawn) >= 5
    assert all(re.search(r"\d", label) for label in labels), "alt texts are made of numbers"
    folder = page.path.parent / "figures"
    assert {path.name for path in folder.iterdir()} == {
        f"{figure}.{kind}" for figure in drawn for kind in ("png", "svg")
    }
    for figure in drawn:
        with Image.open(folder / f"{figure}.png") as image:
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
            assert len(image.convert("L").getcolors()) > 10


@each_run
def test_nothing_is_loaded(name, pages):
    page = pages[name]
    for tag, attributes, _ in page.elements:
        for key in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
            if key in attributes and tag != "a":
                assert attributes[key].startswith(("data:", "#")), (tag, attributes[key])
    assert "@import" not in page.source
    assert not re.search(r"url\((?!#)", page.source)
    (policy,) = [a["content"] for _, a, _ in page.all("meta") if "http-equiv" in a]
    assert policy.startswith("default-src 'none'")


@each_run
def test_inline_figures_follow_the_theme(name, pages):
    svg = "".join(re.findall(r'<svg class="plot".*?</svg>', pages[name].source, re.DOTALL))
    assert "currentColor" in svg
    assert not re.search(r"(?:fill|stroke): ?#[0-9a-f]{6}", svg)


@each_run
def test_metrics_table_has_every_metric(name, pages):
    page = pages[name]
    parts = evaluation(page)["parts"]
    cells = [(a["data-metric"], "".join(t)) for _, a, t in page.all("td") if "data-metric" in a]
    names = {metric for part in parts.values() for metric in part}
    assert {metric for metric, _ in cells} == names
    for metric in names:
        values = [words.metric(metric, p[metric]) if metric in p else "" for p in parts.values()]
        assert [text for found, text in cells if found == metric] == values
    assert names <= set(METRICS), "each has an explanation"


def test_summary_of_a_classification(pages):
    page = pages["images"]
    arrays = predictions(page)
    mean, label = arrays["test/mean"], arrays["test/label"]
    right = mean.argmax(1) == label
    text = " ".join(page.texts("p"))
    assert f"{right.sum():,} of {len(label):,} test inputs are right ({right.mean():.1%})" in text
    entropy, doubt = arrays["test/entropy"], report_runs.doubt(mean)
    ood = arrays["notmnist/entropy"], report_runs.doubt(arrays["notmnist/mean"])
    for pairs in (
        [(entropy[~right], entropy[right]), (doubt[~right], doubt[right])],
        [(ood[0], entropy), (ood[1], doubt)],
    ):
        by_entropy, by_softmax = (report_runs.auroc(*pair) for pair in pairs)
        assert f"AUROC {by_entropy:.2f} by entropy, {by_softmax:.2f} by max-softmax" in text


def test_summary_of_a_regression(pages):
    page = pages["two targets"]
    arrays = predictions(page)
    error = arrays["test/mean"] - arrays["test/target"]
    rmse = [words.number(float(value)) for value in np.sqrt((error**2).mean(0))]
    text = " ".join(page.texts("p"))
    assert f"{rmse[0]} for heating load and {rmse[1]} for cooling load <kWh>" in text
    assert "too narrow" in text


def test_summary_where_nothing_is_wrong(pages):
    assert "All 200 test inputs are right" in " ".join(pages["flawless"].texts("p"))
    assert "wrong" not in pages["flawless"].texts("span")


def test_missing_history_is_said(pages):
    assert "No training history" in " ".join(pages["without history"].texts("p"))
    assert "figure-training-loss" not in pages["without history"].source


@each_run
def test_curves_are_counts_at_their_thresholds(name, pages):
    """Every point of every curve against counting in predictions.npz."""
    page, arrays = pages[name], predictions(pages[name])
    data = page.data()
    assert data["samples"] == len(arrays["test/mean"])
    for score in data["scores"]:
        column = score["target"]
        assert len(score["threshold"]) <= refusing.POINTS + 1
        assert score["answered"][-1] == data["samples"]

        def scores(part, column=column, name=score["score"]):
            if name == "stddev":
                return np.sqrt(arrays[f"{part}/variance"][:, column].astype(float))
            if name == "max_softmax":
                return report_runs.doubt(arrays[f"{part}/mean"])
            return arrays[f"{part}/entropy"].astype(float)

        if data["task"] == "classification":
            loss = (arrays["test/mean"].argmax(1) != arrays["test/label"]).astype(float)
        else:
            loss = (arrays["test/mean"] - arrays["test/target"])[:, column] ** 2
        # Sums in another order differ in the last digits.
        limits = np.array(score["threshold"]) * (1 + 1e-12 * np.sign(score["threshold"]))
        answered = scores("test") <= limits[:, None]
        np.testing.assert_array_equal(answered.sum(1), score["answered"])
        np.testing.assert_allclose(answered @ loss, score["loss"], rtol=1e-9, atol=1e-9)
        for part, counts in zip(data["ood"], score["ood"], strict=True):
            assert part["samples"] == len(arrays[f"{part['name']}/mean"])
            found = scores(part["name"]) <= limits[:, None]
            np.testing.assert_array_equal(found.sum(1), counts)


def test_gallery_shows_the_extremes(pages):
    page, arrays = pages["images"], predictions(pages["images"])
    entropy, label = arrays["test/entropy"], arrays["test/label"]
    prediction = arrays["test/mean"].argmax(1)
    alts = [a["alt"] for _, a, _ in page.all("img")]
    for group in (prediction == label, prediction != label):
        order = np.flatnonzero(group)[np.argsort(entropy[group])]
        for ends in (order[:8], order[::-1][:8]):
            expected = [f"Input {i}: predicted {prediction[i]}, truly {label[i]}" for i in ends]
            start = alts.index(expected[0])
            assert alts[start : start + 8] == expected
    bad = [a for tag, a, _ in page.all("li") if a.get("class") == "bad"]
    assert len(bad) == 16
    assert page.texts("span").count("wrong") == 16
    assert "Out-of-distribution inputs: notmnist" in page.texts("h3")
    # Pixels are those of the inputs.
    for _, attributes, _ in page.all("img")[:8]:
        index = int(re.findall(r"\d+", attributes["alt"])[0])
        file = io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2]))
        place = int(np.flatnonzero(arrays["test/input_index"] == index)[0])
        with Image.open(file) as image:
            np.testing.assert_array_equal(np.asarray(image), arrays["test/input"][place, 0])


def test_configuration_and_commands(pages):
    page = pages["one target"]
    blocks = page.texts("pre")
    assert blocks[0].splitlines() == [
        "covary train 'concrete' --out runs/concrete",
        "covary evaluate runs/concrete",
    ]
    config = (page.path.parent / "config.toml").read_text(encoding="utf-8")
    assert config.strip() in blocks
    assert {"8 \N{EN DASH} 50 \N{EN DASH} 1", "relu", "0.2", "3"} <= set(page.texts("dd"))
    assert "Note on the data: made up, not measured." in page.texts("p")
    assert "a496e06c0ffee0123456789abcdef0123456789ab" in page.texts("td")


# What could break a page


def test_names_cannot_break_the_page(pages):
    page = pages["table"]
    assert "</script><b>$x" in page.texts("td")
    assert page.source.count("</script>") == 2
    assert page.all("b") == []
    assert page.texts("h1") == ["iris & <friends>: what the network is unsure of"]
    two = pages["two targets"]
    assert "cooling load <kWh>" in two.texts("span")
    assert "<kWh>" not in "".join(re.findall(r"<text.*?</text>", two.source))


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "\u2028", "&amp;", '"', "\\"])
def test_embedded_json_comes_back(text):
    embedded = page.embeddable({"name": text})
    assert "<" not in embedded
    assert json.loads(embedded) == {"name": text}


def test_the_page_depends_on_the_run_alone(pages, tmp_path):
    """Neither on the user's settings of matplotlib, which stay as they are, nor on the place."""
    found = pages["flawless"]
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "axes.grid": False}):
        again = report.write(found.path.parent, out=tmp_path / "elsewhere" / "page.html")
        assert matplotlib.rcParams["font.size"] == 30
    assert again == tmp_path / "elsewhere" / "page.html"
    assert again.read_text(encoding="utf-8") == found.source
    assert (tmp_path / "elsewhere" / "figures" / "entropy.svg").is_file()


def calibrate(run, arrays, **numbers):
    """Add calibrated arrays and scores to a run, and what held-out data gave."""
    stored = dict(np.load(run / "predictions.npz"))
    np.savez(run / "predictions.npz", **stored, **arrays)
    content = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    content["calibration"] = {"noise": None, "held_out_samples": 40, **numbers}
    (run / "evaluation.json").write_text(json.dumps(content), encoding="utf-8")
    return Page(report.write(run))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A classification with calibrated probabilities, one more score, and thresholds."""
    run = report_runs.table(tmp_path_factory.mktemp("calibrated"))
    stored = dict(np.load(run / "predictions.npz"))
    probabilities = report_runs.softmax(stored["test/mean"] / 3)
    trace = stored["test/variance"].sum(1)
    return calibrate(
        run,
        {"test/calibrated_probabilities": probabilities, "test/score_trace": trace},
        kind="logits",
        scale=1.0,
        temperature=3.0,
        thresholds={"calibrated": 0.2, "entropy": float(np.median(stored["test/entropy"]))},
        test={"ece": 0.0123},
    )


def test_calibrated_probabilities_come_first(calibrated):
    data, arrays = calibrated.data(), predictions(calibrated)
    first, *others = data["scores"]
    assert first["score"] == "calibrated"
    assert [score["score"] for score in others] == ["entropy", "max_softmax", "trace"]
    doubt = 1 - arrays["test/calibrated_probabilities"].max(1)
    np.testing.assert_allclose(first["threshold"], np.unique(doubt.round(12)), rtol=1e-6)
    text = (calibrated.path.parent / "figures" / "reliability.svg").read_text(encoding="utf-8")
    assert "Calibrated probabilities (ECE 0.012)" in text
    assert "before calibration (ECE" in text
    assert "Dotted: max-softmax, which is not calibrated." in calibrated.source


def test_thresholds_are_those_of_held_out_inputs(calibrated):
    data = calibrated.data()
    assert data["held_out"] == 40
    assert [score["recommended"] for score in data["scores"]][0::2] == [0.2, None]


def distributed(run, names, *, slices=30, columns=12):
    """Add distributions of each target to a run, here normal, and what test rows say of them."""
    stored = dict(np.load(run / "predictions.npz"))
    mean, variance = stored["test/mean"], 2 * stored["test/variance"] + 1
    score = (stored["test/target"] - mean) / np.sqrt(variance)
    half = stats.norm.ppf(0.95) * np.sqrt(variance)
    arrays = {
        "mean": mean, "variance": variance, "level": stats.norm.cdf(score),
        "low": mean - half, "high": mean + half,
    }  # fmt: skip
    return calibrate(
        run,
        {f"test/calibrated_{name}": array for name, array in arrays.items()},
        kind="distribution",
        thresholds={"stddev_1": 3.0},
        test={"coverage_90": 0.9, "spearman_error": 0.5},
        level=0.9,
        effect_rows=200,
        targets=[target_distribution(name, slices, columns) for name in names],
    )


def target_distribution(name, slices, columns):
    numbers = {"samples": 20, "low": 0.3, "high": 0.8, "chance": 1e-6, "is_beyond": True}
    fine = {"samples": 40, "inside": 36, "low": 0.76, "high": 0.97, "is_beyond": False}
    every = [{"column": "age", "label": "7 to 28", "inside": 11, **numbers}]
    every += [{"column": f"c{i}", "label": "<b>", "chance": 1.0, **fine} for i in range(1, slices)]
    rises = {"is_ordered": True, "labels": ["1", "2", "3"], "std": [1.0, 1.5, 2.0]}
    level = {"is_ordered": False, "labels": ["north", "a very long name of a level"]}
    level |= {"std": [1.0, 1.01], "lower": [0.9, 0.9], "upper": [1.1, 1.1]}
    effects = [{"column": "age", **rises, "lower": [0.9] * 3, "upper": [2.5] * 3}]
    effects += [{"column": f"c{i}", **level} for i in range(1, columns)]
    return {
        "name": name,
        "family": "student",
        "shares": {"emergent": 0.2, "learned": 0.8},
        "gains": {"emergent": -0.01, "learned": 0.3},
        "test": {"coverage_90": 0.9},
        "slices": every[:slices],
        "unusual_by_chance": 1.2,
        "effects": effects[:columns],
    }


def test_deviations_on_the_slider_are_those_of_the_distributions(tmp_path):
    page = distributed(report_runs.concrete(tmp_path), ["strength (MPa)"])
    variance = predictions(page)["test/calibrated_variance"]
    score = page.data()["scores"][0]
    assert (score["label"], score["recommended"]) == ("standard deviation", 3.0)
    np.testing.assert_allclose(score["threshold"], np.unique(np.sqrt(variance)), rtol=1e-6)
    said = " ".join(page.texts("p"))
    assert "Intervals meant to hold 90%" in said
    assert "standard deviation with the size of the error: 0.50." in said
    assert "in 1 of 30 slices of the test rows, beyond chance: age 7 to 28 (55.0%)." in said


def figures_of(page):
    return {path.stem for path in (page.path.parent / "figures").glob("*.svg")}


@pytest.mark.parametrize(("slices", "columns"), [(1, 1), (30, 30), (0, 0), (5, 2)])
def test_figures_of_a_table_that_is_regressed(slices, columns, tmp_path):
    run = report_runs.concrete(tmp_path)
    page = distributed(run, ["strength (MPa)"], slices=slices, columns=columns)
    there = {"slices": slices > 0, "effects": columns > 0, "variance-parts": True}
    assert {name for name, is_there in there.items() if is_there} == figures_of(page) & set(there)
    captions = " ".join(page.texts("figcaption"))
    if slices:
        assert f"The {min(12, slices)} most unusual of {slices} slices" in captions
        assert "By chance alone about 1.2" in captions
        assert "Marked: 1 that chance does not explain" in captions
    else:
        assert "There are 103 test rows, too few to say where intervals hold" in " ".join(
            page.texts("p")
        )
    assert ("22 more change it by 1% at most" in captions) == (columns == 30)
    assert ("#columns", "Columns") in [(a.get("href"), t[0]) for _, a, t in page.all("a")]


def test_several_targets_have_figures_each(tmp_path):
    names = ["heating load", "cooling load <kWh>"]
    page = distributed(report_runs.two_targets(tmp_path), names)
    every = {f"{name}-{i}" for name in ("slices", "effects", "spread") for i in (1, 2)}
    assert every | {"variance-parts"} <= figures_of(page)


@pytest.mark.parametrize("name", ["images", "table", "one target"])
def test_what_has_no_distributions_has_no_such_figures(name, pages):
    assert not figures_of(pages[name]) & {"slices", "effects", "variance-parts"}
    assert not [a for _, a, _ in pages[name].all("section") if a.get("id") == "columns"]


def test_intervals_and_levels_of_a_part_without_a_distribution_are_gaussian(tmp_path):
    run = Run(report_runs.concrete(tmp_path))
    test = run.predictions["test"]
    std = np.sqrt(test.variance.astype(float))
    low, high = test.interval
    np.testing.assert_allclose(low, stats.norm.ppf(0.05, test.mean, std))
    np.testing.assert_allclose(high, stats.norm.ppf(0.95, test.mean, std))
    inside = (test.target >= low) & (test.target <= high)
    np.testing.assert_array_equal(test.holds(0.9), inside)
    shown = report.read(distributed(run.path, ["strength"]).path.parent).test.calibrated
    inside = (test.target >= shown.low) & (test.target <= shown.high)
    np.testing.assert_array_equal(shown.holds(0.9), inside)
    expected = (test.target - shown.mean) / shown.stddev
    np.testing.assert_allclose(shown.scaled, expected, rtol=1e-6, atol=1e-9)


def test_an_evaluation_from_before_distributions_is_measured_again(tmp_path):
    run = report_runs.concrete(tmp_path)
    stored = dict(np.load(run / "predictions.npz"))
    with pytest.raises(FileError, match=r"calibration.kind.*'variance'.*Run `covary evaluate"):
        calibrate(run, {"test/calibrated_mean": stored["test/mean"]}, kind="variance", scale=1.0)


@each_run
def test_inputs_of_other_kinds_are_called_out_of_distribution(name, pages):
    assert "foreign" not in pages[name].source.lower()


@pytest.fixture
def small(tmp_path):
    return report_runs.flawless(tmp_path)


def edit(run, array, change):
    """Store another value of one array, and return it."""
    arrays = dict(np.load(run / "predictions.npz"))
    arrays[array] = change(arrays[array].copy())
    np.savez(run / "predictions.npz", **arrays)
    return arrays[array]


def test_ties_are_answered_together(small):
    values, counts = np.unique(edit(small, "test/entropy", np.floor), return_counts=True)
    curve = refusing.curves(report.read(small))[0]
    assert curve.threshold.tolist() == values.tolist()
    assert curve.answered.tolist() == np.cumsum(counts).tolist()


def test_undefined_numbers_make_a_page(small):
    """Entropies of outputs without variance, and NaN for rates among nothing."""
    edit(small, "test/entropy", lambda entropy: np.r_[[-np.inf] * 30, np.nan, entropy[31:]])
    stored = json.loads((small / "evaluation.json").read_text(encoding="utf-8"))
    stored["parts"]["test"]["nll"] = float("nan")
    (small / "evaluation.json").write_text(json.dumps(stored), encoding="utf-8")
    found = Page(report.write(small))
    score = found.data()["scores"][0]
    assert score["threshold"][0] is None
    assert score["answered"][0] == 30
    assert score["answered"][-2:] == [199, 200]
    assert "31 inputs without a finite entropy" in " ".join(found.texts("figcaption"))
    (nll,) = [t for _, a, t in found.all("td") if a.get("data-metric") == "nll"]
    assert nll == [words.NOTHING]


def test_a_network_behind_a_trunk_has_its_own_widths(small):
    text = (small / "config.toml").read_text(encoding="utf-8")
    changed = text.replace("hidden =", 'trunk = "lenet"\nhidden =')
    (small / "config.toml").write_text(changed, encoding="utf-8")
    features = lenet((1, 28, 28))(torch.zeros(1, 1, 28, 28)).shape[-1]
    widths = " \N{EN DASH} ".join(map(str, (features, 392, 196, 98, 10)))
    assert f"{widths} behind a lenet trunk" in Page(report.write(small)).texts("dd")


def test_a_resumed_and_interrupted_history(small):
    row = '{"kind": "epoch", "step": 9, "epoch": %d, "loss": %d}\n'
    text = row % (1, 3) + row % (2, 2) + row % (2, 1) + '{"kind": "epo'
    (small / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert [row.loss for row in report.read(small).run.history] == [3, 1]
    (small / "metrics.jsonl").write_text("oops\n" + text, encoding="utf-8")
    with pytest.raises(FileError, match="line 1, is not a row of metrics"):
        report.read(small)


@pytest.mark.parametrize("file", ["evaluation.json", "predictions.npz"])
def test_a_run_without_evaluation(small, file):
    (small / file).unlink()
    expected = f"{small} has no evaluation yet: run `covary evaluate {small}` first"
    with pytest.raises(report.ReportError, match=re.escape(expected)):
        report.write(small)


def test_files_that_cannot_be_read(small):
    with pytest.raises(report.ReportError, match="is not a directory"):
        report.write(small / "nowhere")
    edit(small, "test/label", lambda label: label[:0])
    with pytest.raises(FileError, match=r"predictions\.npz has test/label of int64 \(0,\)"):
        report.write(small)
    (small / "predictions.npz").write_bytes(b"PK nonsense")
    with pytest.raises(FileError, match=r"predictions\.npz is not a readable npz file"):
        report.write(small)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "json, key 'command': missing; expected a text. Run `covary evaluate"),
    ):
        (small / "evaluation.json").write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=message):
            report.write(small)
    (small / "config.toml").write_text("= 1", encoding="utf-8")
    with pytest.raises(FileError, match=r"config\.toml is not the configuration of a run"):
        report.write(small)


def test_missing_libraries_are_named(small, monkeypatch):
    real = report.importlib.util.find_spec
    monkeypatch.setattr(
        report.importlib.util, "find_spec", lambda name: None if name == "jinja2" else real(name)
    )
    with pytest.raises(ImportError, match=r"needs jinja2: pip install 'covary\[report\]'"):
        report.write(small)


# In a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as session:
        yield session


def visit(browser, page, *, width=1200, scheme="light", media="", script=True):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
    browser.get(page.path.resolve().as_uri())
    if script and media != "print":
        # The chart is drawn when the browser has laid out the page.
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(browser, 10).until(lambda b: b.find_elements("css selector", "#curve svg"))
        browser.execute_script("localStorage.clear()")


def readout(browser):
    """What is shown beside the slider: key -> (main, small)."""
    return browser.execute_script(
        """const spans = row => [...row.querySelectorAll("dd span")].map(span => span.textContent);
           const rows = document.querySelectorAll("#readout [data-key]");
           return Object.fromEntries([...rows].map(row => [row.dataset.key, spans(row)]));"""
    )


def choose(browser, kind, place):
    chosen = browser.find_elements("css selector", f"input[name={kind}]")[place]
    browser.execute_script("arguments[0].click()", chosen)


def move_to(browser, at):
    browser.execute_script(
        """const slider = document.getElementById("coverage"); slider.value = arguments[0];
           slider.dispatchEvent(new Event("input", {bubbles: true}));""",
        at,
    )


def integers(text):
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", text)]


@each_run
def test_pages_open_without_complaint(name, pages, browser):
    visit(browser, pages[name])
    assert browser.get_log("browser") == []
    assert browser.find_element("id", "explorer").is_displayed()
    image = np.asarray(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("L"))
    assert image.std() > 5, "the screen is blank"


@each_run
def test_a_phone_does_not_scroll_sideways(name, pages, browser):
    visit(browser, pages[name], width=360)
    widths = "return [document.documentElement.scrollWidth, window.innerWidth]"
    wide, inner = browser.execute_script(widths)
    assert wide <= inner == 360


def test_slider_and_choice_of_a_classification(pages, browser):
    page = pages["images"]
    arrays = predictions(page)
    right = arrays["test/mean"].argmax(1) == arrays["test/label"]
    visit(browser, page)
    scores = {
        "entropy": lambda part: arrays[f"{part}/entropy"].astype(float),
        "max-softmax": lambda part: report_runs.doubt(arrays[f"{part}/mean"]),
    }
    seen = set()
    for i, (key, score) in enumerate(scores.items()):
        choose(browser, "score", i)
        last = int(browser.find_element("id", "coverage").get_attribute("max"))
        for at in (0, last // 3, last - 20, last):
            move_to(browser, at)
            threshold = page.data()["scores"][i]["threshold"][at]
            threshold += 1e-12 * abs(threshold)  # sums in another order
            answered, ood = score("test") <= threshold, score("notmnist") <= threshold
            shown = readout(browser)
            seen.add(str(shown))
            assert integers(shown["answered"][1]) == [answered.sum(), len(right)]
            assert integers(shown["right"][1]) == [(answered & right).sum(), answered.sum()]
            if not answered.all():
                refused = ~answered
                assert integers(shown["refused"][1]) == [(refused & right).sum(), refused.sum()]
            assert integers(shown["ood-0"][1]) == [ood.sum(), len(ood)]
            assert shown["right"][0] == words.percent(
                int((answered & right).sum()), int(answered.sum()), decimals=2
            )
            assert shown["threshold"][0].startswith(key)
    assert len(seen) == 8


def test_slider_of_a_regression(pages, browser):
    page = pages["two targets"]
    arrays = predictions(page)
    visit(browser, page)
    for column in range(2):
        choose(browser, "target", column)
        stddev = np.sqrt(arrays["test/variance"][:, column].astype(float))
        error = (arrays["test/mean"] - arrays["test/target"])[:, column]
        for at in (3, 250, 400):
            move_to(browser, at)
            (curve,) = [
                score
                for score in page.data()["scores"]
                if (score["score"], score["target"]) == ("stddev", column)
            ]
            answered = stddev <= curve["threshold"][at]
            shown = readout(browser)
            assert integers(shown["answered"][1]) == [answered.sum(), len(error)]
            for key, chosen in (("rmse", answered), ("refused", ~answered)):
                rmse = float(np.sqrt((error[chosen] ** 2).mean()))
                assert float(shown[key][0]) == pytest.approx(rmse, rel=1e-3)


def test_the_slider_begins_where_held_out_inputs_say(calibrated, browser):
    visit(browser, calibrated)
    doubt = 1 - predictions(calibrated)["test/calibrated_probabilities"].max(1)
    shown = readout(browser)
    assert integers(shown["answered"][1]) == [(doubt <= 0.2).sum(), len(doubt)]
    advice = browser.find_element("id", "advice").text
    assert "Recommended: calibrated probability ≥ 0.8000" in advice
    assert "85% of the 40 held-out training inputs" in advice
    move_to(browser, 0)
    assert readout(browser) != shown
    browser.find_element("id", "recommended").click()
    assert readout(browser) == shown
    choose(browser, "score", 3)
    assert not browser.find_element("id", "recommended").is_displayed()


def test_slider_by_keyboard(pages, browser):
    from selenium.webdriver.common.keys import Keys

    visit(browser, pages["images"])
    slider = browser.find_element("id", "coverage")
    before = readout(browser)
    slider.send_keys(Keys.ARROW_LEFT)
    after = readout(browser)
    assert integers(after["answered"][1])[0] < integers(before["answered"][1])[0]
    assert after["answered"][0] in slider.get_attribute("aria-valuetext")
    slider.send_keys(Keys.END)
    assert readout(browser)["answered"][0] == "100%"
    assert readout(browser)["refused"][1] == "none refused"
    assert browser.find_element("id", "readout").get_attribute("aria-live") == "polite"


def background(browser):
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_dark_and_light(pages, browser):
    visit(browser, pages["images"])
    light = background(browser)
    visit(browser, pages["images"], scheme="dark")
    dark = background(browser)
    assert light == "rgb(255, 255, 255)" != dark
    ink = "return getComputedStyle(document.querySelector('svg.plot text')).fill"
    assert min(integers(browser.execute_script(ink))) > 200, "text of figures is light on dark"
    browser.find_element("id", "theme").click()
    assert background(browser) == light
    browser.find_element("id", "theme").click()
    assert background(browser) == dark


def test_paper_and_browsers_without_script(pages, browser):
    for options in ({"media": "print", "scheme": "dark"}, {"script": False}):
        visit(browser, pages["images"], **options)
        assert not browser.find_element("id", "explorer").is_displayed()
        assert browser.find_element("id", "figure-risk-coverage").is_displayed()
        if "media" in options:
            assert background(browser) == "rgb(255, 255, 255)"
