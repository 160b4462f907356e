"""Conversion of trained models: moments against draws, and a network like any other."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import covary
from covary import Moments
from covary.nn.fidelity import TrackingWarning
from tests import trained
from tests.architectures import ARCHITECTURES


def leaves(outputs):
    return tree_leaves(outputs, is_leaf=lambda value: isinstance(value, Moments))


class Residual(nn.Module):
    """(B, 6) to (B, 4): a residual sum, and the same block twice."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.enter(x))
        for _ in range(2):
            x = x + self.block(x)
        return self.head(x)


def residual(seed=0):
    torch.manual_seed(seed)
    return Residual().eval()


def inputs(n=32, seed=1):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def tracked(model=None, noise=0.05, **options):
    net = covary.convert(model or residual(), noise=noise, **options)
    covary.track(net, inputs(64))
    return net


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
@torch.no_grad()
def test_without_noise_a_converted_model_is_the_model(row):
    model = row.build()
    x = row.inputs(5, seed=2)
    net = covary.convert(model, noise=0.0, batch_dim=row.batch_dim)
    for out, plain in zip(leaves(row.run(net, x)), leaves(row.run(model, x)), strict=True):
        # Relative to the largest output: sums in another order have errors of that size.
        difference = (out.mean - plain.reshape(out.mean.shape)).abs().max()
        assert difference <= 1e-6 * plain.abs().max()
        assert out.variance.abs().max() == 0


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_moments_agree_with_draws(row):
    """20,000 draws of each input; the scatter of the draws is taken out of the errors."""
    net = covary.convert(row.build(), noise=0.05, batch_dim=row.batch_dim)
    covary.track(net, [row.inputs(64, seed=0)])
    found = covary.verify(net, row.inputs(2, seed=1), draws=20_000)
    assert found.variance.value < 0.06
    assert found.covariance.value < 0.08


@pytest.mark.parametrize("name", trained.NETWORKS)
def test_moments_of_trained_networks_agree_with_draws(name):
    net = covary.convert(trained.trained(name), noise=0.05)
    x, _, x_test, _ = trained.data(name)
    covary.track(net, x)
    found = covary.verify(net, x_test[:4], draws=20_000)
    assert found.variance.value < 0.06
    assert found.covariance.value < 0.08


def test_common_ancestors_add_up_coherently():
    """x + x has four times the variance of x, not twice."""

    class Twice(nn.Module):
        def forward(self, x):
            y = x * 1.0
            return y + y

    net = covary.convert(Twice().eval(), noise=0.5)
    torch.testing.assert_close(net(inputs(2)).variance, torch.full((2, 6), 1.0))


def test_outputs_have_all_that_moments_have():
    net, x = tracked(), inputs(3)
    out = net(x)
    assert out.entropy().shape == (3,)
    assert out.sample(7).shape == (7, 3, 4)
    assert out.distribution().log_prob(out.mean).shape == (3,)
    rows = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    lead = out.project(rows)
    expected = rows @ out.covariance_matrix @ rows.mT
    torch.testing.assert_close(lead.covariance_matrix, expected)
    torch.testing.assert_close(lead.mean, out.mean @ rows.mT)
    torch.testing.assert_close(out[1:].covariance_matrix, out.covariance_matrix[1:])
    torch.testing.assert_close(net(x)[[2, 0]].variance, out.variance[[2, 0]])
    each = torch.randn(2, 1, 4)
    selected = net(x)[1:].project(each).variance
    torch.testing.assert_close(selected, out[1:].project(each).variance)
    assert len(list(out)) == 3
    assert out.double().covariance_matrix.dtype == torch.float64
    again = pickle.loads(pickle.dumps(out))
    torch.testing.assert_close(again.covariance_matrix, out.covariance_matrix)
    torch.testing.assert_close(out.detach().variance, out.variance)


def test_layers_of_moments_take_what_a_converted_network_gives():
    out = tracked()(inputs(3))
    scaled = covary.nn.Rescale(torch.ones(4), torch.full((4,), 2.0))(out)
    torch.testing.assert_close(scaled.covariance_matrix, 4 * out.covariance_matrix)
    linear = covary.nn.Linear(4, 2)
    expected = linear.weight @ out.covariance_matrix @ linear.weight.mT
    torch.testing.assert_close(linear(out).covariance_matrix, expected)
    noisy = covary.nn.Noise(0.3)(out)
    torch.testing.assert_close(noisy.variance, out.variance + 0.09)
    active = covary.nn.ReLU()(out)
    full = Moments(out.mean, covary.covariance.Full(out.covariance_matrix))
    torch.testing.assert_close(
        active.covariance_matrix, covary.nn.ReLU()(full).covariance_matrix, rtol=1e-4, atol=1e-7
    )


def test_training_with_smuc_is_the_ordinary_loop():
    x, y = inputs(128), torch.randint(0, 4, (128,), generator=torch.Generator().manual_seed(0))
    net = tracked()
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x).mean, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    # Variances followed the weights.
    found = covary.verify(net.eval(), x[:4], draws=4000)
    assert found.variance.value < 0.1


def test_batch_norm_and_dropout_train():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(144, 3),
    ).eval()  # fmt: skip
    net = covary.convert(model, noise=0.1)
    before = model[1].running_mean.clone()
    net.train()
    x = torch.randn(16, 1, 8, 8)
    out = net(x)
    out.mean.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not torch.equal(model[1].running_mean, before)  # shared, as all parameters and buffers
    assert (out.variance > 0).all()
    assert not model.training


def test_gradients_are_those_of_the_gain_linearised_network():
    """The backward pass of the mean under SMUC is the sweep: rows of it agree."""
    net, x = tracked(), inputs(2).requires_grad_()
    out = net(x)
    rows = torch.stack([torch.autograd.grad(out.mean[:, i].sum(), x, retain_graph=True)[0]
                        for i in range(4)], 1)  # fmt: skip
    cov, met = out.cov, {}
    cov.tape.sweep(
        cov.at,
        torch.eye(4)[:, None].expand(4, 2, 4),
        lambda terms, here: met.update({term.name: here for term in terms}),
    )
    torch.testing.assert_close(met["input"].transpose(0, 1), rows)


def test_smsc_gradients_reach_weights_through_the_covariance():
    net = covary.convert(residual().double(), noise=0.2)
    covary.track(net, inputs(64).double())
    x = inputs(2).double()
    with covary.supervise_covariance():
        net(x).variance.sum().backward()
    weight = net.model.enter.weight
    found = weight.grad[0, 0].item()
    h = 1e-6
    with torch.no_grad():
        weight[0, 0] += h
        above = net(x).variance.sum()
        weight[0, 0] -= 2 * h
        below = net(x).variance.sum()
    assert found == pytest.approx(((above - below) / (2 * h)).item(), rel=1e-3)


def test_weights_changed_before_the_look_are_noticed():
    net, x = tracked(), inputs(2)
    out = net(x)
    with torch.no_grad():
        net.model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed after the forward pass"):
        out.covariance_matrix  # noqa: B018


def test_the_original_model_is_not_changed():
    model = residual()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    x = inputs(4)
    expected = model(x)
    net = tracked(model)
    net.train()
    net(x).mean.sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError):
        net(torch.randn(4, 5))
    assert torch.equal(model(x), expected)
    assert not any(module.training for module in model.modules())
    for name, module in model.named_modules():
        assert set(vars(module)) == set(before[name])
        assert "forward" not in vars(module)
    assert net.model.head.weight is model.head.weight


def test_no_gradients_leak_into_the_model():
    model = residual()
    with torch.no_grad():
        out = tracked(model)(inputs(2))
    assert not out.mean.requires_grad
    assert not out.covariance_matrix.requires_grad
    assert all(p.grad is None for p in model.parameters())
    out = tracked(model)(inputs(2))
    assert out.mean.requires_grad
    assert not out.covariance_matrix.requires_grad


def test_copies_states_and_pickles():
    net, x = tracked(), inputs(3)
    expected = net(x).covariance_matrix
    twin = copy.deepcopy(net)
    torch.testing.assert_close(twin(x).covariance_matrix, expected)
    with torch.no_grad():
        twin.model.head.weight.mul_(2)
    torch.testing.assert_close(twin(x).covariance_matrix, 4 * expected)
    torch.testing.assert_close(net(x).covariance_matrix, expected)
    again = pickle.loads(pickle.dumps(net))
    torch.testing.assert_close(again(x).covariance_matrix, expected)
    other = covary.convert(residual(seed=5), noise=0.05)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(x).covariance_matrix, expected)


def test_noise_is_part_of_the_state():
    state = tracked(noise=0.05).state_dict()
    other = covary.convert(residual(), noise=0.2)
    with pytest.warns(UserWarning, match=r"had noise=0\.2 and takes noise=0\.05"):
        other.load_state_dict(state)
    assert repr(other.noise) == "0.05"


def test_measurements_survive_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    net, x = tracked(), inputs(3)
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    other = covary.convert(residual(seed=5), noise=0.05)
    other.load_state_dict(load_file(tmp_path / "net.safetensors"))
    torch.testing.assert_close(other(x).covariance_matrix, net(x).covariance_matrix)


def test_float64():
    net = tracked(residual())
    exact = copy.deepcopy(net).double()
    x = inputs(3)
    torch.testing.assert_close(
        exact(x.double()).covariance_matrix.float(), net(x).covariance_matrix, rtol=1e-3, atol=1e-6
    )


def test_compiled_networks_run_uncompiled():
    net, x = tracked(), inputs(3)
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(x).covariance_matrix, net(x).covariance_matrix)


def test_threads_do_not_disturb_each_other():
    net = tracked()
    batches = [inputs(3, seed=i) for i in range(8)]
    expected = [net(x).covariance_matrix for x in batches]
    found = [None] * 8

    def work(i):
        for _ in range(5):
            found[i] = net(batches[i]).covariance_matrix

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_reaches_the_trunk_alone():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x):
            return self.head(self.trunk(x))

    torch.manual_seed(0)
    net = covary.convert(Mixed().eval(), noise=0.1, start="head")
    covary.track(net, inputs(64))
    seen = []
    net.model.trunk.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(inputs(3))
    assert seen[-1] == torch.float16
    assert out.mean.dtype == torch.float32
    assert out.covariance_matrix.dtype == torch.float32


def test_start_is_where_noise_enters():
    model = residual()
    net = covary.convert(model, noise=0.1, start="head")
    x = inputs(3)
    expected = 0.01 * model.head.weight @ model.head.weight.mT
    out = net(x)
    torch.testing.assert_close(out.covariance_matrix, expected.expand(3, 4, 4))
    torch.testing.assert_close(out.mean, model(x))


def test_noise_by_path_and_type():
    model = residual()
    x = inputs(3)
    only_input = covary.convert(model, noise={"input": 0.1})
    covary.track(only_input, inputs(64))
    names = {name for name, _ in only_input(x).cov.by_source().items()}
    assert "input" in names
    by_type = covary.convert(model, noise={nn.Tanh: 0.3})
    covary.track(by_type, inputs(64))
    parts = by_type(x).cov.by_source()
    assert "input" not in parts
    assert parts["block.1:tanh"].sum() > 0
    by_path = covary.convert(model, noise={"block": 0.3, "": 0.1})
    assert by_path.noise.at("block.1").sigma == 0.3
    assert by_path.noise.at("head").sigma == 0.1
    assert by_path.noise.at_input.sigma == 0.1


def test_shares_add_up():
    net = tracked()
    out = net(inputs(5))
    total = sum(out.cov.by_source().values())
    torch.testing.assert_close(total, out.covariance_matrix.diagonal(dim1=1, dim2=2))
    result = covary.track(net, inputs(64))
    assert sum(result.shares.values()) == pytest.approx(1, abs=1e-5)
    shown = str(net)
    for word in ("block.1", "tanh#2", "moment matched", "%", "exact:"):
        assert word in shown


def test_an_untracked_network_measures_on_its_batch_and_says_so():
    net = covary.convert(residual(), noise=0.05)
    with pytest.warns(TrackingWarning, match="never tracked"):
        out = net(inputs(16))
    expected = tracked()(inputs(16))
    difference = (out.covariance_matrix - expected.covariance_matrix).norm()
    assert difference < 0.05 * expected.covariance_matrix.norm()
    assert not net.sites.known()


def test_track_takes_loaders_of_pairs_and_dicts():
    net = covary.convert(residual(), noise=0.05)
    pairs = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs(50), torch.zeros(50)), batch_size=20
    )
    assert covary.track(net, pairs, samples=40).samples == 40
    row = next(row for row in ARCHITECTURES if row.name == "dict_input")
    net = covary.convert(row.build(), noise=0.05)
    assert covary.track(net, [row.inputs(16, seed=0)]).samples == 16
    with pytest.raises(ValueError, match="2 samples at least"):
        covary.track(net, [])


def test_images_of_another_size_take_what_is_typical_of_a_channel():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()
    net = covary.convert(model, noise=0.1)
    covary.track(net, torch.randn(64, 1, 12, 12))
    found = covary.verify(net, torch.randn(3, 1, 16, 16), draws=4000)
    assert found.variance.value < 0.06


def test_verify_also_takes_chains():
    torch.manual_seed(0)
    net = covary.mlp([6, 32, 16, 3], noise=0.1).eval()
    found = covary.verify(net, inputs(2), draws=4000)
    assert found.mean.value < 0.05
    assert found.covariance.value < 0.1
    assert "draws each" in str(found)
    with pytest.raises(ValueError, match="32 draws at least"):
        covary.verify(net, inputs(2), draws=3)


def test_large_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3000)).eval()
    net = covary.convert(model, noise=0.1)
    covary.track(net, inputs(32))
    out = net(inputs(32))
    assert out.variance.shape == (32, 3000)
    best = out.mean.topk(5).indices
    rows = F.one_hot(best, 3000).float()
    lead = out.project(rows)
    assert lead.covariance_matrix.shape == (32, 5, 5)
    torch.testing.assert_close(lead.variance, out.variance.gather(1, best))
    with pytest.raises(MemoryError, match="3000 outputs for a batch of 32 would take about"):
        net(inputs(32)).covariance_matrix  # noqa: B018


def test_large_networks_are_verified_on_fewer_outputs_at_a_time(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 64)).eval()
    net = covary.convert(model, noise=0.05)
    covary.track(net, inputs(64))
    rows, samples = [], []
    project, draw = Moments.project, type(net).draw
    monkeypatch.setattr(Moments, "project", lambda self, r: rows.append(len(r)) or project(self, r))
    monkeypatch.setattr(
        type(net), "draw", lambda self, x, **how: samples.append(len(x)) or draw(self, x, **how)
    )
    for numbers in (2**26, 2**14):
        monkeypatch.setattr("covary.stochastic.verification._NUMBERS", numbers)
        found = covary.verify(net, inputs(2), draws=4000)
        assert found.covariance.value < 0.06
    assert rows == [16]  # of 2 * 512 numbers each; at first all 64 outputs, without a projection
    assert samples[0] == 512
    assert samples[-1] == 32


def test_batches_of_one_and_none():
    net = tracked()
    x = inputs(3)
    torch.testing.assert_close(net(x[:1]).covariance_matrix, net(x).covariance_matrix[:1])
    assert net(x[:0]).covariance_matrix.shape == (0, 4, 4)


def test_warnings_come_once_per_line():
    net = covary.convert(residual(), noise=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            net(inputs(4))
    assert len(caught) == 1


class WritesBetween(nn.Module):
    """A convolution, then an in-place function on what it was applied to, then batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x):
        x = x * 1.0
        y = self.conv(x)
        x.mul_(3.0)
        return self.norm(y).mean((2, 3))


def test_batch_norm_behind_a_convolution_does_not_follow_what_is_written_since():
    torch.manual_seed(0)
    model = WritesBetween().eval()
    x = torch.randn(2, 2, 6, 6)
    net = covary.convert(model, noise={"input": 0.1})
    single = nn.Sequential(model.conv, model.norm, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    expected = covary.convert(single, noise={"input": 0.1})(x).covariance_matrix
    torch.testing.assert_close(net(x).covariance_matrix, expected)


def test_a_look_at_an_earlier_output_takes_the_statistics_of_its_own_pass():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).eval()
    net = covary.convert(model, noise=0.2)
    x = torch.randn(8, 1, 5, 5)
    covary.track(net, x)
    expected, out = net(x).covariance_matrix, net(x)
    model.train()
    model(3 * x)  # moves the running statistics, which torch does not count as a change
    model.eval()
    torch.testing.assert_close(out.covariance_matrix, expected)


class RMSNorm(nn.Module):
    """By hand, as language models write it."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LayerNorm(nn.Module):
    """By hand."""

    def forward(self, x):
        apart = x - x.mean(-1, keepdim=True)
        return apart / torch.sqrt(apart.pow(2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_by_hand_have_moments(norm):
    """No noise enters before roots and powers, which it would make NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), norm(), nn.Linear(16, 3)).eval()
    net, x = covary.convert(model, noise=0.05), torch.randn(64, 12)
    covary.track(net, x)
    found = covary.verify(net, x[:4], draws=4000, progress=False)
    assert found.variance.value < 0.06
    assert found.covariance.value < 0.08


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1)])
def test_the_largest_of_activated_values_is_taken_before_the_activation(activation):
    """Units near their kink: the largest of rectified values is far from a Gaussian's."""
    torch.manual_seed(0)
    model = nn.Sequential(activation, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)).eval()
    x = 0.03 * torch.randn(64, 1, 12, 12)
    net = covary.convert(model, noise={type(activation): 0.05})
    covary.track(net, x)
    moved = nn.Sequential(nn.MaxPool2d(2), activation, nn.Flatten(), model[-1]).eval()
    same = covary.convert(moved, noise={"input": 0.05})
    covary.track(same, x)
    expected = same(x).covariance_matrix
    assert (net(x).covariance_matrix - expected).norm() < 0.03 * expected.norm()


def test_noise_of_an_activated_value_that_is_pooled_and_used_is_one():
    """Both uses vary by the same noise: their difference without the activation is exact."""
    torch.manual_seed(0)

    class Twice(nn.Module):
        def forward(self, x):
            y = nn.functional.relu(x)
            return torch.cat([y, nn.functional.max_pool1d(y[:, None], 1)[:, 0]], 1)

    net, x = covary.convert(Twice().eval(), noise=0.1), 3 + torch.rand(32, 4)
    covary.track(net, x)
    matrix = net(x).covariance_matrix
    torch.testing.assert_close(matrix[:, :4, 4:], matrix[:, :4, :4], rtol=1e-4, atol=1e-6)


def test_measurements_of_another_start_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    whole, head = covary.convert(model, noise=0.5), covary.convert(model, noise=0.5, start="1")
    covary.track(whole, torch.randn(32, 4))
    with pytest.raises(ValueError, match=r"start=None, and this one has start='1'\. Convert"):
        head.load_state_dict(whole.state_dict())
    covary.track(head, torch.randn(32, 4))
    again = covary.convert(model, noise=0.5, start="1")
    again.load_state_dict(head.state_dict())
    x = torch.randn(2, 4)
    torch.testing.assert_close(again(x).variance, head(x).variance)


def test_sparse_buffers_are_no_obstacle():
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    assert covary.convert(model, noise=0.1)(torch.ones(2, 4)).mean.shape == (2, 3)


@pytest.mark.parametrize("covariance", ["full", "tracked:100"])
def test_chains_with_dropout_as_noise_are_verified_by_masks(covariance):
    torch.manual_seed(0)
    net = covary.mlp([4, 32, 16, 3], noise=0.1, dropout=0.2, covariance=covariance).eval()
    x = torch.randn(4, 4)
    found = covary.verify(covary.with_dropout(net), x, draws=4000, progress=False)
    assert found.mean.value < 0.03
    assert found.variance.value < 0.06
