"""SMUC and SMSC: which gradients flow, and that they are right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from covary import activations, covariance

COVARIANCES = covariance.names()
# In evaluation mode, where gradients do not depend on what a pass measures, and none has before.
unmeasured = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")


def network(
    activation: str = "relu",
    covariance: str = "full",
    widths: Sequence[int] = (3, 5, 4, 2),
    **options: object,
) -> nn.Sequential:
    torch.manual_seed(0)
    net = covary.mlp(widths, activation=activation, covariance=covariance, noise=0.4, **options)  # type: ignore[arg-type]
    return net.double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6,))


def smuc_gradient_by_hand(net: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The paper's eq. (breve partial): the chain rule over means, with covariances kept constant.

    Backwards layer by layer, with d mean / d mu of each activation from the covariances of a
    forward pass. Nothing of autograd is used.
    """
    with torch.no_grad(), covary.record(net) as layers:
        out = net(x)
    gradients = {}
    error = (torch.softmax(out.mean, -1) - F.one_hot(y, out.mean.shape[-1])) / len(x)
    names = list(net._modules)
    for name in reversed(names):
        layer = net._modules[name]
        before = layers[names[names.index(name) - 1]]
        if isinstance(layer, covary.nn.Linear):
            gradients[f"{name}.weight"] = error.T @ before.mean
            gradients[f"{name}.bias"] = error.sum(0)
            error = error @ layer.weight
        elif isinstance(layer, covary.nn.Activation):
            error = error * layer.activation(before.mean, before.cov.unit_variance).gain
    return gradients


@unmeasured
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("activation", activations.names())
def test_smuc_gradient_is_that_of_the_paper(activation, covariance):
    net, (x, y) = network(activation, covariance).eval(), batch()
    F.cross_entropy(net(x).mean, y).backward()
    for name, expected in smuc_gradient_by_hand(net, x, y).items():
        torch.testing.assert_close(net.get_parameter(name).grad, expected)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_smuc_is_the_default_and_leaves_the_covariance_out(covariance):
    net, (x, _) = network(covariance=covariance, batch_norm=True, dropout=0.1), batch()
    out = net(x)
    assert out.mean.requires_grad
    assert not out.variance.requires_grad
    assert not out.covariance_matrix.requires_grad


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("smsc", [False, True])
def test_every_parameter_gets_a_gradient_through_every_kind_of_layer(covariance, smsc):
    net, (x, y) = network(covariance=covariance, batch_norm=True, dropout=0.1), batch()
    with covary.supervise_covariance(smsc):
        out = net(x)
    F.cross_entropy(out.mean, y).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any() or ".bias" in name, name


@unmeasured
@pytest.mark.parametrize("covariance", ["full", "tracked"])
def test_smuc_differs_from_the_gradient_of_the_mean(covariance):
    """The mean depends on the variances, and SMUC says not to look."""
    net, (x, y) = network(covariance=covariance).eval(), batch()
    F.cross_entropy(net(x).mean, y).backward()
    smuc = net.linear1.weight.grad.clone()
    net.zero_grad()
    with covary.supervise_covariance():
        out = net(x)
    F.cross_entropy(out.mean, y).backward()
    assert (smuc - net.linear1.weight.grad).norm() > 1e-3 * smuc.norm()


def test_smuc_has_second_derivatives():
    """With variances constant the mean is a smooth function of the input, Hessian and all."""
    net, (x, _) = network("gelu"), batch()
    x.requires_grad_()
    frozen = [(layer, layer.activation) for layer in net if isinstance(layer, covary.nn.Activation)]
    with covary.record(net) as layers:
        (slope,) = torch.autograd.grad(net(x).mean[:, 0].sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x)

    # The same function with the recorded variances as constants, differentiated by autograd alone.
    variances = [layers[f"noise{i}"].variance.detach() for i in (1, 2)]

    def mean(x: Tensor) -> Tensor:
        for i, (_, activation) in enumerate(frozen):
            linear = net.get_submodule(f"linear{i + 1}")
            x = activation(F.linear(x, linear.weight, linear.bias), variances[i]).mean
        return F.linear(x, net.linear3.weight, net.linear3.bias)

    (expected_slope,) = torch.autograd.grad(mean(x)[:, 0].sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(expected_slope.sum(), x)
    torch.testing.assert_close(slope, expected_slope)
    torch.testing.assert_close(curvature, expected)


def functional(net: nn.Sequential, x: Tensor):
    names = [name for name, _ in net.named_parameters()]

    def outputs(*parameters: Tensor) -> tuple[Tensor, Tensor]:
        with covary.supervise_covariance():
            out = torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))
            return out.mean, out.covariance_matrix

    return outputs


@unmeasured
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("activation", activations.names())
def test_gradcheck_in_smsc(activation, covariance):
    net, (x, _) = network(activation, covariance, widths=[3, 3, 3, 2]).eval(), batch()
    parameters = [p.detach().clone().requires_grad_() for p in net.parameters()]
    assert torch.autograd.gradcheck(functional(net, x[:2]), parameters)


@pytest.mark.parametrize("training", [True, False])
def test_gradcheck_in_smsc_through_batch_norm(training):
    net, (x, _) = network(batch_norm=True), batch()
    net.train(training)
    # The running statistics must not move between the evaluations.
    for module in net:
        if isinstance(module, covary.nn.BatchNorm1d):
            module.momentum = 0.0
    parameters = [p.detach().clone().requires_grad_() for p in net.parameters()]
    assert torch.autograd.gradcheck(functional(net, x[:4]), parameters)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("loss", ["trace", "likelihood"])
def test_smsc_trains_the_covariance(covariance, loss):
    """Losses that contain the covariance go down; the paper's eq. (mean_cov_super) and the NLL."""
    torch.manual_seed(0)
    net = covary.mlp([3, 16, 2], noise=0.3, covariance=covariance)
    x = torch.randn(64, 3)
    y = x[:, :2] * x[:, 1:]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        with covary.supervise_covariance():
            out = net(x)
        if loss == "trace":
            value = ((out.mean - y).square().sum(-1) + out.variance.sum(-1)).mean()
        else:
            value = -out.distribution().log_prob(y).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_smsc_ends_with_its_block(covariance):
    net, (x, _) = network(covariance=covariance), batch()
    with covary.supervise_covariance():
        assert net(x).variance.requires_grad
        with covary.supervise_covariance(False):
            assert not net(x).variance.requires_grad
    assert not net(x).variance.requires_grad
    with covary.supervise_covariance(), torch.no_grad():
        assert not net(x).variance.requires_grad


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_smuc_keeps_no_graph_for_the_covariance(covariance):
    """What is kept for the backward pass grows with B n, not with B n^2."""
    net, (x, _) = network(covariance=covariance), batch()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.dim()) or t, lambda t: t
    ):
        out = net(x)
        assert not out.covariance_matrix.requires_grad
    assert max(sizes) == 2
