"""The conventional network of the same layers."""

from __future__ import annotations

from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.nn import Activation, BatchNorm1d, Dropout, Lift, Linear, Noise, Rescale


def plain(
    net: nn.Sequential, *, dropout: float = 0.0, activation: str | MomentActivation | None = None
) -> nn.Sequential:
    """The conventional network of the same weights: means alone, without noise or covariance.

    Parameters and buffers are shared: training either changes both. Layers in front of ``Lift``
    (a trunk) are conventional already and stay as they are. In evaluation mode.

    Args:
        net: a moment neural network, layer after layer.
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
    layers: list[nn.Module] = []
    for layer in net:
        if isinstance(layer, Lift | Noise | Dropout):
            continue  # they are for covariances, or for another training
        layers.append(_plain(layer, chosen))
        if dropout and isinstance(layer, Activation):
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers).eval()


def has_slope(net: nn.Module) -> bool:
    """Whether the conventional network can be trained: no activation is a step, or a neuron.

    Without noise a neuron is silent below threshold, and of infinite slope just above it.
    """
    step = activations.get("heaviside")
    found = [layer.activation for layer in net.modules() if isinstance(layer, Activation)]
    return all(each is not step and each.neuron is None for each in found)


def _plain(layer: nn.Module, activation: MomentActivation | None) -> nn.Module:
    if isinstance(layer, Linear):
        bias = layer.bias is not None
        return _like(nn.Linear(layer.in_features, layer.out_features, bias, device="meta"), layer)
    if isinstance(layer, BatchNorm1d):
        affine = layer.weight is not None
        features, eps, momentum = layer.num_features, layer.eps, layer.momentum
        return _like(nn.BatchNorm1d(features, eps, momentum, affine, device="meta"), layer)
    if isinstance(layer, Activation):
        return Function(activation or layer.activation)
    if isinstance(layer, Rescale):
        return Rescaled(layer)
    return layer


def _like(empty: nn.Module, layer: nn.Module) -> nn.Module:
    state = {
        name: value for name, value in layer.state_dict().items() if name in empty.state_dict()
    }
    empty.load_state_dict(state, assign=True)
    return empty


class Function(nn.Module):
    """The function whose moments an activation takes."""

    def __init__(self, activation: MomentActivation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(B, n), unit by unit."""
        return self.activation.function(x)

    def extra_repr(self) -> str:
        """Its name."""
        return repr(self.activation)


class Rescaled(nn.Module):
    """Outputs in their original units."""

    def __init__(self, layer: Rescale) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(B, t) as ``Rescale`` makes means."""
        return x * self.layer.scale + self.layer.shift


def units_of(net: nn.Sequential) -> Rescale | None:
    """What gives the outputs their units, if that is the last layer, conventional or not."""
    last = net[-1].layer if isinstance(net[-1], Rescaled) else net[-1]
    return last if isinstance(last, Rescale) else None
