"""Noise is saved with the weights, and comes back with them."""

import copy
import hashlib
import math
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import covary
from covary.models import noise_of
from covary.runs.directory import weights_digest
from covary.training.checkpoint import Checkpoint, Position
from covary.training.replicas import Replicas

NOISES = [0.1, 1 / 3, math.pi]  # of which float32 has none


def network(noise=0.2, **options):
    torch.manual_seed(0)
    return covary.mlp([3, 4, 4, 2], noise=noise, **options)


def without_noise(state):
    """The state as it was saved before noise was part of it."""
    return {name: value for name, value in state.items() if not name.endswith("noise")}


def test_weights_bring_their_noise_and_say_so():
    saved, net, x = network(NOISES), network(0.9), torch.randn(5, 3)
    with pytest.warns(UserWarning, match="had noise") as said:
        net.load_state_dict(saved.state_dict())
    messages = [str(each.message) for each in said]
    assert len(messages) == 3
    assert messages[1].startswith(f"noise1 had noise=0.9 and takes noise={1 / 3}, ")
    assert "covary.with_noise(net, ...)" in messages[1]
    assert {each.filename for each in said} == {__file__}
    assert noise_of(net) == NOISES
    assert torch.equal(net(x).covariance_matrix, saved(x).covariance_matrix)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_noise_loads_silently_and_exactly(tmp_path, dtype, assign):
    saved = network(NOISES).to(dtype)
    path = tmp_path / "model.safetensors"
    save_file(saved.state_dict(), path)
    state = load_file(path)
    assert state["lift.noise"].dtype == torch.float64
    assert state["lift.noise"].shape == ()
    other = network(NOISES).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(other.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert noise_of(other) == NOISES


@pytest.mark.parametrize("strict", [False, True])
def test_files_without_noise_load_as_they_did(strict):
    old, net = without_noise(network(0.2).state_dict()), network(0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(net.load_state_dict(old, strict=strict))
    assert noise_of(net) == [0.9] * 3


def test_twins_share_weights_and_not_noise():
    net = network(0.2)
    loud = covary.with_noise(net, 0.9)
    assert loud.lift._buffers is net.lift._buffers
    assert loud.state_dict()["noise1.noise"] == 0.9
    assert net.state_dict()["noise1.noise"] == 0.2
    with pytest.warns(UserWarning, match="had noise=0.9"):
        loud.load_state_dict(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.load_state_dict(net.state_dict())


def test_what_was_saved_stays_when_the_network_changes():
    net = network(0.2)
    state = net.state_dict()
    net.lift.noise = 0.5
    assert state["lift.noise"] == 0.2


@pytest.mark.parametrize("poisson", [False, True])
def test_whether_inputs_are_rates_is_saved(poisson):
    saved, net = network(poisson=poisson), network(poisson=not poisson)
    with pytest.warns(UserWarning, match=f"poisson={not poisson} and takes poisson={poisson}"):
        net.load_state_dict(saved.state_dict())
    assert net.lift.poisson is poisson
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.load_state_dict(without_noise(saved.state_dict()) if not poisson else net.state_dict())
    assert net.lift.poisson is poisson


def test_noise_of_another_shape_is_an_error():
    state = network().state_dict() | {"lift.noise": torch.zeros(2)}
    with pytest.raises(RuntimeError, match=r"lift\.noise is one number, and the file has \(2,\)"):
        network().load_state_dict(state)


def test_a_network_without_values_saves_and_loads():
    with torch.device("meta"):
        state = network(0.3).state_dict()
    assert state["lift.noise"] == 0.3
    net = network(0.2)
    net.load_state_dict({name: value.to("meta") for name, value in state.items()}, assign=True)
    assert noise_of(net) == [0.2] * 3


def test_noise_belongs_to_the_digest_of_no_network():
    """Results that were stored with the digest of the same weights stay valid."""
    net = nn.Sequential(network(0.2, batch_norm=True, poisson=True))
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        if name in dict(net.named_parameters()) or name in dict(net.named_buffers()):
            digest.update(name.encode() + value.numpy().tobytes())
    assert weights_digest(net) == digest.hexdigest()
    assert weights_digest(covary.with_noise(net, 0.9)) == digest.hexdigest()


def test_a_checkpoint_brings_the_noise_back(tmp_path):
    net = network(NOISES)
    Checkpoint(tmp_path / "checkpoint").save(net, torch.optim.SGD(net.parameters()), Position(1, 0))
    other = network(0.9)
    with pytest.warns(UserWarning, match="had noise=0.9"):
        Checkpoint(tmp_path / "checkpoint").restore(other, torch.optim.SGD(other.parameters()))
    assert noise_of(other) == NOISES


def test_replicas_save_the_noise_of_each():
    nets = [network([sigma, 2 * sigma, 0.5]) for sigma in NOISES]
    replicas, others = Replicas(nets), Replicas([network(0.9) for _ in NOISES])
    state = copy.deepcopy(replicas.state_dict())
    assert state["stacked.lift.noise"].tolist() == NOISES
    assert replicas.stacked.lift.noise == NOISES[0]
    with pytest.warns(UserWarning, match=r"stacked\..* had noise=\[0\.9, 0\.9, 0\.9\]"):
        nn.ModuleList([others]).load_state_dict(nn.ModuleList([replicas]).state_dict())
    assert [noise_of(net) for net in others.unstack()] == [noise_of(net) for net in nets]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others.load_state_dict(state)
        others.load_state_dict(without_noise(state))


def test_replicas_of_another_number_are_refused():
    two, three = (Replicas([network() for _ in range(count)]) for count in (2, 3))
    with pytest.raises(RuntimeError, match="size mismatch for stacked"):
        two.load_state_dict(three.state_dict())
