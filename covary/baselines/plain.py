"""The conventional network of the same layers and weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from covary import activations
from covary.activations import MomentActivation
from covary.nn import Dropout
from covary.nn.layers import Function
from covary.nn.protocol import activation_of, plain_of


def plain(
    net: nn.Sequential, *, dropout: float = 0.0, activation: str | MomentActivation | None = None
) -> nn.Sequential:
    """The conventional network of the same weights: means alone, without noise or covariance.

    Parameters and buffers are shared: training either changes both. Layers in front of ``Lift``
    (a trunk) are conventional already and stay as they are; each other one says itself what it is
    in a conventional network (``plain``). In evaluation mode.

    Args:
        net: a moment neural network, layer after layer. An ``nn.Sequential`` within it that has
            layers of moments is replaced by its layers.
        dropout: probability of ``nn.Dropout`` behind each activation; what the network itself has
            for training does not count.
        activation: in place of the network's own. The heaviside function needs one to be trained:
            its slope is 0, and only noise gives its mean a gradient.

    Examples:
        >>> import covary
        >>> plain(covary.mlp([4, 8, 3]), dropout=0.1)
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): Function(relu)
          (2): Dropout(p=0.1, inplace=False)
          (3): Linear(in_features=8, out_features=3, bias=True)
        )
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"plain needs a dropout probability in [0, 1), got {dropout}.")
    chosen = None if activation is None else activations.get(activation)
    return nn.Sequential(*_layers(net, dropout, chosen)).eval()


def has_slope(net: nn.Module) -> bool:
    """Whether the conventional network can be trained: no activation is a step, or a neuron.

    Without noise a neuron is silent below threshold, and of infinite slope just above it.
    """
    step = activations.get("heaviside")
    found = [activation_of(layer) for layer in net.modules()]
    return all(each is not step and each.neuron is None for each in found if each is not None)


def _layers(
    net: nn.Sequential, dropout: float, activation: MomentActivation | None
) -> Iterator[nn.Module]:
    for layer in net:
        if isinstance(layer, nn.Sequential):
            inner = list(_layers(layer, dropout, activation))
            yield from [layer] if inner == list(layer) else inner
            continue
        plain = None if isinstance(layer, Dropout) else plain_of(layer)
        if plain is None:
            continue  # for covariances alone, or for another training
        if not isinstance(plain, Function):
            yield plain
            continue
        yield plain if activation is None else Function(activation)
        if dropout:
            yield nn.Dropout(dropout)
