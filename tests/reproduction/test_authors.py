"""The networks that the paper's authors published: read, measured, and left out where absent."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from covary.data import DataError
from covary.models import mlp
from covary.stochastic import Chain, sample_steady
from reproduction.catalogue import get
from reproduction.experiment import SCALES, Measured, Part, seeds
from reproduction.experiments import behind, networks
from reproduction.figures import FIGURES, TABLES
from reproduction.published import weights
from reproduction.running import reproduce
from reproduction.workshop import Network, Workshop
from tests.reproduction.trials import trial, with_mnist

with_weights = pytest.mark.skipif(
    not all(weights.find(name) for name in weights.NETWORKS),
    reason="needs the authors' published weights in $COVARY_DATA/authors",
)
ROWS = ("network-relu", "network-heaviside", "ood-notmnist", "fgsm")
# What each of the four gives without any noise, of all test digits.
ACTIVATIONS = {
    "mnist_relu_mlp": "relu",
    "mnist_heav_mlp": "heaviside",
    "mnist_ood_demo": "relu",
    "mnist_attack_demo": "heaviside",
}


@with_weights
@pytest.mark.parametrize("name", weights.NETWORKS)
def test_weights_are_those_of_the_widths(name):
    widths = weights.NETWORKS[name].widths
    tensors = weights.read(name)
    for i, (before, after) in enumerate(pairwise(widths), 1):
        assert tensors.pop(f"linear{i}.weight").shape == (after, before)
        assert tensors.pop(f"linear{i}.bias").shape == (after,)
    assert not tensors


@with_weights
@with_mnist
@pytest.mark.parametrize("name", weights.NETWORKS)
def test_a_network_of_them_classifies_digits(tmp_path, name):
    """Its means without noise are those of the plain network, written out here."""
    count = len(weights.NETWORKS[name].widths) - 1
    network = networks.published("any", "smoke", name, ACTIVATIONS[name], (0.0,) * count)
    shop = Workshop(folder=tmp_path)
    run = shop.trained(Network.from_dict(network.to_dict()), 0)
    x, y = run.data.x_test, run.data.y_test
    signal, tensors = x.flatten(1).float() / 127.5 - 1, weights.read(name)
    for i in range(1, count + 1):
        signal = F.linear(signal, tensors[f"linear{i}.weight"], tensors[f"linear{i}.bias"])
        if i < count:
            is_step = ACTIVATIONS[name] == "heaviside"
            signal = (signal >= 0).float() if is_step else signal.relu()
    torch.testing.assert_close(run.network()(x).mean, signal, rtol=1e-4, atol=1e-4)
    assert (signal.argmax(1) == y).double().mean() > 0.85
    assert run.config.training.epochs == 0
    written = run.model_path.stat().st_mtime_ns
    assert shop.trained(network, 0).model_path.stat().st_mtime_ns == written


@with_weights
def test_another_file_is_refused(tmp_path):
    (tmp_path / "authors").mkdir()
    path = tmp_path / "authors" / "mnist_relu_mlp.safetensors"
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="is damaged or another version"):
        weights.read("mnist_relu_mlp", str(tmp_path))


NETWORK = {"name": "theirs", "data": "mnist", "settings": {}, "published": "mnist_relu_mlp"}


def test_parts_whose_weights_are_absent_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "folders", lambda _: iter([tmp_path / "data"]))
    said: list[str] = []
    shop = Workshop(folder=tmp_path / "work", say=said.append)

    def measure(part: Part, _workshop: Workshop) -> Measured:
        return Measured({"number": 20.0 + part.seed}, {})

    parts = (*seeds("ours", 2, size=1), *seeds("theirs", 2, network=NETWORK))
    experiment = trial(measure, **dict.fromkeys(SCALES, parts))
    for jobs in (1, 2):
        record = reproduce(experiment, "paper", shop, results=tmp_path, jobs=jobs)
        assert [part["label"] for part in record["parts"]] == ["ours", "ours"]
        assert record["missing"] == [{"label": "theirs", "seed": seed} for seed in range(2)]
    left_out = next(line for line in said if "left out" in line)
    assert "theirs, seed 0; left out. The weights mnist_relu_mlp, which the paper's" in left_out
    assert str(tmp_path / "data" / "authors") in left_out
    alone = replace(shop, folder=tmp_path / "alone")
    with pytest.raises(ValueError, match="Nothing of trial can be measured"):
        reproduce(experiment, "paper", alone, results=tmp_path / "else", only=["theirs"])
    with pytest.raises(DataError, match="are not in"):
        weights.read("mnist_relu_mlp")
    # They are measured where the weights are, and stay in the results where they are not.
    monkeypatch.setattr(weights, "find", lambda *_: tmp_path)
    whole = reproduce(experiment, "paper", shop, results=tmp_path)
    assert whole["missing"] == []
    monkeypatch.undo()
    monkeypatch.setattr(weights, "folders", lambda _: iter([tmp_path / "data"]))
    other = replace(shop, folder=tmp_path / "other")
    again = reproduce(experiment, "paper", other, results=tmp_path)
    assert [part["metrics"] for part in again["parts"]] == [p["metrics"] for p in whole["parts"]]


@with_weights
@with_mnist
@pytest.mark.parametrize("name", ROWS)
def test_parts_of_theirs_run_and_are_drawn(tmp_path, name):
    experiment = get(name)
    labels = [part.label for part in experiment.parts["smoke"] if "authors" in part.label]
    shop = Workshop(folder=tmp_path)
    record = reproduce(experiment, "smoke", shop, results=tmp_path / "results", only=labels)
    assert {part["label"] for part in record["parts"]} == set(labels)
    assert networks.AUTHORS in labels
    about = [claim for claim in experiment.claims if claim.labels == (networks.AUTHORS,)]
    assert about
    for claim in about:
        assert claim.values(record), claim.metric
    assert FIGURES[name](record).alt
    if name in TABLES:
        assert len(TABLES[name](record).rows) == len(set(labels))


# The stochastic network with noise behind activations.


def _linear(sigma: float) -> tuple[Chain, torch.Tensor]:
    """Two hidden layers of linear units, of which all moments are known."""
    torch.manual_seed(0)
    net = mlp([3, 5, 4, 2], activation="identity", noise=sigma).eval()
    return Chain.of(net), torch.tensor([[0.3, -0.2, 0.5]])


def test_noise_behind_activations_goes_through_the_next_weights():
    """C = sigma^2 (W3 W2 W1 (...)^T + W3 W2 (...)^T + W3 W3^T), which holds before them as well."""
    chain, x = _linear(0.7)
    first, second, third = (stage.weight for stage in chain.stages)
    maps = (third @ second @ first, third @ second, third)
    expected = 0.49 * sum(each @ each.T for each in maps).double()
    for network in (chain, behind.noise_behind(chain)):
        found = list(sample_steady(network, x, copies=64_000).values())[-1]
        error = (found.covariance_matrix[0] - expected).norm() / expected.norm()
        assert error < 0.03


def test_noise_behind_a_step_is_not_squashed():
    """h(u) + sigma z has a variance of sigma^2 at least, and h(u + sigma z) a quarter at most."""
    chain = Chain.of(mlp([3, 1, 1], activation="heaviside", noise=[0.0, 2.0]).eval())
    weight = chain.stages[1].weight.double().square().item()
    x = torch.tensor([[0.3, -0.2, 0.5]])
    before, after = (
        list(sample_steady(each, x, copies=64_000).values())[-1].variance.item() / weight
        for each in (chain, behind.noise_behind(chain))
    )
    assert before < 0.26
    assert after == pytest.approx(4.0, rel=0.05)


def test_layers_in_time_filter_what_is_before_them():
    """One linear layer leaves half of the input's variance, and Euler's steps add their part."""
    chain = Chain.of(mlp([3, 2], noise=0.5).eval())
    x = torch.tensor([[0.3, -0.2, 0.5]])
    found = behind.in_time(chain, x, steps=8000, dt=0.05)
    weight = chain.stages[0].weight.double()
    keep = 0.95
    # Of an AR(1) process behind a filter with the same coefficient, which sees it a step ahead.
    noise = 0.25 * 2 * 0.05 / (1 - keep**2)
    share = (1 - keep) ** 2 * (1 + keep**2) / (1 - keep**2) ** 2
    expected = noise * share * weight @ weight.T
    torch.testing.assert_close(found.covariance_matrix[0], expected, rtol=0.08, atol=0.004)
    torch.testing.assert_close(
        found.mean[0], chain.stages[0].drive(x).double()[0], rtol=0.05, atol=0.03
    )


def test_errors_of_moments_of_a_linear_network_are_nothing():
    chain, x = _linear(0.4)
    first, second, third = (stage.weight for stage in chain.stages)
    maps = (third @ second @ first, third @ second, third)
    covariance = 0.16 * sum(each @ each.T for each in maps)
    mean = x
    for stage in chain.stages:
        mean = stage.drive(mean)
    found = behind.errors(chain, x, (mean[0], covariance), copies=16_384, steps=2000, dt=0.1)
    assert found["mean_error_behind"] < 0.02
    assert found["covariance_error_behind"] < 0.03
    assert found["variance_share_behind"] == pytest.approx(1.0, rel=0.05)
    assert found["variance_share_behind_in_time"] < 0.9
