"""What a moment neural network says of the stochastic network behind it: weights and noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.nn import Activation, BatchNorm1d, Dropout, Flatten, Lift, Linear, Noise, Rescale

_IDENTITY = activations.get("identity")


@dataclass(frozen=True)
class Stage:
    """One layer of units, ``x = weight v + bias + noise z`` and then ``h(x)``.

    Attributes:
        name: of the module that gives the moments of h(x), as ``covary.record`` knows it.
        weight: (m, n), whatever scales its results (batch norm, units of the output) folded in.
        bias: (m,).
        noise: sigma of what is added to every unit before the activation.
        activation: h.
    """

    name: str
    weight: Tensor
    bias: Tensor
    noise: float
    activation: MomentActivation


@dataclass(frozen=True)
class Chain:
    """A moment neural network taken apart: a deterministic trunk, noisy inputs, then stages.

    Attributes:
        trunk: what stands in front of ``Lift``: ordinary layers, that know no noise.
        noise: sigma of the inputs.
        poisson: whether inputs are rates of Poisson processes, whose variance is their mean (in
            addition to that of the noise).
        stages: the layers behind it; the last one gives the output.
    """

    trunk: nn.Sequential
    noise: float
    poisson: bool
    stages: tuple[Stage, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, net: nn.Module) -> Chain:
        """Take a network apart, as it is in evaluation mode (running statistics, no dropout).

        Any nesting of ``nn.Sequential`` will do, as long as one layer follows another; of other
        modules nobody knows in which order they call their layers.
        """
        if not isinstance(net, nn.Sequential):
            raise ValueError(
                "A stochastic network is made from an nn.Sequential, whose layers follow each "
                f"other; got {type(net).__name__}."
            )
        layers = list(_leaves(net))
        places = [i for i, (_, layer) in enumerate(layers) if isinstance(layer, Lift)]
        if len(places) != 1:
            raise ValueError(
                "A stochastic network needs a moment neural network with one covary.nn.Lift, layer "
                f"after layer; this one shows {len(places)}."
            )
        lift = layers[places[0]][1]
        assert isinstance(lift, Lift)
        trunk = nn.Sequential(*(layer for _, layer in layers[: places[0]]))
        stages = tuple(_stages(layers[places[0] + 1 :]))
        if not stages:
            raise ValueError("A stochastic network needs weights behind its covary.nn.Lift.")
        return cls(trunk, lift.noise, lift.poisson, stages)

    @property
    def is_spiking(self) -> bool:
        """Whether any of its units is a spiking neuron."""
        return any(stage.activation.neuron is not None for stage in self.stages)

    @torch.no_grad()
    def prepared(self, x: Tensor) -> tuple[Chain, Tensor]:
        """All of one dtype, and the means (B, n) of the first units for raw inputs (B, ...)."""
        weight = self.stages[0].weight
        if len(x) == 0:
            raise ValueError("There is no input to simulate a network for: the batch is empty.")
        means = self._through_trunk(x.to(weight.device))
        if means.dim() != 2 or means.shape[1] != weight.shape[1]:
            raise ValueError(
                f"The first weights take inputs (B, {weight.shape[1]}), got {tuple(means.shape)}. "
                "Give raw inputs with a batch dimension, as the network itself takes them."
            )
        if not bool(torch.isfinite(means).all()):
            raise ValueError("Inputs of a network to be simulated have NaN or infinite values.")
        if self.poisson and bool((means < 0).any()):
            raise ValueError(
                "Poisson inputs are rates, in spikes per ms, 0 or more; the lowest is "
                f"{means.min():.3g}. Scale the inputs, or use a Lift without poisson."
            )
        # Units of a regression's output are kept in float64, in a network that is not.
        stages = tuple(
            replace(stage, weight=stage.weight.to(weight.dtype), bias=stage.bias.to(weight.dtype))
            for stage in self.stages
        )
        return replace(self, stages=stages), means.to(weight.dtype)

    def _through_trunk(self, x: Tensor) -> Tensor:
        """In evaluation mode, whatever mode its layers are in: they are the network's own."""
        modes = [(module, module.training) for module in self.trunk.modules()]
        try:
            signal: Tensor = self.trunk.eval()(x)
        finally:
            for module, training in modes:
                module.training = training
        return signal


def _leaves(net: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    # Not named_children, which leaves out a module that comes again.
    for name, layer in net._modules.items():
        assert layer is not None
        if isinstance(layer, nn.Sequential):
            yield from _leaves(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def _stages(layers: list[tuple[str, nn.Module]]) -> Iterator[Stage]:
    """Weights, with what scales them, noise and activation: complete when other weights follow."""
    stage: Stage | None = None
    for name, layer in layers:
        if isinstance(layer, Dropout | Flatten):
            continue  # nothing, in evaluation
        if isinstance(layer, Linear):
            if stage is not None:
                yield stage
            bias = layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            stage = Stage(name, layer.weight.detach(), bias.detach(), 0.0, _IDENTITY)
            continue
        if stage is None:
            raise _misplaced(name, layer, "before the first weights")
        if isinstance(layer, BatchNorm1d | Rescale):
            stage = _scaled(stage, name, layer)
        elif isinstance(layer, Noise):
            if stage.activation is not _IDENTITY:
                raise _misplaced(name, layer, "behind an activation, where no noise belongs")
            stage = replace(stage, name=name, noise=(stage.noise**2 + layer.noise**2) ** 0.5)
        elif isinstance(layer, Activation):
            if stage.activation is not _IDENTITY:
                raise _misplaced(name, layer, "behind another activation")
            stage = replace(stage, name=name, activation=layer.activation)
        else:
            raise _misplaced(name, layer, "behind covary.nn.Lift")
    if stage is not None:
        yield stage


def _scaled(stage: Stage, name: str, layer: BatchNorm1d | Rescale) -> Stage:
    """The stage with a layer that scales and shifts its results folded into the weights."""
    if stage.noise or stage.activation is not _IDENTITY:
        raise _misplaced(name, layer, "behind noise or an activation")
    if isinstance(layer, Rescale):
        scale, shift = layer.scale, layer.shift
    else:
        scale = torch.rsqrt(layer.running_var + layer.eps)
        if layer.weight is not None:
            scale = scale * layer.weight
        shift = -layer.running_mean * scale
        if layer.bias is not None:
            shift = shift + layer.bias
    weight, bias = stage.weight, stage.bias
    return replace(
        stage,
        name=name,
        weight=(weight * scale.expand(len(weight))[:, None]).detach(),
        bias=(bias * scale + shift).detach(),
    )


def _misplaced(name: str, layer: nn.Module, where: str) -> ValueError:
    return ValueError(
        f"No stochastic network is known for {name} ({layer}) {where}. It is known for Linear, "
        "then BatchNorm1d or Rescale, Noise and Activation, again and again."
    )
