"""``covary predict --engine ray`` on a local cluster: two workers, and a slot for reading."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import covary as library
from covary.data import DataError
from covary.serving import FileOptions, Predictor, on_ray, predict_files
from tests.commands import covary
from tests.test_predict import trained
from tests.test_predict_folders import lake, scored

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
ROOT = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Three slots: two workers, and one to read with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", ROOT)
        ray.init(
            "local",  # and no other cluster that runs here
            num_cpus=3,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("houses"), "price")


@pytest.fixture(scope="module")
def predictor(houses) -> Predictor:
    return Predictor.load(houses)


def test_a_worker_that_is_killed_loses_and_doubles_no_row(cluster, houses, tmp_path):
    """A real process, while it writes: its number is in the name of the unfinished file."""
    folder, out, rows = lake(tmp_path, files=4, rows=40_000), tmp_path / "ray", 160_000
    killed = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for path in out.glob(".*.parquet.*.unfinished"):
                number = int(path.name.split(".")[-2])
                if b"ray::" in Path(f"/proc/{number}/cmdline").read_bytes():
                    os.kill(number, signal.SIGKILL)
                    killed.append(path)
                    return
            time.sleep(0.001)

    killer = threading.Thread(target=kill)
    killer.start()
    said = covary("predict", houses, folder, "--out", out, "--engine", "ray")
    killer.join()
    assert killed
    assert f"{rows:,} rows" in said
    assert "Warning" not in said
    assert not [path.name for path in out.rglob(".*")]
    found = scored(out)
    assert found["id"].tolist() == list(range(rows))
    covary("predict", houses, folder, "--out", tmp_path / "local")
    expected = scored(tmp_path / "local")
    for name in expected.select_dtypes("number"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert (found["flag"] == expected["flag"]).mean() > 0.9999
    here, there = (sorted(x.name for x in (tmp_path / y).rglob("*")) for y in ("local", "ray"))
    assert here == there


def test_a_worker_tells_what_is_wrong_with_a_file(predictor, tmp_path, monkeypatch):
    folder, out = lake(tmp_path), tmp_path / "scored"
    wrong = pd.read_parquet(folder / "0.parquet").astype({"age": str})
    wrong.loc[7, "age"] = "old"
    wrong.to_parquet(folder / "0.parquet")
    predictor.save(tmp_path / "kept")
    worker = on_ray.Worker(str(tmp_path / "kept"), FileOptions())
    batch = {"source": np.array([folder / "0.parquet"]), "out": np.array([out / "0.parquet"])}
    problem = str(worker(batch)["problem"][0])
    assert "'old'" in problem
    assert not (out / "0.parquet").exists()
    monkeypatch.setattr(on_ray, "predicted", lambda *_: (each for each in [problem]))
    with pytest.raises(DataError, match=r"0\.parquet.*0 of 3 files .*--resume goes on"):
        predict_files(predictor, str(folder), out, engine="ray")
    assert [path.name for path in out.iterdir()] == ["_predictions.json"]


def test_one_slot_is_left_unless_there_is_just_one(cluster, monkeypatch):
    assert on_ray.actors(files=100) == 2
    assert on_ray.actors(files=1) == 1
    for slots, expected in ((1, 1), (2, 1), (64, 63)):
        monkeypatch.setattr(ray, "cluster_resources", lambda slots=slots: {"CPU": float(slots)})
        assert on_ray.actors(files=100) == expected
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(RuntimeError, match=r"no CPU to predict with\. Start it with some"):
        on_ray.actors(files=100)


class Scored:
    """As in docs/lake.md."""

    def __init__(self, run: str) -> None:
        self.predictor = library.Predictor.load(run)

    def __call__(self, rows: pd.DataFrame) -> pd.DataFrame:
        rows = self.predictor.frame(rows, keep=["id"])
        return rows.assign(place=library.__file__)


def test_map_batches_over_blocks_of_any_size_in_any_order(cluster, houses, predictor, tmp_path):
    folder = lake(tmp_path, files=3, rows=200)
    found = (
        ray.data.read_parquet(str(folder))
        .random_shuffle(seed=1)
        .map_batches(
            Scored,
            fn_constructor_args=(str(houses),),
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_format="pandas",
            batch_size=33,
        )
        .to_pandas()
        .sort_values("id")
    )
    every = pd.concat([pd.read_parquet(path) for path in sorted(folder.rglob("*.parquet"))])
    expected = predictor.frame(every, keep=["id"])
    assert found["id"].tolist() == list(range(600))
    np.testing.assert_allclose(found["std"], expected["std"], rtol=1e-4)
    assert (found["flag"].to_numpy() == expected["flag"].to_numpy()).mean() > 0.98
    assert set(found["place"]) == {library.__file__}
