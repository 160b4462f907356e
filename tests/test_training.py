"""The loop: what it does at each step, what it saves, and that nothing cuts it short for good."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import covary
from covary import files
from covary.nn import Rescale
from covary.training import (
    Checkpoint,
    ClassificationLoss,
    DivergedError,
    Epoch,
    GaussianLikelihood,
    MetricsLog,
    RegressionLoss,
    StoppedError,
    TensorBatches,
    TrainingConfig,
    fit,
)
from covary.training import checkpoint as checkpoints
from covary.training.config import learning_rate
from covary.training.log import read as read_log

CONFIG = TrainingConfig(epochs=4, batch_size=16, lr=1e-2)


def problem(n: int = 70) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def objective(*, dropout: float = 0.0, batch_norm: bool = False) -> ClassificationLoss:
    torch.manual_seed(0)
    net = covary.mlp(
        [5, 8, 2], covariance="shared", dropout=dropout, batch_norm=batch_norm, noise=0.3
    )
    return ClassificationLoss(net)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_the_loop_is_the_loop_everyone_writes():
    x, y = problem()
    ours, plain = objective(), objective()
    history = fit(ours, TensorBatches(x, y, 16), CONFIG)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=1e-4)
    for epoch in range(4):
        losses = []
        for rows_x, rows_y in TensorBatches(x, y, 16).epoch(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain.net(rows_x).mean, rows_y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(rows_x))
        assert history[epoch].loss == pytest.approx(sum(losses) / 70, rel=1e-5)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert [row.step for row in history] == [5, 10, 15, 20]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cooldown", "cosine", "one-cycle"])
def test_training_lowers_the_loss(optimizer, schedule):
    x, y = problem(200)
    config = TrainingConfig(
        epochs=30, batch_size=32, lr=1e-2, optimizer=optimizer, schedule=schedule
    )
    history = fit(objective(), TensorBatches(x, y, 32), config)
    assert history[-1].loss < 0.6 * history[0].loss


def test_regression_loss_counts_in_deviations_of_the_target():
    body = covary.mlp([3, 4, 2])
    x, y = torch.randn(9, 3), torch.randn(9, 2) * torch.tensor([1.0, 1000.0]) + 50
    net = nn.Sequential(*body, covary.nn.Rescale(y.mean(0), y.std(0)))
    loss, error = RegressionLoss(net)(x, y)
    gap = net(x).mean - y
    torch.testing.assert_close(loss, (gap / y.std(0)).square().mean())
    torch.testing.assert_close(error, gap.abs().mean())
    loss, error = RegressionLoss(body)(x, y)
    torch.testing.assert_close(loss, (body(x).mean - y).square().mean())
    torch.testing.assert_close(error, (body(x).mean - y).abs().mean())


class Wrapped(nn.Module):
    """A module of one's own around a network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> covary.Moments:
        out: covary.Moments = self.net(x)
        return out


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


_slow = [pytest.param(name, marks=pytest.mark.slow) for name in ("full", "diagonal", "shared")]


@pytest.mark.parametrize("covariance", ["tracked", *_slow])
def test_training_compiled_is_the_same(covariance, monkeypatch):
    """Loss, weights and corrections, after steps of two batch sizes."""
    found = []
    x, y = torch.randn(22, 6), torch.randint(0, 3, (22,))
    compile_ = torch.compile  # to machine code would take a minute
    monkeypatch.setattr(torch, "compile", lambda net: compile_(net, backend="aot_eager"))
    for wanted in (False, True):
        torch.manual_seed(0)
        net = covary.mlp([6, 8, 7, 3], noise=0.2, covariance=covariance)
        config = TrainingConfig(epochs=2, batch_size=8, lr=1e-2, compile=wanted)
        history = fit(ClassificationLoss(net), TensorBatches(x, y, batch_size=8), config)
        found.append((history[-1].loss, net.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [RegressionLoss, GaussianLikelihood])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_networks_are_trained_on_the_same_scale(loss, dtype):
    torch.manual_seed(0)
    body, x = covary.mlp([3, 4, 2]), torch.randn(9, 3)
    y = (torch.randn(9, 2) * torch.tensor([1.0, 1000.0]) + 50).to(dtype)
    net = nn.Sequential(*body, Rescale.of(y))
    expected, error = loss(net)(x, y)
    (gradient,) = torch.autograd.grad(expected, net[1].weight)
    in_place = nn.Sequential(*net)
    in_place.compile(backend="eager")
    # In float32 the offset, which is undone, has taken some digits.
    close: dict[str, Any] = {"check_dtype": False, "rtol": 1e-4, "atol": 1e-4}
    if loss is GaussianLikelihood:  # the inverse of a covariance multiplies rounding errors
        close |= {"rtol": 1e-3, "atol": 1e-2}
    elif dtype == torch.float64:
        close |= {"rtol": 1e-5, "atol": 1e-6}
    whole, last = compiled(net), nn.Sequential(net[0], compiled(net[1:]))
    for other in (whole, nn.Sequential(whole), last, in_place):
        found, same_error = loss(other)(x, y)
        torch.testing.assert_close(found, expected, **close)
        torch.testing.assert_close(same_error, error, **close)
        (same,) = torch.autograd.grad(found, net[1].weight)
        torch.testing.assert_close(same, gradient, **close)
    together = compiled(loss(net))(x, y)[0]  # or all of it
    torch.testing.assert_close(together, expected)


def test_a_compiled_network_learns_targets_with_a_large_offset():
    x, _ = problem(200)
    y = (x[:, :1] + x[:, 1:2]).double() + 1e9
    torch.manual_seed(0)
    net = nn.Sequential(*covary.mlp([5, 16, 1], noise=0.1), Rescale.of(y))
    config = TrainingConfig(epochs=60, batch_size=32, lr=1e-2)
    fit(RegressionLoss(compiled(net)), TensorBatches(x, y, 32), config)
    with torch.no_grad():
        error = (net(x).mean - y).square().mean().sqrt()
    assert error < 0.3 * y.std()


@pytest.mark.parametrize("covariance", ["full", "tracked", "diagonal"])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
def test_the_likelihood_is_the_joint_one_of_all_targets(covariance, targets):
    torch.manual_seed(0)
    net = covary.mlp([3, 8, targets], noise=0.5, covariance=covariance)
    x, y = torch.randn(9, 3), torch.randn(9, targets)
    loss, error = GaussianLikelihood(net)(x, y)
    out = net.eval()(x)
    expected = -MultivariateNormal(out.mean, out.covariance_matrix).log_prob(y).mean() / targets
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(error, (out.mean - y).abs().mean())


def test_the_likelihood_of_targets_that_are_the_same_is_finite():
    net, x = covary.mlp([3, 8, 2], noise=0.5), torch.randn(9, 3)
    with torch.no_grad():
        net.linear2.weight[1], net.linear2.bias[1] = net.linear2.weight[0], net.linear2.bias[0]
    loss, _ = GaussianLikelihood(net)(x, torch.randn(9, 1).expand(-1, 2))
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("loss", [RegressionLoss, GaussianLikelihood])
def test_scales_that_nobody_can_see_are_refused(loss):
    body, y = covary.mlp([3, 4, 2]), torch.randn(9, 2)
    net = nn.Sequential(*body, Rescale.of(y))
    hidden = [Wrapped(net), compiled(Wrapped(net)), nn.Sequential(Wrapped(net)), Wrapped(net[-1:])]
    for each in hidden:
        with pytest.raises(ValueError, match=r"the one within Wrapped is the last layer. Give it"):
            loss(each)
    # Seen to be the last layer, not to be it, or not there at all: all of these are known.
    x = torch.randn(9, 3)
    expected = loss(net)(x, y)
    for one, other in zip(loss(nn.Sequential(Wrapped(body), net[-1]))(x, y), expected, strict=True):
        torch.testing.assert_close(one, other)
    loss(Wrapped(body))
    loss(nn.Sequential(*net, covary.nn.Linear(2, 2)))


@pytest.mark.parametrize("loss", [ClassificationLoss, RegressionLoss])
def test_conventional_networks_have_the_same_losses(loss):
    torch.manual_seed(0)
    net, x = covary.mlp([3, 4, 2], noise=0.0), torch.randn(9, 3)
    if loss is RegressionLoss:
        y = torch.randn(9, 2) * 10
        net = nn.Sequential(*net, Rescale.of(y))
    else:
        y = torch.randint(2, (9,))
    for one, other in zip(loss(net)(x, y), loss(covary.models.plain(net))(x, y), strict=True):
        torch.testing.assert_close(one, other)


def test_targets_with_a_large_offset_are_learnt_as_well():
    x, _ = problem(200)
    y = (x[:, :1] + x[:, 1:2]).double() + 1e9
    torch.manual_seed(0)
    net = nn.Sequential(*covary.mlp([5, 16, 1], noise=0.1), covary.nn.Rescale(y.mean(0), y.std(0)))
    config = TrainingConfig(epochs=60, batch_size=32, lr=1e-2)
    fit(RegressionLoss(net), TensorBatches(x, y, 32), config)
    with torch.no_grad():
        error = (net(x).mean - y).square().mean().sqrt()
    assert error < 0.3 * y.std()


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 18])
def test_no_batch_has_a_single_sample(n):
    batches = TensorBatches(torch.arange(n), torch.arange(n), 8)
    sizes = [len(part) for part, _ in batches.epoch(0)]
    assert len(sizes) == len(batches)
    assert sum(sizes) == n
    assert n == 1 or min(sizes) > 1


def test_errors_survive_a_process_pool():
    for error in (DivergedError("why"), StoppedError("when")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert not issubclass(StoppedError, Exception)  # or a grid search would go on to the next


def test_batches_depend_on_seed_and_epoch_alone():
    x, y = torch.arange(11), torch.arange(11)
    batches = TensorBatches(x, y, 3, seed=5)
    assert len(batches) == 4
    first = [part.tolist() for part, _ in batches.epoch(0)]
    assert sorted(row for part in first for row in part) == list(range(11))
    assert first == [part.tolist() for part, _ in TensorBatches(x, y, 3, seed=5).epoch(0)]
    assert first[2:] == [part.tolist() for part, _ in batches.epoch(0, skip=2)]
    assert first != [part.tolist() for part, _ in batches.epoch(1)]
    assert first != [part.tolist() for part, _ in TensorBatches(x, y, 3, seed=6).epoch(0)]
    with pytest.raises(ValueError, match="as many targets"):
        TensorBatches(x, y[:4], 3)
    with pytest.raises(ValueError, match="0 samples"):
        TensorBatches(x[:0], y[:0], 3)


def test_schedules():
    for schedule, start, top, end in (
        ("constant", 1, 1, 1),
        ("cooldown", 1, 1, 0),
        ("cosine", 1, 1, 0),
        ("one-cycle", 0.04, 1, 0),
    ):
        config = TrainingConfig(lr=1.0, schedule=schedule)
        rates = [learning_rate(config, step, 1000) for step in range(1001)]
        assert rates[0] == pytest.approx(start)
        assert max(rates) == pytest.approx(top)
        assert rates[-1] == pytest.approx(end, abs=1e-9)
        # A cooldown takes 100 equal steps down; no other schedule moves so fast.
        most = 0.0101 if schedule == "cooldown" else 0.01
        assert max(abs(a - b) for a, b in zip(rates[1:], rates[:-1], strict=True)) < most


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": -1}, {"batch_size": 0}, {"lr": math.nan}, {"optimizer": "sgd"}, {"schedule": "x"}],
    ids=str,
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainingConfig(**wrong)


class Killed(BaseException):
    """What kill -9 looks like from inside: nothing after it runs."""


class KillAt:
    """A display that ends the process, so to speak, at a step."""

    def __init__(self, at: int) -> None:
        self.left = at

    def start(self, epochs, batches, step):
        pass

    def step(self, loss, name, statistic, samples):
        self.left -= 1
        if self.left == 0:
            raise Killed

    def epoch(self, row):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("at", [1, 5, 6, 13, 20])
@pytest.mark.parametrize("minutes", [0.0, 60.0], ids=["every step", "every epoch"])
def test_a_run_that_was_killed_ends_where_it_would_have(tmp_path, at, minutes):
    x, y = problem()
    batches = TensorBatches(x, y, 16, transform=lambda x: x + 0.1 * torch.randn_like(x))
    whole = objective(dropout=0.3, batch_norm=True)
    expected = fit(whole, batches, CONFIG)

    log, checkpoint = MetricsLog(tmp_path / "log.jsonl"), Checkpoint(tmp_path / "c", minutes)
    with pytest.raises(Killed):
        fit(
            objective(dropout=0.3, batch_norm=True),
            batches,
            CONFIG,
            checkpoint=checkpoint,
            log=log,
            display=KillAt(at),
        )
    resumed = objective(dropout=0.3, batch_norm=True)
    fit(resumed, batches, CONFIG, checkpoint=checkpoint, resume=True, log=log)
    assert_same(weights(resumed), weights(whole))
    rows = read_log(tmp_path / "log.jsonl")
    assert [row.epoch for row in rows] == [1, 2, 3, 4]
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected])


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    x, y = problem()
    trained, checkpoint = objective(), Checkpoint(tmp_path / "c")
    fit(trained, TensorBatches(x, y, 16), CONFIG, checkpoint=checkpoint)
    again = objective()
    assert fit(again, TensorBatches(x, y, 16), CONFIG, checkpoint=checkpoint, resume=True) == []
    assert_same(weights(trained), weights(again))


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_leaves(tmp_path, name):
    x, y = problem()

    class Ask(KillAt):
        def step(self, loss, name_, statistic, samples):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), name)

    checkpoint = Checkpoint(tmp_path / "c")
    before = signal.getsignal(name)
    with pytest.raises(StoppedError, match="after step 8"):
        fit(objective(), TensorBatches(x, y, 16), CONFIG, checkpoint=checkpoint, display=Ask(7))
    assert signal.getsignal(name) is before
    whole, resumed = objective(), objective()
    fit(whole, TensorBatches(x, y, 16), CONFIG)
    fit(resumed, TensorBatches(x, y, 16), CONFIG, checkpoint=checkpoint, resume=True)
    assert_same(weights(resumed), weights(whole))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    x, y = problem()
    checkpoint = Checkpoint(tmp_path / "c")
    fit(
        objective(),
        TensorBatches(x, y, 16),
        TrainingConfig(epochs=1, batch_size=16),
        checkpoint=checkpoint,
    )
    good = checkpoint.path.read_bytes()
    wild = TrainingConfig(epochs=3, batch_size=16, lr=1e30)
    with pytest.raises(DivergedError, match=r"step \d+ \(epoch 2, batch \d of 5\).*learning rate"):
        fit(objective(), TensorBatches(x, y, 16), wild, checkpoint=checkpoint, resume=True)
    assert checkpoint.path.read_bytes() == good


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    broken = objective()
    with torch.no_grad():
        broken.net.linear2.bias.fill_(math.inf)
    optimizer = torch.optim.Adam(broken.parameters())
    with pytest.raises(FloatingPointError, match=r"net.linear2.bias"):
        Checkpoint(tmp_path / "c").save(broken, optimizer, checkpoints.Position())
    assert not (tmp_path / "c").exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "c").write_bytes(b"\x80\x04pickle?")
    with pytest.raises(ValueError, match=r"c is not a readable safetensors file"):
        fit(
            objective(),
            TensorBatches(*problem(), 16),
            CONFIG,
            checkpoint=Checkpoint(tmp_path / "c"),
            resume=True,
        )


def test_stop_ends_training_early():
    history = fit(
        objective(),
        TensorBatches(*problem(), 16),
        CONFIG,
        validate=lambda: {"validation_loss": 1.0},
        stop=lambda row: row.epoch == 2,
    )
    assert [row.measured["validation_loss"] for row in history] == [1.0, 1.0]


def test_the_log_is_json_and_tensorboard(tmp_path):
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  (it is installed)

    log = MetricsLog(tmp_path / "m.jsonl")
    rates = {"lr": 0.1, "samples_per_second": 9.0, "seconds": 2.0, "seconds_outside_steps": 1.0}
    undefined = {"entropy_wrong": math.nan}
    log.write(Epoch(epoch=1, step=3, loss=0.5, **rates, measured={"accuracy": 0.9, **undefined}))
    log.write(Epoch(epoch=2, step=6, loss=math.inf, **rates, measured={}))
    log.close()
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"epoch": 3, "st')  # a process killed while it wrote
    first, second, _ = (tmp_path / "m.jsonl").read_text().splitlines()
    known = {"kind": "epoch", "epoch": 1, "step": 3, "loss": 0.5, "accuracy": 0.9, **rates}
    assert json.loads(first) == known | {"entropy_wrong": None}
    assert json.loads(second)["loss"] is None
    one, two = read_log(tmp_path / "m.jsonl")
    assert (one.epoch, one.step, one.loss, one.seconds) == (1, 3, 0.5, 2.0)
    assert one.measured == {"accuracy": 0.9, "entropy_wrong": pytest.approx(math.nan, nan_ok=True)}
    assert math.isnan(two.loss)
    log.rewind(3)
    assert [row.step for row in read_log(tmp_path / "m.jsonl")] == [3]
    assert (tmp_path / "m.jsonl").read_text() == first + "\n"
    assert list((tmp_path / "tensorboard").iterdir())
