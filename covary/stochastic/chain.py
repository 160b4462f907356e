"""The stochastic network that a moment neural network describes, as a chain of stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.activations.neuron import LIF
from covary.models import evaluating
from covary.nn import Lift
from covary.nn.protocol import Drawn, MomentLayer, leaves_of_chain

_IDENTITY = activations.get("identity")


@dataclass(frozen=True)
class Stage:
    """One layer of units, ``x = weight v + bias + noise z`` and then ``h(x)``.

    Attributes:
        name: of the module that gives the moments of h(x), as ``covary.record`` knows it.
        weight: (m, n), with what scales its results (batch norm, ``Rescale``) folded in.
        bias: (m,).
        noise: sigma of what is added to every unit before the activation.
        activation: h.
    """

    name: str
    weight: Tensor
    bias: Tensor
    noise: float
    activation: MomentActivation

    @property
    def units(self) -> int:
        """How many, m."""
        return len(self.weight)

    @property
    def neuron(self) -> LIF:
        """Constants of its neurons, which only a stage that spikes has."""
        neuron = self.activation.neuron
        assert neuron is not None
        return neuron

    def drive(self, signal: Tensor) -> Tensor:
        """(..., n) -> (..., m): W v + b."""
        return signal @ self.weight.mT + self.bias


@dataclass(frozen=True)
class Chain:
    """A moment neural network taken apart: a deterministic trunk, noisy inputs, then stages.

    Attributes:
        trunk: the layers in front of ``Lift``: ordinary ones, without noise.
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
    def of(cls, net: nn.Module | Chain) -> Chain:
        """Take a network apart, as it is in evaluation mode (running statistics, no dropout).

        Any nesting of ``nn.Sequential`` will do. The order in which other modules call their layers
        is not known. A chain is given back as it is.
        """
        if isinstance(net, Chain):
            return net
        if not isinstance(net, nn.Sequential):
            raise ValueError(
                "A stochastic network is made from an nn.Sequential, whose layers follow each "
                f"other; got {type(net).__name__}."
            )
        layers = list(leaves_of_chain(net))
        lifts = [(i, layer) for i, (_, layer) in enumerate(layers) if isinstance(layer, Lift)]
        if len(lifts) != 1:
            raise ValueError(
                "A stochastic network needs a moment neural network with one covary.nn.Lift, layer "
                f"after layer; this one shows {len(lifts)}."
            )
        ((place, lift),) = lifts
        trunk = nn.Sequential(*(layer for _, layer in layers[:place]))
        stages = tuple(_stages(layers[place + 1 :]))
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
        with evaluating(self.trunk):
            means = self.trunk(x.to(weight.device))
        if means.dim() != 2 or means.shape[1] != weight.shape[1]:
            raise ValueError(
                f"The first weights take inputs (B, {weight.shape[1]}), got {tuple(means.shape)}. "
                "Give raw inputs with a batch dimension, as the network itself takes them; samples "
                "that are several rows of features one by one: x.flatten(0, 1)."
            )
        if not bool(torch.isfinite(means).all()):
            raise ValueError("Inputs of a network to be simulated have NaN or infinite values.")
        if self.poisson and bool((means < 0).any()):
            raise ValueError(
                "Poisson inputs are rates, in spikes per ms, 0 or more; the lowest is "
                f"{means.min():.3g}. Scale the inputs, or use a Lift without poisson."
            )
        # The scale of a regression's output is kept in float64, in a network that is not.
        stages = tuple(
            replace(stage, weight=stage.weight.to(weight.dtype), bias=stage.bias.to(weight.dtype))
            for stage in self.stages
        )
        return replace(self, stages=stages), means.to(weight.dtype)

    def input_stddev(self, means: Tensor) -> Tensor:
        """(B, n) of the inputs: their noise, and the root of the rate where they are Poisson's."""
        rates = means if self.poisson else torch.zeros_like(means)
        return (rates + self.noise**2).sqrt()

    def neurons_and_readout(self) -> tuple[tuple[Stage, ...], Stage | None]:
        """Layers of neurons, and what reads them: None, where the last layer has neurons too."""
        *hidden, last = self.stages
        if last.activation.neuron is not None:
            return self.stages, None
        if not self.is_spiking:
            raise ValueError(
                "A spiking network needs layers with activation 'lif'; this network has "
                f"{', '.join(str(stage.activation) for stage in self.stages)}. Train one so: "
                "covary.mlp(..., activation='lif'), or covary train --activation lif."
            )
        for stage in hidden:
            if stage.activation.neuron is None:
                raise ValueError(
                    f"{stage.name} has activation {stage.activation} among layers that spike; only "
                    "the last weights may have none. Use 'lif' in all of them."
                )
        if last.noise or last.activation.name != "identity":
            raise ValueError(
                f"The output {last.name} of a spiking network reads spike counts, without noise or "
                f"activation of its own; got noise {last.noise:g} and activation "
                f"{last.activation}."
            )
        return tuple(hidden), last


def _stages(layers: list[tuple[str, nn.Module]]) -> Iterator[Stage]:
    """Weights, with what scales them, noise and activation: complete when other weights follow."""
    stage: Stage | None = None
    for name, layer in layers:
        if not isinstance(layer, MomentLayer):
            raise _misplaced(name, layer, "behind covary.nn.Lift")
        drawn = layer.drawn()
        if drawn.is_nothing:
            continue
        if drawn.weight is not None:
            if stage is not None:
                yield stage
            weight = drawn.weight.detach()
            stage = Stage(name, weight, weight.new_zeros(len(weight)), 0.0, _IDENTITY)
        elif stage is None:
            raise _misplaced(name, layer, "before the first weights")
        stage = _with(stage, name, layer, drawn)
    if stage is not None:
        yield stage


def _with(stage: Stage, name: str, layer: nn.Module, drawn: Drawn) -> Stage:
    """The stage with what another layer does behind it; scale and shift go into the weights."""
    weight, bias, noise = stage.weight, stage.bias, stage.noise
    if stage.activation is not _IDENTITY:
        raise _misplaced(name, layer, "behind an activation")
    if noise and not (drawn.scale is None and drawn.shift is None):
        raise _misplaced(name, layer, "behind noise")
    if drawn.scale is not None:
        weight = weight * drawn.scale.detach().expand(len(weight))[:, None]
        bias = bias * drawn.scale.detach()
    if drawn.shift is not None:
        bias = bias + drawn.shift.detach()
    if drawn.noise is not None:
        noise = (noise**2 + drawn.noise**2) ** 0.5
    return Stage(name, weight, bias, noise, drawn.activation or _IDENTITY)


def _misplaced(name: str, layer: nn.Module, where: str) -> ValueError:
    return ValueError(
        f"No stochastic network is known for {name} ({layer}) {where}. It is known for weights, "
        "then what scales and shifts (BatchNorm1d, Rescale), noise and an activation, again and "
        "again, of layers with the methods of covary.nn.MomentLayer."
    )
