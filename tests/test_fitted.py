"""The fitted score: what it is, what it finds, and what a run keeps of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from typer.testing import CliRunner

import covary
from covary.cli import app
from covary.runs import Choices, DataConfig, Run, RunError, calibrate, evaluate, uncertainty_of
from covary.runs.samples import load_data, validation_rows
from covary.runs.training import resolve, train
from covary.uncertainty import FittedScore, fit, metrics
from covary.uncertainty.calibration import LogitCalibration, fit_logits
from covary.uncertainty.fitted import (
    FEATURES,
    cross_fitted,
    features_of,
    fit_features,
    log_margin,
)
from covary.uncertainty.scores import expected_max, expected_softmax

CLASSES = 4


def clusters(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, 6) in four clusters, and which."""
    generator = torch.Generator().manual_seed(seed)
    centers = 3 * torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(99))
    y = torch.arange(n) % CLASSES
    return centers[y] + torch.randn(n, 6, generator=generator), y


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = covary.mlp([6, 24, 16, CLASSES], noise=0.3, covariance="shared")
    x, y = clusters(800)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x).mean, y).backward()
        optimizer.step()
    return covary.with_covariance(net, "full").eval()


@pytest.mark.parametrize("features", ["moments", "plain"])
def test_the_density_is_a_gaussian_per_predicted_class(net, features):
    """Against scipy, of the same regularised covariances."""
    x, _ = clusters(1200, seed=1)
    score = fit(net, x, features=features)
    with torch.no_grad():
        values, out = FEATURES[features](net, x)
    white = ((values - values.mean(0)) / values.std(0, correction=0)).numpy()
    predicted = out.mean.argmax(-1).numpy()
    groups = [white[predicted == k] for k in range(CLASSES)]
    common = sum(np.cov(group.T, bias=True) * len(group) for group in groups) / len(white)
    width = white.shape[1]
    expected = np.empty(len(white))
    for k, group in enumerate(groups):
        own = np.cov(group.T, bias=True) * len(group)
        cov = (own + width * common) / (len(group) + width) + 1e-3 * np.eye(width)
        density = stats.multivariate_normal(group.mean(0), cov).logpdf(group)
        expected[predicted == k] = -density - 0.5 * width * np.log(2 * np.pi)
    surprise = score.surprise(values, out.mean)
    np.testing.assert_allclose(surprise, expected, rtol=1e-8)
    margin = log_margin(out.mean).numpy()
    whole = stats.zscore(expected) - 2 * stats.zscore(margin)
    np.testing.assert_allclose(score(net, x), whole, rtol=1e-6, atol=1e-8)


def test_it_finds_errors_and_foreign_inputs(net):
    score = fit(net, clusters(800, seed=2)[0])
    x, y = clusters(2000, seed=3)
    usual = score(net, x).numpy()
    wrong = (net(x).mean.argmax(-1) != y).numpy()
    assert wrong.sum() > 5
    assert metrics.auroc(usual[wrong], usual[~wrong]) > 0.85
    for foreign in (4 * torch.randn(500, 6), torch.full((500, 6), 5.0), -2 * x[:500]):
        assert metrics.auroc(score(net, foreign).numpy(), usual) > 0.9


def test_plain_features_look_at_no_covariance(net):
    """They are those of the conventional network of the same weights, whatever the noise."""
    x, _ = clusters(300)
    conventional = nn.Sequential(
        *(
            nn.ReLU()
            if isinstance(layer, covary.nn.Activation)
            else nn.Linear(layer.in_features, layer.out_features)
            for layer in net
            if isinstance(layer, covary.nn.Linear | covary.nn.Activation)
        )
    ).eval()
    linears = [layer for layer in net if isinstance(layer, covary.nn.Linear)]
    for ours, theirs in zip(conventional[::2], linears, strict=True):
        ours.load_state_dict(theirs.state_dict())
    expected = fit(net, x, features="plain")
    louder = covary.with_noise(net, 2.0)
    for other in (conventional, louder):
        score = fit(other, x, features="plain")
        torch.testing.assert_close(score(other, x), expected(net, x), rtol=1e-3, atol=1e-3)
    assert fit(conventional, x).features == "plain"
    with pytest.raises(ValueError, match="no moments"):
        fit(conventional, x, features="moments")


def test_regression_has_one_gaussian_and_no_margin():
    torch.manual_seed(0)
    net = covary.mlp([3, 16, 1], noise=0.2).eval()
    score = fit(net, torch.randn(300, 3))
    assert score.classes == 1
    usual, far = score(net, torch.randn(200, 3)), score(net, 10 + torch.randn(200, 3))
    assert metrics.auroc(far.numpy(), usual.numpy()) > 0.95


@pytest.mark.parametrize("covariance", ["tracked", "diagonal"])
def test_any_covariance_per_sample(net, covariance):
    x, _ = clusters(300)
    other = covary.with_covariance(net, covariance)
    if covariance == "tracked":
        covary.track(other, [x], progress=False)
    assert fit(other, x)(other, x).isfinite().all()


def test_a_score_that_cannot_be_written_leaves_the_old_one(net, tmp_path, monkeypatch):
    path = tmp_path / "score.safetensors"
    score = fit(net, clusters(200)[0])
    score.save(path, weights="old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device.*score.safetensors"):
        score.save(path, weights="new")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert FittedScore.load_with(path)[1] == {"weights": "old"}


def test_saved_and_loaded(net, tmp_path):
    x, _ = clusters(300)
    score = fit(net, x)
    score.save(tmp_path / "score.safetensors", weights="abc")
    again, about = FittedScore.load_with(tmp_path / "score.safetensors")
    torch.testing.assert_close(again(net, x), score(net, x), rtol=0, atol=0)
    assert about == {"weights": "abc"}
    assert (again.features, again.samples) == ("moments", 300)
    (tmp_path / "other").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        FittedScore.load(tmp_path / "other")


def test_a_class_that_is_never_predicted_and_features_that_never_vary():
    values, mean = torch.randn(200, 3, dtype=torch.float64), torch.zeros(200, 3)
    values[:, 2] = 7.0
    mean[:, 0] = 1.0
    mean[::2, 1] = 2.0
    score = fit_features(values, mean, classes=3, features="moments")
    rare = torch.tensor([[0.0, 0.0, 5.0]])
    assert score.of(values[:1], rare).isfinite().all()


def test_refused(net):
    x, _ = clusters(300)
    with pytest.raises(ValueError, match="evaluation mode"):
        fit(covary.mlp([6, 4, 2]), x)
    with pytest.raises(ValueError, match="neighbours"):
        fit(covary.with_covariance(net, "shared"), x)
    with pytest.raises(ValueError, match="held-out samples"):
        fit(net, x[:20])
    with pytest.raises(ValueError, match="Unknown features"):
        fit(net, x, features="nonsense")
    score = fit(net, x)
    with pytest.raises(ValueError, match="Fit one to it"):
        score(covary.mlp([6, 4, CLASSES]).eval(), x)
    values = torch.full((100, 3), torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        fit_features(values, torch.zeros(100, 2), classes=2, features="moments")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    config = DataConfig(name="digits", validation=0.3)
    dataset, _ = load_data(config)
    run = Run(tmp_path_factory.mktemp("runs") / "digits")
    chosen = Choices(epochs=8, hidden=(24, 12), activation="relu")
    train(resolve(config, dataset, chosen), dataset, run)
    return run


def test_a_run_keeps_its_calibration_and_scores(digits, monkeypatch):
    found = evaluate(digits, covariance="full")
    test = found.scores["test"]
    assert {"entropy", "max_softmax", "fitted", "fitted_plain"} <= set(test)
    assert test["entropy"]["auroc"] == found.parts["test"]["auroc_entropy"]
    calibration = found.calibration
    assert calibration.kind == "logits"
    dataset, _ = load_data(digits.config.data)
    held_out, _ = validation_rows(len(dataset.x), digits.config)
    assert calibration.held_out_samples == len(held_out)
    net = covary.with_covariance(digits.network(), "full")
    with torch.no_grad():
        by_hand = fit_logits(net(dataset.x[held_out]), dataset.y[held_out])
        probabilities = expected_softmax(by_hand(net(dataset.x_test)))
    assert calibration.temperature == pytest.approx(by_hand.temperature.item(), rel=1e-3)
    expected = metrics.nll(probabilities.numpy(), dataset.y_test.numpy())
    assert calibration.test["nll"] == pytest.approx(expected, rel=1e-3)
    with np.load(digits.predictions_path) as arrays:
        assert arrays["test/score_fitted"].shape == (len(dataset.x_test),)
    known = uncertainty_of(digits)
    assert known.numbers().temperature == calibration.temperature
    score = known.scores["fitted"](net, dataset.x_test)
    with np.load(digits.predictions_path) as arrays:
        np.testing.assert_allclose(score, arrays["test/score_fitted"], rtol=1e-4, atol=1e-4)
    # Thresholds that most held-out inputs do not exceed, and of no other inputs.
    with torch.no_grad():
        moments = net(dataset.x[held_out])
        scored = {"entropy": moments.entropy(), "calibrated": expected_max(by_hand(moments))}
        own = known.scores["fitted"](net, dataset.x[held_out])
    for name, values in scored.items():
        threshold = calibration.thresholds[name]
        assert threshold == pytest.approx(np.quantile(values, 0.85), rel=0.05)
        assert (values <= threshold + 1e-3 * abs(threshold)).float().mean() >= 0.84
    # The fitted score's comes from fits to other inputs: its own score lower than new ones.
    assert calibration.thresholds["fitted"] > np.quantile(own, 0.85)
    # Known from now on: nothing is fitted again.
    monkeypatch.setattr("covary.runs.uncertainty.fit_logits", None)
    again = evaluate(digits, covariance="full")
    assert again.scores == found.scores
    assert again.calibration == found.calibration


def test_what_is_fitted_does_not_depend_on_test_data(digits, monkeypatch):
    before = calibrate(digits, covariance="full")
    dataset, _ = load_data(digits.config.data)
    other = replace(dataset, x_test=dataset.x_test.flip(0) // 2, y_test=dataset.y_test.roll(1))
    monkeypatch.setattr(Run, "data", other)
    after = calibrate(digits, covariance="full")
    assert after.numbers() == before.numbers()
    for name, score in after.scores.items():
        torch.testing.assert_close(score.state_dict(), before.scores[name].state_dict())


def test_calibrate_command(digits):
    ran = CliRunner().invoke(
        app, ["calibrate", str(digits.path), "--noise", "one", "--covariance", "full", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    content = json.loads(ran.stdout)
    noise = content["noise"]
    assert len(noise) == 3
    found = evaluate(digits, covariance="full")
    assert list(found.calibration.noise) == noise
    assert found.calibration.temperature == content["temperature"]
    # The noise that was chosen is that of the calibrated numbers, and of no others.
    dataset, _ = load_data(digits.config.data)
    net = covary.with_covariance(digits.network(), "full")
    layer = LogitCalibration(content["temperature"], content["scale"])
    with torch.no_grad():
        chosen = expected_softmax(layer(covary.with_noise(net, noise)(dataset.x_test)))
    nll = metrics.nll(chosen.numpy(), dataset.y_test.numpy())
    assert found.calibration.test["nll"] == pytest.approx(nll, rel=1e-3)
    # One call gives the network with that noise, so that the pieces cannot be put together wrongly.
    with torch.no_grad():
        once = expected_softmax(digits.calibrated_network()(dataset.x_test))
    torch.testing.assert_close(once, chosen)
    # Another covariance takes the same noise, and leaves what is there alone.
    kept = (digits.path / "calibration.json").read_bytes()
    assert evaluate(digits, covariance="diagonal").calibration.noise == tuple(noise)
    assert (digits.path / "calibration.json").read_bytes() == kept
    ran = CliRunner().invoke(app, ["calibrate", str(digits.path)])
    assert ran.exit_code == 0
    assert "as in training" in ran.stdout
    ran = CliRunner().invoke(app, ["calibrate", str(digits.path), "--noise", "two"])
    assert ran.exit_code == 2


def test_a_run_without_held_out_data(tmp_path):
    config = DataConfig(name="digits", validation=0.0)
    dataset, _ = load_data(config)
    run = Run(tmp_path / "digits")
    train(resolve(config, dataset, Choices(epochs=1, hidden=(8,))), dataset, run)
    found = evaluate(run)
    assert found.calibration is None
    assert "fitted" not in found.scores["test"]
    assert any("--validation" in note for note in found.notes)
    with pytest.raises(RunError, match="held-out"):
        calibrate(run)
    with pytest.raises(RunError, match="no calibration"):
        uncertainty_of(run)
    with pytest.raises(RunError, match="has no calibration of its weights"):
        run.calibrated_network()


def test_a_run_of_regression(tmp_path):
    config = DataConfig(name="yacht", validation=0.3)
    dataset, _ = load_data(config)
    run = Run(tmp_path / "yacht")
    train(resolve(config, dataset, Choices(epochs=40)), dataset, run)
    found = evaluate(run)
    before, after = found.parts["test"], found.calibration.test
    assert found.calibration.kind == "distribution"
    assert any("held-out samples" in note for note in found.notes)
    assert after["rmse"] == pytest.approx(before["rmse"])
    assert after["log_likelihood"] > before["log_likelihood"]
    scale = float(run.network().rescale.scale)
    for numbers in (before, after):
        gap = numbers["log_likelihood_standardised"] - numbers["log_likelihood"]
        assert gap == pytest.approx(np.log(scale))
    with np.load(run.predictions_path) as arrays:
        for name in ("variance", "level", "low", "high"):
            assert arrays[f"test/calibrated_{name}"].shape == arrays["test/variance"].shape
    assert set(found.scores["test"]["fitted"]) == {"spearman_error"}


def test_a_loader_is_told_how_to_be_gathered():
    net = covary.mlp([4, 8, 3], noise=0.3).eval()
    with pytest.raises(TypeError, match=r"got list\. Of a loader: torch\.cat"):
        fit(net, [(torch.randn(8, 4), torch.zeros(8))])


def test_cross_fitted_scores_are_those_of_new_samples():
    """Of samples that a score was fitted to, fewer exceed a threshold than of new ones."""
    net = covary.mlp([4, 16, 3], noise=0.3).eval()
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 4, generator=generator) for n in (150, 4000))
    values, mean = features_of("moments", net, [x])
    settings = {"classes": 3, "features": "moments"}
    score = fit_features(values, mean, **settings)
    own = score.of(values, mean).quantile(0.85)
    crossed = cross_fitted(values, mean, **settings).quantile(0.85)
    answered = [
        (score(net, new) <= threshold).double().mean().item() for threshold in (own, crossed)
    ]
    assert answered[0] < answered[1]
    assert abs(answered[1] - 0.85) < 0.08
