"""Networks that train together against the same networks trained one by one."""

from __future__ import annotations

import copy
import warnings
import weakref

import pytest
import torch
from torch import nn

import covary
from covary import covariance
from covary.nn.fidelity import Fidelity, FidelityRow
from covary.training import (
    ClassificationLoss,
    GaussianLikelihood,
    RegressionLoss,
    TensorBatches,
    TrainingConfig,
    fit,
)
from covary.training import replicas as module
from covary.training.replicas import ReplicaBatches, ReplicaLoss, Replicas

NOISES = [0.0, 0.1, 0.3, 1.0]
FEATURES = 3


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def networks(outputs=1, **settings):
    """One for each noise, each with its own weights and scale."""
    return [
        nn.Sequential(
            covary.nn.Standardize(torch.randn(FEATURES), torch.rand(FEATURES) + 0.5),
            *covary.mlp([FEATURES, 8, 7, outputs], noise=noise, **settings),
            covary.nn.Rescale(torch.randn(outputs), torch.rand(outputs) + 0.5),
        )
        for noise in NOISES
    ]


def tracking(covariance="tracked", **settings):
    return covary.mlp([FEATURES, 8, 1], covariance=covariance, **settings)


def rows_of_each(n=40, samples=25):
    return torch.stack([torch.randperm(n)[:samples] for _ in NOISES])


def states_differ_by(nets, others):
    """The largest difference of any number in them."""
    pairs = [
        (value, other.state_dict()[name])
        for net, other in zip(nets, others, strict=True)
        for name, value in net.state_dict().items()
    ]
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def train_both_ways(nets, loss_of, x, y, *, epochs=12, **settings):
    """The networks after training together, and after training alone."""
    config = TrainingConfig(epochs=epochs, batch_size=10, lr=1e-2, **settings)
    rows, seeds = rows_of_each(len(x)), range(5, 5 + len(nets))
    alone = copy.deepcopy(nets)
    together = ReplicaLoss([loss_of(net) for net in nets])
    history = fit(together, ReplicaBatches(x, y, rows, 10, seeds=seeds), config)
    histories = [
        fit(loss_of(net), TensorBatches(x[mine], y[mine], 10, seed=seed), config)
        for net, mine, seed in zip(alone, rows, seeds, strict=True)
    ]
    for row, *others in zip(history, *histories, strict=True):
        assert row.loss == pytest.approx(sum(other.loss for other in others), rel=1e-4)
    return [objective.net for objective in together.unstack()], alone


@pytest.mark.parametrize("covariance", covariance.names())
def test_a_replica_gives_the_moments_of_its_network(covariance):
    nets = networks(outputs=2, covariance=covariance)
    x = torch.randn(len(nets), 6, FEATURES)
    out = Replicas(nets)(x)
    for index, net in enumerate(nets):
        alone = net(x[index])
        torch.testing.assert_close(out.mean[index], alone.mean)
        torch.testing.assert_close(out.covariance_matrix[index], alone.covariance_matrix)
        torch.testing.assert_close(out.variance[index], alone.variance)
        if NOISES[index]:
            torch.testing.assert_close(out.entropy()[index], alone.entropy())


@pytest.mark.parametrize("covariance", covariance.names())
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
def test_the_likelihood_reaches_weights_through_the_covariance_of_replicas(covariance, outputs):
    nets = networks(outputs=outputs, covariance=covariance)[1:]
    x, y = torch.randn(7, len(nets), FEATURES), torch.randn(7, len(nets), outputs)
    together = ReplicaLoss([GaussianLikelihood(net) for net in nets])
    for _ in range(8):  # more than there are before steps are recorded
        together.zero_grad()
        together(x, y)[0].backward()
    for index, net in enumerate(nets):
        GaussianLikelihood(net)(x[:, index], y[:, index])[0].backward()
        found = together.replicas.stacked.net
        for name, parameter in net.named_parameters():
            same = found.get_parameter(name).grad[index]
            torch.testing.assert_close(same, parameter.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
def test_a_replica_tracks_as_its_network_does():
    nets = networks(outputs=2, covariance="tracked")
    replicas, x = Replicas(nets), torch.randn(len(nets), 6, FEATURES)
    optimizer = torch.optim.SGD(replicas.parameters(), lr=1e-3)
    for _ in range(3):
        replicas(x).mean.square().sum().backward()
        optimizer.step()
    alone = replicas.unstack()
    assert [net[5].probed.item() for net in alone] == [3 * 7] * len(nets)
    assert all(net[5].log_correction.any() for net in alone[1:])
    assert not alone[0][5].log_correction.any(), "without noise there is nothing to measure"
    out = replicas.eval()(x)
    for index, net in enumerate(alone):
        expected = net.eval()(x[index])
        torch.testing.assert_close(out.mean[index], expected.mean)
        torch.testing.assert_close(out.cov.unit_variance[index], expected.cov.unit_variance)
        torch.testing.assert_close(out.covariance_matrix[index], expected.covariance_matrix)
    late = replicas(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights were changed"):
        late.entropy()


def measured():
    """Two networks of which it is known how well they track."""
    nets = [tracking().eval() for _ in range(2)]
    for net in nets:
        net.lift.set_fidelity(Fidelity((FidelityRow(0, 1.0, 0.0),)))
    return nets


def test_replicas_know_nothing_of_how_well_their_networks_tracked():
    nets, x = measured(), torch.randn(2, 6, FEATURES)
    replicas = Replicas(nets).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas(x), replicas(x)
    assert ["never measured" in str(warning.message) for warning in caught] == [True]
    replicas.train()(x)
    assert [net.lift.fidelity for net in replicas.unstack()] == [None, None]
    assert all(net.lift.fidelity is not None for net in nets)


def test_networks_that_torch_stacks_warn_once_and_stay_copyable():
    nets, x = measured(), torch.randn(6, FEATURES)
    state = torch.func.stack_module_state(nets)

    def mean(state, x):
        return torch.func.functional_call(nets[0], state, (x,)).mean

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.func.vmap(mean, in_dims=(0, None))(state, x)
    assert ["never measured" in str(warning.message) for warning in caught] == [True]
    assert torch.equal(copy.deepcopy(nets[0])(x).mean, nets[0](x).mean)


@pytest.mark.parametrize("recorded_after", [5, 10**9], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("covariance", covariance.names())
@pytest.mark.parametrize("activation", ["relu", "heaviside"])
def test_together_as_alone(activation, covariance, recorded_after, monkeypatch):
    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", recorded_after)
    x = torch.randn(40, FEATURES, dtype=torch.float64)
    y = x[:, :1].sin() + 3
    nets = networks(activation=activation, covariance=covariance)
    before = copy.deepcopy(nets)
    together, alone = train_both_ways(nets, lambda net: RegressionLoss(net), x, y)
    assert states_differ_by(together, alone) < 1e-4
    assert states_differ_by(before, alone) > 0.1
    assert states_differ_by(before, nets) == 0, "replicas are copies"


@pytest.mark.parametrize("settings", [{"optimizer": "adamw", "schedule": "one-cycle"}, {}])
def test_classifiers_together_as_alone(settings):
    x = torch.randn(40, FEATURES)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    together, alone = train_both_ways(networks(outputs=3), ClassificationLoss, x, y, **settings)
    assert states_differ_by(together, alone) < 1e-4


@pytest.mark.parametrize("recorded_after", [0, 10**9], ids=["recorded", "not recorded"])
def test_batch_norm_together_as_alone(recorded_after, monkeypatch):
    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", recorded_after)
    x = torch.randn(40, FEATURES)
    y = x[:, :1].sin()
    # A bias before batch norm has no effect and no gradient but round-off, which Adam makes large.
    nets = networks(batch_norm=True, bias=False)
    together, alone = train_both_ways(nets, lambda net: RegressionLoss(net), x, y)
    assert states_differ_by(together, alone) < 1e-4
    assert together[0].state_dict()["3.running_mean"].abs().max() > 0.01


def test_supervised_covariance_together_as_alone(monkeypatch):
    class Likelihood(nn.Module):
        statistic = "loss again"

        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x, y):
            out = self.net(x)
            var = out.variance + 0.1
            loss = ((out.mean - y).square() / var + var.log()).mean()
            return loss, loss.detach()

    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", 3)
    x = torch.randn(40, FEATURES)
    with covary.supervise_covariance():
        together, alone = train_both_ways(networks(), Likelihood, x, x[:, :1].sin())
    assert states_differ_by(together, alone) < 1e-4


def test_a_recorded_step_gives_the_same_gradients_and_leaves_the_rest_alone(monkeypatch):
    x, y = torch.randn(6, len(NOISES), FEATURES), torch.randn(6, len(NOISES), 1)

    def gradients(recorded_after):
        monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", recorded_after)
        torch.manual_seed(1)
        nets = networks(batch_norm=True)
        loss = ReplicaLoss([RegressionLoss(net) for net in nets])
        for parameter in loss.replicas.stacked.net[2].parameters():
            parameter.requires_grad_(False)
        randomness = torch.get_rng_state()
        value, _ = loss(x, y)
        (2 * value).backward()
        assert torch.equal(torch.get_rng_state(), randomness)
        found = [p.grad for p in loss.parameters() if p.requires_grad]
        return value, found, list(loss.buffers())

    torch.testing.assert_close(gradients(0), gradients(10**9))


def test_a_recorded_step_is_gone_with_its_last_use(monkeypatch):
    from torch.jit._state import _python_cu  # what torch keeps until the process ends

    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", 0)
    before = len(_python_cu.get_functions())
    loss = ReplicaLoss([RegressionLoss(net) for net in networks()])
    loss(torch.randn(6, len(NOISES), FEATURES), torch.randn(6, len(NOISES), 1))
    (step,) = loss._steps.values()
    assert isinstance(step, torch.jit.ScriptFunction)
    assert len(_python_cu.get_functions()) == before


def test_networks_are_freed_with_their_last_use():
    loss = ReplicaLoss([RegressionLoss(net) for net in networks()])
    seen = weakref.ref(loss)
    del loss
    assert seen() is None


def test_recorded_dropout_draws_anew_for_every_step_and_replica(monkeypatch):
    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", 0)
    net = covary.mlp([FEATURES, 50, 1], dropout=0.5)
    loss = ReplicaLoss([RegressionLoss(net)] * 2)
    x, y = torch.ones(4, 2, FEATURES), torch.zeros(4, 2, 1)
    values = []
    for _ in range(3):
        loss.zero_grad()
        loss(x, y)[0].backward()
        values.append(loss.replicas.stacked.net.linear2.weight.grad.clone())
    assert not torch.allclose(values[0][0], values[0][1])
    assert not torch.allclose(values[1], values[2])


def test_modes_and_covariances_have_recordings_of_their_own(monkeypatch):
    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", 0)
    nets = networks(batch_norm=True, covariance="shared")
    loss = ReplicaLoss([RegressionLoss(net) for net in nets])
    twin = covary.with_covariance(loss, "diagonal")
    x, y = torch.randn(6, len(NOISES), FEATURES), torch.randn(6, len(NOISES), 1)
    values = [loss(x, y)[0], twin(x, y)[0], loss.eval()(x, y)[0]]
    with torch.no_grad():
        torch.testing.assert_close(loss(x, y)[0], values[2].detach())
    assert len({value.item() for value in values}) == 3


def test_parameters_may_be_frozen_after_recording(monkeypatch):
    monkeypatch.setattr(module, "_STEPS_BEFORE_RECORDING", 0)
    loss = ReplicaLoss([RegressionLoss(net) for net in networks()])
    x, y = torch.randn(6, len(NOISES), FEATURES), torch.randn(6, len(NOISES), 1)
    loss(x, y)[0].backward()
    first, *others = loss.parameters()
    expected = [other.grad for other in others]
    loss.zero_grad()
    first.requires_grad_(False)
    loss(x, y)[0].backward()
    assert first.grad is None
    torch.testing.assert_close([other.grad for other in others], expected)


def test_unstack_gives_back_what_was_stacked():
    nets = networks(batch_norm=True)
    back = Replicas(nets).unstack()
    assert states_differ_by(nets, back) == 0
    assert [net[1].noise for net in back] == NOISES
    assert back[0][2].weight.requires_grad
    assert back[0][2].weight.is_leaf
    assert repr(back) == repr(nets)


def test_state_has_usual_names():
    state = Replicas([covary.mlp([2, 3, 1]) for _ in range(4)]).state_dict()
    assert state["stacked.linear1.weight"].shape == (4, 3, 2)


def test_tied_weights_stay_tied():
    def tied():
        net = covary.mlp([2, 2, 2])
        net.linear2.weight = net.linear1.weight
        return net

    nets = [tied(), tied()]
    replicas = Replicas(nets)
    x = torch.randn(2, 5, 2)
    torch.testing.assert_close(replicas(x).mean[1], nets[1](x[1]).mean)
    (_, back) = replicas.unstack()
    assert back.linear1.weight is back.linear2.weight


def test_each_replica_has_the_batches_it_would_have_alone():
    x, y = torch.randn(40, 2, 2), torch.randn(40)
    rows, seeds = rows_of_each(), [3, 1, 4, 1]
    batches = ReplicaBatches(x, y, rows, 10, seeds=seeds)
    assert len(batches) == 3
    for index, (mine, seed) in enumerate(zip(rows, seeds, strict=True)):
        alone = TensorBatches(x[mine], y[mine], 10, seed=seed)
        for epoch, skip in [(0, 0), (3, 1)]:
            pairs = zip(batches.epoch(epoch, skip=skip), alone.epoch(epoch, skip=skip), strict=True)
            for (some_x, some_y), (expected_x, expected_y) in pairs:
                assert torch.equal(some_x[:, index], expected_x)
                assert torch.equal(some_y[:, index], expected_y)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: covary.mlp([3, 8, 1], activation="heaviside"), r"heaviside.*where.*relu"),
        (lambda: covary.mlp([3, 9, 1]), r"in_features=3, out_features=9"),
        (lambda: covary.mlp([3, 8, 8, 1]), "replica 1 has"),
        (lambda: covary.mlp([3, 8, 1], covariance="shared"), "'shared'.*Lift.*'full'"),
        (lambda: covary.mlp([3, 8, 1]).double(), "float64"),
        (lambda: tracking("tracked:8"), "'tracked:8'.*'full'"),
        (lambda: covary.mlp([3, 8, 1], poisson=True), "poisson=True"),
    ],
)
def test_other_architectures_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        Replicas([covary.mlp([3, 8, 1]), other()])


def test_layers_that_are_exact_belong_to_the_architecture():
    with pytest.raises(ValueError, match=r"'tracked:8'.*where.*'tracked:4'"):
        Replicas([tracking("tracked:4"), tracking("tracked:8")])


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="got none"):
        Replicas([])
    with pytest.raises(ValueError, match=r"2 replicas take inputs of shape \(2, batch"):
        Replicas([covary.mlp([3, 8, 1])] * 2)(torch.randn(5, 3))
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"rows of shape \(2, samples\)"):
        ReplicaBatches(x, x, torch.zeros(3, 4, dtype=torch.int64), 2, seeds=[0, 1])
    with pytest.raises(ValueError, match="as many targets"):
        ReplicaBatches(x, x[:4], torch.zeros(2, 4, dtype=torch.int64), 2, seeds=[0, 1])
    with pytest.raises(ValueError, match="nothing to train on"):
        ReplicaBatches(x, x, torch.zeros(2, 0, dtype=torch.int64), 2, seeds=[0, 1])


def test_only_noise_before_every_activation_makes_variances_certain():
    def is_always_noisy(*nets):
        return ReplicaLoss([RegressionLoss(net) for net in nets])._is_always_noisy()

    # The input's noise stands before no activation.
    assert is_always_noisy(*(covary.mlp([3, 4, 4, 1], noise=[0.0, 0.1, s]) for s in (0.1, 0.2)))
    assert not is_always_noisy(covary.mlp([3, 4, 4, 1], noise=[0.1, 0.1, 0.0]))
    without = covary.nn.Lift(0.1), covary.nn.Linear(3, 4), covary.nn.ReLU()
    assert not is_always_noisy(torch.nn.Sequential(*without))
