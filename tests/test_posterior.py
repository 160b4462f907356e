"""A posterior of the weights: curvature against brute force, closed forms, files, and the gap."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, jacrev

import covary
from covary.covariance import Full
from covary.posterior import fit
from covary.uncertainty import scores

DOUBLE = torch.float64


def regression(n: int = 40, inputs: int = 3, outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n, inputs, dtype=DOUBLE)
    weight = torch.randn(inputs, outputs, dtype=DOUBLE)
    return x, x @ weight + 0.3 * torch.randn(n, outputs, dtype=DOUBLE)


def linear_map(x: torch.Tensor, y: torch.Tensor, precision: float, noise: float) -> nn.Linear:
    """The most likely weights given the prior, bias included."""
    design = F.pad(x, (0, 1), value=1.0)
    eye = torch.eye(design.shape[1], dtype=DOUBLE)
    best = torch.linalg.solve(design.T @ design / noise + precision * eye, design.T @ y / noise)
    model = nn.Linear(x.shape[1], y.shape[1]).double()
    with torch.no_grad():
        model.weight.copy_(best[:-1].T)
        model.bias.copy_(best[-1])
    return model.eval()


@pytest.mark.parametrize("outputs", [1, 2, 20])
def test_linear_regression_is_exact(outputs):
    x, y = regression(40 if outputs < 20 else 2000, outputs=outputs)
    precision, noise = 0.7, 0.09
    model = linear_map(x, y, precision, noise)
    net = fit(model, (x, y), prior_precision=precision, noise_variance=noise)
    design = F.pad(x, (0, 1), value=1.0)
    eye = torch.eye(4, dtype=DOUBLE)
    cov = torch.linalg.inv(design.T @ design / noise + precision * eye)
    at = torch.randn(5, 3, dtype=DOUBLE)
    point = F.pad(at, (0, 1), value=1.0)
    expected = ((point @ cov) * point).sum(-1)
    budget = net(at).budget()
    weights = budget["weights of model"]
    # Of many outputs, gradients are those of random signs.
    close = {"rtol": 1e-9, "atol": 0.0} if outputs < 20 else {"rtol": 0.2, "atol": 0.0}
    torch.testing.assert_close(weights, expected[:, None].expand(-1, outputs), **close)
    assert torch.equal(budget["noise at targets"], torch.full((5, outputs), noise, dtype=DOUBLE))
    if outputs < 20:
        # y of every output is Gaussian with covariance X X^T / precision + noise.
        whole = design @ design.T / precision + noise * torch.eye(len(x), dtype=DOUBLE)
        density = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), whole)
        assert net.posterior.log_marginal == pytest.approx(float(density.log_prob(y.T).sum()))


def test_the_prior_has_the_largest_marginal_likelihood():
    x, y = regression()
    model = linear_map(x, y, 0.1, 0.09)
    best = fit(model, (x, y), noise_variance=0.09).posterior
    (precision,) = best.prior_precision.values()
    for factor in (0.9, 1.1):
        other = fit(model, (x, y), noise_variance=0.09, prior_precision=factor * precision)
        assert other.posterior.log_marginal < best.log_marginal


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def gauss_newton(model: nn.Module, path: str, x: torch.Tensor) -> torch.Tensor:
    """The whole matrix of a layer's weights and bias (m, n + 1, m, n + 1), for classification."""
    parameters = dict(model.named_parameters())
    names = [f"{path}.weight", f"{path}.bias"]

    def logits(values, each):
        given = dict(zip(names, values, strict=True))
        return functional_call(model, given, (each[None],))[0]

    total = torch.zeros(())
    for each in x:
        weight, bias = jacrev(logits)([parameters[name] for name in names], each)
        jacobian = torch.cat([weight.flatten(2), bias[..., None]], -1)
        p = logits([parameters[name] for name in names], each).softmax(0)
        curvature = hessian(lambda out: -out.log_softmax(0)[0])(p.log())
        total = total + torch.einsum("kmn,kl,lop->mnop", jacobian, curvature, jacobian)
    return total.detach()


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_curvature_is_that_of_the_gauss_newton_matrix_in_the_basis(structure):
    torch.manual_seed(0)
    convolutional = nn.Sequential(
        nn.Conv2d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )
    cases = [(mlp(), torch.randn(7, 3)), (convolutional.double().eval(), torch.randn(6, 2, 4, 4))]
    for model, inputs in cases:
        x = inputs.double()
        net = fit(
            model,
            (x, torch.zeros(len(x), dtype=torch.int64)),
            structure=structure,
            prior_precision=2.0,
        )
        for path, weights in net.posterior.weights.items():
            m, n = weights.variance.shape
            left = torch.eye(m).double() if weights.left is None else weights.left
            right = torch.eye(n).double() if weights.right is None else weights.right
            whole = gauss_newton(model, path.removesuffix(".weight"), x)
            diagonal = torch.einsum("mnop,mi,nj,oi,pj->ij", whole, left, right, left, right)
            torch.testing.assert_close(weights.variance, 1 / (diagonal + 2.0), rtol=1e-8, atol=0.0)


def test_bases_are_those_of_the_factors():
    model, x = mlp(), torch.randn(9, 3, dtype=DOUBLE)
    net = fit(model, (x, torch.zeros(9, dtype=torch.int64)), prior_precision=1.0)
    weights = net.posterior.weights["2.weight"]
    hidden = F.pad(model[1](model[0](x)), (0, 1), value=1.0)
    p = model(x).softmax(-1)
    factors = {
        "right": hidden.T @ hidden,
        "left": (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).sum(0),
    }
    for name, factor in factors.items():
        basis = getattr(weights, name)
        turned = basis.T @ factor.detach() @ basis
        torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0.0, atol=1e-10)


def test_random_labels_have_the_same_curvature_on_average():
    torch.manual_seed(0)
    model = nn.Linear(3, 20).double().eval()
    x = torch.randn(3000, 3, dtype=DOUBLE)
    labels = torch.zeros(3000, dtype=torch.int64)
    found = fit(model, (x, labels), structure="diagonal", prior_precision=1.0).posterior
    p = model(x).softmax(-1)
    exact = ((p * (1 - p)).T @ F.pad(x, (0, 1), value=1.0).square()).detach() + 1.0
    ratio = found.weights["weight"].variance * exact
    assert 0.9 < float(ratio.mean()) < 1.1


def test_singular_factors_are_harmless():
    """Inputs that are always 0: the data say nothing, and the prior all."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(20, 2), torch.zeros(20, 2)], 1)
    net = fit(nn.Linear(4, 2).eval(), (x, torch.randint(0, 2, (20,))), prior_precision=4.0)
    out = net(torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    bias = net(torch.zeros(1, 4))
    torch.testing.assert_close(out.variance - bias.variance, torch.full((1, 2), 0.25))


def classification(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n, 3, dtype=DOUBLE)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def test_a_posterior_is_saved_with_the_weights(tmp_path):
    x, y = classification()
    net = fit(mlp(), (x, y))
    path = tmp_path / "net.pt"
    torch.save(net.state_dict(), path)
    other = covary.convert(mlp(), noise=0.0)
    other.load_state_dict(torch.load(path))
    torch.testing.assert_close(other(x).covariance_matrix, net(x).covariance_matrix)
    assert other.posterior.log_marginal == net.posterior.log_marginal
    assert repr(other.posterior) == repr(net.posterior)
    copied = copy.deepcopy(net)
    torch.testing.assert_close(copied(x).covariance_matrix, net(x).covariance_matrix)
    single = copied.float()(x.float())
    torch.testing.assert_close(single.variance.double(), net(x).variance, rtol=1e-4, atol=1e-6)


def test_a_posterior_of_other_weights_is_refused():
    x, y = classification()
    net = fit(mlp(), (x, y))
    state = net.state_dict()
    changed = {**state, "model.0.weight": state["model.0.weight"] * 1.001}
    with pytest.raises(RuntimeError, match="fitted to other weights"):
        covary.convert(mlp(), noise=0.0).load_state_dict(changed)
    with torch.no_grad():
        net.model[0].weight.mul_(1.001)
    with pytest.raises(RuntimeError, match="fitted to other weights"):
        net(x)
    net.posterior.clear()
    assert not bool(net(x).variance.any())


def test_the_given_network_stays_as_it_was():
    x, y = classification()
    given = covary.convert(mlp(), noise=0.1)
    covary.track(given, x)
    before = given(x).variance
    net = fit(given, (x, y))
    torch.testing.assert_close(given(x).variance, before)
    budget = net(x).budget().by_kind()
    torch.testing.assert_close(budget["noise"] + budget["input"], before, rtol=1e-6, atol=1e-9)
    assert float(budget["weights"].min()) > 0
    torch.testing.assert_close(net(x).mean, given(x).mean)


def test_layers_can_be_chosen():
    x, y = classification()
    last = fit(mlp(), (x, y), layers="last")
    assert list(last(x).budget()) == ["weights of 2"]
    assert "fixed: 0.weight, 0.bias" in repr(last)
    assert list(fit(mlp(), (x, y), layers=["0"])(x).budget()) == ["weights of 0"]


def test_what_cannot_vary_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)
    ).eval()
    data = torch.randn(12, 2, 5, 5), torch.randint(0, 3, (12,))
    with pytest.warns(UserWarning, match=r"stay fixed: 0\.weight"):
        net = fit(model, data)
    assert list(net.posterior.prior_precision) == ["3.weight"]
    assert "fixed: 0.weight, 0.bias, 1.weight, 1.bias" in repr(net)
    with pytest.raises(ValueError, match=r"No posterior can be found of 0\.weight"):
        fit(model, data, layers=["0"])


def test_whole_numbers_are_inputs_too():
    """Bytes of images do not vary, and what the first weights make of them does."""

    class OfBytes(nn.Sequential):
        def forward(self, x):
            return super().forward(x.float() / 255)

    torch.manual_seed(0)
    model = OfBytes(nn.Linear(4, 3)).eval()
    x, y = torch.randint(0, 256, (20, 4), dtype=torch.uint8), torch.randint(0, 3, (20,))
    net, real = fit(model, (x, y)), fit(model[0], (x.float() / 255, y))
    torch.testing.assert_close(net(x).covariance_matrix, real(x.float() / 255).covariance_matrix)


def test_attention_and_embeddings():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.attention(self.words(x)).mean(1))

    torch.manual_seed(0)
    data = torch.randint(0, 9, (16, 5)), torch.randint(0, 2, (16,))
    with pytest.warns(UserWarning, match=r"stay fixed: words\.weight"):
        net = fit(Words().eval(), data)
    assert "weights of attention.self_attn.in_proj_weight" in net(data[0]).budget()
    assert len(net.posterior.weights) == 5


WRONG = {
    "training": (lambda x, y: fit(mlp().train(), (x, y)), ValueError, "evaluation mode"),
    "structure": (lambda x, y: fit(mlp(), (x, y), structure="full"), ValueError, "structure is"),
    "prior": (lambda x, y: fit(mlp(), (x, y), prior_precision=0.0), ValueError, "number > 0"),
    "no data": (lambda x, y: fit(mlp(), []), ValueError, "got no batch"),
    "generator": (lambda x, y: fit(mlp(), iter([(x, y)])), TypeError, "a generator"),
    "no labels": (lambda x, y: fit(mlp(), [x]), TypeError, "a tensor of targets"),
    "range": (lambda x, y: fit(mlp(), (x, y + 5)), ValueError, "Labels are 0 to 2"),
    "type": (
        lambda x, y: fit(mlp(), (x, y.double()), likelihood="classification"),
        ValueError, "whole numbers",
    ),
    "targets": (lambda x, y: fit(mlp(), (x, y.double())), ValueError, "a real target for each"),
    "nan": (lambda x, y: fit(mlp(), (x * math.nan, y)), ValueError, "not finite"),
    "held out": (
        lambda x, y: fit(mlp(), (x, y), prior_precision="held-out"), ValueError, "needs held_out",
    ),
    "layer": (lambda x, y: fit(mlp(), (x, y), layers=["3"]), ValueError, "layers names '3'"),
    "wide": (
        lambda x, y: fit(nn.Linear(9000, 2).eval(), (torch.zeros(2, 9000), y[:2])),
        ValueError, "weight is 2 x 9001.*structure='diagonal'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_calls_are_explained(case):
    call, error, message = case
    with pytest.raises(error, match=message), covary.check_values(False):
        call(*classification())


def test_held_out_data_choose_the_prior():
    x, y = classification(200)
    wide = fit(mlp(), (x, y))
    chosen = fit(mlp(), (x, y), prior_precision="held-out", held_out=classification(100))
    ratios = {
        chosen.posterior.prior_precision[path] / prior
        for path, prior in wide.posterior.prior_precision.items()
    }
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-4)  # one factor for all
    assert chosen.posterior.temperature != 1.0


def test_the_temperature_makes_held_out_data_most_likely():
    """The bias is off by more than its posterior allows: weights have to vary more."""
    x, y = regression(400)
    model = linear_map(x, y, 1e-6, 0.09)
    with torch.no_grad():
        model.bias.add_(0.1)
    held_out = regression(400)
    net = fit(model, (x, y), noise_variance=0.09, prior_precision=1.0, held_out=held_out)

    def loss(temperature: float) -> float:
        ratio = temperature / net.posterior.temperature
        parts = net(held_out[0]).budget()
        variance = parts["noise at targets"] + ratio * parts["weights of model"]
        return float(
            ((held_out[1] - net(held_out[0]).mean.detach()) ** 2 / variance + variance.log()).mean()
        )

    best = loss(net.posterior.temperature)
    assert best < loss(1.0)
    assert best <= min(loss(net.posterior.temperature * 1.8), loss(net.posterior.temperature / 1.8))


def test_the_temperature_belongs_to_how_probabilities_are_made():
    """Logits are larger than wrong labels allow; the formula is too flat, and takes less."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double().eval()
    with torch.no_grad():
        model.weight.copy_(3 * torch.eye(3))
    x = torch.randn(400, 3, dtype=DOUBLE)
    y = torch.where(torch.rand(400) < 0.2, 0, x.argmax(-1))
    found = []
    for way in (scores.expected_softmax, scores.averaged_softmax):
        data = x[:10], y[:10]
        net = fit(model, data, prior_precision=0.1, held_out=(x, y), probabilities=way)
        with torch.no_grad():
            out = net(x)
        losses = []
        for factor in (1.0, 1.8, 1 / 1.8, 0.0):
            scaled = covary.Moments(out.mean, Full(factor * out.covariance_matrix))
            losses.append(float(-way(scaled).gather(1, y[:, None]).log().mean()))
        assert losses[0] < min(losses[1:])
        found.append(net.posterior.temperature)
    assert found[0] < found[1]


def test_weights_are_unsure_in_a_gap_of_the_data():
    """The picture that everybody knows: error bars open where there were no data."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-3, -1, 50), torch.linspace(1, 3, 50)])[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn(100, 1)
    model = nn.Sequential(
        nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(600):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    net = fit(covary.convert(model.eval(), noise={"input": 0.02}), (x, y))
    at = torch.tensor([[-2.0], [0.0], [2.0]])
    budget = net(at).budget().by_kind()
    weights, noise = budget["weights"][:, 0], budget["noise"][:, 0]
    assert float(weights[1]) > 3 * float(weights[0])
    assert float(weights[1]) > 3 * float(weights[2])
    torch.testing.assert_close(noise, noise[:1].expand(3))
    residual = F.mse_loss(model(x), y).item()
    assert float(noise[0]) == pytest.approx(residual, rel=1e-4)


def test_a_chain_keeps_its_noise_and_a_plain_network_has_none():
    x, y = classification()
    chain = covary.mlp([3, 6, 3], noise=0.1).double().eval()
    budget = fit(chain, (x, y))(x).budget().by_kind()
    assert set(budget) == {"weights", "noise", "input"}
    plain = covary.models.plain(chain)
    assert set(fit(plain, (x, y))(x).budget().by_kind()) == {"weights"}


class Recurrent(nn.Module):
    """A hand-written cell, whose weights are used at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(3 + 4, 4), nn.Linear(4, 2)

    def forward(self, x):
        state = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat([step, state], 1)))
        return self.out(state)


def test_weights_that_are_used_again_and_again_stay_fixed():
    torch.manual_seed(0)
    x, y = torch.randn(64, 5, 3), torch.randint(0, 2, (64,))
    model = Recurrent().eval()
    with pytest.warns(UserWarning, match=r"stay fixed: cell\.weight.*used once"):
        net = fit(model, (x, y))
    assert list(net(x).budget()) == ["weights of out"]
    assert list(fit(model, (x, y), layers="last").posterior.prior_precision) == ["out.weight"]
    with pytest.raises(ValueError, match=r"of cell\.weight: .*once"):
        fit(model, (x, y), layers=["cell"])
