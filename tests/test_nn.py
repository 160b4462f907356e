"""Layers: what each does to mean and covariance, and what it says to bad input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import covary
from covary import activations, covariance
from covary.moments import Moments

COVARIANCES = covariance.names()
# Of networks that no test here asks how good their tracked covariances are.
unmeasured = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def lifted(batch: int = 6, n: int = 4, covariance: str = "full") -> Moments:
    """Moments that have been through a layer, so that samples differ in their covariance."""
    head = nn.Sequential(
        covary.nn.Lift(0.5, covariance), covary.nn.Linear(3, n), covary.nn.ReLU()
    ).double()
    out: Moments = head(torch.randn(batch, 3, dtype=torch.float64))
    return out


def test_lift():
    x = torch.randn(5, 3)
    out = covary.nn.Lift(0.5)(x)
    assert out.mean is x
    torch.testing.assert_close(out.covariance_matrix, 0.25 * torch.eye(3).expand(5, 3, 3))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_lift_expands_nothing(covariance):
    out = covary.nn.Lift(0.5, covariance)(torch.randn(1000, 3))
    assert out.cov.dense().shape == (1, 3, 3)


def test_linear():
    layer, before = covary.nn.Linear(4, 2, dtype=torch.float64), lifted()
    after = layer(before)
    torch.testing.assert_close(after.mean, before.mean @ layer.weight.T + layer.bias)
    expected = layer.weight @ before.covariance_matrix @ layer.weight.T
    torch.testing.assert_close(after.covariance_matrix, expected)


def test_linear_starts_as_torch_starts_it():
    torch.manual_seed(1)
    ours = covary.nn.Linear(4, 2)
    torch.manual_seed(1)
    plain = nn.Linear(4, 2)
    assert torch.equal(ours.weight, plain.weight)
    plain.load_state_dict(ours.state_dict())
    assert covary.nn.Linear(4, 2, bias=False).bias is None


def test_noise():
    before = lifted()
    after = covary.nn.Noise(0.3)(before)
    assert after.mean is before.mean
    expected = before.covariance_matrix + 0.09 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(after.covariance_matrix, expected)


@pytest.mark.parametrize("covariance", ["full", "tracked"])
@pytest.mark.parametrize("name", activations.names())
def test_activation(name, covariance):
    before = lifted(covariance=covariance)
    after = covary.nn.Activation(name)(before)
    expected = activations.get(name)(before.mean, before.variance)
    torch.testing.assert_close(after.mean, expected.mean)
    torch.testing.assert_close(after.variance, expected.variance)
    gains = expected.gain[:, :, None] * expected.gain[:, None, :]
    off_diagonal = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(
        after.covariance_matrix[:, off_diagonal],
        (gains * before.covariance_matrix)[:, off_diagonal],
    )


@pytest.mark.parametrize(
    "layer",
    ["ReLU", "Heaviside", "LeakyReLU", "GELU", "Probit", "Tanh", "Sigmoid", "SiLU", "Softplus"],
)
def test_every_named_activation_layer_runs(layer):
    out = getattr(covary.nn, layer)()(lifted())
    assert torch.isfinite(out.covariance_matrix).all()


def test_shared_takes_gain_and_variance_at_the_average_mean():
    before = lifted(covariance="shared")
    after = covary.nn.ReLU()(before)
    relu = activations.get("relu")
    torch.testing.assert_close(after.mean, relu(before.mean, before.variance).mean)
    at_average = relu(before.mean.mean(0, keepdim=True), before.cov.variance)
    torch.testing.assert_close(after.cov.variance, at_average.variance)
    assert after.cov.dense().shape[0] == 1


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_scales_mean_and_covariance_alike(training, affine, covariance):
    layer = covary.nn.BatchNorm1d(4, affine=affine, dtype=torch.float64)
    plain = nn.BatchNorm1d(4, affine=affine, dtype=torch.float64)
    if affine:
        nn.init.uniform_(layer.weight, 0.5, 2)
        nn.init.normal_(layer.bias)
    layer.running_var.uniform_(0.5, 2)
    plain.load_state_dict(layer.state_dict())
    layer.train(training)
    plain.train(training)
    before = lifted(covariance=covariance)
    after = layer(before)
    assert torch.equal(after.mean, plain(before.mean))
    # the slope of the normalisation for fixed statistics
    var = before.mean.var(0, correction=0) if training else layer.running_var
    scale = (1 if layer.weight is None else layer.weight) / torch.sqrt(var + layer.eps)
    expected = scale[:, None] * before.covariance_matrix * scale[None, :]
    torch.testing.assert_close(after.covariance_matrix, expected.detach())
    for name, buffer in plain.named_buffers():
        assert torch.equal(getattr(layer, name), buffer)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_dropout_masks_mean_and_covariance_alike(covariance):
    before = lifted(covariance=covariance)
    layer = covary.nn.Dropout(0.5)
    torch.manual_seed(3)
    after = layer(before)
    torch.manual_seed(3)
    assert torch.equal(after.mean, nn.Dropout(0.5)(before.mean))
    mask = nn.functional.dropout(torch.ones_like(before.mean), 0.0)
    mask = torch.where(before.mean == 0, mask, after.mean / before.mean)
    expected = mask[:, :, None] * before.covariance_matrix * mask[:, None, :]
    if covariance == "shared":
        expected = expected.mean(0, keepdim=True).expand_as(expected)
    torch.testing.assert_close(after.covariance_matrix, expected)
    assert layer.eval()(before) is before


def test_flatten_takes_images_and_moments():
    flatten = covary.nn.Flatten()
    assert flatten(torch.zeros(5, 1, 28, 28)).shape == (5, 784)
    before = lifted()
    assert flatten(before).mean is before.mean
    rows = covary.nn.Lift(0.3)(torch.zeros(5, 4, 3))
    assert flatten(rows).mean.shape == (5, 12)
    assert flatten(rows).covariance_matrix.shape == (5, 12, 12)


def plain_twin(net: nn.Sequential) -> nn.Sequential:
    """The conventional network with the same weights."""
    plain = {
        "relu": nn.ReLU(),
        "tanh": nn.Tanh(),
        "leaky_relu(0.01)": nn.LeakyReLU(),
        "softplus": nn.Softplus(),
        "silu": nn.SiLU(),
        "gelu": nn.GELU(),
    }
    layers: list[nn.Module] = []
    for layer in net:
        if isinstance(layer, covary.nn.Linear):
            layers.append(nn.Linear(layer.in_features, layer.out_features))
        elif isinstance(layer, covary.nn.BatchNorm1d):
            layers.append(nn.BatchNorm1d(layer.num_features))
        elif isinstance(layer, covary.nn.Activation):
            layers.append(plain[repr(layer.activation)])
        elif isinstance(layer, covary.nn.Dropout):
            layers.append(nn.Dropout(layer.p))
        if isinstance(layer, covary.nn.Linear | covary.nn.BatchNorm1d):
            kept = layers[-1].state_dict()  # all but what tracks a covariance
            layers[-1].load_state_dict({name: layer.state_dict()[name] for name in kept})
    return nn.Sequential(*layers)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh", "softplus", "silu"])
@pytest.mark.parametrize(("batch_norm", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_without_noise_it_is_the_conventional_network(covariance, name, batch_norm, dropout):
    net = covary.mlp(
        [5, 9, 7, 3],
        activation=name,
        noise=0,
        covariance=covariance,
        batch_norm=batch_norm,
        dropout=dropout,
    )
    plain = plain_twin(net)
    x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
    torch.manual_seed(4)
    out = net(x)
    torch.manual_seed(4)
    expected = plain(x)
    assert torch.equal(out.mean, expected)
    assert (out.covariance_matrix == 0).all()
    nn.functional.cross_entropy(out.mean, y).backward()
    nn.functional.cross_entropy(expected, y).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_gelu_without_noise_is_torch_gelu_to_rounding():
    net = covary.mlp([5, 9, 3], activation="gelu", noise=0)
    x = torch.randn(8, 5)
    torch.testing.assert_close(net(x).mean, plain_twin(net)(x), rtol=1e-5, atol=1e-6)


def test_mixed_network():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.ReLU(),
        covary.nn.Flatten(),
        covary.nn.Lift(noise=0.2),
        covary.nn.Linear(2 * 4 * 4, 5),
        covary.nn.Noise(0.2),
        covary.nn.ReLU(),
        covary.nn.Linear(5, 3),
    )
    out = net(torch.rand(7, 1, 6, 6))
    assert out.covariance_matrix.shape == (7, 3, 3)
    out.mean.sum().backward()
    assert net[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: covary.nn.Lift(-0.1), r"Lift needs a finite noise >= 0 .*got -0\.1"),
        (lambda: covary.nn.Noise(math.nan), "Noise needs a finite noise >= 0 .*got nan"),
        (lambda: covary.nn.Noise(math.inf), "got inf"),
        (lambda: covary.nn.Activation("ReLU"), r"'ReLU' \(did you mean 'relu'\?\); known are"),
        (lambda: covary.nn.Activation(nn.ReLU()), "did you mean 'relu'"),  # type: ignore[arg-type]
        (lambda: covary.nn.Lift(0.2, "fulll"), "'fulll'; known are full, diagonal, shared, tr"),
        (lambda: covary.nn.Lift(0.2, "tracked:-1"), "'tracked:-1'; known are .* tracked:N"),
        (lambda: covary.mlp([4, 2], covariance="full:3"), "Unknown covariance 'full:3'"),
        (
            lambda: covary.with_covariance(covary.mlp([4, 2]), "tracked:2.5"),
            "Unknown covariance 'tracked:2.5'",
        ),
        (lambda: covary.nn.Dropout(1.0), r"in \[0, 1\), got 1\.0"),
        (lambda: covary.nn.Activation("swishy"), "Unknown activation 'swishy'; known are"),
        (lambda: covary.mlp([784]), r"at least two widths of 1 or more, got \[784\]"),
        (lambda: covary.mlp([784, 0, 10]), r"got \[784, 0, 10\]"),
        (lambda: covary.mlp([9, 5, 3], noise=[0.1]), "or 2 of them .* got 1"),
        (lambda: covary.mlp([9, 5, 3], noise=[0.1, -1]), "got -1"),
        (
            lambda: covary.nn.Lift(0.2, ["full"]),  # type: ignore[arg-type]
            r"Unknown covariance \['full'\]",
        ),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (
            torch.zeros(2, 1, 28, 28),
            ValueError,
            r"4 features, got 28.*on each row of .* \(1, 28, 28\); .*Flatten before it",
        ),
        (torch.zeros(4), ValueError, r"got \(4,\)\. Give a single sample a batch .*x\[None\]"),
        (torch.zeros(2, 4, dtype=torch.uint8), TypeError, r"got torch\.uint8\. Convert .*x\.float"),
        (torch.zeros(2, 4).half(), TypeError, r"float32 or float64 .*got torch\.float16"),
        (torch.zeros(2, 4).double(), TypeError, r"torch\.float32 weights .*net\.double"),
        (torch.zeros(2, 3), ValueError, "Linear expects 4 features, got 3.*that of the input"),
        ([[0.0] * 4], TypeError, "Lift takes a Tensor, got list"),
        (torch.tensor([[0, 1, math.nan, 3.0]]), ValueError, r"1 NaN or infinite .*at \[0, 2\]"),
        (torch.full((2, 4), math.inf), ValueError, "8 NaN or infinite"),
    ],
)
def test_bad_input_is_named(x, error, message):
    with pytest.raises(error, match=message):
        covary.mlp([4, 3, 2])(x)


@pytest.mark.parametrize(
    "layer",
    [
        covary.nn.Linear(4, 2),
        covary.nn.Noise(0.1),
        covary.nn.ReLU(),
        covary.nn.BatchNorm1d(4),
        covary.nn.Dropout(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_tensor_where_moments_belong_says_so(layer):
    name = type(layer).__name__
    message = rf"{name} takes Moments and got a Tensor of shape \(2, 4\)\. Put a covary\.nn\.Lift"
    with pytest.raises(TypeError, match=message):
        layer(torch.zeros(2, 4))


@pytest.mark.parametrize("noise", ["0.2", None, [[0.1]]])
def test_noise_that_is_no_number_is_named(noise):
    with pytest.raises(TypeError, match="Lift needs a number as noise, got"):
        covary.nn.Lift(noise)


@pytest.mark.parametrize("noise", [np.float32(0.5), torch.tensor(0.5), 1])
def test_noise_may_be_any_number(noise):
    assert covary.mlp([4, 3, 2], noise=noise).lift.noise == float(noise)


@pytest.mark.parametrize("widths", [784, [784, 32.0, 10]])
def test_widths_that_are_no_list_of_numbers_are_named(widths):
    with pytest.raises(TypeError, match="a list of whole numbers as widths, got"):
        covary.mlp(widths)


def test_value_checks_can_be_switched_off():
    net = covary.mlp([4, 3, 2])
    x = torch.full((2, 4), math.nan)
    with covary.check_values(False):
        assert net(x).mean.isnan().all()
    with pytest.raises(ValueError, match="NaN"):
        net(x)


def test_layers_print_well():
    assert repr(covary.nn.Lift(0.2)) == "Lift(noise=0.2, covariance='full')"
    tracked = covary.nn.Lift(0.2, "tracked:8")
    assert repr(tracked) == "Lift(noise=0.2, covariance='tracked:8')"
    assert repr(covary.nn.Linear(4, 2)) == "Linear(in_features=4, out_features=2, bias=True)"
    assert repr(covary.nn.Activation("relu")) == "Activation(relu)"
    assert repr(covary.nn.ReLU()) == "ReLU()"
    assert repr(covary.nn.LeakyReLU(0.25)) == "LeakyReLU(negative_slope=0.25)"
    assert repr(covary.nn.Noise(0.1)) == "Noise(noise=0.1)"
    assert repr(covary.nn.Dropout(0.1)) == "Dropout(p=0.1)"
    assert repr(covary.nn.BatchNorm1d(4)) == "BatchNorm1d(4, eps=1e-05, momentum=0.1)"


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
@pytest.mark.parametrize("name", activations.names())
def test_networks_copy_and_pickle(copier, name):
    net = covary.mlp([4, 3, 2], activation=name, batch_norm=True, dropout=0.1).eval()
    x = torch.randn(5, 4)
    assert torch.equal(copier(net)(x).covariance_matrix, net(x).covariance_matrix)


def test_state_dict_round_trips():
    net, other = (covary.mlp([4, 3, 2], batch_norm=True) for _ in range(2))
    net(torch.randn(5, 4))
    other.load_state_dict(net.state_dict())
    x = torch.randn(5, 4)
    assert torch.equal(other.eval()(x).covariance_matrix, net.eval()(x).covariance_matrix)


@unmeasured
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("name", activations.names())
def test_dtype_follows_the_input(covariance, name):
    net = covary.mlp([4, 3, 2], activation=name, covariance=covariance, batch_norm=True)
    x = torch.randn(5, 4)
    single, double = net.eval()(x), net.double()(x.double())
    assert single.mean.dtype == single.covariance_matrix.dtype == torch.float32
    assert double.mean.dtype == double.covariance_matrix.dtype == torch.float64
    torch.testing.assert_close(
        single.covariance_matrix.double(), double.covariance_matrix, rtol=1e-4, atol=1e-6
    )


@unmeasured
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("training", [True, False])
def test_the_meta_device_follows_the_network(covariance, training):
    """No part of a forward pass makes a tensor on a device of its own choice."""
    net = covary.mlp([4, 3, 3, 2], activation="tanh", covariance=covariance, batch_norm=True)
    net = net.to("meta").train(training)
    out = net(torch.randn(5, 4, device="meta"))
    assert out.covariance_matrix.device.type == "meta"


def test_standardize_takes_data_as_they_come():
    shift, scale = torch.tensor([1e9, 5.0], dtype=torch.float64), torch.tensor([1.0, 0.0])
    layer = covary.nn.Standardize(shift, scale.double())
    rows = torch.tensor([[1e9 + 1, 5.0], [1e9 - 2, 7.0]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0], [-2.0, 2.0]])
    torch.testing.assert_close(layer(rows), expected)
    torch.testing.assert_close(layer.double()(rows), expected.double())
    pixels = covary.nn.Standardize(torch.tensor(127.5), torch.tensor(127.5))
    torch.testing.assert_close(
        pixels(torch.tensor([0, 255], dtype=torch.uint8)), torch.tensor([-1.0, 1.0])
    )
    with pytest.raises(ValueError, match="finite scales"):
        covary.nn.Standardize(shift, torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_rescale(covariance):
    before = lifted(covariance=covariance)
    shift, scale = torch.randn(4), torch.rand(4) + 0.5
    after = covary.nn.Rescale(shift, scale)(before)
    torch.testing.assert_close(after.mean, before.mean * scale.double() + shift.double())
    expected = before.covariance_matrix * torch.outer(scale, scale).double()
    torch.testing.assert_close(after.covariance_matrix, expected)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_autocast_leaves_moments_in_full_precision(covariance):
    net = covary.mlp([4, 8, 3], activation="tanh", covariance=covariance)
    x = torch.randn(5, 4)
    exact = net(x)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x.half())
        loss = out.mean.square().sum()
    assert out.mean.dtype == torch.float32
    torch.testing.assert_close(out.mean, exact.mean, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(net(x.half().float()).mean, out.mean, rtol=0, atol=0)
    loss.backward()


class NoHalfPrecision(TorchDispatchMode):
    """Refuses every operation that gives such numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(out):
            assert not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16, func
        return out


@unmeasured
@pytest.mark.parametrize("looked_at", ["covariance_matrix", "variance"])
@pytest.mark.parametrize("used_within", [True, False])
@pytest.mark.parametrize("exact_width", [0, 15])
def test_a_look_within_autocast_is_in_full_precision(exact_width, used_within, looked_at):
    net = covary.mlp([30, 20, 15, 70], covariance=f"tracked:{exact_width}").eval()
    x = torch.randn(50, 30)
    with torch.no_grad():
        expected, out = getattr(net(x), looked_at), net(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), NoHalfPrecision():
            found = getattr(net(x) if used_within else out, looked_at)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@unmeasured
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize(
    "between",
    [covary.nn.BatchNorm1d(6), covary.nn.Rescale(torch.zeros(6), torch.rand(6) + 0.5)],
    ids=["BatchNorm1d", "Rescale"],
)
def test_no_activation_need_stand_between_weights(between, covariance):
    front = [covary.nn.Lift(0.3, covariance), covary.nn.Linear(4, 8), covary.nn.ReLU()]
    weights = [covary.nn.Linear(8, 6), between, covary.nn.Linear(6, 3)]
    net = nn.Sequential(*front, *weights).double().eval()
    with covary.record(net) as layers:
        out = net(torch.randn(7, 4, dtype=torch.float64))
    weight = net[5].weight.detach()
    expected = weight @ layers["4"].covariance_matrix @ weight.mT
    if covariance == "diagonal":
        expected = torch.diag_embed(expected.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(out.covariance_matrix, expected)
