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
from covary.training.batches import count
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
    size = {side: np.sqrt(np.mean(error[left == side] ** 2)) for side in (True, False)}
    assert size[True] < 0.2
    for side in (True, False):
        assert np.median(found["std"][left == side]) == pytest.approx(size[side], rel=0.4)
    assert rank(found["std"], error) > 0.5
    inside = (found["low"] <= new["y"]) & (new["y"] <= found["high"])
    assert inside.mean() == pytest.approx(0.9, abs=0.05)


@pytest.fixture
def fitted_to(monkeypatch):
    """How many rows distributions are fitted to, one number for each fit."""
    found = []
    fit = fitting.TargetHead.fit

    def counted(seen, y, held_out):
        found.append(len(y))
        return fit(seen, y, held_out)

    monkeypatch.setattr(fitting.TargetHead, "fit", counted)
    return found


def trained(folder, table, *options):
    table.to_csv(folder / "t.csv", index=False)
    covary("train", folder / "t.csv", "--target", "y", "--out", folder / "run", *options)
    return runs.open(folder / "run")


def test_training_rows_are_looked_at_where_few_are_held_out(tmp_path, fitted_to, monkeypatch):
    run = trained(tmp_path, waves(150, 0), "--epochs", 2)
    held_out, training = validation_rows(len(run.data.x), run.config)
    head = fitting._fitted(run, None).head
    assert len(head.far) == len(held_out) == 12
    monkeypatch.setattr(fitting, "_LEAST_TRAINING", len(training) + 1)
    fitting._fitted(run, None)
    monkeypatch.undo()
    assert fitted_to == [len(run.data.x), len(held_out)]


def test_each_network_ends_where_it_would_have_without_its_fold_and_alone(tmp_path):
    run = trained(tmp_path, waves(100, 2), "--epochs", 3)
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
    fewest = len(rows) - max(len(fold) for _, fold in found)
    assert len(steps) == how.epochs * count(fewest, how.batch_size)
    for number, (one, fold) in enumerate(found):
        seed = how.seed + 1 + number
        alone = _alike(run, net, seed)
        others = torch.cat([fold for i, (_, fold) in enumerate(found) if i != number])
        batches = training.TensorBatches(
            run.data.x[others[:fewest]], run.data.y[others[:fewest]], how.batch_size, seed=seed
        )
        training.fit(objective_of(alone, run.config), batches, how)
        for value, expected in zip(one.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)
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
        ("--hidden", "600,8"),
        ("--target", "twice"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_networks_of_any_configuration_are_trained_alike(tmp_path, options, fitted_to):
    table = waves(120, 3).assign(constant=1, twice=lambda rows: 2 * rows["y"])
    run = trained(tmp_path, table, "--epochs", 2, *options)
    found = Predictor.load(run.path)(table)
    stds = [values for name, values in found.items() if "std" in name]
    assert stds
    assert np.isfinite(stds).all()
    assert fitted_to == [96]


def test_what_is_fitted_depends_on_the_run_alone(tmp_path):
    run = trained(tmp_path, waves(120, 3), "--epochs", 2, "--dropout", 0.2)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(fitting._fitted(run, None).state_dict())
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=0, equal_nan=True)


def test_where_networks_alike_cannot_be_trained_held_out_rows_are_all(
    tmp_path, fitted_to, monkeypatch
):
    run = trained(tmp_path, waves(120, 3), "--epochs", 2)

    def diverging(*_, **__):
        raise training.DivergedError("The loss is no number.")

    monkeypatch.setattr(training, "fit", diverging)
    assert np.isfinite(Predictor.load(run.path)(waves(9, 4))["std"]).all()
    assert fitted_to == [10]


def test_a_table_with_next_to_no_training_rows_predicts(tmp_path, fitted_to):
    options = ("--epochs", 2, "--validation", 0.9, "--batch-norm")
    run = trained(tmp_path, waves(30, 3), *options)
    assert np.isfinite(Predictor.load(run.path)(waves(9, 4))["std"]).all()
    assert fitted_to == [22]
