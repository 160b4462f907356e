"""Rules in models that write in place, change constants, compare, embed, or are in training."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covary
from covary.nn.fidelity import TrackingWarning
from covary.testing.contract import seeded
from covary.testing.rules import SIGMA, Apply, jacobian_covariance, moments, relative
from covary.varying import ConversionError
from tests.jacobians import IMAGE, MASK, ROW, STEPS, weights


def _filled_then_changed(x, change):
    mask = MASK.clone()
    y = change(x, mask)
    mask.logical_not_()
    return y


def _index_changed(x):
    index = ROW.clone()
    y = x[:, index]
    index.zero_()
    return y


def _sizes_changed(x):
    sizes = [1, 3]
    y = x.split(sizes, 1)[0]
    sizes.reverse()
    return y


def _factor_changed(x):
    t = torch.ones(1, dtype=x.dtype)
    y = x * t
    t += 1
    return y * t


def _same_tensor(x):
    y = x * 1.0
    z = y.double()
    z.mul_(3.0)
    return y


def _contiguous_copy(x):
    y = x * 1.0
    z = y.transpose(1, 2).contiguous()
    z.mul_(2.0)
    return y + z.transpose(1, 2)


# Models that write in place, or change constants after they were used.
LATER = {
    "masked_fill": (lambda x: _filled_then_changed(x, lambda x, m: x.masked_fill(m, 0.0)), STEPS),
    "where": (lambda x: _filled_then_changed(x, lambda x, m: torch.where(m, x, 2 * x)), STEPS),
    "index": (_index_changed, IMAGE),
    "split": (_sizes_changed, IMAGE),
    "factor": (_factor_changed, STEPS),
    "dropped nowhere": (lambda x: F.dropout(x, 0.0, True, True) * 2, STEPS),
    "same tensor": (_same_tensor, STEPS),
    "contiguous": (_contiguous_copy, STEPS),
}


@pytest.mark.parametrize("name", LATER)
def test_what_changes_after_its_use(name):
    function, x = LATER[name]
    found = moments(function, x)
    torch.testing.assert_close(found.mean, function(x))
    truth = jacobian_covariance(function, x, torch.func.jacfwd)
    assert relative(found.covariance_matrix, truth) < 1e-9


def test_views_are_views_in_any_memory_layout():
    """Convolutions lie in memory here as they do not in the model, where flatten is a view."""

    def through_flatten(x):
        h = F.conv2d(x, weights(5, 4, 3, 3))
        F.relu(h.flatten(1), inplace=True)
        return h.mean((2, 3))

    with pytest.raises(ConversionError, match="another view of the same memory"):
        moments(through_flatten, IMAGE)


def test_windows_do_not_compare_an_element_with_itself():
    """Noise of each sample at the border is that of the elements inside the window alone."""
    x = torch.tensor([[[[0.0, 5.0], [0.0, 0.0]]], [[[5.0, 0.0], [0.0, 0.0]]]])
    net = covary.convert(Apply(lambda x: F.max_pool2d(x, 5, 1, 2)).eval(), noise=0.1)
    covary.track(net, x)
    torch.testing.assert_close(net(x).variance, torch.full((2, 1, 2, 2), 0.01))


def test_mixed_types():
    def both(x, weight):
        return F.linear(x, weight) * weights(4)

    truth = jacobian_covariance(lambda x: both(x, weights(4, 8)), STEPS)
    found = moments(lambda x: both(x.float(), weights(4, 8).float()), STEPS)
    assert found.mean.dtype == torch.float64
    assert relative(found.covariance_matrix, truth) < 1e-5
    truth = jacobian_covariance(lambda x: F.linear(x, weights(4, 8)).sum(1), STEPS)
    found = moments(
        lambda x: F.linear(x.float(), weights(4, 8).float()).sum(1, dtype=torch.float64), STEPS
    )
    assert relative(found.covariance_matrix, truth) < 1e-5


def test_dropout_in_place_in_training():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5, inplace=True)
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            y = x * 1.0
            self.drop(y)
            return y

    net = covary.convert(Drops().eval(), noise={"input": SIGMA}).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        found = net(STEPS)
    dropped = found.mean == 0
    assert 0.2 < dropped.double().mean() < 0.8
    torch.testing.assert_close(found.variance, torch.where(dropped, 0.0, 4 * SIGMA**2).double())


def test_batch_statistics_are_told():
    """In training they are those of the means, taken for constant, and not called exact."""
    net = covary.convert(nn.BatchNorm1d(8).double().eval(), noise={"input": SIGMA})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        net(STEPS[:, 0])
        assert "batch statistics" not in str(net)
        net.train()
        found = net(STEPS[:, 0])
        assert "batch statistics" in str(net)
    scale = SIGMA**2 / (STEPS[:, 0].var(0, correction=0) + 1e-5)
    torch.testing.assert_close(found.variance, scale.expand(3, 8))


def test_instance_norm_in_training():
    """Running statistics move as in the model, and once for each pass."""
    model = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        net = covary.convert(model.eval(), noise={"input": 1e-4})
        x = IMAGE.float()
        by_running = net(x).covariance_matrix
        torch.testing.assert_close(
            by_running, 1e-8 / (1 + 1e-5) * torch.eye(144).expand(3, 144, 144)
        )
        net.train()
        found = net(x)
        moved = model.running_mean.clone()
        assert relative(found.mean.detach(), F.instance_norm(x)) < 1e-5
        assert found.covariance_matrix.isfinite().all()
    assert torch.equal(model.running_mean, moved)
    assert moved.abs().max() > 0


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)]
)
def test_weights_of_normalisation_are_trained(norm):
    model = nn.Sequential(norm).eval()
    x = IMAGE.float()
    for net in (model, covary.convert(model, noise={"input": 1e-4})):
        found = net(x)
        (found if isinstance(found, torch.Tensor) else found.mean).square().sum().backward()
    twice = norm.weight.grad.clone()
    norm.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(twice, 2 * norm.weight.grad)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sign(),
        lambda x: x * (x > 0),
        lambda x: x * torch.ones(8, dtype=torch.float64).to(x),
        lambda x: x * torch.ones(8).expand_as(x),
    ],
)
def test_products_with_constants_are_tracked(function):
    """They are not pairs, in draws as in moments."""
    net = covary.convert(Apply(lambda x: torch.tanh(function(x))).eval(), noise=0.1)
    covary.track(net, STEPS.float())
    assert net(STEPS.float()).variance.isfinite().all()


class Tokens(nn.Module):
    """An embedding of whole numbers that were moved about before."""

    def __init__(self, function):
        super().__init__()
        self.embedding, self.function = nn.Embedding(10, 4), function

    def forward(self, ids):
        return self.function(ids, self.embedding)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids, e: e(ids.t()).transpose(0, 1),
        lambda ids, e: e(ids.reshape(-1)).view(3, 5, 4),
        lambda ids, e: e(ids.view(-1)).view(3, 5, 4),
        lambda ids, e: torch.stack([e(each) for each in ids.t()], 1),
        lambda ids, e: e(ids.flip(1)).flip(1),
        lambda ids, e: e(ids.clamp(min=0)),
        lambda ids, e: torch.stack([e(each) for each in ids.unbind(1)], 1),
    ],
)
def test_whole_numbers_keep_their_samples(function):
    ids = torch.randint(10, (3, 5), generator=seeded())
    model = Tokens(function).eval()
    net = covary.convert(model, noise=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        found = net(ids)
    torch.testing.assert_close(found.mean, model.embedding(ids))
    torch.testing.assert_close(found.covariance_matrix, 0.01 * torch.eye(20).expand(3, 20, 20))


def test_no_noise_enters_what_was_chosen_by_the_means():
    model = Tokens(lambda x, e: x + e((x > 0).long().flip(1).sum(-1))).eval()
    net = covary.convert(model, noise=0.1)
    x = torch.randn(3, 5, 4, generator=seeded())
    covary.track(net, x)
    torch.testing.assert_close(net(x).mean, model(x))
    torch.testing.assert_close(net(x).variance, torch.full((3, 5, 4), 0.01))


def test_transformers_with_a_padding_mask():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = STEPS.float(), torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [4]])
    net = covary.convert(model, noise={"input": 1e-3})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = net(x, src_key_padding_mask=mask)
    with torch.enable_grad():
        truth = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found.mean[~mask], truth[~mask], rtol=1e-3, atol=1e-4)
    assert found.variance.isfinite().all()


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16)])
def test_normalisation_divides_by_what_varying_values_have(norm):
    """Values that vary as much as they differ have twice the average square of their means."""
    torch.manual_seed(0)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(64, 16)
    net = covary.convert(nn.Sequential(norm, nn.Linear(16, 3)).eval(), noise={"input": 0.7})
    covary.track(net, x)
    found = covary.verify(net, x[:4], draws=8000, progress=False)
    assert found.mean.value < 0.05
    assert found.variance.value < 0.15
    # At the mean alone, both would be too large by a third and more.
    drawn = torch.stack(
        [net.draw(x, generator=torch.Generator().manual_seed(i)) for i in range(64)]
    )
    at_the_mean = net.model(x).detach()
    assert (at_the_mean - drawn.mean(0)).norm() > 2 * (net(x).mean - drawn.mean(0)).norm()
