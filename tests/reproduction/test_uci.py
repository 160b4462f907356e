"""Regression on small sets: trained as the library trains, chosen without the test part."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import covary
from covary.moments import Moments
from covary.training import RegressionLoss, TensorBatches, TrainingConfig, fit
from reproduction.experiment import Part
from reproduction.experiments import uci, uci_measures, uci_printed, uci_training
from reproduction.experiments.uci_standardized import Standardized
from reproduction.published import uci as published
from reproduction.store import load
from reproduction.workshop import Workshop
from tests.reproduction.trials import RESULTS

ACTIVATIONS = ("relu", "heaviside")


def networks(hidden, activation, covariance, count=3):
    made = []
    for index in range(count):
        torch.manual_seed(index)
        noise = [0.1 * (index + 1), *[0.05 * index] * len(hidden)]
        net = covary.mlp([4, *hidden, 1], activation=activation, noise=noise, covariance=covariance)
        made.append(net.double())
    return made


def samples(count=3, size=11):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, size, 4, dtype=torch.float64, generator=random)
    return x, torch.randn(count, size, 1, dtype=torch.float64, generator=random)


def gradients_of(net, x, y):
    net.zero_grad()
    RegressionLoss(net)(x, y)[0].backward()
    linear = [each for each in net if isinstance(each, covary.nn.Linear)]
    return [(each.weight.grad.T, each.bias.grad[None]) for each in linear]


@pytest.mark.parametrize("hidden", [(6,), (7, 6), (7, 6, 5)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_step_written_out_is_the_librarys_with_a_shared_covariance(activation, hidden):
    nets, (x, y) = networks(hidden, activation, "shared"), samples()
    stack = uci_training.Stack(nets, activation).double()
    loss, _ = stack(x.transpose(0, 1), y.transpose(0, 1))
    loss.backward()
    total = sum(RegressionLoss(net)(x[i], y[i])[0] for i, net in enumerate(nets))
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-6)
    for index, net in enumerate(nets):
        for layer, (weight, bias) in enumerate(gradients_of(net, x[index], y[index])):
            torch.testing.assert_close(
                stack.weights[layer].grad[index], weight, rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(stack.biases[layer].grad[index], bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_correlations_reach_training_from_the_second_hidden_layer_on(activation):
    """With one, full, shared and diagonal covariances give one gradient; with two they do not."""
    x, y = samples(1)

    def gap(hidden, covariance):
        first, second = (
            gradients_of(networks(hidden, activation, kind, 1)[0].train(), x[0], y[0])
            for kind in ("full", covariance)
        )
        return max((a[0] - b[0]).abs().max().item() for a, b in zip(first, second, strict=True))

    for covariance in ("shared", "diagonal"):
        assert gap((6,), covariance) < 1e-14
        assert gap((7, 6), covariance) > 1e-5


def test_networks_trained_together_are_as_if_alone():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64, generator=random)
    known = Standardized(x, x[:, :1].sin() + 3)
    config = TrainingConfig(epochs=3, batch_size=16, lr=1e-2, weight_decay=0.0)
    jobs = [uci_training.Job(known, (0.1 * index, 0.0), index) for index in (1, 2, 3)]
    together = uci_training.train(jobs, [5], "relu", config)
    for job, net in zip(jobs, together, strict=True):
        torch.manual_seed(job.seed)
        alone = covary.mlp([4, 5, 1], noise=job.noise)
        fit(RegressionLoss(alone), TensorBatches(known.x, known.y, 16, seed=job.seed), config)
        whole = torch.nn.Sequential(known.standardize, *alone.children(), *known.back).double()
        found, expected = uci_training.predicted(net, x), uci_training.predicted(whole, x)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.variance, expected.variance, rtol=1e-4, atol=1e-7)


def test_many_jobs_come_back_in_their_order():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, dtype=torch.float64, generator=random)
    known = Standardized(x, x[:, :1])
    config = TrainingConfig(epochs=1, batch_size=16, lr=0.0, weight_decay=0.0)
    jobs = [uci_training.Job(known, (0.1, 0.0), seed) for seed in range(70)]
    nets = uci_training.train(jobs, [3], "relu", config)
    for seed in (0, 1, 35, 69):
        torch.manual_seed(seed)
        start = covary.mlp([4, 3, 1])[1].weight.double()
        assert torch.equal(list(nets[seed].children())[2].weight, start)


def test_densities_are_those_of_a_gaussian_on_the_targets_scale():
    mean, var = torch.tensor([[1.0], [-2.0]]).double(), torch.tensor([[0.3], [4.0]]).double()
    y = torch.tensor([[1.5], [3.0]]).double()
    matrix = var[..., None]
    out = Moments(mean, covary.covariance.Full(matrix, added=matrix.new_zeros(1, 1)))
    expected = stats.norm.logpdf(y[:, 0], mean[:, 0], var[:, 0].sqrt())
    np.testing.assert_allclose(uci_training.densities(out, y).numpy(), expected, rtol=1e-12)


def test_a_target_off_a_mean_that_has_no_variance_counts_as_most_unlikely():
    matrix = torch.tensor([0.0, 0.0, 1e-250]).double()[:, None, None]
    mean, y = torch.zeros(3, 1).double(), torch.tensor([[1.0], [0.0], [1.0]]).double()
    out = Moments(mean, covary.covariance.Full(matrix, added=matrix.new_zeros(1, 1)))
    assert uci_training.densities(out, y).tolist() == [-1e100] * 3


def drawn(size):
    random = np.random.default_rng(0)
    variance, spread = random.gamma(2.0, 1.0, size), random.gamma(1.0, 0.5, size)
    mean = random.normal(size=size)
    truth = uci_training.EnsembleCalibration(0.5, 3.0, 0.2)
    var = truth.own * variance + truth.spread * spread + truth.rest
    y = mean + np.sqrt(var) * random.normal(size=size)
    out = uci_training.EnsemblePrediction(
        *(torch.from_numpy(each) for each in (mean, variance, spread))
    )
    return out, torch.from_numpy(y)[:, None], truth


def test_calibration_finds_the_numbers_that_the_data_were_made_with():
    out, y, truth = drawn(60_000)
    np.testing.assert_allclose(uci_training.calibrate(out, y), truth, rtol=0.1)


def test_calibration_is_the_most_likely_one():
    out, y, _ = drawn(300)
    found = uci_training.densities(uci_training.calibrate(out, y)(out), y).mean().item()

    def loss(logs):
        return (
            -uci_training.densities(uci_training.EnsembleCalibration(*np.exp(logs))(out), y)
            .mean()
            .item()
        )

    best = optimize.minimize(loss, np.zeros(3), method="Nelder-Mead", options={"maxiter": 2000})
    assert found == pytest.approx(-best.fun, abs=1e-5)


def test_without_the_emergent_variance_the_rest_is_the_most_likely_one():
    out, y, _ = drawn(300)
    fitted = uci_training.calibrate(out.without_emergent(), y)
    assert fitted.own == 0
    found = uci_training.densities(fitted(out), y).mean().item()

    def loss(logs):
        calibration = uci_training.EnsembleCalibration(0.0, *np.exp(logs))
        return -uci_training.densities(calibration(out), y).mean().item()

    best = optimize.minimize(loss, np.zeros(2), method="Nelder-Mead", options={"maxiter": 2000})
    assert found == pytest.approx(-best.fun, abs=1e-5)
    whole = uci_training.densities(uci_training.calibrate(out, y)(out), y).mean().item()
    assert whole > found


def test_a_single_network_has_no_spread_to_scale():
    out, y, _ = drawn(300)
    alone = uci_training.EnsemblePrediction(out.mean, out.variance, torch.zeros_like(out.mean))
    found = uci_training.calibrate(alone, y)
    assert found.spread == 0
    assert math.isfinite(found.own)


def test_targets_that_are_hit_exactly_leave_the_variance_of_rounding():
    random = np.random.default_rng(0)
    y = torch.from_numpy(random.integers(3, 9, (400, 1)).astype(float))
    assert uci_training.rounding(y) == pytest.approx(1 / 12)
    hit = torch.from_numpy(random.random(400) < 0.5)
    miss = torch.from_numpy(random.normal(size=400))
    mean = torch.where(hit, y[:, 0], y[:, 0] + miss)
    spread = torch.where(hit, 0.0, torch.ones(400, dtype=torch.float64))
    out = uci_training.EnsemblePrediction(mean, torch.full_like(mean, 0.1), spread)
    assert uci_training.calibrate(out, y).rest < 1e-6
    found = uci_training.calibrate(out, y, least=uci_training.rounding(y))
    assert found.rest + found.own * 0.1 == pytest.approx(1 / 12, rel=1e-3)


def test_an_ensemble_has_the_moments_of_a_draw_from_its_members():
    matrix = torch.full((2, 1, 1), 0.5, dtype=torch.float64)
    still = matrix.new_zeros(1, 1)
    members = [
        Moments(
            torch.tensor([[value], [2.0]]).double(), covary.covariance.Full(matrix, added=still)
        )
        for value in (1.0, 3.0)
    ]
    found = uci_training.EnsemblePrediction.of(members)
    expected = covary.uncertainty.calibration.combined(members)
    torch.testing.assert_close(found.mean, expected.mean[:, 0])
    torch.testing.assert_close(found.variance + found.spread, expected.variance[:, 0])


def test_steps_are_rounded_to_epochs():
    assert uci_training.epochs_of(3000, 455, 32) == 200
    assert uci_training.epochs_of(1, 10_000, 32) == 1


SETTINGS = {
    "data": "yacht",
    "hidden": [5],
    "activations": ["relu"],
    "noises": [0.1, 0.5],
    "epochs": 2,
    "batch_size": 32,
    "lr": 1e-3,
    "validation": 0.2,
    "targets": "raw",
    "splits": 2,
    "limit": 60,
}
OURS = {
    **{key: SETTINGS[key] for key in ("data", "hidden", "noises", "batch_size", "lr", "targets")},
    **{"activation": "relu", "steps": 8, "weight_decay": 0.0, "members": 2, "folds": 2},
    **{"validation": 0.2, "splits": 1, "limit": 60},
}


@pytest.fixture
def small_set(monkeypatch):
    """A set of our own in place of the published ones; what its test targets are is ours to say."""
    random = np.random.default_rng(0)
    x = random.normal(size=(80, 3))
    y = 5 + 2 * np.sin(x[:, :1]) + 0.1 * random.normal(size=(80, 1))
    shift = {"test": 0.0}

    def load(name, *, split, data_dir):
        order = torch.from_numpy(np.random.default_rng(split).permutation(80))
        rows, test = order[:64], order[64:]
        whole, target = torch.from_numpy(x), torch.from_numpy(y)
        return SimpleNamespace(
            x=whole[rows], y=target[rows], x_test=whole[test], y_test=target[test] + shift["test"]
        )

    monkeypatch.setattr(uci_training.data, "load", load)
    return shift


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        {**SETTINGS, "every": True},
        {**SETTINGS, "scaling": "min-max"},
        OURS,
        {**OURS, "folds": 1},
        {**OURS, "without": True},
    ],
    ids=["recipe", "every", "min-max", "ours", "one fold", "without"],
)
def test_nothing_is_chosen_by_the_test_part(small_set, settings, tmp_path):
    part = Part("small", 0, settings)
    found = uci.measure(part, Workshop(folder=tmp_path / "one"))
    small_set["test"] = 1000.0
    moved = uci.measure(part, Workshop(folder=tmp_path / "other"))
    for name, column in found.series.items():
        scored = {"log-likelihood", "rmse", "covered", "tried on test", "tried on test, whole"}
        chosen = set(column) - scored
        assert {"noise", "held out"} <= chosen
        for key in chosen:
            assert column[key] == moved.series[name][key]
        assert moved.series[name]["rmse"] != column["rmse"]


def test_the_best_of_a_split_is_the_one_with_the_highest_held_out_likelihood(small_set, tmp_path):
    part = Part("small", 0, {**SETTINGS, "activations": list(ACTIVATIONS), "every": True})
    metrics, series = uci.measure(part, Workshop(folder=tmp_path))
    for split in range(2):
        rows = [column for name, column in series.items() if name != "best"]
        assert len(rows) == 4
        held_out = [column["held out"][split] for column in rows]
        winner = rows[int(np.argmax(held_out))]
        assert series["best"]["log-likelihood"][split] == winner["log-likelihood"][split]
        for column in rows:
            assert column["held out"][split] == max(column["tried"][split])
            place = np.argmax(column["tried"][split])
            assert column["noise"][split] == SETTINGS["noises"][place]
            whole = column["tried on test, whole"][split]
            assert column["log-likelihood"][split] == whole[place]
    for name, column in series.items():
        assert metrics[name] == pytest.approx(np.mean(column["log-likelihood"]))
    for suffix in ("", ", whole"):
        on_test = [np.mean(column[f"tried on test{suffix}"], 0).max() for column in rows]
        assert metrics[f"chosen by the test score{suffix}"] == pytest.approx(max(on_test))


def test_rows_are_kept_until_settings_change(small_set, tmp_path):
    workshop, part = Workshop(folder=tmp_path), Part("small", 0, SETTINGS)
    first = uci.measure(part, workshop)
    small_set["test"] = 1000.0  # would change what is computed anew
    assert uci.measure(part, workshop).metrics == first.metrics
    again = uci.measure(Part("small", 0, {**SETTINGS, "lr": 2e-3}), workshop)
    assert again.metrics["best"] < first.metrics["best"] - 10


def test_rows_of_another_format_are_computed_again(small_set, tmp_path, monkeypatch):
    workshop, part = Workshop(folder=tmp_path), Part("small", 0, SETTINGS)
    first = uci.measure(part, workshop)
    small_set["test"] = 1000.0
    monkeypatch.setattr(uci_measures, "_FORMAT", uci_measures._FORMAT + 1)
    assert uci.measure(part, workshop).metrics["best"] < first.metrics["best"] - 10


def test_sharing_the_covariance_changes_nothing_with_one_hidden_layer(small_set, tmp_path):
    settings = {**SETTINGS, "check": {"steps": 6, "noise": 0.3}}
    metrics, _ = uci_measures.measure_shared(Part("small", 0, settings), Workshop(folder=tmp_path))
    assert abs(metrics["lost by sharing, relu"]) < 1e-9
    assert metrics["weights, shared and full, relu"] < 1e-9

    plain, _ = uci_measures.measure_shared(Part("small", 0, SETTINGS), Workshop(folder=tmp_path))
    assert plain == {"MNN relu": metrics["MNN relu"]}
    _, series = uci.measure(Part("small", 0, SETTINGS), Workshop(folder=tmp_path))
    assert plain["MNN relu"] == pytest.approx(np.mean(series["MNN relu"]["log-likelihood"]))


def test_what_the_emergent_variance_adds_is_between_the_same_networks(small_set, tmp_path):
    plain = uci.measure(Part("small", 0, OURS), Workshop(folder=tmp_path))
    metrics, series = uci.measure(
        Part("small", 0, {**OURS, "without": True}), Workshop(folder=tmp_path)
    )
    row = series["without emergent variance"]
    assert row["own"] == [0.0]
    assert row["rmse"] == series["calibrated"]["rmse"] == plain.series["calibrated"]["rmse"]
    assert series["calibrated"] == plain.series["calibrated"]
    gain = metrics["calibrated"] - metrics["without emergent variance"]
    assert metrics["added by emergent variance"] == gain


def test_stored_metrics_are_those_that_are_measured_now(small_set, tmp_path):
    """What a result has beside them is of code that is no more."""
    kinds = {
        "closer": {**SETTINGS, "every": True},
        "calibrated": OURS,
        "without": {**OURS, "without": True},
        "": SETTINGS,
    }
    for part in load(RESULTS, "uci")["parts"]:
        settings = kinds[next(kind for kind in kinds if kind in part["label"])]
        if "activations" in settings:
            settings = {**settings, "activations": list(ACTIVATIONS)}
        now = uci.measure(Part("small", 0, settings), Workshop(folder=tmp_path))
        assert set(part["metrics"]) == set(now.metrics)
        assert set(part["series"]) == set(now.series)


@pytest.mark.parametrize(("targets", "change"), [("raw", np.array), ("log1p", np.log1p)])
def test_targets_are_transformed_before_anything_else(small_set, targets, change):
    raw = uci_training.Split("small", 0, targets="raw", data_dir=None)
    found = uci_training.Split("small", 0, targets=targets, data_dir=None)
    np.testing.assert_allclose(found.y_test.numpy(), change(raw.y_test.numpy()))
    np.testing.assert_allclose(found.y.numpy(), change(raw.y.numpy()))


def test_waves_are_of_inputs_on_the_scale_of_the_training_part():
    x = np.random.default_rng(0).normal(3.0, 2.0, (9, 2))
    training, test = torch.from_numpy(x[:6]), torch.from_numpy(x[6:])
    z = (x[6:] - x[:6].mean(0)) / x[:6].std(0)
    expected = np.hstack([x[6:], np.sin(2 * z), np.cos(2 * z), np.sin(4 * z), np.cos(4 * z)])
    np.testing.assert_allclose(uci_training.with_waves(test, training, [2, 4]).numpy(), expected)


def test_every_published_set_is_measured_by_both_recipes():
    labels = {part.label for part in uci.PARTS["paper"]}
    assert labels >= set(published.SETS)
    assert labels >= {uci.calibrated(name) for name in published.SETS}
    assert labels >= {uci.without_emergent(name) for name in published.SETS}
    assert labels >= {f"{name}, log targets" for name in published.LOG_TARGETS}


@pytest.mark.parametrize(
    "experiment", [*uci.EXPERIMENTS, *uci_printed.EXPERIMENTS], ids=lambda each: each.name
)
def test_claims_are_about_parts_that_are_measured(experiment):
    labels = {part.label for part in experiment.parts["paper"]}
    assert {label for claim in experiment.claims for label in claim.labels} <= labels
