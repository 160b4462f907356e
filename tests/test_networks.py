"""Whole networks: against the literal equations, against sampling, and as PyTorch uses them."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import covary
from benchmarks import steps
from covary import activations, covariance
from tests import digits, reference

COVARIANCES = covariance.names()
# Of networks that no test here asks how good their tracked covariances are.
unmeasured = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("activation", ["relu", "heaviside"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_full_covariance_is_that_of_the_literal_equations(activation, dtype, tolerance):
    net = covary.mlp(steps.WIDTHS, activation=activation, noise=0.3).to(dtype)
    literal = steps.Literal(steps.WIDTHS, 0.3, activation).to(dtype)
    for parameter, ours in zip(literal.parameters(), net.parameters(), strict=True):
        parameter.data.copy_(ours)
    x = torch.randn(16, steps.WIDTHS[0], dtype=dtype)
    with torch.no_grad():
        out = net(x)
        literal_mean, literal_cov = literal(x)
    assert (out.mean - literal_mean).norm() < tolerance * literal_mean.norm()
    assert (out.covariance_matrix - literal_cov).norm() < tolerance * literal_cov.norm()


@unmeasured
@pytest.mark.parametrize("name", ["full", "diagonal", "tracked"])
@pytest.mark.parametrize("batch", [1, 300])
def test_a_batch_is_its_samples(batch, name):
    """Chunks, shared first layers and all: no sample's moments depend on its neighbours."""
    net = covary.mlp([6, 90, 70, 3], noise=0.3, covariance=name).eval()
    x = torch.randn(batch, 6)
    together = net(x)
    for i in (0, batch // 2, batch - 1):
        alone = net(x[i : i + 1])
        torch.testing.assert_close(together.mean[i], alone.mean[0])
        torch.testing.assert_close(
            together.covariance_matrix[i], alone.covariance_matrix[0], rtol=1e-4, atol=1e-7
        )


def test_shared_covariance_is_the_full_one_for_equal_samples():
    net = covary.mlp([6, 20, 12, 3], noise=0.3)
    x = torch.randn(1, 6).expand(4, 6)
    shared = covary.with_covariance(net, "shared")(x)
    torch.testing.assert_close(shared.covariance_matrix, net(x).covariance_matrix)
    torch.testing.assert_close(shared.mean, net(x).mean)


def test_diagonal_is_exact_for_one_layer_and_drops_correlations_after_it():
    net = covary.mlp([6, 20, 12, 3], noise=0.3)
    x = torch.randn(4, 6)
    diagonal = covary.with_covariance(net, "diagonal")
    with covary.record(net) as exact, covary.record(diagonal) as dropped:
        net(x), diagonal(x)
    torch.testing.assert_close(dropped["activation1"].variance, exact["activation1"].variance)
    correlations = exact["activation1"].covariance_matrix
    assert (correlations - torch.diag_embed(exact["activation1"].variance)).abs().max() > 1e-3
    second = net.linear2.weight.square() @ dropped["activation1"].variance[..., None]
    torch.testing.assert_close(dropped["linear2"].variance, second[..., 0])


@st.composite
def deep_networks(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor]:
    """Random depth, widths, scales of weights, noises and activations."""
    depth = draw(st.integers(1, 4))
    widths = draw(st.lists(st.integers(1, 300), min_size=depth + 1, max_size=depth + 1))
    noises = draw(st.lists(st.floats(0, 10), min_size=depth, max_size=depth))
    name = draw(st.sampled_from(activations.names()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    net = covary.mlp(
        widths,
        activation=name,
        noise=noises,
        covariance=draw(st.sampled_from(COVARIANCES)),
        batch_norm=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
    )
    for layer in net:
        if isinstance(layer, covary.nn.Linear):
            scale = 10 ** draw(st.floats(-3, 3))
            nn.init.normal_(layer.weight, 0, scale, generator=generator)
            nn.init.normal_(layer.get_parameter("bias"), 0, scale, generator=generator)
    return net, torch.randn(3, widths[0], generator=generator)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(deep_networks())
def test_covariances_are_positive_semidefinite(network):
    net, x = network
    torch.manual_seed(0)  # of dropout
    with torch.no_grad(), covary.record(net) as layers:
        net(x)
    for name, layer in layers.items():
        matrix = layer.covariance_matrix
        assert torch.isfinite(matrix).all(), name
        assert (layer.variance >= 0).all(), name
        torch.testing.assert_close(matrix.diagonal(dim1=1, dim2=2), layer.variance)
        eigenvalues = torch.linalg.eigvalsh(matrix.double())
        # Numbers below 1e-38 are subnormal and have no relative accuracy to speak of.
        assert (eigenvalues[:, 0] >= -1e-6 * eigenvalues[:, -1] - 1e-38).all(), name


def test_off_diagonal_error_shrinks_with_the_square_of_the_correlation():
    """docs/theory.md, eq. (6): linear response is the first term of a series in rho."""
    mu, var = (0.9, 1.2), (1.0, 2.0)
    for name in ("relu", "heaviside"):
        out = activations.get(name)(
            torch.tensor([mu], dtype=torch.float64), torch.tensor([var], dtype=torch.float64)
        )
        gains = out.gain.prod().item() * (var[0] * var[1]) ** 0.5
        errors = [
            abs(gains * rho - reference.pair_covariance(name, mu, var, rho))
            for rho in (0.2, 0.1, 0.05)
        ]
        for larger, smaller in pairwise(errors):
            assert 3.3 < larger / smaller < 4.7, (name, errors)


@cache
def trained(activation: str, noise: float) -> nn.Sequential:
    return digits.trained(activation, noise)


@pytest.mark.parametrize(("noise", "limit"), [(0.45, 0.08), (0.2, 0.03)])
def test_a_trained_relu_network_describes_its_stochastic_network(noise, limit):
    net = trained("relu", noise)
    assert digits.accuracy(net) > 0.95
    mean_errors, cov_errors = reference.errors_against_sampling(net, digits.data()[2][:6])
    assert mean(mean_errors) < 0.01
    assert mean(cov_errors) < limit


def test_an_untrained_heaviside_network_describes_its_stochastic_network():
    torch.manual_seed(0)
    net = covary.mlp(digits.WIDTHS, activation="heaviside", noise=0.2)
    mean_errors, cov_errors = reference.errors_against_sampling(net, digits.data()[2][:6])
    assert mean(mean_errors) < 0.01
    assert mean(cov_errors) < 0.05


def test_entropy_is_higher_where_a_trained_network_errs():
    net = trained("relu", 0.2)
    _, _, x, y = digits.data()
    with torch.no_grad():
        out = net(x)
    wrong = out.mean.argmax(-1) != y
    assert wrong.sum() >= 3
    assert out.entropy()[wrong].mean() > out.entropy()[~wrong].mean()


@pytest.mark.parametrize("name", COVARIANCES)
def test_with_covariance_shares_parameters_and_buffers(name):
    net = covary.mlp([4, 5, 2], covariance="shared", batch_norm=True)
    twin = covary.with_covariance(net, name)
    assert twin.lift.covariance == name
    assert net.lift.covariance == "shared"
    assert [id(p) for p in twin.parameters()] == [id(p) for p in net.parameters()]
    net.train()(torch.randn(8, 4))
    assert torch.equal(twin.batch_norm1.running_mean, net.batch_norm1.running_mean)
    assert twin.batch_norm1.running_mean.abs().sum() > 0


def test_with_covariance_stays_the_same_network_when_it_is_moved_or_shares_modules():
    layer = covary.nn.Linear(4, 4)
    norm = covary.nn.BatchNorm1d(4)
    net = nn.Sequential(covary.nn.Lift(0.2), layer, norm, covary.nn.ReLU(), layer)
    twin = covary.with_covariance(net, "diagonal")
    assert twin[1] is twin[4]
    net.double()
    assert twin[2].running_var is net[2].running_var
    assert twin(torch.randn(5, 4, dtype=torch.float64)).mean.dtype == torch.float64


def test_with_covariance_within_record_leaves_no_hook_behind():
    net, x = covary.mlp([4, 5, 2]), torch.randn(3, 4)
    with covary.record(net) as layers:
        twin = covary.with_covariance(net, "diagonal")
        out = net(x)
    twin(x)
    assert layers["linear2"] is out


def test_with_covariance_keeps_its_own_mode():
    net = covary.mlp([4, 5, 2], dropout=0.5)
    twin = covary.with_covariance(net, "diagonal").eval()
    assert net.training
    assert not twin.training


def test_with_covariance_needs_a_lift():
    with pytest.raises(ValueError, match=r"needs a network with a covary\.nn\.Lift"):
        covary.with_covariance(nn.Linear(3, 2), "full")
    with pytest.raises(ValueError, match="Unknown covariance 'fulll'"):
        covary.with_covariance(covary.mlp([3, 2]), "fulll")
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        covary.with_covariance(torch.compile(covary.mlp([3, 2])), "full")


def test_record_gives_every_layer_once():
    net = nn.Sequential(nn.Linear(4, 6), covary.mlp([6, 5, 2]))
    x = torch.randn(3, 4)
    with covary.record(net) as layers:
        out = net(x)
    assert list(layers) == ["1.lift", "1.linear1", "1.noise1", "1.activation1", "1.linear2"]
    assert layers["1.linear2"] is out
    assert layers["1.activation1"].entropy().shape == (3,)
    net(x)
    assert layers["1.linear2"] is out, "recording ends with its block"
    with covary.record(net.get_submodule("1.linear2")) as last:
        net(x)
    assert list(last) == [""]


@pytest.mark.parametrize("training", [True, False])
def test_record_names_layers_that_pass_moments_on(training):
    net = nn.Sequential(*covary.mlp([4, 5, 2], dropout=0.1), covary.nn.Flatten()).train(training)
    with covary.record(net) as layers:
        net(torch.randn(3, 4))
    assert list(layers) == [str(i) for i in range(7)]


def test_record_of_nothing_is_an_error():
    net = covary.mlp([4, 5, 2])
    with (
        pytest.raises(RuntimeError, match="Was the network called within the block, uncompiled"),
        covary.record(net),
    ):
        pass


def test_record_keeps_the_last_of_several_passes():
    net = covary.mlp([4, 5, 2])
    with covary.record(net) as layers:
        net(torch.randn(3, 4))
        out = net(torch.randn(3, 4))
    assert layers["linear2"] is out


@unmeasured
@pytest.mark.parametrize("name", COVARIANCES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_vmap(activation, name):
    net = covary.mlp([4, 6, 5, 3], activation=activation, covariance=name).eval()
    x = torch.randn(6, 7, 4)
    out = torch.func.vmap(net)(x)
    assert out.mean.shape == (6, 7, 3)
    within = torch.func.vmap(lambda x: net(x).covariance_matrix)(x)
    torch.testing.assert_close(within, out.covariance_matrix)
    for i in range(6):
        alone = net(x[i])
        torch.testing.assert_close(out.mean[i], alone.mean)
        torch.testing.assert_close(out.covariance_matrix[i], alone.covariance_matrix)
        torch.testing.assert_close(out.entropy()[i], alone.entropy(), rtol=1e-4, atol=1e-4)


@unmeasured
@pytest.mark.parametrize("name", ["full", "diagonal", "tracked"])
def test_per_sample_gradients_with_torch_func(name):
    net = covary.mlp([4, 6, 5, 3], covariance=name).eval()
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    parameters = dict(net.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(net, parameters, (x[None],))
        return nn.functional.cross_entropy(out.mean, y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    nn.functional.cross_entropy(net(x).mean, y).backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.mean(0), net.get_parameter(name).grad)


def assert_compiles(backend: str, name: str, activation: str) -> None:
    torch._dynamo.reset()
    net = covary.mlp([4, 5, 3], activation=activation, covariance=name).eval()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    out, expected = compiled(x), net(x)
    torch.testing.assert_close(out.mean, expected.mean)
    torch.testing.assert_close(out.covariance_matrix, expected.covariance_matrix)
    nn.functional.cross_entropy(out.mean, y).backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    nn.functional.cross_entropy(net(x).mean, y).backward()
    torch.testing.assert_close([parameter.grad for parameter in net.parameters()], gradients)
    with covary.supervise_covariance():
        assert compiled(x).variance.requires_grad


def test_compiles_again_in_a_thread_that_never_turned_a_switch():
    """Where settings live on the class, dynamo sees no change when an instance gets its own."""
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(assert_compiles, "aot_eager", "full", "relu").result()


@unmeasured
@pytest.mark.parametrize("name", COVARIANCES)
@pytest.mark.parametrize("activation", ["relu", "heaviside", "tanh"])
def test_compile_in_one_graph(name, activation):
    assert_compiles("aot_eager", name, activation)


def test_spiking_neurons_compile_in_one_graph():
    assert_compiles("aot_eager", "full", "lif")


def test_one_compiled_graph_serves_many_batch_sizes():
    """A network wide enough that eager mode works in chunks."""
    torch._dynamo.reset()
    net = covary.mlp([10, 300, 300, 3])
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for batch in range(20, 32):
        x = torch.randn(batch, 10)
        torch.testing.assert_close(compiled(x).covariance_matrix, net(x).covariance_matrix)


def compiler_is_there() -> bool:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return any(shutil.which(name) for name in ("g++", "clang++")) and header.exists()


@pytest.mark.skipif(
    not compiler_is_there() or sys.platform == "win32",
    reason="torch.compile generates C++ and needs a compiler and Python.h",
)
def test_compile_to_machine_code():
    assert_compiles("inductor", "full", "relu")


MAKERS: dict[str, Callable[[str], Any]] = {
    "Lift": lambda kind: covary.nn.Lift(0.2, kind),
    "mlp": lambda kind: covary.mlp([4, 3], covariance=kind)[0],
    "with_covariance": lambda kind: covary.with_covariance(covary.mlp([4, 3]), kind).lift,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_tracked_covariances_may_name_up_to_how_many_units_layers_are_exact(make):
    for kind in ("tracked", "tracked:0", "tracked:30"):
        assert make(kind).covariance == kind
    for wrong in ("tracked:", "tracked:-1", "tracked:3.0", "tracked: 3", "tracked:x", "full:3"):
        with pytest.raises(ValueError, match=f"Unknown covariance '{wrong}'; .*tracked:N"):
            make(wrong)
