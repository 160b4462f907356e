"""``covary predict`` of many files: a file of predictions for each, in a folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from covary.data import DataError
from covary.data.locking import locked
from covary.serving import FileOptions, PredictedTable, Predictor, on_ray, predict_files
from covary.serving.folders import merged, works
from tests.commands import covary, trained_run
from tests.test_predict import frame, trained

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("houses"), "price")


@pytest.fixture(scope="module")
def predictor(houses) -> Predictor:
    return Predictor.load(houses)


def lake(folder: Path, files: int = 3, rows: int = 50) -> Path:
    """Files of rows that carry ids, one of them in a sub-folder."""
    for i in range(files):
        table = frame(rows, seed=i).drop(columns=["kind", "other"])
        table.insert(0, "id", np.arange(rows) + i * rows)
        path = folder / "lake" / ("sub" if i == files - 1 else ".") / f"{i}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(path)
    return folder / "lake"


def scored(folder: Path) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(path) for path in sorted(folder.rglob("*.parquet"))])


def words(said: str) -> str:
    return " ".join(said.split())


def test_each_file_gets_predictions_of_its_name(houses, predictor, tmp_path):
    folder = lake(tmp_path)
    said = covary("predict", houses, folder, "--out", tmp_path / "scored")
    assert "150 rows" in said
    assert "all rows (150): root mean squared error" in said
    files = sorted(path.name for path in (tmp_path / "scored").rglob("*") if path.is_file())
    assert files == ["0.parquet", "1.parquet", "2.parquet", "_predictions.json"]
    for path in sorted(folder.rglob("*.parquet")):
        expected = predictor.frame(pd.read_parquet(path))
        found = pd.read_parquet(tmp_path / "scored" / path.relative_to(folder))
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)


def test_a_pattern_names_files_and_a_format_their_predictions(houses, tmp_path):
    folder = lake(tmp_path)
    out = tmp_path / "scored"
    covary("predict", houses, f"{folder}/*.parquet", "--out", out, "--format", "csv")
    assert sorted(path.name for path in out.glob("*.*")) == ["0.csv", "1.csv", "_predictions.json"]
    command = ["predict", houses, f"{folder}/**/*.parquet", "--out", tmp_path / "all", "--json"]
    said = covary(*command)
    summary = json.loads(said[said.index("{") :])
    assert summary["rows"] == 150
    assert (tmp_path / "all" / "sub" / "2.parquet").exists()


def test_several_names_are_many_files(houses, predictor, tmp_path):
    folder, out = lake(tmp_path), tmp_path / "scored"
    covary("predict", houses, folder / "1.parquet", folder / "sub" / "2.parquet", "--out", out)
    assert (out / "1.parquet").exists()
    assert (out / "sub" / "2.parquet").exists()
    assert len(scored(out)) == 100
    covary("predict", houses, folder / "1.parquet", "--out", f"{tmp_path}/one/")
    assert (tmp_path / "one" / "1.parquet").exists()
    with pytest.raises(DataError, match="each is a file"):
        predict_files(predictor, [str(folder), str(folder / "1.parquet")], tmp_path / "other")
    with pytest.raises(DataError, match="No file is named"):
        predict_files(predictor, [], tmp_path / "other")


def test_names_are_places_and_no_table_is_replaced(tmp_path, monkeypatch):
    folder = lake(tmp_path)
    shutil.copy(folder / "0.parquet", tmp_path / "0.parquet")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    up = os.path.relpath(folder)
    names = [f"{up}/1.parquet", f"{up}/sub/../1.parquet", str(folder / "1.parquet")]
    found = works([*names, "../0.parquet"], Path("scored"), FileOptions())
    assert [each.out for each in found] == [
        Path("scored", folder.name, "1.parquet"),
        Path("scored", "0.parquet"),
    ]
    with pytest.raises(DataError, match="which is one of the tables: choose another folder"):
        works([f"{up}/0.parquet", "../0.parquet"], folder, FileOptions())


def test_endings_that_are_none_of_a_table_stay_in_the_name(tmp_path):
    for name in ("data.2024-01", "data.2024-02", "x.csv"):
        (tmp_path / name).touch()
    names = [str(tmp_path / name) for name in ("data.2024-01", "data.2024-02", "x.csv")]
    found = works(names, Path("scored"), FileOptions(format="parquet"))
    ends = [each.out.name for each in found]
    assert ends == ["data.2024-01.parquet", "data.2024-02.parquet", "x.parquet"]


def test_predictions_that_are_there_are_kept_replaced_or_refused(houses, tmp_path):
    folder, out = lake(tmp_path), tmp_path / "scored"
    command = ["predict", houses, folder, "--out", out]
    covary(*command)
    said = words(covary(*command, code=1))
    assert "3 of 3 files of predictions are in" in said
    assert "Go on with the rest (--resume), replace them (--overwrite), or choose" in said
    (out / "1.parquet").unlink()
    (out / ".1.parquet.77.unfinished").write_text("of a process that was killed")
    before = (out / "0.parquet").stat().st_mtime_ns
    assert "50 rows" in covary(*command, "--resume")
    assert (out / "0.parquet").stat().st_mtime_ns == before
    assert not list(out.glob(".*"))
    assert "All files were predicted already" in covary(*command, "--resume")
    said = words(covary(*command, "--resume", "--level", 0.5, code=1))
    assert "has predictions with other settings (level). Go on with the model and options" in said
    covary(*command, "--overwrite", "--level", 0.5)
    settings = json.loads((out / "_predictions.json").read_text())
    assert "replacing" not in settings
    (out / "_predictions.json").write_text(json.dumps(settings | {"replacing": True}))
    said = words(covary(*command, "--resume", "--level", 0.5, code=1))
    assert "an --overwrite did not come to its end. Replace them all (--overwrite)" in said
    assert "not both: choose one" in covary(*command, "--resume", "--overwrite", code=1)
    assert (out / "0.parquet").stat().st_mtime_ns != before


def test_columns_are_checked_before_anything_is_written(houses, tmp_path):
    folder, out = lake(tmp_path), tmp_path / "scored"
    more = pd.read_parquet(folder / "1.parquet").assign(more=1)
    more.to_parquet(folder / "1.parquet")
    said = words(covary("predict", houses, folder, "--out", out, code=1))
    assert "have different columns: 'more'. Write those that all have (--keep NAMES, or" in said
    assert not out.exists()
    covary("predict", houses, folder, "--out", out, "--keep", "id")
    assert len(scored(out)) == 150
    more.drop(columns="age").to_parquet(folder / "1.parquet")
    said = words(covary("predict", houses, folder, "--out", tmp_path / "b", code=1))
    assert "1.parquet: there is no column 'age'" in said
    assert not (tmp_path / "b").exists()


def test_a_file_that_is_wrong_in_its_middle_leaves_the_others(houses, tmp_path):
    folder, out = lake(tmp_path), tmp_path / "scored"
    good = (folder / "1.parquet").read_bytes()
    wrong = pd.read_parquet(folder / "1.parquet").astype({"age": str})
    wrong.loc[7, "age"] = "old"
    wrong.to_parquet(folder / "1.parquet")
    said = words(covary("predict", houses, folder, "--out", out, code=1))
    assert "1 of 3 files are predicted; when this one is mended or moved away, --resume" in said
    assert [path.name for path in out.glob("*.parquet")] == ["0.parquet"]
    (folder / "1.parquet").write_bytes(good)
    covary("predict", houses, folder, "--out", out, "--resume")
    assert scored(out)["id"].is_unique
    assert len(scored(out)) == 150


def test_wrong_use_is_told_with_the_remedy(houses, predictor, tmp_path, monkeypatch):
    folder = lake(tmp_path)
    one = folder / "0.parquet"

    def told(*arguments: object, code: int = 1) -> str:
        return words(covary("predict", houses, *arguments, code=code)).replace("│ ", "")

    assert "No file matches" in told(f"{folder}/*.csv", "--out", tmp_path / "o")
    (tmp_path / "empty").mkdir()
    assert "is a folder without any, nor" in told(tmp_path / "empty", "--out", tmp_path / "o")
    assert "many files go to a folder" in told(folder, code=2)
    assert "many files go to a folder" in told(folder, "--out", "-", code=2)
    assert "is a file, where predictions of many" in told(folder, "--out", one)
    for out in (folder, folder / "scored"):
        assert "is where the files are read from" in told(folder, "--out", out)
    assert "is where the files are read" in told(f"{folder}/*.parquet", "--out", folder)
    assert "--resume is for many files" in told(one, "--resume", code=2)
    assert "--engine ray is for many files" in told(one, "--engine", "ray", code=2)
    out = tmp_path / "o"
    assert "one of local, ray, got 'spark'" in told(folder, "--out", out, "--engine", "spark")
    pd.read_parquet(one).to_csv(folder / "0.csv", index=False)
    assert "would both be written" in told(folder, "--out", tmp_path / "o", "--format", "csv")
    with locked(tmp_path / "o", wait=False):
        assert "Another process writes" in told(f"{folder}/*.parquet", "--out", tmp_path / "o")
    assert not list((tmp_path / "o").iterdir())
    monkeypatch.setitem(sys.modules, "ray.data", None)
    said = told(f"{folder}/*.parquet", "--out", tmp_path / "o", "--engine", "ray")
    assert "predicting with --engine ray needs Ray: pip install 'covary[ray]'" in said
    run = tmp_path / "untrained"
    run.mkdir()
    (run / "config.toml").write_bytes((houses / "config.toml").read_bytes())
    (run / "schema.json").write_bytes((houses / "schema.json").read_bytes())
    said = words(covary("predict", run, folder, "--out", tmp_path / "o", code=1))
    assert "is not trained to its end. Go on with it first" in said


def test_images_of_many_files(tmp_path):
    run = trained_run(tmp_path / "run", "digits", epochs=1, hidden=(8,))
    images = np.random.default_rng(0).integers(0, 16, (7, 1, 8, 8), dtype=np.uint8)
    (tmp_path / "scans").mkdir()
    for name in ("a", "b"):
        np.savez(tmp_path / "scans" / f"{name}.npz", images=images)
    covary("predict", run.path, f"{tmp_path}/scans/*.npz", "--out", tmp_path / "out")
    assert len(pd.read_csv(tmp_path / "out" / "a.npz.csv")) == 7
    (tmp_path / "scans" / "c.png").touch()
    said = covary("predict", run.path, f"{tmp_path}/scans/*.png", "--out", tmp_path / "x", code=1)
    assert "name their folder" in words(said)


def test_scores_of_several_files_are_those_of_all_their_rows(predictor, tmp_path):
    folder = lake(tmp_path)
    whole = predict_files(predictor, str(folder), tmp_path / "out", how=FileOptions(keep=("id",)))
    table = pd.concat([pd.read_parquet(path) for path in sorted(folder.rglob("*.parquet"))])
    error = predictor(table)["prediction"] - table["price"].to_numpy()
    found = whole.scores["all"]
    assert found["rows"] == 150
    assert found["root mean squared error"] == pytest.approx(math.sqrt((error**2).mean()))
    assert found["mean absolute error"] == pytest.approx(np.abs(error).mean())
    assert merged([]) == PredictedTable()


def test_a_command_that_is_killed_leaves_whole_files_and_goes_on(houses, tmp_path):
    folder, out = lake(tmp_path, files=6, rows=20_000), tmp_path / "scored"
    arguments = ["predict", str(houses), str(folder), "--out", str(out)]
    code = f"from covary.cli import app; app({arguments!r})"
    running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not list(out.glob("*.parquet")):
        assert running.poll() is None
        time.sleep(0.005)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    covary(*arguments, "--resume")
    found = scored(out)
    assert sorted(found["id"]) == list(range(120_000))
    assert not list(out.glob(".*"))


def test_one_missing_source_is_still_told_as_before(houses, tmp_path):
    with pytest.raises(DataError, match="No file matches"):
        predict_files(Predictor.load(houses), f"{tmp_path}/*.csv", tmp_path / "o")
    assert "is not there" in covary("predict", houses, tmp_path / "no.csv", code=1)


def test_workers_have_ended_when_a_problem_is_told(predictor, tmp_path, monkeypatch):
    happened = []

    def predicted(kept, work, how):
        try:
            yield "Nothing can be read."
        finally:
            happened.append(("ended", kept.exists()))

    monkeypatch.setattr(on_ray, "require", lambda: None)
    monkeypatch.setattr(on_ray, "predicted", predicted)
    lake(tmp_path)
    # An error keeps frames alive, and what they hold.
    with pytest.raises(DataError, match=r"Nothing can be read\. 0 of 3 files") as kept:
        predict_files(predictor, str(tmp_path / "lake"), tmp_path / "out", engine="ray")
    assert happened == [("ended", True)]
    assert kept.tb is not None


def test_a_folder_that_is_named_like_a_table_is_refused(houses, tmp_path):
    folder = lake(tmp_path)
    out = tmp_path / "both.csv"
    said = covary(
        "predict", houses, folder / "0.parquet", folder / "1.parquet", "--out", out, code=2
    )
    assert "the name of a file" in " ".join(said.replace("│", "").split())
    assert not out.exists()
