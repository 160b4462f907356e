"""Predictors in other people's hands: saved as plain files, frame by frame, as MLflow's models."""

from __future__ import annotations

import ast
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import covary
from covary.data import DataError
from covary.files import FileError, read_tensors, write_tensors
from covary.serving import Predictor
from tests.commands import covary as command
from tests.commands import trained_run
from tests.test_predict import frame, trained

PLAIN = {".json", ".safetensors", ".toml"}


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("houses"), "price")


@pytest.fixture(scope="module")
def predictor(houses) -> Predictor:
    return Predictor.load(houses, level=0.8, conformal=True, coverage=1.0)


def same(found, expected) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


# ------------------------------------------------------------------------- plain files


def test_a_saved_predictor_needs_neither_run_nor_data(houses, predictor, tmp_path):
    pickle.loads(pickle.dumps(predictor)).save(tmp_path / "kept")
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} == PLAIN
    assert str(houses.parent) not in (tmp_path / "kept" / "config.toml").read_text()
    rows = frame(40, seed=8)
    same(Predictor.restored(tmp_path / "kept")(rows), predictor(rows))
    again = Predictor.load(tmp_path / "kept", level=0.5)
    same(again(rows), Predictor.load(houses, level=0.5)(rows))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_mixtures_from_before_they_had_tails_are_fitted_again(houses, tmp_path):
    run = Path(shutil.copytree(houses, tmp_path / "run"))
    path = run / "predictor.safetensors"
    tensors, about = read_tensors(path)
    for earlier, is_kept in (({}, True), ({"families": '["mixture"]'}, False)):
        del about["format"]
        about |= earlier | {"seconds": "123.0"}
        write_tensors(path, tensors, about)
        Predictor.load(run)
        _, about = read_tensors(path)
        assert (about["seconds"] == "123.0") == is_kept
        assert ("format" in about) == (not is_kept)
        about["format"] = "2"


def test_a_noise_that_was_chosen_anew_is_kept(tmp_path, recwarn):
    run = trained(tmp_path, "kind", "--noise", "0.3")
    command("calibrate", run, "--noise", "one")
    predictor = Predictor.load(run)
    predictor.save(tmp_path / "kept")
    rows = frame(40, seed=8)
    same(Predictor.restored(tmp_path / "kept")(rows), predictor(rows))
    assert not [warning for warning in recwarn if "saved with the weights" in str(warning.message)]


def test_images_are_saved_too(tmp_path):
    run = trained_run(tmp_path / "run", "digits", epochs=1, hidden=(8,))
    predictor = Predictor.load(run.path)
    predictor.save(tmp_path / "kept")
    images = np.random.default_rng(0).integers(0, 16, (5, 1, 8, 8), dtype=np.uint8)
    same(Predictor.restored(tmp_path / "kept")(images), predictor(images))


def test_what_cannot_be_saved_or_restored_is_told_with_the_remedy(houses, predictor, tmp_path):
    with pytest.raises(FileError, match=r"is there already\. Remove it, or choose another"):
        predictor.save(houses)
    kept = tmp_path / "kept"
    predictor.save(kept)
    path = kept / "predictor.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format": "7"}))
    with pytest.raises(FileError, match="has format '7', and this covary reads format '1'"):
        Predictor.restored(kept)
    path.write_text(json.dumps({"format": "1"}))
    with pytest.raises(FileError, match=r"is damaged: KeyError.*Save the predictor again"):
        Predictor.restored(kept)
    path.unlink()
    with pytest.raises(FileError, match=r"predictor\.json is not there"):
        Predictor.restored(kept)


# ------------------------------------------------------------------------------ frames


def test_a_frame_gets_predictions_behind_its_columns(predictor):
    rows = frame(30, seed=9).set_index("age", drop=False)[::-1]
    found, expected = predictor.frame(rows), predictor(rows)
    assert list(found) == [*rows, *expected]
    assert (found.index == rows.index).all()
    same({name: found[name].to_numpy() for name in expected}, expected)
    assert list(predictor.frame(rows, keep=["age"])) == ["age", *expected]
    nothing = predictor.frame(rows[:0], keep=["age"])
    assert (len(nothing), list(nothing)) == (0, ["age", *expected])
    assert (nothing.dtypes == predictor.frame(rows, keep=["age"]).dtypes).all()
    with pytest.raises(DataError, match="'std', which predictions are called, too"):
        predictor.frame(rows.assign(std=1.0))
    with pytest.raises(DataError, match="no column 'aeg' \\(did you mean 'age'"):
        predictor.frame(rows, keep=["aeg"])


def test_an_example_is_a_row_that_the_run_takes(tmp_path):
    rows = frame(200).drop(columns=["kind", "other"])
    rows["day"] = pd.date_range("2024-01-01", periods=200).astype(str)
    rows["old"] = rows["age"] > 50
    rows["error"] = 0.1
    rows.to_csv(tmp_path / "t.csv", index=False)
    options = ["--target", "price", "--error", "income=error", "--epochs", 1, "--validation", 0.2]
    command("train", tmp_path / "t.csv", *options, "--out", tmp_path / "run")
    predictor = Predictor.load(tmp_path / "run")
    example = predictor.example()
    assert set(example) == {"income", "age", "city", "day", "old", "error"}
    assert predictor(example)["reason"][0] in ("", "unsure")
    covary.mlflow.save_model(predictor, tmp_path / "model")
    import mlflow

    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    kinds = {column.name: column.type.name for column in model.metadata.signature.inputs}
    assert kinds == {
        "income": "double", "age": "double", "city": "string", "day": "datetime", "old": "boolean",
        "error": "double",
    }  # fmt: skip
    given = rows.drop(columns="price").assign(day=pd.to_datetime(rows["day"]))
    found = model.predict(given)
    same({name: found[name].to_numpy() for name in found}, predictor(given))


def functions_in_docs(folder: Path) -> list[dict[str, object]]:
    """What the blocks of docs/lake.md that are not run define, block by block."""
    text = (Path(covary.__file__).parents[1] / "docs" / "lake.md").read_text()
    found = []
    for block in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        tree = ast.parse(block.replace("/shared/predictor", str(folder)))
        tree.body = [
            x for x in tree.body if "covary" in ast.unparse(x) or "predictor" in ast.unparse(x)
        ]
        names: dict[str, object] = {"covary": covary}
        exec(compile(tree, "lake.md", "exec"), names)
        found.append(names)
    return found


def test_functions_for_ray_spark_and_dask_take_frames(predictor, tmp_path):
    predictor.save(tmp_path / "kept")
    on_ray, on_spark, on_dask = functions_in_docs(tmp_path / "kept")
    rows = frame(30, seed=9)
    rows.insert(0, "id", np.arange(30))
    expected = predictor.frame(rows, keep=["id"])
    pd.testing.assert_frame_equal(on_ray["Scored"]()(rows), expected)
    parts = list(on_spark["scored"](iter([rows[:0], rows])))
    pd.testing.assert_frame_equal(parts[1], expected)
    assert (len(parts[0]), list(parts[0])) == (0, list(expected))
    text = (Path(covary.__file__).parents[1] / "docs" / "lake.md").read_text()
    types = "".join(re.findall(r'^numbers = "(.*)"', text, re.MULTILINE)) + ", flag, reason"
    assert [each.split()[0] for each in types.split(", ")] == list(expected)
    meta = on_dask["scored"](rows[:0])
    pd.testing.assert_frame_equal(on_dask["scored"](rows), expected)
    assert (meta.dtypes == expected.dtypes).all()


# ------------------------------------------------------------------------------ MLflow

_FRESH = """
import sys
import mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
model.predict(pandas.read_parquet(sys.argv[2])).to_parquet(sys.argv[3])
"""


def test_a_model_of_mlflow_predicts_in_a_fresh_process(predictor, tmp_path):
    rows = frame(50, seed=10)
    rows.loc[3, "age"] = np.nan
    rows.loc[4, "city"] = None
    rows.to_parquet(tmp_path / "rows.parquet")
    covary.mlflow.save_model(predictor, tmp_path / "model")
    ran = subprocess.run(
        [sys.executable, "-c", _FRESH, tmp_path / "model", "rows.parquet", "out.parquet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(covary.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
    )
    assert ran.returncode == 0, ran.stderr
    found = pd.read_parquet(tmp_path / "out.parquet")
    same({name: found[name].to_numpy() for name in found}, predictor(rows))
    assert found["reason"][3] == "age: missing"


def test_a_model_of_mlflow_has_signature_requirements_and_example_and_no_pickle(
    predictor, tmp_path
):
    import mlflow

    covary.mlflow.save_model(predictor, tmp_path / "model")
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert not [path.name for path in files if path.suffix in (".pkl", ".pickle", ".pt", ".pth")]
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    assert model.metadata.flavors["python_function"]["loader_module"] == "covary.mlflow"
    outputs = {column.name: column.type.name for column in model.metadata.signature.outputs}
    assert outputs == {
        **dict.fromkeys(("prediction", "std", "low", "high", "novelty"), "double"),
        **dict.fromkeys(("flag", "reason"), "string"),
    }
    wanted = (tmp_path / "model" / "requirements.txt").read_text()
    assert f"covary[mlflow]=={covary.__version__}" in wanted
    assert "+" not in wanted
    example = model.input_example
    assert model.predict(example)["reason"][0] == ""
    with pytest.raises(mlflow.exceptions.MlflowException, match="missing inputs"):
        model.predict(example.drop(columns="city"))


def test_a_model_is_logged_in_a_run_of_mlflow(predictor, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run():
        info = covary.mlflow.log_model(predictor)
    rows = frame(5, seed=11)
    found = mlflow.pyfunc.load_model(info.model_uri).predict(rows)
    same({name: found[name].to_numpy() for name in found}, predictor(rows))


def test_a_run_of_images_is_no_model_of_mlflow(tmp_path):
    run = trained_run(tmp_path / "run", "digits", epochs=1, hidden=(8,))
    with pytest.raises(ValueError, match="takes data frames, and the run is of images"):
        covary.mlflow.save_model(Predictor.load(run.path), tmp_path / "model")
