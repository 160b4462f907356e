"""Every rule against the Jacobian of its torch function, and large noise against draws."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import covary
from covary.rules import RULES, elementwise, rule
from covary.testing import RuleContract
from covary.testing.rules import Apply, jacobian_covariance, moments, relative
from covary.varying import ConversionError
from tests.jacobians import BLOCK, IMAGE, LARGE, LINE, MASK, POSITIVE, ROW, STEPS, weights

CASES = {
    # convolutions, in all their arrangements
    "conv1d": (lambda x: F.conv1d(x, weights(6, 4, 3), weights(6), 2, 1), LINE),
    "conv1d dilated": (lambda x: F.conv1d(x, weights(6, 4, 3), dilation=2), LINE),
    "conv2d": (lambda x: F.conv2d(x, weights(5, 4, 3, 3), weights(5), padding=1), IMAGE),
    "conv2d strided": (lambda x: F.conv2d(x, weights(5, 4, 3, 3), stride=2), IMAGE),
    "conv2d strided, odd rest": (lambda x: F.conv2d(x, weights(5, 4, 2, 3), stride=(3, 2)), IMAGE),
    "conv2d depthwise": (lambda x: F.conv2d(x, weights(8, 1, 3, 3), groups=4, padding=1), IMAGE),
    "conv2d grouped": (lambda x: F.conv2d(x, weights(6, 2, 3, 3), None, 1, 1, 1, 2), IMAGE),
    "conv2d same": (lambda x: F.conv2d(x, weights(5, 4, 3, 3), weights(5), padding="same"), IMAGE),
    "conv2d same, even": (lambda x: F.conv2d(x, weights(5, 4, 4, 2), padding="same"), IMAGE),
    "conv2d valid": (lambda x: F.conv2d(x, weights(5, 4, 3, 3), padding="valid"), IMAGE),
    "conv2d one channel, stride 2": (
        lambda x: F.conv2d(x[:, :1], weights(3, 1, 3, 4), None, 2, 1),
        LARGE,
    ),
    "conv2d one channel, stride 3": (
        lambda x: F.conv2d(x[:, :1], weights(3, 1, 5, 2), stride=3),
        LARGE,
    ),
    "conv2d one channel": (
        lambda x: F.conv2d(x[:, :1], weights(5, 1, 3, 3), stride=2, padding=1),
        IMAGE,
    ),
    "conv2d strided, large": (
        lambda x: F.conv2d(x, weights(5, 2, 3, 3), weights(5), stride=2, padding=1),
        LARGE,
    ),
    "conv2d stride 3, large": (lambda x: F.conv2d(x, weights(5, 2, 4, 2), stride=3), LARGE),
    "conv2d stride 2, even": (
        lambda x: F.conv2d(x, weights(5, 2, 2, 5), stride=2, padding=(0, 2)),
        LARGE,
    ),
    "conv3d": (lambda x: F.conv3d(x, weights(3, 2, 2, 2, 2), stride=2), BLOCK),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(x, weights(4, 3, 3), stride=2), LINE),
    "conv_transpose2d": (
        lambda x: F.conv_transpose2d(x, weights(4, 3, 3, 3), weights(3), 2, 1, 1),
        IMAGE,
    ),
    "conv_transpose2d grouped": (
        lambda x: F.conv_transpose2d(x, weights(4, 3, 2, 2), None, 2, 0, 0, 2),
        IMAGE,
    ),
    "conv_transpose3d": (lambda x: F.conv_transpose3d(x, weights(2, 3, 2, 2, 2)), BLOCK),
    # normalisation in evaluation, behind a convolution and not
    "batch_norm": (
        lambda x: F.batch_norm(x, weights(4), weights(4).abs(), weights(4), weights(4)),
        IMAGE,
    ),
    "conv2d, batch_norm": (
        lambda x: F.batch_norm(
            F.conv2d(x, weights(5, 4, 3, 3)), weights(5), weights(5).abs(), weights(5)
        ),
        IMAGE,
    ),
    "conv_transpose2d, batch_norm": (
        lambda x: F.batch_norm(
            F.conv_transpose2d(x, weights(4, 3, 3, 3)), weights(3), weights(3).abs(), weights(3)
        ),
        IMAGE,
    ),
    "layer_norm": (lambda x: F.layer_norm(x, (8,), weights(8), weights(8)), STEPS),
    "rms_norm": (lambda x: F.rms_norm(x, (8,), weights(8)), STEPS),
    "group_norm": (lambda x: F.group_norm(x, 2, weights(4), weights(4)), IMAGE),
    "instance_norm": (lambda x: F.instance_norm(x), IMAGE),
    "normalize": (lambda x: F.normalize(x, dim=-1), STEPS),
    # linear maps
    "linear": (lambda x: F.linear(x, weights(3, 8), weights(3)), STEPS),
    "matmul": (lambda x: x @ weights(8, 3), STEPS),
    "matmul by a vector": (lambda x: x @ weights(8), STEPS),
    "matmul of a vector": (lambda x: weights(5) @ x, STEPS),
    "rmatmul": (lambda x: weights(3, 5) @ x, STEPS),
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), STEPS),
    "matmul of two": (lambda x: x @ x.mT, STEPS),
    "einsum": (lambda x: torch.einsum("btn,nm->bmt", x, weights(8, 3)), STEPS),
    "einsum of two": (lambda x: torch.einsum("btn,bsn->bts", x, x * 2), STEPS),
    "addmm": (lambda x: torch.addmm(weights(4), x.flatten(1), weights(40, 4)), STEPS),
    # sums, scaling
    "add": (lambda x: x + 2 * x.flip(-1), STEPS),
    "add broadcast": (lambda x: x + x.mean(1, keepdim=True), STEPS),
    "add constant": (lambda x: 1 + x + weights(8), STEPS),
    "constant in the type of a value": (
        lambda x: x * weights(8).float().to(x) + weights(8).float().type_as(x).expand_as(x),
        STEPS,
    ),
    "add larger constant": (lambda x: x.mean(1, keepdim=True) + weights(5, 8), STEPS),
    "sub": (lambda x: x.sub(x.roll(1, -1), alpha=0.5), STEPS),
    "rsub": (lambda x: 3 - x, STEPS),
    "neg": (lambda x: -x, STEPS),
    "mul": (lambda x: x * weights(8) * 2, STEPS),
    "rmul": (lambda x: weights(5, 1) * x, STEPS),
    "div": (lambda x: x / 3, STEPS),
    "div by tensor": (lambda x: x / (1 + weights(8).abs()), STEPS),
    "augmented": (lambda x: _augmented(x), STEPS),
    "lerp by hand": (lambda x: 0.3 * x + 0.7 * x.mean(-1, keepdim=True), STEPS),
    # torch's other names of arguments
    "linear by name": (lambda x: F.linear(input=x, weight=weights(3, 8), bias=weights(3)), STEPS),
    "matmul by name": (lambda x: torch.matmul(x, other=weights(8, 3)), STEPS),
    "mul by name": (lambda x: x.mul(other=2.0), STEPS),
    "add by name": (lambda x: torch.add(input=x, other=x.flip(1)), STEPS),
    "reshape by name": (lambda x: torch.reshape(input=x, shape=(len(x), -1)), STEPS),
    "conv2d by name": (lambda x: F.conv2d(input=x, weight=weights(5, 4, 3, 3)), IMAGE),
    "softmax by name": (lambda x: torch.softmax(input=x, dim=-1), STEPS),
    "mean by axis": (lambda x: x.mean(axis=1, keepdims=True), STEPS),
    "where by name": (lambda x: torch.where(MASK, input=x, other=-x), STEPS),
    "where all by name": (lambda x: torch.where(condition=MASK, input=x, other=-x), STEPS),
    # products of two that vary
    "product": (lambda x: x * x.flip(-1), STEPS),
    "gate": (lambda x: x * x.mean((1,), keepdim=True), STEPS),
    "division of two": (lambda x: x / (5 + x.flip(-1)), STEPS),
    "rdiv": (lambda x: 1 / x, POSITIVE),
    "addcmul": (lambda x: torch.addcmul(x, x, weights(8)), STEPS),
    # moving
    "flatten": (lambda x: torch.flatten(x, 1), IMAGE),
    "view": (lambda x: x.view(x.size(0), -1), IMAGE),
    "reshape": (lambda x: x.reshape(x.shape[0], 2, 2, 36), IMAGE),
    "permute": (lambda x: x.permute(0, 2, 3, 1), IMAGE),
    "permute and back": (lambda x: x.permute(1, 0, 2, 3).transpose(0, 1), IMAGE),
    "transpose and view": (lambda x: x.transpose(1, 2).reshape(len(x), -1), STEPS),
    "merged batch": (lambda x: x.reshape(-1, 8).relu().view(-1, 5, 8), STEPS),
    "merged batch, transposed": (
        lambda x: x.transpose(0, 1).reshape(-1, 8).tanh().view(5, -1, 8).transpose(0, 1),
        STEPS,
    ),
    "windows": (
        lambda x: x.view(-1, 4, 3, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 4, 2, 2).tanh()
        .view(-1, 3, 3, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 4, 6, 6),
        IMAGE,
    ),
    "squeeze": (lambda x: x[:, :1].squeeze(1).unsqueeze(-1), IMAGE),
    "slice": (lambda x: x[:, 1:, ::2, -1], IMAGE),
    "ellipsis": (lambda x: x[..., 2], IMAGE),
    "index": (lambda x: x[:, ROW], IMAGE),
    "mask": (lambda x: x[:, MASK], STEPS),
    "index_select": (lambda x: x.index_select(1, ROW), IMAGE),
    "narrow": (lambda x: x.narrow(1, 1, 2), IMAGE),
    "expand": (lambda x: x[:, :1].expand(-1, 3, -1, -1), IMAGE),
    "repeat": (lambda x: x.repeat(1, 2, 1), STEPS),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), STEPS),
    "flip": (lambda x: x.flip(1), STEPS),
    "roll": (lambda x: torch.roll(x, (1, 2), (1, 2)), STEPS),
    "chunk": (lambda x: x.chunk(2, 1)[1], IMAGE),
    "split": (lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1), IMAGE),
    "unbind": (lambda x: x.unbind(1)[0] + x.unbind(1)[2], IMAGE),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), IMAGE),
    "movedim": (lambda x: x.movedim(1, -1), IMAGE),
    "mT": (lambda x: x.mT, STEPS),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "unfold": (lambda x: x.unfold(2, 3, 1), IMAGE),
    "cat": (lambda x: torch.cat([x, x * 2, weights(1, 1, 6, 6).expand(len(x), 1, 6, 6)], 1), IMAGE),
    "stack": (lambda x: torch.stack([x, x.flip(1)], -1), STEPS),
    "hstack": (lambda x: torch.hstack([x, x * 3]), STEPS),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1)), IMAGE),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), IMAGE),
    "masked_fill": (lambda x: x.masked_fill(MASK, 0.0), STEPS),
    "where": (lambda x: torch.where(MASK, x, -x), STEPS),
    "where as a method": (lambda x: x.where(MASK, 2 * x), STEPS),
    "windows as columns": (lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGE),
    "columns to images": (lambda x: F.fold(F.unfold(x, 3) * 2, 6, 3), IMAGE),
    "cumsum in place": (lambda x: x.clone().cumsum_(1), STEPS),
    "cat of expanded": (
        lambda x: torch.cat([x, x[:1].expand(3, 5, 8)], 0).view(2, 3, 40)[0] * 2,
        STEPS,
    ),
    "tril": (lambda x: x.tril(), STEPS),
    "gather": (lambda x: x.gather(1, torch.zeros(len(x), 2, 8, dtype=torch.int64)), STEPS),
    # averages
    "mean": (lambda x: x.mean((2, 3)), IMAGE),
    "mean keepdim": (lambda x: x.mean(dim=(-2, -1), keepdim=True), IMAGE),
    "sum": (lambda x: x.sum(-1), STEPS),
    "cumsum": (lambda x: x.cumsum(1), STEPS),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 2), LINE),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), BLOCK),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (1, 4)), IMAGE),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "interpolate bilinear": (
        lambda x: F.interpolate(x, (9, 9), mode="bilinear", align_corners=False),
        IMAGE,
    ),
    # smooth functions of several elements
    "softmax": (lambda x: x.softmax(-1), STEPS),
    "log_softmax": (lambda x: F.log_softmax(x, dim=1), STEPS),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), STEPS),
    "norm": (lambda x: x.norm(dim=-1), STEPS),
    "linalg norm": (lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True), STEPS),
    "var": (lambda x: x.var(-1), STEPS),
    "std": (lambda x: x.std(dim=1, keepdim=True), STEPS),
    "attention": (lambda x: F.scaled_dot_product_attention(x, 2 * x, x.flip(1)), STEPS),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        STEPS,
    ),
    "masked attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=MASK[:, :5] | _eye()),
        STEPS,
    ),
    "softmax, dim by torch": (lambda x: F.softmax(x), IMAGE),
    "normalize by place": (lambda x: F.normalize(x, 2, -1), STEPS),
    # maxima and choices
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), LINE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "max_pool2d overlapping": (lambda x: F.max_pool2d(x, 3, stride=2, padding=1), IMAGE),
    "max_pool2d, wide padding": (lambda x: F.max_pool2d(x, 5, 1, 2), IMAGE),
    "max_pool2d stride 3": (lambda x: F.max_pool2d(x, 4, 3, (1, 2)), LARGE),
    "clamp by tensors": (lambda x: x.clamp(-weights(8).abs(), weights(8).abs()), STEPS),
    "clamp by a tensor": (lambda x: torch.clamp(x, max=weights(8)), STEPS),
    "median": (lambda x: x.median(1).values, STEPS),
    "max_pool2d dilated": (lambda x: F.max_pool2d(x, 2, dilation=2), IMAGE),
    "max_pool2d ceil": (lambda x: F.max_pool2d(x, 4, ceil_mode=True), IMAGE),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), BLOCK),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 1), IMAGE),
    "adaptive_max_pool2d, 2": (lambda x: F.adaptive_max_pool2d(x, 2), IMAGE),
    "amax": (lambda x: x.amax((2, 3)), IMAGE),
    "amin": (lambda x: x.amin(1, keepdim=True), IMAGE),
    "max": (lambda x: x.max(dim=1).values, STEPS),
    "max of two": (lambda x: torch.max(x, x.flip(-1) + 0.1), STEPS),
    "maximum": (lambda x: torch.maximum(x, weights(8)), STEPS),
    "minimum": (lambda x: torch.minimum(x, x.roll(1, -1)), STEPS),
    "topk": (lambda x: x.topk(3, dim=-1).values, STEPS),
    "sort": (lambda x: x.sort(dim=-1)[0], STEPS),
    "product with sign": (lambda x: x * x.sign(), STEPS),
    "where compared": (lambda x: torch.where(x > 0, x, 0.1 * x), STEPS),
    "masked_fill compared": (lambda x: x.masked_fill(~(x > 0), 0.0), STEPS),
    "mask as numbers": (lambda x: x * (x > 0).to(x.dtype).mean(1, keepdim=True), STEPS),
    "hand-made relu": (lambda x: x * (x > 0), STEPS),
}  # fmt: skip


def _augmented(x):
    y = x.clone()
    y += x.flip(-1)
    y *= 2
    y -= 1
    y /= 3
    return y


def _eye():
    return torch.eye(5, dtype=torch.bool)


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:There is a performance drop")
class TestRule(RuleContract):
    cases = CASES


SITES = {
    "relu": lambda x: F.relu(x),
    "relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "relu_": lambda x: x.clone().relu_(),
    "torch.relu": torch.relu,
    "relu6": lambda x: F.relu6(3 * x),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "clamp": lambda x: x.clamp(min=-0.3),
    "clamp both": lambda x: torch.clamp(x, -0.3, 0.4),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu_": lambda x: F.leaky_relu(x.clone(), 0.2, True),
    "prelu": lambda x: F.prelu(x, torch.linspace(0.1, 0.5, 5, dtype=x.dtype)),
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "tanh_": lambda x: x.clone().tanh_(),
    "sigmoid": lambda x: x.sigmoid(),
    "logsigmoid": F.logsigmoid,
    "softplus": lambda x: F.softplus(x, 2.0),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": lambda x: x.cos(),
    "exp": lambda x: x.exp(),
    "square": torch.square,
    "power": lambda x: x**2,
    "product with itself": lambda x: x * x,
    "abs": lambda x: x.abs(),
    "sqrt": lambda x: (0.5 * x + 4).sqrt(),
    "rsqrt": lambda x: (0.5 * x + 4).rsqrt(),
    "log": lambda x: torch.log(0.5 * x + 4),
    "glu": lambda x: F.glu(x, -1),
}


class TestNonlinearity(RuleContract):
    cases: ClassVar = {name: (function, STEPS) for name, function in SITES.items()}
    mean_tolerance = 1e-5
    tolerance = 1e-3


@pytest.mark.parametrize("name", SITES)
def test_nonlinearities_agree_with_draws(name):
    """Noise at the input and before the nonlinearity, large enough to bend it."""
    model = Apply(SITES[name]).eval()
    net = covary.convert(model, noise=0.2, variances="propagated")
    x = STEPS.float()
    covary.track(net, x, samples=3)
    net.sites.replace(net.measure(((x,), {}), draws=300))
    found = covary.verify(net, x, draws=4000)
    assert found.mean.value < 0.02
    assert found.variance.value < 0.12


def test_draws_outside_of_the_domain_of_a_function_are_told():
    net = covary.convert(Apply(lambda x: x.sqrt()).eval(), noise=0.5)
    covary.track(net, POSITIVE.float(), samples=3)
    with pytest.raises(ValueError, match="NaN or infinite draws"):
        covary.verify(net, POSITIVE.float(), draws=320)


def test_a_rule_of_ones_own():
    """What docs/own-rule.md tells a reader to do."""

    def expit(x):
        return torch.special.expit(x)

    known = RULES.pop(torch.special.expit)
    try:
        with pytest.raises(ConversionError, match="expit"):
            moments(expit, STEPS)

        @elementwise(torch.special.expit)
        def _():
            return covary.activations.get("sigmoid")

        found = moments(expit, STEPS)
        assert relative(found.covariance_matrix, jacobian_covariance(expit, STEPS)) < 1e-3
    finally:
        RULES[torch.special.expit] = known


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no function called 'rellu'"):
        rule("rellu")(lambda x: x)
