"""Tracked covariances: with exact variances, one sweep gives what the forward recursion gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import covary
from covary import linalg
from covary.covariance import Tracked
from covary.covariance.tracked import Gram
from covary.moments import Moments
from covary.nn.fidelity import Fidelity, FidelityRow
from tests.spies import calls_of

# Most networks here are made to be looked at, and never measured.
pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")

ACTIVATIONS = ["relu", "leaky_relu", "heaviside", "tanh", "gelu", "identity"]
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]
LAZY, ALL_EXACT = 0, 10**6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def network(*widths: int, exact_width: int | None = LAZY, **options: object) -> nn.Sequential:
    """In double precision and evaluation mode, with corrections that are far from 1."""
    covariance = "tracked" if exact_width is None else f"tracked:{exact_width}"
    net = covary.mlp(widths, covariance=covariance, **options)  # type: ignore[arg-type]
    for layer in linears(net):
        assert layer.log_correction is not None
        layer.log_correction.uniform_(-0.5, 0.5)
    return net.double().eval()


def linears(net: nn.Module) -> list[covary.nn.Linear]:
    return [layer for layer in net.modules() if isinstance(layer, covary.nn.Linear)]


def batch(n: int, size: int = 7) -> Tensor:
    return torch.randn(size, n, dtype=torch.float64)


def close(found: Tensor, exact: Tensor, tolerance: float) -> bool:
    """As matrices: element by element, what cancels has no digits to compare."""
    return bool((found - exact).norm() <= tolerance * exact.norm())


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor]:
    """Pure or mixed, of random depth, widths, noises and activation; training mode or not."""
    depth = draw(st.integers(1, 4))
    mixed = draw(st.booleans())
    width = st.integers(1, 40)
    widths = [2 * 4 * 4 if mixed else draw(width), *(draw(width) for _ in range(depth))]
    noises = [draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])) for _ in range(depth)]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    net = covary.mlp(
        widths,
        activation=draw(st.sampled_from(ACTIVATIONS)),
        noise=noises,
        batch_norm=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
    )
    x = torch.randn(draw(st.integers(2, 6)), widths[0])
    if mixed:
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), covary.nn.Flatten(), *net)
        x = torch.randn(len(x), 1, 6, 6)
    for layer in linears(net):
        layer.weight.data *= 2  # so that activations bend
    for _ in range(3):
        net(x)  # batch norm gets its statistics
    return net.train(draw(st.booleans())), x


def walked(net: nn.Sequential, x: Tensor) -> Iterator[tuple[Moments, Moments]]:
    """Layer by layer, the forward recursion and the recipe that is given its variances."""
    full = covary.with_covariance(net, "full")
    tracked = covary.with_covariance(net, f"tracked:{LAZY}")
    exact: Tensor | Moments = x
    found: Tensor | Moments = x
    for index, layer in enumerate(full):
        torch.manual_seed(index)  # the same mask from both dropouts
        exact = layer(exact)
        torch.manual_seed(index)
        found = tracked[index](found)
        if not isinstance(exact, Moments) or not isinstance(found, Moments):
            continue  # still in the trunk
        if isinstance(layer, covary.nn.Linear):
            assert isinstance(found.cov, Tracked)
            found = Moments(found.mean, replace(found.cov, estimate=exact.cov.variance))
        yield exact, found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(networks())
def test_with_exact_variances_the_sweep_is_the_forward_recursion(case):
    net, x = case
    for dtype, tolerance in PRECISIONS:
        for exact, found in walked(net.to(dtype), x.to(dtype)):
            assert isinstance(found.cov, Tracked)
            matrix = found.covariance_matrix.detach()
            assert close(found.mean, exact.mean, tolerance)
            assert close(matrix, exact.covariance_matrix, tolerance)
            assert close(found.variance, exact.variance, tolerance)
            assert torch.equal(matrix, matrix.mT)
            eigenvalues = torch.linalg.eigvalsh(matrix.double())
            # Numbers below 1e-38 are subnormal and have no relative accuracy to speak of.
            assert (eigenvalues[:, 0] >= -1e-6 * eigenvalues[:, -1] - 1e-38).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(networks())
def test_where_every_layer_is_formed_it_is_the_full_network(case):
    net, x = case
    net.eval()
    for dtype, tolerance in PRECISIONS:
        full = covary.with_covariance(net.to(dtype), "full")
        formed = covary.with_covariance(net, f"tracked:{ALL_EXACT}")
        with covary.record(full) as expected, covary.record(formed) as found:
            full(x.to(dtype)), formed(x.to(dtype))
        for name, exact in expected.items():
            assert close(found[name].covariance_matrix, exact.covariance_matrix, tolerance), name
            assert close(found[name].cov.unit_variance, exact.cov.variance, tolerance), name


@settings(max_examples=30, deadline=None, derandomize=True)
@given(networks())
def test_without_corrections_means_and_variances_are_those_of_the_diagonal_network(case):
    net, x = case
    net.double().eval()  # where corrections are not measured either
    diagonal = covary.with_covariance(net, "diagonal")
    tracked = covary.with_covariance(net, f"tracked:{LAZY}")
    with covary.record(diagonal) as expected, covary.record(tracked) as found:
        diagonal(x.double()), tracked(x.double())
    for name, layer in expected.items():
        assert close(found[name].mean, layer.mean, 1e-12), name
        assert close(found[name].cov.unit_variance, layer.cov.variance, 1e-12), name


@pytest.mark.parametrize("supervised", [False, True], ids=["SMUC", "SMSC"])
@pytest.mark.parametrize(
    ("widths", "pays"), [((8, 300, 20, 5), False), ((300, 40, 20, 5), True)], ids=str
)
def test_a_sweep_is_exact_with_a_first_layer_of_either_shape(monkeypatch, widths, pays, supervised):
    """Whether what its weight makes of the input's noise is formed, or passed by."""
    formed = calls_of(monkeypatch, Gram, "form")
    net, x = covary.mlp(widths, noise=0.4).double().eval(), batch(widths[0], 100)
    with covary.supervise_covariance(supervised):
        *_, (exact, found) = walked(net, x)
        torch.testing.assert_close(found.covariance_matrix, exact.covariance_matrix)
    assert found.covariance_matrix.requires_grad == supervised
    assert bool(formed) == (pays and not supervised), "gradients go through the weight itself"


def literal(net: nn.Sequential, layers: dict[str, Moments]) -> Iterator[tuple[str, Tensor]]:
    """The covariance of each layer by matrices, with gains and excess of the recorded variances."""
    matrix = layers["lift"].covariance_matrix
    before = layers["lift"]
    for name, layer in list(net.named_children())[1:]:
        eye = torch.eye(layers[name].mean.shape[-1], dtype=matrix.dtype)
        if isinstance(layer, covary.nn.Linear):
            matrix = layer.weight @ matrix @ layer.weight.mT
        elif isinstance(layer, covary.nn.Noise):
            matrix = matrix + layer.noise**2 * eye
        elif isinstance(layer, covary.nn.BatchNorm1d):
            scale = layer.get_parameter("weight") / (layer.running_var + layer.eps).sqrt()
            matrix = scale[:, None] * matrix * scale
        elif isinstance(layer, covary.nn.Activation):
            var = before.cov.unit_variance
            response = layer.activation(before.mean, var)
            gain = response.gain
            excess = torch.diag_embed(response.variance - gain.square() * var)
            matrix = gain[:, :, None] * matrix * gain[:, None, :] + excess
        yield name, matrix.detach()
        before = layers[name]


@pytest.mark.parametrize("n", [5, 30], ids=lambda n: f"{n} inputs")
@pytest.mark.parametrize("size", [1, 2, 50], ids=lambda size: f"batch {size}")
def test_record_gives_the_covariance_of_every_layer(size, n):
    """However far the variances are off, and whether what samples have in common is formed."""
    net = network(n, 20, 15, 9, 4, noise=0.4, batch_norm=True)
    with torch.no_grad(), covary.record(net) as layers:
        net(batch(n, size))
    for name, expected in literal(net, layers):
        torch.testing.assert_close(layers[name].covariance_matrix, expected.expand(size, -1, -1))
    off = layers["linear4"].cov.unit_variance / layers["linear4"].variance
    assert (off.log().abs() > 0.1).any()


def test_layers_up_to_exact_width_have_exact_variances_given_those_before():
    net = network(5, 20, 7, 15, 6, 3, noise=0.4, exact_width=7)
    with torch.no_grad(), covary.record(net) as layers:
        net(batch(5))
    for name, expected in literal(net, layers):
        torch.testing.assert_close(
            layers[name].covariance_matrix, expected.expand(7, -1, -1), msg=name
        )
    for name in ("linear1", "linear2", "activation2", "linear4", "linear5"):
        found = layers[name]
        torch.testing.assert_close(found.cov.unit_variance, found.cov.variance, msg=name)
    assert not torch.allclose(layers["linear3"].cov.unit_variance, layers["linear3"].variance)


@pytest.mark.parametrize("front", [[], [covary.nn.ReLU()], [covary.nn.BatchNorm1d(5)]], ids=str)
def test_weights_on_units_that_share_no_noise_need_no_correction(front):
    net = nn.Sequential(covary.nn.Lift(0.5, "tracked"), *front, covary.nn.Linear(5, 4))
    linears(net)[0].begin_tracking()
    linears(net)[0].log_correction.fill_(3)
    out = net.eval()(torch.randn(6, 5))
    torch.testing.assert_close(out.cov.unit_variance, out.cov.variance)


@pytest.mark.parametrize("n", [5, 30], ids=lambda n: f"{n} inputs")
def test_many_samples_in_chunks_are_as_all_at_once(monkeypatch, n):
    net, x = network(n, 20, 15, 9, 4, noise=0.4), batch(n, 60)
    with torch.no_grad():
        at_once = net(x).covariance_matrix
        for elements in (1, 300):
            monkeypatch.setattr(linalg, "_CHUNK_ELEMENTS", {"cpu": elements})
            torch.testing.assert_close(net(x).covariance_matrix, at_once)


@pytest.mark.parametrize("name", ["linear1", "noise1", "linear2", "noise2", "activation2"])
def test_variances_of_a_wide_layer_are_the_diagonal(name):
    net = network(5, 70, 130, 3, noise=0.4)
    with torch.no_grad(), covary.record(net) as layers:
        net(batch(5))
    diagonal = layers[name].covariance_matrix.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(layers[name].variance, diagonal)


def test_variances_of_some_units_and_samples():
    net = network(5, 20, 15, 4, noise=0.4)
    with torch.no_grad(), covary.record(net) as layers:
        net(batch(5))
    units, samples = torch.tensor([3, 0, 11]), slice(2, 5)
    for name in ("linear2", "noise2", "activation2"):
        expected = layers[name].variance[samples][:, units]
        torch.testing.assert_close(layers[name].cov.select(samples).variance_of(units), expected)


@pytest.fixture
def sweeps(monkeypatch) -> list[Tracked]:
    """Grows by one with every sweep for a covariance."""
    swept: list[Tracked] = []
    sweep = Tracked._formed

    def counted(cov: Tracked, units: slice) -> object:
        swept.append(cov)
        return sweep(cov, units)

    monkeypatch.setattr(Tracked, "_formed", counted)
    return swept


def test_what_was_swept_is_kept(sweeps):
    out = network(5, 20, 15, 4)(batch(5))
    assert not sweeps, "nobody looked"
    for _ in range(2):
        out.variance, out.covariance_matrix, out.entropy()
    assert sweeps == [out.cov]


def test_a_look_without_gradients_does_not_spoil_one_with_them(sweeps):
    net = network(5, 20, 15, 4)
    with covary.supervise_covariance():
        out = net(batch(5))
    with torch.no_grad():
        first = out.covariance_matrix
    assert not first.requires_grad
    second = out.covariance_matrix
    assert second.requires_grad
    torch.testing.assert_close(first, second.detach())
    out.entropy().sum().backward()
    assert len(sweeps) == 2, "one of each kind"
    assert all(layer.weight.grad.any() for layer in linears(net))
    with torch.no_grad():
        assert not out.covariance_matrix.requires_grad


@pytest.mark.parametrize("smsc", [False, True])
@pytest.mark.parametrize("look", ["variance", "covariance_matrix", "entropy"])
def test_weights_changed_before_the_look_are_noticed(look, smsc):
    net, x = network(5, 20, 15, 4), batch(5)

    def looked(out: Moments) -> Tensor:
        found = getattr(out, look)
        return found() if callable(found) else found

    with covary.supervise_covariance(smsc):
        early, late = net(x), net(x)
    expected = looked(early).detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    early.mean.sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"weights were changed .*Look first"):
        looked(late)
    assert torch.equal(looked(early), expected), "what was looked at before stays"
    assert repr(late.cov) == "Tracked(7, 4)"
    fresh = net(x)
    net.load_state_dict(net.state_dict())
    with pytest.raises(RuntimeError, match="weights were changed"):
        looked(fresh)


def test_smuc_keeps_no_graph_and_takes_variances_as_constants():
    net, x = network(5, 70, 15, 3, activation="gelu"), batch(5)
    with covary.record(net) as layers:
        out = net(x)
    for moments in layers.values():
        for found in (moments.variance, moments.covariance_matrix, moments.cov.unit_variance):
            assert not found.requires_grad
    assert not out.entropy().requires_grad

    mean = x
    for i in (1, 2):
        linear, activation = net.get_submodule(f"linear{i}"), net.get_submodule(f"activation{i}")
        mean = F.linear(mean, linear.weight, linear.bias)
        mean = activation.activation(mean, layers[f"noise{i}"].cov.unit_variance).mean
    mean = F.linear(mean, net.linear3.weight, net.linear3.bias)
    parameters = list(net.parameters())
    found = torch.autograd.grad(out.mean.square().sum(), parameters)
    expected = torch.autograd.grad(mean.square().sum(), parameters)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("exact_width", [LAZY, 4, ALL_EXACT])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("look", ["variance", "entropy"])
def test_gradients_through_the_covariance_are_right(look, activation, exact_width):
    net = network(3, 5, 4, 3, 2, activation=activation, noise=0.4, exact_width=exact_width)
    names = [name for name, _ in net.named_parameters()]

    def looked(x: Tensor, *parameters: Tensor) -> Tensor:
        with covary.supervise_covariance():
            out = torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))
            return out.variance.sum(-1) if look == "variance" else out.entropy()

    inputs = [batch(3, 2).requires_grad_(), *net.parameters()]
    assert torch.autograd.gradcheck(looked, inputs, fast_mode=True)


def test_gradients_of_wide_variances_are_those_of_the_dense_covariance():
    net, x = network(3, 5, 70, noise=0.4), batch(3)
    with covary.supervise_covariance():
        out = net(x)
    weights = [layer.weight for layer in linears(net)]
    blocks = torch.autograd.grad(out.variance.square().sum(), weights, retain_graph=True)
    diagonal = out.covariance_matrix.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(blocks, torch.autograd.grad(diagonal.square().sum(), weights))


@pytest.mark.parametrize("exact_width", [LAZY, ALL_EXACT])
def test_compiles_in_one_graph_for_many_batch_sizes(exact_width):
    torch._dynamo.reset()
    net = network(4, 20, 15, 3, exact_width=exact_width)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for size in (40, 50, 60):
        x = batch(4, size)
        out, expected = compiled(x), net(x)
        torch.testing.assert_close(out.mean, expected.mean)
        torch.testing.assert_close(out.covariance_matrix, expected.covariance_matrix)
        torch.testing.assert_close(out.entropy(), expected.entropy())


@pytest.mark.parametrize("loaded", [False, True])
def test_a_compiled_network_uses_what_was_measured(loaded):
    torch._dynamo.reset()
    net, x = network(4, 9, 6, 3, exact_width=None), batch(4)
    net.lift.set_fidelity(Fidelity((FidelityRow(0, 0.5, 0.9), FidelityRow(6, 1.0, 0.0))))
    if loaded:
        state, net = net.state_dict(), network(4, 9, 6, 3, exact_width=None)
        net.load_state_dict(state)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    formed = compiled(x).covariance_matrix
    torch.testing.assert_close(formed, net(x).covariance_matrix)
    net.lift.set_fidelity(Fidelity((FidelityRow(0, 1.0, 0.0), FidelityRow(6, 1.0, 0.0))))
    swept = compiled(x).covariance_matrix
    torch.testing.assert_close(swept, net(x).covariance_matrix)
    assert not torch.allclose(swept, formed)


def test_compiled_training_measures_as_eager_training_does():
    torch._dynamo.reset()
    net = network(4, 9, 6, 3).train()
    other = network(4, 9, 6, 3).train()
    other.load_state_dict(net.state_dict())
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = batch(4)
        torch.testing.assert_close(compiled(x).mean, net(x).mean)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(other.get_buffer(name), buffer)


@pytest.mark.parametrize("training", [True, False])
def test_inference_mode(training):
    net, x = network(5, 20, 15, 4, noise=0.4), batch(5)
    expected = net(x)
    with torch.inference_mode():
        out = net(x)
        torch.testing.assert_close(out.entropy(), expected.entropy())
        late = net(x)
    torch.testing.assert_close(late.entropy(), expected.entropy())
    # Layers that were put together by hand get their buffers in the first pass.
    by_hand = nn.Sequential(
        covary.nn.Lift(0.3, "tracked"), covary.nn.Linear(5, 4), covary.nn.Linear(4, 3)
    ).double()
    with torch.inference_mode():
        by_hand.train(training)(x)
    by_hand.train()(x).mean.sum().backward()
    assert by_hand[2].probed.item() == 3 * (1 + training)


def assert_finite(net: nn.Module, out: Moments) -> None:
    assert torch.isfinite(out.mean).all()
    assert torch.isfinite(out.covariance_matrix).all()
    assert all(torch.isfinite(buffer).all() for buffer in net.buffers())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("exact_width", [LAZY, ALL_EXACT])
def test_without_noise_there_is_no_covariance_and_no_correction(activation, exact_width):
    net = covary.mlp(
        [5, 20, 15, 4],
        covariance=f"tracked:{exact_width}",
        activation=activation,
        noise=0,
    )
    for training in (True, True, False):
        out = net.train(training)(torch.randn(6, 5))
        assert_finite(net, out)
        assert not out.covariance_matrix.any()
        assert (out.entropy() == -torch.inf).all()
    assert not any(layer.log_correction.any() for layer in linears(net))


@pytest.mark.parametrize("dead", [slice(0, 8), slice(None)], ids=["some", "all"])
def test_dead_units_leave_no_nan(dead):
    net = covary.mlp([5, 20, 15, 4], covariance=f"tracked:{LAZY}", noise=0.2)
    for layer in linears(net)[:-1]:
        layer.bias.data[dead] = -1e4
    for training in (True, True, False):
        out = net.train(training)(torch.randn(6, 5))
        assert_finite(net, out)
    live = dead != slice(None)
    assert net.linear3.log_correction.any() == live
    assert out.covariance_matrix.any() == live
