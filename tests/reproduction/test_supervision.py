"""Supervised covariances: losses against what they say they are, and choices without test data."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

import covary
from covary.training import RegressionLoss
from reproduction.experiment import Part
from reproduction.experiments import supervision_losses as losses
from reproduction.experiments import supervision_measures as measures
from reproduction.experiments import uci_training
from reproduction.experiments.supervision import (
    ELBO,
    EXPERIMENTS,
    IMAGES,
    LIKELIHOOD,
    LOSSES,
    NUMBERS,
    SETS,
    SMUC,
    STEPS,
    SUPERVISED,
    TRACE,
)
from reproduction.figures.supervision import FIGURES, TABLES
from reproduction.running import reproduce
from reproduction.workshop import Workshop

(SUPERVISION,) = EXPERIMENTS


def networks(outputs=1, count=3):
    made = []
    for index in range(count):
        torch.manual_seed(index)
        noise = [0.2 * (index + 1), 0.1 * index]
        made.append(covary.mlp([4, 7, outputs], noise=noise).double())
    return made


def samples(count=3, size=11, outputs=1):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, size, 4, dtype=torch.float64, generator=random)
    return x, torch.randn(count, size, outputs, dtype=torch.float64, generator=random)


def gradients_of(objective, *batch):
    loss, _ = objective(*batch)
    return torch.autograd.grad(loss, list(objective.parameters()))


def drawn(net, x, count=200_000):
    """Draws of the output, by its moments: what expectations are taken over."""
    with torch.no_grad():
        return net(x).sample(count, generator=torch.Generator().manual_seed(0))


def test_the_trace_loss_is_the_expected_squared_error():
    (net,), (x, y) = networks(2, 1), samples(1, outputs=2)
    loss, error = losses.TraceLoss(net)(x[0], y[0])
    expected = (drawn(net, x[0]) - y[0]).square().mean()
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0)
    out = net(x[0])
    literal = (out.mean - y[0]).square().sum(-1) + out.covariance_matrix.diagonal(0, 1, 2).sum(-1)
    torch.testing.assert_close(loss, literal.mean() / 2)
    torch.testing.assert_close(error, (out.mean - y[0]).abs().mean())


def test_without_its_switch_the_trace_trains_nothing():
    (net,), (x, y) = networks(2, 1), samples(1, outputs=2)
    smuc = gradients_of(RegressionLoss(net), x[0], y[0])
    out = net(x[0])
    both = ((out.mean - y[0]).square() + out.variance).mean()
    parameters = list(net.parameters())
    for one, other in zip(torch.autograd.grad(both, parameters), smuc, strict=True):
        torch.testing.assert_close(one, other)
    smsc = gradients_of(losses.TraceLoss(net), x[0], y[0])
    gaps = [(one - two).abs().max() for one, two in zip(smsc, smuc, strict=True)]
    assert max(gaps) > 1e-3


def test_the_divergence_is_that_of_the_biases_but_for_a_constant():
    first, second = torch.randn(2, 9, dtype=torch.float64)
    prior = Normal(torch.zeros(()), torch.ones(()))

    def whole(bias, sigma):
        return kl_divergence(Normal(bias, sigma), prior).sum()

    for sigma in (0.05, 0.7):
        change = whole(first, sigma) - whole(second, sigma)
        ours = losses.bias_divergence(first) - losses.bias_divergence(second)
        torch.testing.assert_close(ours, change)


def test_the_bound_of_a_regression_is_its_variational_loss():
    (net,), (x, y) = networks(1, 1), samples(1)
    objective = losses.RegressionBound(net, samples=50)
    with torch.no_grad():
        objective.slow_log_noise.fill_(-0.04)
    loss, _ = objective(x[0], y[0])
    surprise = -Normal(drawn(net, x[0]), math.exp(-0.4)).log_prob(y[0]).mean()
    bias = net.linear1.bias.detach()
    torch.testing.assert_close(
        loss.detach(), surprise + bias.square().sum() / 2 / 50, rtol=5e-3, atol=0
    )
    assert gradients_of(objective, x[0], y[0])[0].abs() > 1e-3  # of the noise of targets


def test_the_expected_cross_entropy_is_one_to_second_order():
    mean, label = torch.tensor([[0.5, -0.3, 0.1]]).double(), torch.tensor([1])
    root = torch.tensor([[0.4, 0.0, 0.0], [0.1, 0.3, 0.0], [-0.2, 0.1, 0.2]]).double()
    white = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0)).double()
    # With their opposites, so that what is of first order is 0.
    logits = mean + torch.cat([white, -white]) @ root.T
    expected = F.cross_entropy(logits, label.expand(len(logits)))
    plain = F.cross_entropy(mean, label)
    found = losses.expected_cross_entropy(mean, (root @ root.T)[None], label)
    assert (found - plain).item() == pytest.approx((expected - plain).item(), rel=0.05)


def test_the_bound_of_a_classification_is_its_variational_loss():
    (net,), (x, _) = networks(3, 1), samples(1)
    labels = torch.arange(11) % 3
    loss, accuracy = losses.ClassificationBound(net, samples=50)(x[0], labels)
    out = net(x[0])
    expected = losses.expected_cross_entropy(out.mean, out.covariance_matrix, labels)
    torch.testing.assert_close(loss, expected + net.linear1.bias.square().sum() / 2 / 50)
    assert accuracy == (out.mean.argmax(-1) == labels).float().mean()


@pytest.mark.parametrize("activation", ["relu", "heaviside"])
@pytest.mark.parametrize("loss", SUPERVISED)
def test_the_step_written_out_is_that_of_full_covariances(loss, activation):
    nets, (x, y) = networks(), samples()
    for net in nets:
        net[3] = covary.nn.Activation(activation)
    stack = losses.SupervisedStack(nets, activation, loss=loss, samples=40).double()
    total, _ = stack(x.transpose(0, 1), y.transpose(0, 1))
    total.backward()
    expected = torch.zeros((), dtype=torch.float64)
    for index, net in enumerate(nets):
        objective = losses.regression_loss(loss, net, 40).double()
        value, _ = objective(x[index], y[index])
        value.backward()
        expected += value.detach()
        pairs = [
            (stack.weights[0].grad[index].T, net.linear1.weight.grad),
            (stack.biases[0].grad[index, 0], net.linear1.bias.grad),
            (stack.weights[1].grad[index].T, net.linear2.weight.grad),
            (stack.biases[1].grad[index, 0], net.linear2.bias.grad),
        ]
        if loss == ELBO:
            noise = stack.slow_log_noise.grad[index, 0, 0]
            pairs.append((noise, objective.slow_log_noise.grad))
        for ours, theirs in pairs:
            # Noise is in single precision in the stack.
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total.detach(), expected, rtol=1e-6, atol=1e-7)


def test_predictions_of_a_bound_have_the_noise_of_targets_too():
    nets, (x, _) = networks(), samples()
    stack = losses.SupervisedStack(nets, "relu", loss=ELBO, samples=40).double()
    with torch.no_grad():
        stack.slow_log_noise.copy_(torch.tensor([-0.1, 0.0, 0.05]).view(3, 1, 1))
    for index, (net, plain) in enumerate(zip(stack.unstack(), nets, strict=True)):
        more = math.exp(20 * stack.slow_log_noise[index].item())
        torch.testing.assert_close(net(x[index]).variance, plain(x[index]).variance + more)


@pytest.mark.parametrize("loss", [SMUC, "unknown"])
def test_only_what_supervises_is_stacked(loss):
    with pytest.raises(ValueError, match="SMSC"):
        losses.SupervisedStack(networks(), "relu", loss=loss, samples=40)


SET = {
    "data": "small",
    "hidden": [5],
    "activation": "relu",
    "noises": [0.1, 0.5],
    "rates": [1e-3, 1e-2],
    "epochs": 2,
    "batch_size": 32,
    "validation": 0.2,
    "targets": "raw",
    "splits": 2,
    "limit": 60,
}


@pytest.fixture
def small_set(monkeypatch):
    """A set of our own in place of the published ones; what its test targets are is ours to say."""
    random = np.random.default_rng(0)
    x = random.normal(size=(80, 3))
    y = torch.from_numpy(5 + 2 * np.sin(x[:, :1]) + 0.1 * random.normal(size=(80, 1)))
    shift = {"test": 0.0}

    def load(name, *, split, data_dir):
        order = torch.from_numpy(np.random.default_rng(split).permutation(80))
        rows, test = order[:64], order[64:]
        whole = torch.from_numpy(x)
        return SimpleNamespace(
            x=whole[rows], y=y[rows], x_test=whole[test], y_test=y[test] + shift["test"]
        )

    monkeypatch.setattr(uci_training.data, "load", load)
    return shift


def test_of_a_set_nothing_is_chosen_by_the_test_part(small_set, tmp_path):
    part = Part("small", 0, SET)
    found = measures.measure(part, Workshop(folder=tmp_path / "one"))
    small_set["test"] = 1000.0
    moved = measures.measure(part, Workshop(folder=tmp_path / "other"))
    assert set(found.series) == {SMUC, *SUPERVISED}
    for loss, column in found.series.items():
        for key in ("noise", "rate", "held out", "tried"):
            assert column[key] == moved.series[loss][key]
        assert moved.series[loss]["rmse"] != column["rmse"]
        for split in range(2):
            assert column["held out"][split] == max(column["tried"][split])
            assert len(column["tried"][split]) == 4
        for key in ("log-likelihood", "calibrated", "rmse", "rank"):
            assert found.metrics[f"{key}, {loss}"] == pytest.approx(np.mean(column[key]))
        ratio = np.mean(np.divide(found.series[SMUC]["rmse"], column["rmse"]))
        assert found.metrics[f"rmse of SMUC over {loss}"] == pytest.approx(ratio)


def test_unsupervised_rows_are_those_of_experiment_uci(small_set, tmp_path):
    """With the same rate, the same networks."""
    from reproduction.experiments import uci

    workshop = Workshop(folder=tmp_path)
    ours = measures.measure(Part("small", 0, {**SET, "rates": [1e-3]}), workshop)
    recipe = {key: SET[key] for key in SET if key not in ("activation", "rates")}
    theirs = uci.measure(
        Part("small", 0, {**recipe, "activations": ["relu"], "lr": 1e-3}), workshop
    )
    for key in ("noise", "held out", "log-likelihood", "rmse"):
        assert ours.series[SMUC][key] == pytest.approx(theirs.series["MNN relu"][key], rel=1e-4)


DIGITS = next(part for part in SUPERVISION.parts["smoke"] if part.label == IMAGES)


@pytest.fixture
def made_up_images(monkeypatch):
    """Bytes in place of digits and letters, brighter by their label."""
    changed = {"labels": 0}

    def load(name, *, data_dir):
        random = np.random.default_rng(len(name))
        y = torch.from_numpy(random.integers(0, 10, 400))
        noise = random.integers(0, 100, (400, 1, 28, 28))
        x = torch.from_numpy(noise).add(15 * y.view(-1, 1, 1, 1)).to(torch.uint8)
        test = (y[200:] + changed["labels"]) % 10
        return SimpleNamespace(x=x[:200], y=y[:200], x_test=x[200:], y_test=test)

    monkeypatch.setattr(measures.data, "load", load)
    return changed


def test_of_images_nothing_is_chosen_by_the_test_part(made_up_images, tmp_path):
    found = measures.measure(DIGITS, Workshop(folder=tmp_path / "one"))
    made_up_images["labels"] = 3
    moved = measures.measure(DIGITS, Workshop(folder=tmp_path / "other"))
    assert set(found.series) == set(LOSSES)
    for loss, column in found.series.items():
        for key in ("noise", "rate", "held out", "tried"):
            assert column[key] == moved.series[loss][key]
        assert column["accuracy"] != moved.series[loss]["accuracy"]
        assert column["held out"][0] == max(column["tried"][0])
        for key in NUMBERS:
            known = None not in column[key]
            expected = pytest.approx(np.mean(column[key])) if known else None
            assert found.metrics[f"{key}, {loss}"] == expected


def test_images_are_not_in_two_parts(made_up_images):
    images = measures.Images.load(DIGITS.settings, None)
    assert [len(each) for each in (images.x, images.x_held_out, images.x_test)] == [96, 64, 200]
    assert images.x.min() >= -1
    assert images.x.max() <= 1
    rows = {tuple(row.tolist()) for row in images.x[:, :20]}
    assert not rows & {tuple(row.tolist()) for row in images.x_held_out[:, :20]}


@pytest.fixture
def known_memory(monkeypatch):
    """In place of fresh processes, each of which takes seconds to import what it needs."""
    known = {SMUC: 10.0, TRACE: 25.0, LIKELIHOOD: None, ELBO: 30.0}
    monkeypatch.setattr(measures, "_memory", lambda loss, _settings: known[loss])


def test_a_step_is_measured_beside_that_of_smuc(known_memory, tmp_path):
    part = next(part for part in SUPERVISION.parts["smoke"] if part.label in STEPS)
    metrics, series = measures.measure(part, Workshop(folder=tmp_path))
    seconds = series["seconds"]
    for loss in (SMUC, *SUPERVISED):
        assert metrics[f"time of {loss}"] == pytest.approx(seconds[loss] / seconds[SMUC])
    assert metrics[f"time of {SMUC}"] == 1
    assert metrics[f"memory of {TRACE}"] == 2.5
    assert metrics[f"memory of {LIKELIHOOD}"] is None


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process():
    widths = [400, 400, 100, 10]
    settings = {"widths": widths, "activation": "relu", "noise": 0.3, "batch_size": 32}
    found = {loss: measures._memory(loss, settings) for loss in (SMUC, TRACE)}
    # Weights times gains of each sample, for one: gradients need them, and SMUC has none of these.
    kept = 32 * 100 * 400 * 4 / 1e6
    assert found[TRACE] > found[SMUC] + kept


@pytest.mark.parametrize("widths", [[5, 4, 1], [5, 4, 3]], ids=["regression", "classification"])
@pytest.mark.parametrize("loss", [SMUC, TRACE, LIKELIHOOD, ELBO])
def test_a_timed_step_trains(loss, widths, monkeypatch):
    net = covary.mlp(widths, noise=0.3)
    monkeypatch.setattr(measures, "mlp", lambda *_, **__: net)
    step = measures.step_of(loss, {"widths": widths, "activation": "relu", "noise": 0.3}, 8)
    before = net.linear1.weight.detach().clone()
    step()
    assert not torch.equal(before, net.linear1.weight)


def test_every_part_has_a_claim_and_a_row(made_up_images, known_memory, tmp_path):
    labels = {part.label for part in SUPERVISION.parts["paper"]}
    assert labels == {*SETS, IMAGES, *STEPS}
    assert {label for claim in SUPERVISION.claims for label in claim.labels} == labels
    chosen = [IMAGES, STEPS[0]]
    workshop = Workshop(folder=tmp_path / "work")
    record = reproduce(SUPERVISION, "smoke", workshop, results=tmp_path, only=chosen)
    shown = TABLES["supervision"](record)
    assert all(len(row) == len(shown.columns) for row in shown.rows)
    rows = {row[0]: row[1:] for row in shown.rows}
    found = {part["label"]: part["metrics"] for part in record["parts"]}
    accuracy = found[IMAGES][f"accuracy, {TRACE}"]
    assert rows["MNIST: accuracy (%)"][LOSSES.index(TRACE)].startswith(f"{accuracy:.2f} (")
    time = found[STEPS[0]][f"time of {ELBO}"]
    assert rows[f"{STEPS[0]}: time"][LOSSES.index(ELBO)] == f"{time:.2f}"
    assert "yacht" not in " ".join(rows)
    assert f"time of SMSC, ELBO {time:.2f} times" in FIGURES["supervision"](record).alt
