"""Training rows as new ones: what the error bars of a run on a small table are fitted to."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from covary import runs, training
from covary.runs import row_model as fitting
from covary.runs.samples import validation_rows
from covary.runs.training import objective_of
from covary.runs.unseen import _alike, without_a_fold
from covary.serving import Predictor
from tests.commands import covary

ROWS = 700


def waves(rows: int, seed: int) -> pd.DataFrame:
    """A sine whose noise is 0.1 left of 0, and 0.5 right of it."""
    random = np.random.default_rng(seed)
    x = random.uniform(-3, 3, rows)
    noise = random.standard_normal(rows) * np.where(x < 0, 0.1, 0.5)
    return pd.DataFrame({"x": x, "y": np.sin(2 * x) + noise})


@pytest.fixture(scope="module")
def sine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sine")
    waves(ROWS, 0).to_csv(folder / "sine.csv", index=False)
    covary("train", folder / "sine.csv", "--target", "y", "--out", folder / "run")
    return folder / "run"


def rank(one, other) -> float:
    return pd.Series(one).corr(pd.Series(other), method="spearman")


def test_error_bars_of_a_small_table_know_where_noise_is(sine):
    new = waves(2000, 1)
    found = Predictor.load(sine)(new)
    error = np.abs(found["prediction"] - new["y"].to_numpy())
    left = new["x"].to_numpy() < 0
    assert np.sqrt(np.mean(error[left] ** 2)) < 0.2
    assert np.median(found["std"][left]) == pytest.approx(0.1, rel=0.4)
    assert np.median(found["std"][~left]) == pytest.approx(0.5, rel=0.4)
    assert rank(found["std"], error) > 0.5
    inside = (found["low"] <= new["y"]) & (new["y"] <= found["high"])
    assert inside.mean() == pytest.approx(0.9, abs=0.05)


def test_all_rows_but_those_to_test_on_are_looked_at_where_few_are_held_out(sine, monkeypatch):
    run = runs.open(sine)
    held_out, _ = validation_rows(len(run.data.x), run.config)
    assert len(fitting._fitted(run, None).head.far) == len(run.data.x)
    monkeypatch.setattr(fitting, "_ENOUGH", len(held_out))
    assert len(fitting._fitted(run, None).head.far) == len(held_out)


def test_each_network_ends_where_it_would_have_without_its_fold_and_alone(tmp_path):
    waves(100, 2).to_csv(tmp_path / "t.csv", index=False)
    covary("train", tmp_path / "t.csv", "--target", "y", "--epochs", 3, "--out", tmp_path / "run")
    run = runs.open(tmp_path / "run")
    _, rows = validation_rows(len(run.data.x), run.config)
    net = run.network("full")
    steps = []

    def progress(items, name):
        for item in items:
            steps.append(item)
            yield item

    found = without_a_fold(run, net, rows, progress)
    assert torch.cat([fold for _, fold in found]).sort().values.equal(rows)
    how = run.config.training
    assert len(steps) % how.epochs == 0
    for number, (one, fold) in enumerate(found):
        seed = how.seed + 1 + number
        alone = _alike(run, net, seed)
        others = torch.cat([fold for i, (_, fold) in enumerate(found) if i != number])
        fewest = len(rows) - max(len(fold) for _, fold in found)
        batches = training.TensorBatches(
            run.data.x[others[:fewest]], run.data.y[others[:fewest]], how.batch_size, seed=seed
        )
        training.fit(objective_of(alone, run.config), batches, how)
        for trained, expected in zip(one.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-4)
        x = run.data.x[fold]
        assert one(x).covariance_matrix.shape == (len(fold), 1, 1)
        assert not torch.allclose(one(x).mean, net(x).mean)


@pytest.mark.parametrize(
    "options",
    [
        ("--batch-norm",),
        ("--covariance", "diagonal", "--dropout", 0.1),
        ("--activation", "lif"),
        ("--loss", "likelihood"),
        ("--clip", 1.0),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_networks_of_any_configuration_are_trained_alike(tmp_path, options):
    waves(120, 3).to_csv(tmp_path / "t.csv", index=False)
    run = tmp_path / "run"
    covary("train", tmp_path / "t.csv", "--target", "y", "--epochs", 2, "--out", run, *options)
    found = Predictor.load(run)(waves(20, 4))
    assert np.isfinite(found["std"]).all()
    assert len(Predictor.load(run).model.head.far) == 120 * 0.8
