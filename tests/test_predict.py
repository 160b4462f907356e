"""``covary predict`` and ``covary.Predictor``: rows in, predictions and a flag out."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import covary as library
from covary import runs
from covary.data import DataError
from covary.files import FileError
from covary.runs import RunError
from covary.runs.row_model import row_model
from covary.serving import Predictor, labels_of, predict_table
from covary.serving.predictor import _joined, _promise
from covary.serving.writing import writing
from covary.uncertainty.answering import (
    prediction_sets,
    threshold_of_coverage,
    threshold_of_risk,
)
from tests.commands import covary
from tests.spies import peak_memory

ROWS = 600
OUT = ["prediction", "std", "low", "high", "novelty", "flag", "reason"]


def frame(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """Houses, whose prices scatter more where they are old."""
    random = np.random.default_rng(seed)
    found = pd.DataFrame(
        {
            "income": np.exp(random.normal(3, 0.5, rows)),
            "age": random.uniform(0, 100, rows),
            "city": random.choice(["Oslo", "Bonn", "Rome"], rows),
            "country": "Norway",
        }
    )
    scatter = random.standard_normal(rows) * (1 + found["age"] / 10)
    found["price"] = 50 + 2 * found["income"] + 20 * (found["city"] == "Oslo") + scatter
    found["kind"] = np.select([found["price"] > 100, found["price"] > 80], ["dear", "mid"], "low")
    found["other"] = -found["age"] + random.standard_normal(rows)
    return found


def trained(folder: Path, target: str, *options: object) -> Path:
    """A run of houses; the targets it does not have are left out."""
    path = folder / "houses.csv"
    frame().to_csv(path, index=False)
    wanted, run = target.split(","), folder / "run"
    options += tuple(
        word
        for name in ("price", "kind", "other")
        for word in ("--target" if name in wanted else "--drop", name)
    )
    covary("train", path, "--epochs", 15, "--validation", 0.3, "--out", run, *options)
    return run


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("houses"), "price")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("kinds"), "kind")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("both"), "price,other")


@pytest.fixture
def new(tmp_path) -> Path:
    """A table of new rows, with a column that training did not have."""
    rows = frame(200, seed=1).drop(columns=["price", "kind", "other"])
    rows.insert(0, "id", [f'row "{i}", new' for i in range(len(rows))])
    rows.to_csv(tmp_path / "new.csv", index=False)
    return tmp_path / "new.csv"


def test_an_income_far_beyond_training_has_a_wide_interval_and_is_flagged(houses):
    predictor = Predictor.load(houses)
    rows = frame(50, seed=2)
    near, far = predictor(rows), predictor(rows.assign(income=rows["income"] * 1000))
    spread = frame()["price"].std()
    assert (far["std"] > 100 * spread).all()
    assert (far["std"] > 20 * near["std"]).all()
    assert (far["high"] - far["low"] > 100 * spread).all()
    assert (far["novelty"] > 100).all()
    assert (far["flag"] == "ask someone").all()
    assert set(far["reason"]) == {"income: off the data"}
    assert (near["flag"] == "answer").mean() > 0.7
    farthest = predictor(rows.assign(income=1e36))
    assert np.isfinite(farthest["std"]).all()
    assert np.isfinite(farthest["prediction"]).all()
    assert (farthest["std"] > far["std"]).all()


def test_classes_far_beyond_training_are_less_sure_and_flagged(kinds):
    predictor = Predictor.load(kinds)
    rows = frame(50, seed=2)
    near, far = predictor(rows), predictor(rows.assign(income=rows["income"] * 1000))
    assert far["uncertainty"].min() > np.median(near["uncertainty"])
    assert (far["flag"] == "ask someone").all()
    assert list(near) == [
        "prediction", "probability", "set", "uncertainty", "novelty", "flag", "reason"
    ]  # fmt: skip
    np.testing.assert_allclose(near["uncertainty"], 1 - near["probability"], atol=1e-6)
    assert set(near["prediction"]) <= {"dear", "mid", "low"}
    assert all(
        one in each.split("|") for one, each in zip(near["prediction"], near["set"], strict=True)
    )


def test_combinations_that_training_did_not_have_are_off_the_data(tmp_path):
    random = np.random.default_rng(0)
    a = random.standard_normal(400)
    table = pd.DataFrame(
        {
            "a": a,
            "b": a + 0.01 * random.standard_normal(400),
            "y": 2 * a + random.standard_normal(400),
        }
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    covary("train", tmp_path / "t.csv", "--target", "y", "--epochs", 2, "--out", tmp_path / "run")
    found = Predictor.load(tmp_path / "run")({"a": [1.0], "b": [-1.0]})
    assert found["reason"][0] == "off the data, combined"


def test_what_a_row_has_that_training_did_not_have_is_the_reason_to_ask(houses):
    rows = frame(4, seed=3)
    rows.loc[0, "city"] = "Paris"
    rows.loc[1, "age"] = np.nan
    rows.loc[2, "country"] = "Sweden"
    rows.loc[3, "income"] *= 1000
    found = Predictor.load(houses, coverage=1.0)(rows)
    assert found["flag"].tolist() == ["ask someone"] * 4
    assert found["reason"][:3].tolist() == [
        "city: unseen 'Paris'", "age: missing", "country: constant in training"
    ]  # fmt: skip
    both = Predictor.load(houses, coverage=1.0)(rows.assign(city="Paris"))
    assert both["reason"][3] == "city: unseen 'Paris'; income: off the data"


def test_what_training_did_not_have_widens_intervals_as_in_the_estimators(houses, kinds):
    rows = frame(40, seed=3).assign(city="Oslo")
    near, far = (Predictor.load(houses)(rows.assign(city=city)) for city in ("Oslo", "Paris"))
    assert (far["novelty"] >= 1).all()
    assert (far["std"] > 0.99 * frame()["price"].std()).all()
    assert (far["std"] > near["std"]).all()
    inside = near["novelty"] == 0
    assert set(far["reason"][inside]) == {"city: unseen 'Paris'"}
    near, far = (Predictor.load(kinds)(rows.assign(city=city)) for city in ("Oslo", "Paris"))
    assert np.median(far["uncertainty"]) > np.median(near["uncertainty"])
    constant = Predictor.load(houses)(rows.assign(country="Sweden"))
    assert (constant["novelty"] >= 1).all()


def test_unseen_categories_are_refused_if_asked_for(houses, new, tmp_path):
    rows = pd.read_csv(new)
    rows.loc[150, "city"] = "Paris"
    rows.to_csv(new, index=False)
    out = tmp_path / "p.csv"
    said = covary("predict", houses, new, "--out", out, "--unseen", "error", code=1)
    said = " ".join(said.split())
    told = "column 'city' holds 'Paris', none of the known categories Bonn, Oslo, Rome"
    assert f"{told}; correct it, or train again with such rows" in said
    assert not out.exists()
    with pytest.raises(DataError, match=told):
        Predictor.load(houses, unseen="error")(rows)
    covary("predict", houses, new, "--out", out, "--unseen", "flag")
    assert "'drop' is none of flag, error" in covary(
        "predict", houses, new, "--unseen", "drop", code=2
    )
    with pytest.raises(ValueError, match="unseen must be one of flag, error, got 'drop'"):
        Predictor.load(houses, unseen="drop")


def test_the_file_equals_what_the_predictor_says_in_memory(houses, kinds, new, tmp_path):
    """Exactly, in each format; and a chunk of rows gives what all give, to rounding."""
    readers = {
        "csv": pd.read_csv,
        "parquet": pd.read_parquet,
        "jsonl": lambda p: pd.read_json(p, lines=True, precise_float=True),
    }
    rows = pd.read_csv(new)
    for run in (houses, kinds):
        predictor = Predictor.load(run)
        expected = predictor(rows)
        for form, read in readers.items():
            out = tmp_path / f"{run.parent.name}.{form}"
            summary = predict_table(predictor, new, out)
            options = {"keep_default_na": False} if form == "csv" else {}
            found = read(out, **options)
            assert summary.rows == len(found) == len(rows)
            assert list(found) == [*rows, *expected]
            for name, values in expected.items():
                np.testing.assert_array_equal(
                    found[name].to_numpy(), values, err_msg=f"{form} {name}"
                )
            assert found["id"].tolist() == rows["id"].tolist()
            np.testing.assert_array_equal(found["income"].to_numpy(dtype=float), rows["income"])
        predict_table(predictor, new, tmp_path / "chunks.csv", chunk=7, overwrite=True)
        found = pd.read_csv(tmp_path / "chunks.csv", keep_default_na=False)
        for name, values in expected.items():
            if values.dtype == float:
                np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-6)
        assert (found["flag"] == expected["flag"]).mean() > 0.98


def test_a_predictor_is_the_same_when_it_is_loaded_again_or_unpickled(houses, kinds, both, new):
    rows = pd.read_csv(new)
    for run in (houses, kinds, both):
        (run / "predictor.safetensors").unlink(missing_ok=True)
        first = Predictor.load(run)(rows)
        again = Predictor.load(run)
        for predictor in (again, pickle.loads(pickle.dumps(again))):
            for name, values in predictor(rows).items():
                np.testing.assert_array_equal(values, first[name])
    assert library.Predictor is Predictor


def test_several_targets_have_columns_each(both, new):
    found = Predictor.load(both, conformal=True)(pd.read_csv(new))
    names = [f"{name}_{target}" for target in ("price", "other") for name in OUT[:4]]
    assert list(found) == [*names, *OUT[4:]]
    assert (found["low_other"] < found["prediction_other"]).all()


def test_intervals_and_sets_hold_what_they_promise(houses, kinds):
    rows = frame(4000, seed=5)
    for conformal in (False, True):
        found = Predictor.load(houses, level=0.8, conformal=conformal)(rows)
        inside = (found["low"] <= rows["price"]) & (rows["price"] <= found["high"])
        assert 0.7 < inside.mean() < 0.9
    old = found["std"][rows["age"] > 80].mean() / found["std"][rows["age"] < 20].mean()
    assert old > 1.5  # errors are larger where they are
    found = Predictor.load(kinds, level=0.95)(rows)
    inside = [one in each.split("|") for one, each in zip(rows["kind"], found["set"], strict=True)]
    assert 0.9 < np.mean(inside) < 0.995


def test_the_flag_answers_as_many_rows_as_asked_for(houses, kinds):
    rows = frame(4000, seed=6)
    for run in (houses, kinds):
        for coverage in (0.5, 0.9):
            found = Predictor.load(run, coverage=coverage)(rows)
            assert (found["flag"] == "answer").mean() == pytest.approx(coverage, abs=0.12)
    wrong = Predictor.load(kinds)(rows)["prediction"] != rows["kind"]
    risky = wrong.mean()
    strict = Predictor.load(kinds, risk=risky / 2)
    answered = strict(rows)["flag"] == "answer"
    assert 0 < wrong[answered].mean() < 0.8 * risky
    assert "% are wrong, of all" in strict.promise
    nobody = Predictor.load(kinds, risk=1e-9)
    assert "no threshold keeps the risk" in nobody.promise or nobody.threshold < strict.threshold


def test_what_is_kept_is_fitted_again_for_other_weights_and_calibrations(kinds, houses):
    run = runs.open(kinds)
    row_model(run)
    before = run.predictor_path.read_bytes()
    covary("calibrate", kinds, "--noise", "one")
    row_model(runs.open(kinds))
    assert run.predictor_path.read_bytes() != before
    run = runs.open(houses)
    first = row_model(run)
    net = run.network()
    with torch.no_grad():
        next(net.parameters()).mul_(1.01)
    weights = run.model_path.read_bytes()
    run.save_network(net)
    second = row_model(runs.open(houses))
    assert not torch.equal(first.seen_uncertainty, second.seen_uncertainty)
    run.model_path.write_bytes(weights)
    assert torch.equal(row_model(runs.open(houses)).seen_uncertainty, first.seen_uncertainty)


def test_few_rows_are_taken_at_a_time_where_layers_form_large_covariances(tmp_path):
    run = trained(tmp_path, "kind", "--hidden", "1024")
    assert row_model(runs.open(run)).batch == 4096
    tracked = Predictor.load(run)(frame(30))
    covary("calibrate", run, "--covariance", "full")
    predictor = Predictor.load(run)
    assert predictor.model.batch == 2**24 // 1024**2
    np.testing.assert_allclose(
        predictor(frame(30))["probability"], tracked["probability"], atol=0.1
    )


def test_a_damaged_file_of_a_predictor_is_named_with_a_remedy(houses):
    path = houses / "predictor.safetensors"
    row_model(runs.open(houses))
    good = path.read_bytes()
    try:
        path.write_bytes(good[:-10])
        with pytest.raises(FileError, match="is not a readable safetensors"):
            Predictor.load(houses)
    finally:
        path.write_bytes(good)


# ------------------------------------------------------------------------ the command


def test_the_command_writes_scores_and_says_what_the_flag_promises(houses, kinds, tmp_path):
    table = tmp_path / "new.csv"
    rows = frame(300, seed=7)
    rows.loc[0, "price"] = np.nan
    rows.to_csv(table, index=False)
    out = tmp_path / "out" / "predictions.csv"
    said = covary("predict", houses, table, "--out", out, "--keep", "age, kind")
    assert "300 rows" in said
    assert "Of 144 rows that training did not see, 90" in said
    assert "all rows (299): root mean squared error" in said
    assert "in the interval" in said
    assert list(pd.read_csv(out)) == ["age", "kind", *OUT]
    again = covary("predict", houses, table, "--out", out, code=1)
    assert "exists already. Replace it (--overwrite)" in again
    itself = covary("predict", houses, table, "--out", table, "--overwrite", code=1)
    assert "is the table itself" in itself
    assert len(pd.read_csv(table)) == 300
    covary("predict", houses, table, "--out", out, "--overwrite", "--keep", "none")
    assert list(pd.read_csv(out)) == OUT
    result = json.loads(
        covary("predict", kinds, table, "--out", tmp_path / "k.jsonl.gz", "--risk", 0.1, "--json")
    )
    assert result["rows"] == 300
    assert 0 < result["answered"] <= 300
    assert {"rows", "wrong", "in the set"} == result["scores"]["all"].keys()
    with gzip.open(tmp_path / "k.jsonl.gz", "rt") as file:
        assert json.loads(file.readline())["flag"] in ("answer", "ask someone")


def test_standard_input_and_output(houses, new, tmp_path):
    from typer.testing import CliRunner

    from covary.cli import app

    result = CliRunner().invoke(
        app, ["predict", str(houses), "-", "--out", "-", "--keep", "id"], input=new.read_bytes()
    )
    assert result.exit_code == 0, result.output
    found = pd.read_csv(io.StringIO(result.stdout), keep_default_na=False)
    assert found["id"].tolist() == pd.read_csv(new)["id"].tolist()
    expected = Predictor.load(houses)(pd.read_csv(new))
    np.testing.assert_array_equal(found["flag"], expected["flag"])


def test_a_pipe_that_is_closed_ends_the_command_quietly(houses, new):
    """Whether it is closed before all is written, or when the rest of it is flushed."""
    command = [sys.executable, "-m", "covary", "predict", str(houses), str(new), "--out", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == 141


def test_a_run_that_cannot_be_written_to_predicts_all_the_same(houses, kinds, new, monkeypatch):
    expected = {run: Predictor.load(run)(pd.read_csv(new)) for run in (houses, kinds)}
    for run in (houses, kinds):
        for name in ("predictor.safetensors", "calibration.json"):
            (run / name).unlink(missing_ok=True)
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with monkeypatch.context() as changed:
            changed.setattr(os, "access", lambda path, mode: mode != os.W_OK)
            found = Predictor.load(run)(pd.read_csv(new))
            said = covary("predict", run, new, "--out", new.with_name(f"{run.parent.name}.csv"))
        assert "and not kept, as the run is read-only" in " ".join(said.split())
        assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        np.testing.assert_array_equal(found["prediction"], expected[run]["prediction"])


def test_infinite_ends_are_null_in_json_lines(houses, tmp_path):
    frame(3).to_csv(tmp_path / "new.csv", index=False)
    options = ["--conformal", "--level", 0.999]  # which 144 rows cannot promise
    for form, wrong in (("csv", "inf"), ("jsonl", '"high": null')):
        out = tmp_path / f"p.{form}"
        covary("predict", houses, tmp_path / "new.csv", "--out", out, *options)
        assert wrong in out.read_text()
    assert all(json.loads(line)["low"] is None for line in out.read_text().splitlines())


def _renamed(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={"income": "incomes"})


BROKEN = {
    "a renamed column": (_renamed, "no column 'income' (did you mean 'incomes'?)"),
    "the table of another run": (
        lambda t: pd.DataFrame({"x": [1.0]}),
        "there are no columns 'income', 'age', 'city'",
    ),
    "no rows": (lambda t: t[:0], "has a header but no rows"),
    "text among numbers": (
        lambda t: t.assign(age=["old", *map(str, t["age"][1:])]),
        "correct them, as they were numbers",
    ),
    "an infinite number": (lambda t: t.assign(age=np.inf), "infinite or beyond"),
    "texts as the target": (
        lambda t: t.assign(price="dear"),
        "column 'price' holds 0 numbers and 20 texts, the first 'dear' in line 2",
    ),
    "two columns of one name": (
        lambda t: pd.concat([t, t[["age"]]], axis=1),
        "more than one column is called 'age'",
    ),
    "decimal commas": (
        lambda t: t.assign(age=[f"{age:.1f}".replace(".", ",") for age in t["age"]]),
        "in line 2; correct them, as they were numbers in training",
    ),
    "a column of the predictions": (
        lambda t: t.assign(std=1.0),
        "'std', which predictions are called, too",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(what, houses, tmp_path):
    change, told = BROKEN[what]
    change(frame(20).drop(columns=["price"])).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "out" / "predictions.csv"
    said = covary("predict", houses, tmp_path / "new.csv", "--out", out, code=1)
    assert told in " ".join(said.split())
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_a_target_is_compared_with_or_refused_with_a_remedy(kinds, tmp_path):
    rows, out = frame(20), tmp_path / "p.csv"
    rows.to_csv(tmp_path / "new.csv", index=False)
    said = covary("predict", kinds, tmp_path / "new.csv", "--out", out, "--overwrite")
    assert "Against the target, all rows (20): wrong" in said
    rows.assign(kind=["huge", *rows["kind"][1:]]).to_csv(tmp_path / "new.csv", index=False)
    out.unlink()
    said = " ".join(covary("predict", kinds, tmp_path / "new.csv", "--out", out, code=1).split())
    assert (
        "holds 'huge', none of the classes dear, low, mid; correct it, or leave the column" in said
    )
    assert not out.exists()
    rows[:1].drop(columns=["kind"]).to_csv(tmp_path / "new.csv", index=False)
    assert "1 row, " in covary("predict", kinds, tmp_path / "new.csv", "--out", out)


def test_an_error_in_a_late_chunk_leaves_what_was_there(houses, tmp_path):
    rows = frame(40).drop(columns=["price"]).astype({"age": object})
    rows.loc[35, "age"] = "old"
    rows.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "predictions.csv"
    out.write_text("as it was")
    with pytest.raises(DataError, match="'old' in line 37"):
        predict_table(Predictor.load(houses), tmp_path / "new.csv", out, overwrite=True, chunk=10)
    assert out.read_text() == "as it was"
    assert not list(tmp_path.glob(".*unfinished"))


def test_what_predict_refuses(houses, new, tmp_path):
    (tmp_path / "empty.csv").write_text("")
    assert "is empty" in covary("predict", houses, tmp_path / "empty.csv", code=1)
    assert "is not there" in covary(
        "predict", houses, tmp_path / "none.csv", "--out", tmp_path / "p", code=1
    )
    assert "holds no run" in covary("predict", tmp_path / "none", new, code=1)
    said = covary("predict", houses, new, "--risk", 0.1, "--out", tmp_path / "p.csv", code=1)
    assert "this run predicts numbers" in said
    said = covary("predict", houses, new, "--out", tmp_path / "p.csv", "--format", "xlsx", code=1)
    assert "must be one of csv, jsonl, parquet, got 'xlsx'" in " ".join(said.split())
    said = covary("predict", houses, new, "--out", tmp_path / "p.xyz", code=1)
    assert "its ending does not say: end it in .csv" in " ".join(said.split())
    for option, value in (("--level", 90), ("--level", 0), ("--level", 1), ("--coverage", 0)):
        assert option in covary("predict", houses, new, option, value, code=2)
    said = covary("predict", houses, new, "--array", "x", "--out", tmp_path / "p.csv", code=1)
    assert "which has no array 'x' to choose" in " ".join(said.split())
    for options in ([], ["--overwrite"]):
        said = covary("predict", houses, new, "--out", tmp_path, *options, code=1)
        assert "is a folder, where predictions are a file" in " ".join(said.split())
    said = covary("predict", houses, new, "--risk", 0.1, "--coverage", 0.5, code=2)
    assert "--risk and --coverage both choose the rows to answer" in " ".join(said.split())
    with pytest.raises(ValueError, match="not by both"):
        Predictor.load(houses, risk=0.1, coverage=0.5)
    with pytest.raises(DataError, match=r"Column 'income' is 3.0, expected an array"):
        Predictor.load(houses)({"income": 3.0, "age": 1.0, "city": "Oslo"})
    with pytest.raises(DataError, match="'income' has 2, 'age' has 1"):
        Predictor.load(houses)({"income": [3.0, 4.0], "age": [1.0], "city": ["Oslo"]})
    with pytest.raises(DataError, match="no column 'id2'"):
        predict_table(Predictor.load(houses), new, tmp_path / "p.csv", keep=["id2"])
    assert not (tmp_path / "p.csv").exists()


def test_runs_that_cannot_predict_rows(houses, tmp_path):
    covary("train", "two-moons", "--epochs", 1, "--out", tmp_path / "moons")
    with pytest.raises(RunError, match=r"no run of a table of yours or of images \(two-moons\)"):
        Predictor.load(tmp_path / "moons")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name in ("config.toml", "schema.json", "checkpoint.safetensors"):
        (unfinished / name).write_bytes((houses / name).read_bytes())
    with pytest.raises(RunError, match="not trained to its end"):
        Predictor.load(unfinished)
    gone = tmp_path / "gone"
    shutil.copytree(houses, gone, ignore=shutil.ignore_patterns("predictor*"))
    text = (gone / "config.toml").read_text()
    (gone / "config.toml").write_text(text.replace("houses.csv", "moved.csv"))
    with pytest.raises(
        DataError, match=r"moved\.csv is not there\. Predictions are fitted to what"
    ):
        Predictor.load(gone)
    few = trained(tmp_path, "price", "--limit", 20)
    with pytest.raises(RunError, match=r"held out 6 samples from training, too few"):
        Predictor.load(few)


def test_one_row_and_columns_of_other_types(houses):
    predictor = Predictor.load(houses)
    row = frame(1, seed=8)
    alone = predictor({name: row[name].tolist() for name in ("income", "age", "city")})
    assert alone["prediction"].shape == (1,)
    together = predictor(pd.concat([row, frame(30)]).astype({"city": "category"}))
    np.testing.assert_allclose(alone["prediction"], together["prediction"][:1], rtol=1e-5)


def test_memory_is_bounded_by_the_chunk(houses, tmp_path):
    predictor = Predictor.load(houses)

    def peak(rows: int) -> int:
        frame(rows).to_csv(tmp_path / "many.csv", index=False)
        source, out = tmp_path / "many.csv", tmp_path / "p.csv"
        return peak_memory(
            lambda: predict_table(predictor, source, out, chunk=1000, overwrite=True)
        )

    assert peak(60_000) < 1.2 * peak(20_000)  # both are longer than what is read ahead


def test_errors_of_inputs_widen_intervals(tmp_path):
    rows = frame().assign(income_std=5.0)
    path = tmp_path / "houses.csv"
    rows.drop(columns=["kind", "other"]).to_csv(path, index=False)
    covary(
        "train", path, "--target", "price", "--error", "income=income_std", "--epochs", 15,
        "--validation", 0.3, "--out", tmp_path / "run",
    )  # fmt: skip
    predictor = Predictor.load(tmp_path / "run")
    exact, rough = (predictor(rows.assign(income_std=std)) for std in (0.0, 20.0))
    assert np.median(rough["std"] / exact["std"]) > 1.5


# ------------------------------------------------------------------------ thresholds and formats


def test_thresholds_by_hand():
    uncertainty, wrong = np.array([0.4, 0.1, 0.3, 0.2]), np.array([True, False, False, True])
    assert threshold_of_risk(uncertainty, wrong, 0.4) == 0.3  # wrong: 0.2 of 0.1, 0.2, 0.3
    assert threshold_of_risk(uncertainty, wrong, 0.3) == 0.1
    assert threshold_of_risk(uncertainty[:1], wrong[:1], 0.5) == -np.inf
    assert [threshold_of_coverage(uncertainty, share) for share in (0.25, 0.3, 1)] == [
        0.1,
        0.2,
        0.4,
    ]
    with pytest.raises(ValueError, match="at most 1, got 2"):
        threshold_of_coverage(uncertainty, 2)
    probability = np.array([[0.5, 0.3, 0.2], [0.2, 0.35, 0.45]])
    found = prediction_sets(probability, np.linspace(0.1, 0.9, 9), 0.7)  # the seventh of nine: 0.7
    assert found.tolist() == [[True, True, False], [False, True, True]]


def test_labels_of_a_set_are_told_apart():
    for labels in (["a"], ["no", "yes"], ["a|b", "b"], ["\\", "|", "a\\|"], ["x\ny|", "z"]):
        assert labels_of(_joined(labels)) == labels
    assert _joined(["a", "b c"]) == "a|b c"


def test_a_set_is_compared_with_targets_that_have_bars_in_them(tmp_path):
    table = frame().drop(columns=["price", "other"]).replace({"kind": {"dear": "a|b", "mid": "b"}})
    table.to_csv(tmp_path / "kinds.csv", index=False)
    run = tmp_path / "run"
    covary("train", tmp_path / "kinds.csv", "--target", "kind", "--epochs", 15, "--out", run)
    predictor = Predictor.load(run, level=0.6)
    found = predict_table(predictor, tmp_path / "kinds.csv", tmp_path / "out.csv")
    sets = predictor(table)["set"]
    inside = [one in labels_of(each) for one, each in zip(table["kind"], sets, strict=True)]
    assert found.scores["all"]["in the set"] == pytest.approx(np.mean(inside))
    assert "\\|" in "".join(sets)


def test_a_flag_that_does_not_help_says_so(kinds):
    schema = Predictor.load(kinds).schema
    error, every = np.repeat([[1.0], [0.0]], 50, 0), np.ones(100, bool)
    sure = np.arange(100) >= 50
    assert _promise(schema, error, sure).endswith("of these 0.0% are wrong, of all 50.0%.")
    assert "do not show that the flag helps" in _promise(schema, error, ~sure)
    assert "do not show" not in _promise(schema, error, every)


def test_a_predictor_prints_in_a_line(houses):
    assert len(told := repr(Predictor.load(houses))) < 300
    assert told.startswith("Predictor(price, level=0.9, ")


def test_texts_and_numbers_are_read_back_as_they_were(tmp_path):
    import pyarrow as pa

    texts = ["plain", 'a "quote"', "a, comma", "two\nlines", "", "ø", "|"]
    numbers = [0.1, 1 / 3, 1e300, 5e-324, -0.0, np.inf, 123456789.123456789]
    columns = {
        "text, with comma": pa.array(texts),
        "x": pa.array(numbers),
        "n": pa.array([*range(6), None]),
    }
    for name in ("t.csv", "t.tsv", "t.csv.gz", "t.jsonl", "t.parquet"):
        with writing(tmp_path / name, name.split(".")[1].replace("tsv", "csv")) as write:
            write(columns)
            write(columns)
        if "parquet" in name:
            found = pd.read_parquet(tmp_path / name)
        elif "jsonl" in name:
            lines = (tmp_path / name).read_text().splitlines()
            found = pd.DataFrame([json.loads(line) for line in lines])
            assert np.isnan(found["x"][5])
            found.loc[[5, 12], "x"] = np.inf
        else:
            options = {
                "keep_default_na": False,
                "na_values": {"n": [""]},
                "sep": "\t" if "tsv" in name else ",",
            }
            found = pd.read_csv(tmp_path / name, **options)
        assert found["text, with comma"].tolist() == texts * 2
        np.testing.assert_array_equal(found["x"], numbers * 2)
        np.testing.assert_array_equal(found["n"], [*range(6), np.nan] * 2)
