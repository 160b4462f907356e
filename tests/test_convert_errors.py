"""What convert refuses: each time a sentence that names the place and the remedy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covary
from covary import ConversionError


class Model(nn.Module):
    """A model whose inner module does something to its input."""

    class Inner(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    def __init__(self, function):
        super().__init__()
        self.enter, self.inner = nn.Linear(4, 4), self.Inner(function)

    def forward(self, x):
        return self.inner(self.enter(x))


def run(function, x=None):
    model = Model(function).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = covary.convert(model, noise=0.1)
    try:
        return net(torch.randn(3, 4) if x is None else x)
    finally:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any("forward" in vars(module) for module in model.modules())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def written(x):
    x[:, 0] = 0.0
    return x


def filled(x):
    out = torch.zeros(3, 4)
    out[:, :2] = x[:, :2]
    return out


def through_a_view(x):
    y = x.view(3, 2, 2)
    y.relu_()
    return x


REFUSED = {
    "item": (lambda x: x * x.sum(1)[0].item(), "reads the numbers"),
    "python if": (lambda x: x if x.mean(1)[0] > 0 else -x, "reads the numbers"),
    "python if on all": (lambda x: x if (x > 0).all() else -x, "reads the numbers"),
    "item of a comparison": (lambda x: x * (x > 0).sum(1)[0].item(), "reads the numbers"),
    "comparison in place": (lambda x: x.sign_(), "into a value that varies"),
    "float": (lambda x: x * float(x[0, 0]), "reads the numbers"),
    "numpy": (lambda x: torch.from_numpy(np.tanh(x.numpy())), "reads the numbers"),
    "numpy function": (lambda x: torch.as_tensor(np.asarray(x)), "reads the numbers"),
    "tolist": (lambda x: torch.tensor(x.tolist()), "reads the numbers"),
    "setitem": (written, "writes into a value that varies"),
    "into a plain tensor": (filled, "writes into a value that varies"),
    "in place on a plain tensor": (lambda x: torch.zeros(3, 4).add_(x), "into a plain tensor"),
    "through a view": (through_a_view, "another view of the same memory"),
    "custom function": (lambda x: Doubled.apply(x), "torch.autograd.Function"),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(3, 4)), "writes into out="),
    "out that varies": (lambda x: torch.add(x.numbers, 1, out=x), "writes into out="),
    "unknown argument": (
        lambda x: torch.baddbmm(x, batch1=x, batch2=x),
        "does not take these arguments",
    ),
    "batch statistics": (lambda x: F.batch_norm(x, None, None, training=True), "samples mix"),
    "dropout": (lambda x: F.dropout(x, 0.5), "at random in evaluation"),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, True), "at random"),
    "random numbers": (lambda x: x + torch.randn_like(x), "random numbers of its own"),
    "random choices": (lambda x: x * torch.bernoulli(x.sigmoid()), "random numbers of its own"),
    "median of all": (lambda x: x - x.median(), "goes over all elements"),
    "shape in place": (lambda x: x.unsqueeze_(1), "changes the shape of a value in place"),
    "no rule": (lambda x: torch.fft.rfft(x).real, "There is no rule for it"),
    "half": (lambda x: x.half(), "float16"),
    "over the batch": (lambda x: x - x.mean(0), "different samples"),
    "across the batch": (lambda x: x @ x.T, "different samples"),
    "softmax over the batch": (lambda x: x.softmax(0), "different samples"),
    "sum of all": (lambda x: x / x.sum(), "different samples"),
    "max of all": (lambda x: x - x.max(), "goes over all elements"),
    "rounding": (lambda x: x.round(), "There is no rule for it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_moments_is_refused(name):
    function, why = REFUSED[name]
    with pytest.raises(ConversionError) as caught:
        run(function)
    message = str(caught.value)
    assert why in message
    assert "module 'inner'" in message
    assert message.endswith(".")


def test_powers_of_several_exponents():
    with pytest.raises(ConversionError, match=r"tensor of shape \(4,\).*exp\("):
        run(lambda x: x ** torch.arange(4.0))


def test_custom_functions_are_noticed_without_gradients_too():
    with torch.no_grad(), pytest.raises(ConversionError, match=r"torch\.autograd\.Function"):
        run(lambda x: Doubled.apply(x))


def test_errors_of_the_model_itself_name_their_module():
    with pytest.raises(RuntimeError) as caught:
        run(lambda x: x @ torch.zeros(3, 2))
    assert any("'inner'" in note for note in caught.value.__notes__)


def test_training_mode():
    with pytest.raises(ValueError, match=r"in training mode. Call model\.eval\(\) first"):
        covary.convert(nn.Linear(3, 2))
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).eval()
    model[1].train()
    with pytest.raises(ValueError, match="module '1'"):
        covary.convert(model)


def test_several_devices():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta")).eval()
    with pytest.raises(ValueError, match=r"several devices.*model\.to\(device\)"):
        covary.convert(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    with pytest.raises(TypeError, match=r"0\.weight is torch.*model\.float\(\)"):
        covary.convert(nn.Sequential(nn.Linear(3, 2)).to(dtype).eval())
    net = covary.convert(nn.Linear(3, 2).eval())
    with pytest.raises(TypeError, match=r"float32 or float64 inputs.*x\.float\(\)"):
        net(torch.zeros(2, 3, dtype=dtype))


def test_whole_numbers():
    net = covary.convert(nn.Linear(3, 2).eval())
    with pytest.raises(ConversionError, match=r"whole numbers .*x\.float\(\)"):
        net(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_weights_and_inputs(bad):
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    net = covary.convert(model)
    with pytest.raises(ValueError, match="NaN or infinite"):
        net(torch.full((2, 3), bad))
    with torch.no_grad():
        model[0].weight[0, 0] = bad
    with pytest.raises(ValueError, match=r"0\.weight has NaN or infinite values"):
        covary.convert(model)


def test_hooks_that_replace_outputs():
    model = Model(F.relu).eval()
    model.inner.register_forward_hook(lambda module, args, out: out * 2)  # this varies as well
    covary.convert(model, noise=0.0)(torch.randn(3, 4))

    def constant(module, args, out):
        return torch.zeros(3, 4)

    model.inner.register_forward_hook(constant)
    net = covary.convert(model, noise=0.0)
    with pytest.raises(ConversionError, match="hook 'constant' of module 'inner'"):
        net(torch.randn(3, 4))


def test_hooks_that_look_are_left_alone():
    model, seen = Model(F.relu).eval(), []
    model.inner.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    covary.convert(model, noise=0.0)(torch.randn(3, 4))
    assert seen == [(3, 4)]


def test_a_model_that_loses_what_varies():
    net = covary.convert(Model(lambda x: torch.zeros(3, 4)).eval())
    with pytest.raises(ValueError, match=r"gives \(Tensor\) varies with its inputs"):
        net(torch.randn(3, 4))
    unused = nn.Sequential(nn.Linear(4, 4), nn.Identity()).eval()
    unused.extra = nn.Linear(4, 4).eval()

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    net = covary.convert(Skips().eval(), start="unused")
    with pytest.raises(ValueError, match="varies with module 'unused'"):
        net(torch.randn(3, 4))


def test_bad_options():
    model = Model(F.relu).eval()
    with pytest.raises(ValueError, match="start names 'nowhere'"):
        covary.convert(model, start="nowhere")
    with pytest.raises(ValueError, match="no module of that path"):
        covary.convert(model, noise={"nowhere": 0.1})
    with pytest.raises(ValueError, match="GELU"):
        covary.convert(model, noise={nn.GELU: 0.1})
    with pytest.raises(ValueError, match="standard deviation"):
        covary.convert(model, noise=-1)
    with pytest.raises(TypeError, match="a number"):
        covary.convert(model, noise="0.1")
    with pytest.raises(ValueError, match="variances are one of"):
        covary.convert(model, variances="all")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        covary.convert(lambda x: x)
    with pytest.raises(ValueError, match="has moments already"):
        covary.convert(covary.convert(model))


def test_compiled_and_scripted_models():
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        covary.convert(torch.compile(model).eval())
    with pytest.raises(TypeError, match=r"before torch\.jit"):
        covary.convert(torch.jit.trace(model, torch.zeros(1, 3)))


def test_inputs_of_different_batches():
    net = covary.convert(Two().eval(), noise=0.1)
    with pytest.raises(ValueError, match="the same number of samples, got 2 and 3"):
        net(torch.zeros(2, 4), torch.zeros(3, 4))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, a, b):
        return a + b


def test_calls_that_tracking_never_saw():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.linear = nn.ReLU(), nn.Tanh(), nn.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x)
            return self.a(x) if len(x) > 5 else self.b(x)

    net = covary.convert(Branch().eval(), noise=0.1)
    covary.track(net, torch.randn(20, 4))
    net(torch.randn(8, 4))
    with pytest.raises(ConversionError, match=r"did not occur .*covary\.track"):
        net(torch.randn(3, 4))


def test_what_is_no_input():
    net = covary.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), noise=0.1)
    for bad, name in ((np.zeros((2, 4)), "ndarray"), ([[0.0] * 4], "float"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"takes tensors .* got {name}.*torch\.as_tensor"):
            net(bad)
    with pytest.raises(RuntimeError, match=r"inputs are float64 and the parameters float32"):
        net(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"shape \(4,\) has no batch dimension.*x\[None\]"):
        net(torch.zeros(4))
    with pytest.raises(ValueError, match=r"whole numbers .*x\.float\(\)"):
        covary.convert(Model(lambda x: x).inner.eval())(torch.zeros(2, 4, dtype=torch.uint8))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


@pytest.mark.parametrize("function", [covary.track, covary.verify])
def test_a_plain_model_is_neither_tracked_nor_verified(function):
    with pytest.raises(ValueError, match=r"no moments yet. Convert it first"):
        function(small(), torch.zeros(8, 4))


def test_what_cannot_be_tracked():
    model, x = small(), torch.zeros(8, 4)
    net = covary.convert(model, noise=0.1)
    for bad in (None, 3, np.zeros((8, 4)), "x"):
        with pytest.raises(TypeError, match=rf"a loader of batches; got {type(bad).__name__}"):
            covary.track(net, bad)
    with pytest.raises(TypeError, match="DataLoader"):
        covary.track(net, torch.utils.data.TensorDataset(x, x))
    with pytest.raises(TypeError, match="got ndarray without a tensor"):
        covary.track(net, [np.zeros((8, 4))])
    with pytest.raises(ValueError, match=r"no tensor with a batch dimension \(dimension 5\)"):
        covary.track(covary.convert(model, batch_dim=5), x)


def test_what_cannot_be_verified():
    net, x = covary.convert(small(), noise=0.1), torch.zeros(8, 4)
    covary.track(net, torch.randn(8, 4))
    with pytest.raises(ValueError, match="empty batch"):
        covary.verify(net, x[:0])
    with pytest.raises(ValueError, match="whole number"):
        covary.verify(net, x, draws=100.5)
    assert covary.verify(net, torch.randn(2, 4), draws=1e2).draws == 112
    loader = torch.utils.data.DataLoader(x)
    for bad in (loader, np.zeros((8, 4)), None):
        with pytest.raises(TypeError, match=r"a tensor.*; got .*next\(iter\(loader\)\)"):
            covary.verify(net, bad)


def test_options_of_a_wrong_type():
    model = Model(F.relu).eval()
    with pytest.raises(TypeError, match="start is the path of a module"):
        covary.convert(model, start=model.inner)
    for bad in ("a", -1, True):
        with pytest.raises(ValueError, match="batch_dim is the number of the dimension"):
            covary.convert(model, batch_dim=bad)
    with pytest.raises(TypeError, match="a number or a dict of numbers, got True"):
        covary.convert(model, noise=True)
    with pytest.raises(ValueError, match=r"got -1\."):
        covary.convert(model, noise=-1)


def test_rows_of_another_kind():
    out = covary.convert(nn.Linear(4, 3).eval(), noise=0.1)(torch.zeros(2, 4))
    expected = out.project(torch.eye(3)).covariance_matrix
    for rows in (np.eye(3), torch.eye(3, dtype=torch.float64)):
        torch.testing.assert_close(out.project(rows).covariance_matrix, expected)


def test_scores_and_records_are_of_other_networks():
    net = covary.convert(nn.Linear(4, 3).eval(), noise=0.1)
    with pytest.raises(TypeError, match=r"plain model: fit\(model, held_out\)"):
        covary.uncertainty.fit(net, torch.randn(300, 4))
    with pytest.raises(TypeError, match=r"record takes .*print\(net\)"), covary.record(net):
        net(torch.zeros(2, 4))


def test_samples_that_meet_after_a_view_are_refused():
    class Mixes(nn.Module):
        def forward(self, x):
            halves = x.view(2, 2, 6)
            return (halves + halves.transpose(0, 1)).reshape(4, 6)

    with pytest.raises(ConversionError, match="different samples"):
        covary.convert(Mixes().eval(), noise=0.1)(torch.randn(4, 6))


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return Answer(self.inner(x))


def test_outputs_of_a_class_of_ones_own_are_named():
    with pytest.raises(ValueError, match=r"gives \(Answer\) .*tuples, lists or dicts"):
        covary.convert(Wrapped().eval(), noise=0.1)(torch.ones(2, 4))


def test_noise_of_what_is_no_module_is_named():
    with pytest.raises(TypeError, match=r"types of modules \(nn\.ReLU\) or 'input', got 0"):
        covary.convert(nn.Linear(4, 3).eval(), noise={0: 0.1})


def test_another_precision_is_named_for_convolutions_too():
    net = covary.convert(nn.Conv2d(1, 2, 3).eval(), noise=0.1)
    with pytest.raises(RuntimeError, match=r"inputs are float64 and the parameters float32"):
        net(torch.zeros(2, 1, 5, 5, dtype=torch.float64))
