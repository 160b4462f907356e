"""Builders of networks; twins of one: with another covariance, other noise, plain, or not plain."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from covary import activations
from covary.activations import LIF, MomentActivation
from covary.covariance import Kind, check_kind, class_name
from covary.nn import (
    Activation,
    BatchNorm1d,
    Dropout,
    Flatten,
    Lift,
    Linear,
    Noise,
    Noisy,
    Rescale,
    Standardize,
)
from covary.nn.layers import Function
from covary.nn.protocol import (
    MomentLayer,
    activation_of,
    chain_of,
    check_noise,
    plain_of,
)

Network = TypeVar("Network", bound=nn.Module)
_USUAL_NOISE = 0.2


def mlp(
    widths: Sequence[int],
    *,
    activation: str | MomentActivation = "relu",
    noise: float | Sequence[float] | None = None,
    covariance: Kind = "full",
    batch_norm: bool = False,
    dropout: float = 0.0,
    bias: bool = True,
    poisson: bool = False,
) -> nn.Sequential:
    """A fully connected moment neural network; docs/theory.md, eqs. (2) and (3).

    Input ``(B, widths[0])`` tensors, output ``covary.Moments`` of ``widths[-1]`` units. Each
    hidden layer is Linear, BatchNorm1d (if wanted), Noise, Activation, Dropout (if wanted).

    Args:
        widths: units of the input, of each hidden layer and of the output.
        activation: a name (``covary.activations.names()``) or a moment activation.
        noise: the standard deviation sigma added to the input and before each hidden activation;
            one for all, or ``len(widths) - 1`` of them. None is 0.2; for spiking neurons, whose
            noise is in mV per sqrt(ms), it is 0.2 on the input and ``LIF.irregular_noise`` on them.
        covariance: see ``covary.nn.Lift``.
        poisson: see ``covary.nn.Lift``.
        batch_norm: normalise before each activation. Spiking neurons start with it in the range of
            inputs that they respond to (docs/theory.md, "Spiking neurons").
        dropout: probability of dropping a hidden unit in training.
        bias: whether linear layers have a bias.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([784, 100, 10], activation="relu", noise=0.2)
        >>> net(torch.rand(5, 784))
        Moments(mean=(5, 10), cov=Full)
    """
    if not isinstance(widths, Sequence) or not all(isinstance(width, int) for width in widths):
        raise TypeError(f"mlp needs a list of whole numbers as widths, got {widths!r}.")
    if len(widths) < 2 or any(width < 1 for width in widths):
        raise ValueError(f"mlp needs at least two widths of 1 or more, got {list(widths)}.")
    chosen = activations.get(activation)
    count = len(widths) - 1
    if noise is None:
        hidden_noise = _USUAL_NOISE if chosen.neuron is None else chosen.neuron.irregular_noise
        noise = [_USUAL_NOISE, *[hidden_noise] * (count - 1)]
    if isinstance(noise, Sequence) and not isinstance(noise, str):
        noises = list(noise)
    else:
        noises = [noise] * count
    if len(noises) != count:
        raise ValueError(
            f"mlp needs one noise for all layers or {count} of them (the input's and each hidden "
            f"layer's), got {len(noises)}."
        )
    layers: dict[str, nn.Module] = {"lift": Lift(noises[0], covariance, poisson=poisson)}
    for i in range(1, count):
        layers[f"linear{i}"] = Linear(widths[i - 1], widths[i], bias=bias)
        if batch_norm:
            layers[f"batch_norm{i}"] = BatchNorm1d(widths[i])
        layers[f"noise{i}"] = Noise(noises[i])
        layers[f"activation{i}"] = Activation(chosen)
        if dropout:
            layers[f"dropout{i}"] = Dropout(dropout)
    layers[f"linear{count}"] = Linear(widths[-2], widths[-1], bias=bias)
    net = nn.Sequential(OrderedDict(layers))
    if chosen.neuron is not None and count > 1:
        _start_spiking(net, chosen.neuron)
    have_tracking_buffers(net)
    return net


def _start_spiking(net: nn.Sequential, neuron: LIF) -> None:
    """Start spiking neurons where they respond, and scale the weights that read their rates.

    A neuron responds around ``v_th * leak``, and its gain is next to nothing far from it: batch
    norm, which gives inputs of mean 0 and deviation 1, is centred on half of that drive, and spread
    by as much. The weights that read the neurons are divided by the rate at which they then fire,
    hundredths per ms, as other activations are about 1. Running statistics of batch norm behind
    neurons start at what to expect of such rates: from 0 and 1 they would take a hundred steps.
    """
    drive = 0.5 * neuron.drive_at_threshold
    spread = abs(drive) or 1.0
    with torch.device("cpu"), torch.no_grad():  # numbers, wherever the network is to be
        start = activations.lif(**vars(neuron))(
            torch.tensor([[drive]]), torch.tensor([[neuron.irregular_noise**2]])
        )
        rate, deviation = start.mean.item(), start.gain.item() * spread
        layers = list(net)
        for before, layer in pairwise(layers):
            if not isinstance(layer, BatchNorm1d):
                continue
            assert layer.weight is not None
            assert layer.bias is not None
            layer.bias.fill_(drive)
            layer.weight.fill_(spread)
            if before is not layers[1]:
                assert isinstance(before, Linear)
                bias = 0.0 if before.bias is None else before.bias
                layer.running_mean.copy_(before.weight.sum(1) * rate + bias)
                layer.running_var.copy_(before.weight.square().sum(1) * deviation**2)
        readout = layers[-1]
        assert isinstance(readout, Linear)
        readout.weight /= rate


def lenet(input_shape: Sequence[int]) -> nn.Sequential:
    """A convolutional trunk for small images (B, C, H, W), to stand in front of ``Lift``.

    After LeNet: two 5 x 5 convolutions (16 and 32 channels), each followed by ReLU and 2 x 2
    max-pooling. What comes out is flat, (B, 32 * (H // 4) * (W // 4)).
    """
    channels = _channels(input_shape, least=4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


def lenet5(input_shape: Sequence[int]) -> nn.Sequential:
    """The convolutions of the modified LeNet5 that networks of variances are compared on.

    As in variance back-propagation (Haussmann, Hamprecht and Kandemir, UAI 2019): two 5 x 5
    convolutions with a stride of 2 in place of pooling, each followed by ReLU; 20 and 50 channels
    for grey images, 192 and 192 for those in colour. A hidden layer of 500 or 1000 units follows
    there, which is to have moments here. What comes out is flat: (B, 800) of (1, 28, 28).
    """
    channels = _channels(input_shape, least=13)
    first, second = (20, 50) if channels == 1 else (192, 192)
    return nn.Sequential(
        nn.Conv2d(channels, first, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(first, second, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
    )


def vgg13(input_shape: Sequence[int]) -> nn.Sequential:
    """The ten convolutions of VGG13 (Simonyan and Zisserman, 2014) with batch norm, as a trunk.

    3 x 3 convolutions, each followed by batch norm and ReLU: two each of 64, 128, 256, 512 and 512
    channels, with 2 x 2 max-pooling behind each pair. What comes out is flat,
    (B, 512 * (H // 32) * (W // 32)).
    """
    before = _channels(input_shape, least=32)
    layers: list[nn.Module] = [ChannelsLast()]
    for channels in (64, 128, 256, 512, 512):
        for _ in range(2):
            # Batch norm would take a bias away again.
            convolution = nn.Conv2d(before, channels, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten())


def _channels(shape: Sequence[int], *, least: int) -> int:
    """The channels of images, which have to be large enough for a trunk."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(
            f"This trunk needs images of shape (channels, height, width), {least} x {least} pixels "
            f"at least, got inputs of shape {tuple(shape)}."
        )
    return shape[0]


class ChannelsLast(nn.Module):
    """The same images (B, C, H, W), the channels of a pixel side by side in memory.

    Layers behind it keep that order, in which convolutions are faster.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return x.contiguous(memory_format=torch.channels_last)


class Frozen(nn.Sequential):
    """Layers that training leaves as they are: without gradients, and always as in evaluation."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode: batch norm keeps the statistics it has."""
        super().train(False)
        return self


def with_covariance(net: Network, covariance: Kind) -> Network:
    """The same network with another kind of covariance; parameters and buffers are shared.

    Whatever changes the parameters or buffers of one (training, loading, moving) changes both;
    each has its own training or evaluation mode. ``covary.track`` measures the corrections that
    ``"tracked"`` needs, of a network that has none.

    Examples:
        >>> import covary
        >>> net = covary.mlp([4, 8, 3], covariance="shared")  # as the paper trains
        >>> per_sample = covary.with_covariance(net, "full")  # as it evaluates
        >>> per_sample.linear1.weight is net.linear1.weight
        True
    """
    covariance = check_kind(covariance)
    _check_not_compiled(net, "with_covariance")
    twin = twin_of(net)
    lifts = [module for module in twin.modules() if isinstance(module, Lift)]
    if not lifts:
        raise ValueError("with_covariance needs a network with a covary.nn.Lift; this has none.")
    for lift in lifts:
        lift.covariance = covariance
    have_tracking_buffers(twin)
    return twin


def with_noise(net: Network, noise: float | Sequence[float]) -> Network:
    """The same network with other noise; parameters and buffers are shared.

    Args:
        net: a network with ``covary.nn.Lift`` and ``covary.nn.Noise`` layers.
        noise: sigma of these layers in order, the input's first: one for all, or a list. A list
            that is too short is for the first of them; the others keep theirs.

    Examples:
        >>> import covary
        >>> net = covary.mlp([4, 8, 6, 3], noise=0.2)
        >>> noise_of(covary.with_noise(net, [0.0, 0.0]))
        [0.0, 0.0, 0.2]
    """
    twin = twin_of(net)
    layers = noisy_layers(twin)
    if not layers:
        raise ValueError("with_noise needs a network with a covary.nn.Lift; this has none.")
    wanted = list(noise) if isinstance(noise, Sequence) else [noise] * len(layers)
    if len(wanted) > len(layers):
        raise ValueError(
            f"with_noise got {len(wanted)} noises for {len(layers)} noisy layers (the input's and "
            "each hidden layer's)."
        )
    for layer, sigma in zip(layers, wanted, strict=False):
        layer.noise = check_noise(sigma, type(layer).__name__)
    return twin


def with_dropout(net: Network, as_noise: bool = True) -> Network:
    """The same network whose dropout is noise in evaluation, as in MC dropout but without masks.

    Parameters and buffers are shared. Of a network that tracks its covariance, measure corrections
    again: ``covary.track(net, inputs)``.

    Args:
        net: a network with ``covary.nn.Dropout`` layers, such as ``covary.mlp(..., dropout=0.1)``.
        as_noise: False gives back the network whose dropout does nothing in evaluation.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 3], noise=0.0, dropout=0.2).eval()
        >>> bool((net(torch.ones(2, 4)).variance > 0).any())
        False
        >>> bool((covary.with_dropout(net)(torch.ones(2, 4)).variance > 0).all())
        True
    """
    _check_not_compiled(net, "with_dropout")
    twin = twin_of(net)
    layers = [layer for layer in twin.modules() if isinstance(layer, Dropout)]
    if not layers:
        raise ValueError(
            "with_dropout needs a network with covary.nn.Dropout layers, this has none."
        )
    for layer in layers:
        layer.as_noise = as_noise
    return twin


def noise_of(net: nn.Module) -> list[float]:
    """Sigma of each noisy layer, the input's first."""
    return [layer.noise for layer in noisy_layers(net)]


def noisy_layers(net: nn.Module) -> list[Noisy]:
    """The layers that add noise, in order."""
    return [layer for layer in net.modules() if isinstance(layer, Noisy)]


def have_tracking_buffers(net: nn.Module) -> None:
    """Give the layers of a network that tracks their buffers, before it is copied or wrapped."""
    modules = list(net.modules())
    if any(
        isinstance(module, Lift) and class_name(module.covariance) == "tracked"
        for module in modules
    ):
        for module in modules:
            if isinstance(module, Linear):
                module.begin_tracking()


def twin_of(module: Network, known: dict[nn.Module, nn.Module] | None = None) -> Network:
    """A copy of the tree of modules that shares all tensors with the original."""
    known = {} if known is None else known
    if module not in known:
        known[module] = _shell(module, lambda child: twin_of(child, known))
    return known[module]  # type: ignore[return-value]


def _shell(module: Network, replace: Callable[[nn.Module], nn.Module]) -> Network:
    """A copy of a module with the same parameters and buffers, and other children."""
    # Not by copy.copy, which parametrised modules (weight norm) refuse.
    twin: Network = object.__new__(type(module))
    for name, value in vars(module).items():
        # Hooks, for one, are added to and removed from one network at a time.
        is_shared = name in ("_parameters", "_buffers") or not isinstance(value, dict)
        twin.__dict__[name] = value if is_shared else copy.copy(value)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else replace(child)
    return twin


def _check_not_compiled(net: nn.Module, function: str) -> None:
    if any(hasattr(module, "_orig_mod") for module in net.modules()):
        # Its twin would go on running what was compiled.
        raise ValueError(f"{function} needs a network before torch.compile, not after it.")


def plain(
    net: nn.Module, *, dropout: float = 0.0, activation: str | MomentActivation | None = None
) -> nn.Module:
    """The conventional network of the same weights: means alone, without noise or covariance.

    Parameters and buffers are shared: training either changes both. Each layer of moments says
    itself what it is in a conventional network (``plain``), however deep it is nested. Modules
    without any, such as a trunk in front of ``Lift``, stay as they are. In evaluation mode.

    Args:
        net: a moment neural network. An ``nn.Sequential`` within another that has layers of
            moments is replaced by its layers. Any other module with such layers inside keeps its
            ``forward``, which then runs on tensors; what has no conventional version is an
            ``nn.Identity`` there.
        dropout: probability of ``nn.Dropout`` behind each activation; the network's own, for
            training, does not count.
        activation: in place of the network's own, such as the heaviside function, whose slope of 0
            cannot be trained without noise.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"plain needs a dropout probability in [0, 1), got {dropout}.")
    _check_not_compiled(net, "plain")
    chosen = None if activation is None else activations.get(activation)

    def layers_of(module: nn.Module) -> list[nn.Module]:
        """What stands in place of a module: layers, one after the other."""
        if isinstance(module, MomentLayer):
            layer = None if isinstance(module, Dropout) else plain_of(module)
            if layer is None:  # for covariances alone, or for another training
                return []
            if not isinstance(layer, Function):
                return [layer]
            applied = layer if chosen is None else Function(chosen)
            return [applied, nn.Dropout(dropout)] if dropout else [applied]
        if not any(isinstance(layer, MomentLayer) for layer in module.modules()):
            return [module]
        layers = chain_of(module)
        if layers is None:
            return [_shell(module, one)]
        return [found for layer in layers for found in layers_of(layer)]

    def one(module: nn.Module) -> nn.Module:
        layers = layers_of(module)
        if len(layers) == 1:
            return layers[0]
        return nn.Sequential(*layers) if layers else nn.Identity()

    layers = chain_of(net)
    if layers is None:
        return one(net).eval()
    return nn.Sequential(*[found for layer in layers for found in layers_of(layer)]).eval()


# What a module of torch is called as a moment activation: its name in lower case, or made of the
# numbers that it has.
_OF_MODULES: dict[type[nn.Module], Callable[[Any], MomentActivation]] = {
    nn.CELU: lambda layer: activations.celu(layer.alpha),
    nn.ELU: lambda layer: activations.elu(layer.alpha),
    nn.GELU: lambda layer: activations.get("gelu" + "_tanh" * (layer.approximate == "tanh")),
    nn.Hardshrink: lambda layer: activations.hardshrink(layer.lambd),
    nn.Hardtanh: lambda layer: activations.hardtanh(layer.min_val, layer.max_val),
    nn.LeakyReLU: lambda layer: activations.leaky_relu(layer.negative_slope),
    nn.Softplus: lambda layer: activations.softplus(layer.beta, layer.threshold),
    nn.Softshrink: lambda layer: activations.softshrink(layer.lambd),
    Function: lambda layer: layer.activation,
}
_BY_NAME = (
    nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip

_BEFORE_MOMENTS = (Flatten, Standardize)
_NAMES = {
    Activation: "activation", BatchNorm1d: "batch_norm", Dropout: "dropout", Flatten: "flatten",
    Linear: "linear", Rescale: "rescale", Standardize: "standardize",
}  # fmt: skip


def from_plain(
    net: nn.Module, *, noise: float | Sequence[float], covariance: Kind = "full"
) -> nn.Sequential:
    """The moment neural network of a conventional one's weights: the inverse of ``plain``.

    Tensors (B, n) in, ``covary.Moments`` out. Without noise the means are what the conventional
    network gives. Parameters and buffers are shared: training either changes both. Layers are in
    the order, and have the names, that ``mlp`` gives them, so that a ``state_dict`` fits both.

    Args:
        net: an ``nn.Linear``, or an ``nn.Sequential`` of linear layers, activations,
            ``nn.BatchNorm1d``, ``nn.Dropout``, ``nn.Identity`` and ``nn.Flatten``, nested as one
            likes. ``covary.convert`` takes all other networks.
        noise: the standard deviation added to the input and before each activation; one for all, or
            a list of them.
        covariance: see ``covary.nn.Lift``.

    Examples:
        >>> import covary, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> covary.from_plain(net, noise=0.1)(torch.rand(5, 4))
        Moments(mean=(5, 3), cov=Full)
    """
    _check_not_compiled(net, "from_plain")
    made = [_of_plain(path, layer) for path, layer in _plain_leaves(net, "")]
    layers = [layer for layer in made if layer is not None]
    if not any(isinstance(layer, Linear) for layer in layers):
        raise ValueError(f"from_plain needs a network with an nn.Linear, and this has none: {net}")
    start = next(i for i, layer in enumerate(layers) if not isinstance(layer, _BEFORE_MOMENTS))
    count = 1 + sum(isinstance(layer, Activation) for layer in layers)
    given = list(noise) if isinstance(noise, Sequence) else [noise] * count
    if len(given) != count:
        raise ValueError(
            f"from_plain needs one noise for all layers or {count} of them (the input's and one "
            f"before each activation), got {len(given)}."
        )
    sigmas, found, place = iter(given), OrderedDict[str, nn.Module](), 0

    def add(kind: str, layer: nn.Module) -> None:
        name = f"{kind}{place or ''}"
        while name in found:
            name += "_"
        found[name] = layer

    for i, layer in enumerate(layers):
        if i == start:
            add("lift", Lift(next(sigmas), covariance))
        if isinstance(layer, Linear):
            place += 1
        if isinstance(layer, Activation):
            add("noise", Noise(next(sigmas)))
        add(_NAMES[type(layer)], layer)
    made_of = nn.Sequential(found)
    have_tracking_buffers(made_of)
    return made_of.train(net.training)


def _plain_leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Paths and layers of nested ``nn.Sequential``s; a single layer is a network of its own."""
    layers = chain_of(module)
    hooked = module._forward_hooks or module._forward_pre_hooks
    if layers is None or hooked:
        yield path, module
        return
    for name, layer in module._modules.items():
        if layer is not None:
            yield from _plain_leaves(layer, f"{path}.{name}".lstrip("."))


def _of_plain(path: str, layer: Any) -> nn.Module | None:  # its attributes are of its kind
    """The layer of moments of a conventional one; None for one that does nothing."""
    kind = type(layer)
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise _not_taken(path, layer, "has hooks, which change what it gives")
    if kind is nn.Identity:
        return None
    if isinstance(layer, Flatten | Standardize | Rescale):
        return layer
    if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flatten()
    if kind is nn.Dropout:
        return Dropout(layer.p)
    if kind is nn.Linear:
        features = layer.in_features, layer.out_features
        return _sharing(layer, Linear(*features, bias=layer.bias is not None, device="meta"))
    if kind is nn.BatchNorm1d and layer.running_mean is not None and layer.momentum is not None:
        numbers = layer.num_features, layer.eps, layer.momentum, layer.affine
        return _sharing(layer, BatchNorm1d(*numbers, device="meta"))
    if kind in _OF_MODULES:
        return Activation(_OF_MODULES[kind](layer))
    if kind in _BY_NAME:
        return Activation(kind.__name__.lower())
    raise _not_taken(path, layer, "has no layer of moments here")


def _sharing(layer: nn.Module, made: Network) -> Network:
    """``made`` with the parameters and buffers of ``layer`` in place of its own."""
    for name, value in (*layer._parameters.items(), *layer._buffers.items()):
        setattr(made, name, value)
    return made


def _not_taken(path: str, layer: nn.Module, why: str) -> ValueError:
    """The error for a layer that has no place in a chain of moments, with what to do instead."""
    where = f" ({path!r})" if path else ""
    return ValueError(
        f"from_plain takes linear layers, activations, BatchNorm1d, Dropout and Flatten in "
        f"nn.Sequentials, and {type(layer).__name__}{where} {why}. covary.convert(net, noise=...) "
        "takes any network; layers in front of the first Linear can stay as they are, in "
        "nn.Sequential(front, covary.from_plain(rest, noise=...))."
    )


def has_slope(net: nn.Module) -> bool:
    """Whether the conventional network can be trained: no activation is a step, or a neuron."""
    step = activations.get("heaviside")
    found = [activation_of(layer) for layer in net.modules()]
    return all(each is not step and each.neuron is None for each in found if each is not None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this block the model is in evaluation mode, whatever modes its modules have."""
    modes = [(module, module.training) for module in model.modules() if module.training]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """After this block all buffers are as before it: for passes that only measure."""
    before = [
        (module, name, value, value.clone())
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None
    ]
    try:
        yield
    finally:
        for module, name, value, copied in before:
            module._buffers[name] = value
            # Nothing writes into a sparse buffer, and torch cannot compare two.
            if value.layout is torch.strided and not torch.equal(value, copied):
                value.copy_(copied)
