"""Weights that vary: their part of the covariance against Jacobians and draws, in all layouts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

import covary
from covary.convert import Converted
from covary.sources import DropConnect, Targets, UncertainWeights

pytestmark = pytest.mark.filterwarnings("ignore:This network was never tracked")


def orthogonal(n: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


def uncertain(weight: torch.Tensor, *, bias: bool, scale: float = 1e-6) -> UncertainWeights:
    """A random Gaussian around a weight, in random bases."""
    m, n = weight.shape[0], weight[0].numel() + bias
    variance = (0.5 + torch.rand(m, n, dtype=torch.float64)) * scale
    return UncertainWeights(variance, orthogonal(m), orthogonal(n))


def covariance_of(weights: UncertainWeights) -> torch.Tensor:
    """Of the weights row by row, (m n, m n)."""
    assert weights.left is not None
    assert weights.right is not None
    basis = torch.kron(weights.left, weights.right)
    return basis @ torch.diag(weights.variance.flatten()) @ basis.T


def filled(
    model: nn.Module,
    batch_dim: int = 0,
    scale: float = 1e-6,
    *,
    linearised: bool = False,
    **options,
) -> Converted:
    """The model with weights that vary, in float64."""
    torch.manual_seed(1)
    net = covary.convert(model.double().eval(), noise=0.0, batch_dim=batch_dim, **options)
    layers = {
        f"{path}.weight" if path else "weight": module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
    }
    weights = {
        path: uncertain(layer.weight, bias=layer.bias is not None, scale=scale)
        for path, layer in layers.items()
    }
    net.posterior.replace(weights, dict.fromkeys(weights, 1.0), model, linearised=linearised)
    return net


def by_brute_force(net, x: torch.Tensor) -> torch.Tensor:
    """(B, n, n): the sum over layers of J C J^T, to first order in the weights."""
    model, batch_dim = net.plan.model, net.batch_dim
    parameters = dict(model.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for path, weights in net.posterior.weights.items():
        weight = parameters[path]
        bias = path.removesuffix("weight") + "bias"
        names = [path, bias] if bias in parameters else [path]

        def outputs(values, names=names):
            given = dict(zip(names, values, strict=True))
            return functional_call(model, given, (x,)).movedim(batch_dim, 0).flatten(1)

        jacobians = jacrev(outputs)([parameters[name] for name in names])
        jacobian = jacobians[0].reshape(*jacobians[0].shape[:2], len(weight), -1)
        if len(names) == 2:
            jacobian = torch.cat([jacobian, jacobians[1][..., None]], -1)
        jacobian = jacobian.flatten(2)
        total = total + jacobian @ covariance_of(weights) @ jacobian.mT
    return total


class Merged(nn.Module):
    """(B, T, ...) as B T samples, in another order, and back."""

    def __init__(self, layer: nn.Module, transposed: bool = False) -> None:
        super().__init__()
        self.layer, self.transposed = layer, transposed

    def forward(self, x):
        b, t = x.shape[:2]
        x = x.transpose(0, 1) if self.transposed else x
        y = torch.tanh(self.layer(x.flatten(0, 1)))
        if self.transposed:
            return y.unflatten(0, (t, b)).transpose(0, 1)
        return y.unflatten(0, (b, t))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


def conv(*args, **kwargs) -> nn.Module:
    kind = kwargs.pop("kind", nn.Conv2d)
    return nn.Sequential(kind(*args, **kwargs), nn.Tanh(), nn.Flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


CASES = {
    "mlp": (mlp, (3, 4), 0),
    "without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 4), 0),
    "one sample": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh()), (1, 4), 0),
    "positions": (mlp, (3, 2, 4), 0),
    "time first": (mlp, (4, 3, 4), 1),
    "merged": (lambda: Merged(nn.Linear(4, 3)), (3, 2, 4), 0),
    "merged, time first": (lambda: Merged(nn.Linear(4, 3), transposed=True), (3, 2, 4), 0),
    "image": (lambda: conv(2, 3, 3), (2, 2, 5, 5), 0),
    "image, strided": (lambda: conv(2, 3, 3, stride=2, padding=(1, 0)), (2, 2, 6, 5), 0),
    "image, dilated": (lambda: conv(1, 2, 2, dilation=2, padding=1), (3, 1, 5, 5), 0),
    "image, same": (lambda: conv(2, 3, (2, 3), padding="same"), (2, 2, 4, 5), 0),
    "image, valid": (lambda: conv(2, 3, 2, padding="valid", bias=False), (2, 2, 4, 4), 0),
    "sequence": (lambda: conv(2, 3, 3, padding=1, stride=2, kind=nn.Conv1d), (2, 2, 7), 0),
    "merged images": (lambda: Merged(nn.Conv2d(2, 3, 2)), (2, 3, 2, 3, 3), 0),
    "merged images, time first": (
        lambda: Merged(nn.Conv2d(2, 3, 2), transposed=True), (2, 3, 2, 3, 3), 0,
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten()),
        (2, 2, 4, 4), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("linearised", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_variances_of_weights_follow_the_jacobian(case, linearised):
    """Of any size if outputs are taken as linear in weights, else if they are small."""
    make, shape, batch_dim = case
    torch.manual_seed(0)
    net = filled(make(), batch_dim, scale=1.0 if linearised else 1e-6, linearised=linearised)
    x = torch.randn(shape, dtype=torch.float64)
    expected = by_brute_force(net, x)
    out = net(x)
    scale = expected.diagonal(dim1=-2, dim2=-1).mean()
    torch.testing.assert_close(
        out.covariance_matrix / scale, expected / scale, rtol=2e-3, atol=2e-4
    )
    torch.testing.assert_close(
        out.budget().total.flatten(1), out.variance.flatten(1), rtol=1e-9, atol=0
    )
    assert all(label.startswith("weights of") or not label for label in out.budget())


@pytest.mark.parametrize("variances", ["averaged", "propagated"])
@pytest.mark.parametrize(
    "name", ["mlp", "positions", "time first", "merged, time first", "image, strided", "sequence"]
)
def test_large_variances_of_weights_agree_with_draws(name, variances):
    make, shape, batch_dim = CASES[name]
    torch.manual_seed(0)
    net = filled(make(), batch_dim, scale=0.02, variances=variances)
    size = list(shape)
    size[batch_dim] = 64
    covary.track(net, torch.randn(size, dtype=torch.float64))
    found = covary.verify(net, torch.randn(shape, dtype=torch.float64), draws=4000)
    assert found.mean.value < 0.1
    assert found.covariance.value < 0.15


def test_a_layer_whose_inputs_vary_has_the_product_of_variances():
    """Two linear layers without bias, one sample: the exact variance of (W + D)(V + E) x."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    net = filled(model, scale=0.05)
    x = torch.randn(64, 3, dtype=torch.float64)
    covary.track(net, x[:1].expand(256, 3))
    out = net(x[:1])
    first, second = net.posterior.weights.values()
    assert first.left is not None
    assert first.right is not None
    assert second.left is not None
    assert second.right is not None
    spread = (x[:1] @ first.right).square() @ first.variance.T  # in the basis of left
    hidden = first.left @ torch.diag(spread[0]) @ first.left.T
    mean = model[0](x[:1])[0]
    both = hidden + mean[:, None] * mean
    own = (second.right.T @ both @ second.right).diagonal() @ second.variance.T
    expected = model[1].weight @ hidden @ model[1].weight.T
    expected = expected + second.left @ torch.diag(own) @ second.left.T
    torch.testing.assert_close(out.covariance_matrix[0], expected.detach(), rtol=0.03, atol=1e-3)


def test_attention_has_one_packed_weight():
    torch.manual_seed(0)
    model = Attention().double().eval()
    net = covary.convert(model, noise=0.0)
    path = "attention.in_proj_weight"
    weights = uncertain(model.attention.in_proj_weight, bias=True, scale=1e-3)
    net.posterior.replace({path: weights}, {path: 1.0}, model, linearised=False)
    covary.track(net, torch.randn(64, 3, 4, dtype=torch.float64))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert list(net(x).budget()) == [f"weights of {path}"]
    assert covary.verify(net, x, draws=4000).covariance.value < 0.15


def test_dropconnect_is_dropout_of_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    net = covary.convert(model, noise=0.0, sources={"0": DropConnect(0.2)})
    x = torch.randn(2, 6, dtype=torch.float64)
    covary.track(net, torch.randn(64, 6, dtype=torch.float64))
    assert list(net(x).budget()) == ["dropout at 0"]
    weight, bias = model[0].weight, model[0].bias
    keep = torch.empty(20_000, *weight.shape, dtype=torch.float64).bernoulli_(0.8) / 0.8
    hidden = torch.einsum("smn,bn->sbm", keep * weight, x) + bias
    drawn = model[2](F.relu(hidden)).detach()
    expected = drawn.var(0)
    assert (net(x).variance / expected - 1).abs().max() < 0.2


@pytest.mark.parametrize("source", [{"1": DropConnect(0.1)}, {"input": DropConnect(0.1)}])
def test_dropconnect_needs_a_weight(source):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    with pytest.raises(ValueError, match="DropConnect at"):
        covary.convert(model, noise=0.0, sources=source)
    with pytest.raises(ValueError, match=r"probability in \[0, 1\)"):
        DropConnect(1.0)


def test_noise_of_targets_is_a_source():
    source = Targets(torch.tensor([0.5, 2.0]))
    drawn = source.draw(torch.zeros(20_000, 2), torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.var(0), source.var, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), (2, 4, 5, 5)),
        (nn.Conv1d(4, 4, 3, groups=4), (2, 4, 5)),
    ],
)
def test_grouped_convolutions_are_refused(model, shape):
    net = filled(model)
    with pytest.raises(covary.ConversionError, match="groups or three dimensions"):
        net(torch.randn(shape, dtype=torch.float64))


def test_weights_that_are_used_twice_are_refused():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    net = filled(Twice())
    with pytest.raises(covary.ConversionError, match="used a second time"):
        net(torch.randn(2, 3, dtype=torch.float64))
