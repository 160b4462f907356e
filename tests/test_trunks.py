"""Convolutional trunks: shapes, memory, gradients, and whole networks behind them."""

import os

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import covary
from covary import models
from covary.activations import LIF
from covary.cli import app
from covary.data import Dataset
from covary.runs import Choices, DataConfig, ModelConfig, Run
from covary.runs.training import resolve, train

SHAPES = {"lenet": (1, 28, 28), "lenet5": (1, 28, 28), "vgg13": (3, 32, 32)}
TRUNKS = {name: getattr(models, name) for name in SHAPES}


@pytest.mark.parametrize(
    ("trunk", "shape", "width"),
    [
        ("lenet5", (1, 28, 28), 50 * 4 * 4),
        ("lenet5", (3, 32, 32), 192 * 5 * 5),
        ("lenet5", (1, 13, 13), 50),
        ("vgg13", (3, 32, 32), 512),
        ("vgg13", (1, 32, 64), 1024),
    ],
)
def test_what_comes_out_is_flat(trunk, shape, width):
    assert TRUNKS[trunk](shape).eval()(torch.rand(2, *shape)).shape == (2, width)


@pytest.mark.parametrize(("trunk", "least"), [("lenet", 4), ("lenet5", 13), ("vgg13", 32)])
def test_images_that_are_too_small_are_refused(trunk, least):
    build = TRUNKS[trunk]
    assert build((1, least, least)).eval()(torch.rand(1, 1, least, least)).numel() > 0
    for shape in ((1, least, least - 1), (1, least - 1, least), (least, least)):
        with pytest.raises(ValueError, match=f"{least} x {least} pixels"):
            build(shape)


def test_vgg13_has_ten_convolutions_each_with_batch_norm():
    layers = list(models.vgg13((3, 32, 32)))
    channels = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)]
    assert channels == [64, 64, 128, 128, 256, 256, 512, 512, 512, 512]
    for here, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            assert isinstance(layers[here + 1], nn.BatchNorm2d)
            assert isinstance(layers[here + 2], nn.ReLU)


def test_the_order_of_memory_changes_no_number():
    """Against the same layers without the first, which is all that decides the order."""
    torch.manual_seed(0)
    net = models.vgg13((3, 32, 32)).double()
    usual = nn.Sequential(*list(net)[1:])
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    assert net[:2](x).is_contiguous(memory_format=torch.channels_last)
    assert not usual[:1](x).is_contiguous(memory_format=torch.channels_last)
    found, expected = net(x), usual(x)
    torch.testing.assert_close(found, expected)
    weights = list(net.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
    )


@pytest.mark.parametrize("trunk", ["lenet5", "vgg13"])
def test_every_weight_has_a_gradient_in_its_own_order_of_memory(trunk):
    """Fused optimizers go through the memory of both side by side."""
    torch.manual_seed(0)
    net = nn.Sequential(TRUNKS[trunk](SHAPES[trunk]), nn.LazyLinear(2))
    net(torch.rand(4, *SHAPES[trunk])).square().sum().backward()
    for parameter in net.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("trunk", ["lenet5", "vgg13"])
def test_weights_go_from_one_network_to_another(trunk):
    x = torch.rand(3, *SHAPES[trunk])
    one = TRUNKS[trunk](SHAPES[trunk])
    one(x)  # running averages are part of it
    other = TRUNKS[trunk](SHAPES[trunk])
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.eval()(x), one.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["relu", "heaviside"])
def test_moments_behind_a_trunk_teach_it(activation):
    torch.manual_seed(0)
    model = ModelConfig(
        hidden=(8, 6), trunk="vgg13", activation=activation, input_shape=(3, 32, 32), outputs=4
    )
    assert model.widths == [512, 8, 6, 4]
    net = model.build()
    out = net(torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8))
    assert isinstance(out, covary.Moments)
    nn.functional.cross_entropy(out.mean, torch.arange(6) % 4).backward()
    first = next(layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
    assert first.weight.grad.abs().sum() > 0


def bright_and_dark(shape, samples=48):
    """Noise, and in one of two classes twice as much of it."""
    noise = np.random.default_rng(0).integers(128, size=(samples, *shape), dtype=np.uint8)
    label = np.arange(samples) % 2
    x = torch.from_numpy(noise * (1 + label.astype(np.uint8).reshape(-1, 1, 1, 1)))
    y = torch.from_numpy(label)
    return Dataset("cifar10", "classification", x, y, x[:8], y[:8], classes=("dark", "bright"))


def trained(path, epochs, **more):
    dataset = bright_and_dark((3, 15, 15))
    chosen = Choices(trunk="lenet5", hidden=(4,), schedule="constant", batch_size=16, epochs=epochs)
    config = resolve(DataConfig(name="cifar10"), dataset, chosen)
    run = Run(path)
    train(config, dataset, run, **more)
    return run.network()


def test_a_training_that_was_stopped_ends_with_the_same_weights(tmp_path):
    whole = trained(tmp_path / "whole", 2)
    trained(tmp_path / "stopped", 1)
    resumed = trained(tmp_path / "stopped", 2, existing="resume")
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("trunk", "shape", "activation", "hidden"),
    [
        ("vgg13", (3, 32, 32), "relu", (64, 32)),
        ("vgg13", (3, 32, 32), "lif", (64, 32)),
        ("lenet5", (3, 32, 32), "heaviside", (1000,)),
        ("lenet5", (1, 28, 28), "relu", (500,)),
        ("lenet", (1, 28, 28), "relu", (128, 64, 32)),
    ],
)
def test_presets_behind_trunks(trunk, shape, activation, hidden):
    chosen = Choices(trunk=trunk, activation=activation)
    config = resolve(DataConfig(name="cifar10"), bright_and_dark(shape, 4), chosen)
    assert config.model.hidden == hidden
    assert len(config.model.noise) in (1, len(hidden) + 1)
    if trunk == "vgg13":
        assert (config.training.lr, config.training.weight_decay) == (5e-4, 1e-3)
    if activation == "lif":  # noise and batch norm of neurons, not of the images
        assert config.model.batch_norm
        assert config.model.noise[-1] == pytest.approx(LIF().irregular_noise)


@pytest.mark.skipif("COVARY_DATA" not in os.environ, reason="needs CIFAR-10 in $COVARY_DATA")
def test_a_mixed_network_trains_from_the_command_line(tmp_path):
    command = ["train", "cifar10", "--trunk", "vgg13", "--augment", "--limit", "32"]
    ran = CliRunner().invoke(app, [*command, "--epochs", "1", "--out", str(tmp_path / "run")])
    assert ran.exit_code == 0, ran.output
    assert "512-64-32-10 behind a vgg13 trunk" in ran.output
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_trained_trunk_is_taken_and_left_as_it_is(tmp_path):
    """Behind the trunk of another run, only what is behind it is trained."""

    def run_of(name: str, **chosen) -> Run:
        run, data = Run(tmp_path / name), DataConfig(name="shapes")
        train(resolve(data, images(), Choices(epochs=2, hidden=(8,), **chosen)), images(), run)
        return run

    first = run_of("first", trunk="vgg13")
    second = run_of("second", trunk="vgg13", trunk_from=str(first.path), activation="heaviside")
    theirs, ours = (run.network().get_submodule("trunk").state_dict() for run in (first, second))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)
    heads = [run.network().get_submodule("linear1").weight for run in (first, second)]
    assert not torch.equal(*heads)
    with pytest.raises(ValueError, match=r"has a vgg13 trunk .* needs a lenet trunk"):
        run_of("third", trunk="lenet", trunk_from=str(first.path))


def images() -> Dataset:
    """A few noisy images of two classes, 32 x 32 in colour."""
    rng = np.random.default_rng(0)
    y = torch.arange(24) % 2
    x = torch.from_numpy(rng.integers(0, 100, size=(24, 3, 32, 32), dtype=np.uint8))
    x += (100 * y[:, None, None, None]).to(torch.uint8)
    return Dataset("shapes", "classification", x, y, x[:4], y[:4], classes=("dark", "light"))
