"""Networks that are several in one, and networks with a head for the variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.convert import Converted, convert
from covary.covariance import Diagonal
from covary.moments import Moments
from covary.nn.scales import Rescale, before_rescale
from covary.tracking import track
from covary.training.objectives import LEAST_VARIANCE


class Members(nn.Module):
    """(B, ...) -> (M, B, n): what each of several networks gives."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        if not nets:
            raise ValueError("An ensemble needs at least one network, got none.")
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return torch.stack([net(x) for net in self.nets])


class DropoutSamples(nn.Module):
    """(B, ...) -> (S, B, n): what a network gives under so many random dropout masks.

    Masks are drawn in evaluation too, by a seed of their own: the same input in the same place of
    the same batch has the same masks. The state of torch's random numbers stays as it was.
    """

    def __init__(self, net: nn.Module, samples: int, *, seed: int = 0) -> None:
        super().__init__()
        if samples < 1:
            raise ValueError(f"Monte Carlo dropout needs at least one sample, got {samples}.")
        if not any(isinstance(layer, nn.Dropout) for layer in net.modules()):
            raise ValueError("Monte Carlo dropout needs a network with nn.Dropout; this has none.")
        self.net, self.samples, self.seed = net, samples, seed

    def forward(self, x: Tensor) -> Tensor:
        """One mask after the other; only dropout layers are in training mode for it."""
        devices = [x.device] if x.device.type == "cuda" else []
        dropouts = [layer for layer in self.net.modules() if isinstance(layer, nn.Dropout)]
        before = [layer.training for layer in dropouts]
        for layer in dropouts:
            layer.train()
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(self.seed)
                return torch.stack([self.net(x) for _ in range(self.samples)])
        finally:
            for layer, mode in zip(dropouts, before, strict=True):
                layer.train(mode)


def without_masks(net: nn.Module, x: Tensor) -> Converted:
    """(B, ...) -> Moments of what a network gives under all dropout masks, of which none is drawn.

    Args:
        net: with ``nn.Dropout``, from the first of which on values vary; shared.
        x: (n, ...) inputs to track variances with.
    """
    first = next((path for path, each in net.named_modules() if isinstance(each, nn.Dropout)), None)
    if first is None:
        raise ValueError("Dropout without masks needs a network with nn.Dropout; this has none.")
    converted = convert(net, noise=0.0, dropout=True, start=first)
    track(converted, x, progress=False)
    return converted


class MemberMoments(nn.Module):
    """The average of what ``Members`` or ``DropoutSamples`` give (M, B, t), and its variance.

    That is their spread alone, 0 for a single network: noise of the targets around the average is
    for ``covary.uncertainty.calibration`` to add.
    """

    def __init__(self, draws: nn.Module) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x: Tensor) -> Moments:
        """Moments (B, t) without correlations."""
        outputs: Tensor = self.draws(x)
        return Moments(outputs.mean(0), Diagonal(outputs.var(0, correction=0)))


class GaussianHead(nn.Module):
    """(B, 2t) -> Moments of t targets: their means, then what softplus makes their variances."""

    def forward(self, x: Tensor) -> Moments:
        """Moments (B, t) without correlations."""
        mean, raw = x.chunk(2, -1)
        return Moments(mean, Diagonal(F.softplus(raw) + LEAST_VARIANCE))


def with_variance_head(net: nn.Sequential) -> nn.Sequential:
    """A conventional regression network with a variance beside each of its means.

    The last weight gets a second row for each target, newly initialised (a variance of about 0.7
    on the standardised scale); the rest is shared.
    """
    layers, last, rescale = divided(net)
    bias, targets = last.bias is not None, last.out_features
    both = nn.Linear(last.in_features, 2 * targets, bias=bias).to(last.weight)
    with torch.no_grad():
        both.weight[:targets] = last.weight
        if bias:
            both.bias[:targets] = last.bias
    return nn.Sequential(*layers, both, GaussianHead(), *rescale).eval()


def divided(net: nn.Sequential) -> tuple[nn.Sequential, nn.Linear, list[Rescale]]:
    """The layers that make features, the last weights, and what rescales outputs, if anything."""
    layers, rescale = before_rescale(net)
    last = layers.pop()
    if not isinstance(last, nn.Linear):
        raise ValueError(
            "Another last layer needs a conventional network that ends with an nn.Linear; this "
            f"ends with {type(last).__name__}."
        )
    return nn.Sequential(*layers).eval(), last, [] if rescale is None else [rescale]
