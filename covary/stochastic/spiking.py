"""The spiking network behind a moment neural network of leaky integrate-and-fire neurons."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from covary.activations.neuron import LIF
from covary.nn.fidelity import frames_to_caller
from covary.stochastic.chain import Chain, Stage
from covary.stochastic.counts import CountMoments, Readout, SpikingLayer
from covary.stochastic.membrane import CROSSINGS, Arrivals, Membranes
from covary.stochastic.statistics import GROUPS, Progress, check_groups, unshown

# Steps of a membrane's time constant, at most: in one, V relaxes by so much.
_LARGEST_STEP = 0.1
# A neuron is saturated at so much of the rate that its refractory period allows, and a layer is
# if so many of its neurons are (over all inputs).
_SATURATED = 0.9
_MANY = 0.1
# A layer is silent if no more of its neurons fired at all.
_FEW = 0.01
# Spikes of a step at most, in neurons without refractory period, which fire once in it.
_MOST_PER_STEP = 0.2


class SaturationWarning(UserWarning):
    """Neurons fire as fast as they can, whatever their input: they pass on no information."""


class SilenceWarning(UserWarning):
    """Neurons do not fire at all, and pass on nothing."""


@dataclass(frozen=True, eq=False, repr=False)
class Spiking:
    """What ``simulate_spikes`` found.

    Attributes:
        layers: spike counts of each layer of neurons, by the name of the stage.
        readout: the output as time goes on.
        dt: step, in ms.
        burn_in: in ms.
        duration: in ms, burning in included.
    """

    layers: dict[str, SpikingLayer]
    readout: Readout
    dt: float
    burn_in: float
    duration: float

    def __repr__(self) -> str:
        return f"Spiking(layers={self.layers}, readout={self.readout})"


@torch.no_grad()
def simulate_spikes(
    net: nn.Module | Chain,
    x: Tensor,
    *,
    duration: float = 1100.0,
    burn_in: float = 100.0,
    window: float = 100.0,
    copies: int = 32,
    dt: float = 0.25,
    crossing: str = "bridge",
    covariance: Sequence[str] = (),
    times: Sequence[float] | None = None,
    groups: int = GROUPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Spiking:
    """Simulate the leaky integrate-and-fire neurons that a moment neural network describes.

    dV_i/dt = -L V_i + sum_j w_ij S_j + b_i + sigma noise; at V_th a spike, then V_res for T_ref;
    the paper's Eq. (LIF). Weights w, with batch norm folded in, are mV per spike, the bias b is a
    current in mV per ms, sigma^2 is the intensity of white noise in mV^2 per ms. Inputs x enter as
    a current, W (x + sigma noise) + b; or, if ``Lift`` has ``poisson``, as spikes of that rate. The
    last weights, with no neurons behind them, read the spike counts: y(t) = W N(t) / t + b.

    Potentials start anywhere from V_res to V_th, so that neurons do not fire together. Times are in
    ms, rates in spikes per ms.

    Args:
        net: a moment neural network whose activations are all ``lif``, or its ``Chain``.
        x: (B, ...) raw inputs, as the network takes them.
        duration: time to simulate, burning in included.
        burn_in: time before spikes are counted. 0 shows decisions from the very start.
        window: counts are those of windows of this length; a last one that is shorter is not used.
        copies: independent networks for each input; a multiple of ``groups``.
        dt: step. Rates of neurons with Gaussian noise are right to 0.1% up to 0.5 ms or more; with
            0.25 ms, those of neurons driven by spikes are too, to about 1%.
        crossing: ``"bridge"``, or ``"grid"`` for what simpler simulators do (``Membranes``).
        covariance: names of layers to record covariances of, at the cost of groups x B x n x n
            numbers.
        times: since the end of burning in, at which to look at the output; None: ten, evenly.
        groups: standard errors come from the spread between so many groups of copies.
        seed: decides everything that is random.
        progress: wraps what is done step by step, given a name, to show how far it is.

    Warns:
        SaturationWarning: more than a tenth of a layer fires at 90% of 1 / T_ref or above.
        SilenceWarning: less than a hundredth of a layer fires at all.

    Examples:
        >>> import covary
        >>> net = covary.mlp([4, 8, 3], activation="lif", noise=1.0)
        >>> x = torch.full((2, 4), 3.0)
        >>> simulate_spikes(net, x, duration=50, burn_in=0, window=50).readout
        Readout(inputs=2, copies=32, times=10, outputs=3)
    """
    chain = net if isinstance(net, Chain) else Chain.of(net)
    layers_of_neurons(chain)  # or say what is wrong with it
    chain, means = chain.prepared(x)
    hidden, last = layers_of_neurons(chain)
    for stage in hidden:
        _check_step(dt, neuron_of(stage), crossing)
    clock = _clock(duration, burn_in, window, dt, times)
    recorded = _checked_names(covariance, [stage.name for stage in hidden])
    shape = (groups, len(means), _checked_copies(copies, groups, clock))
    network = _Network(chain, hidden, means, shape, dt, crossing)
    moments = [
        CountMoments(
            *shape[:2], len(stage.weight), covariance=stage.name in recorded, device=means.device
        )
        for stage in hidden
    ]
    steps = (progress or unshown)(range(1, clock.steps + 1), "spikes")
    outputs = _counted(network, moments, last, clock, dt, steps, seed)
    layers = {}
    for stage, one in zip(hidden, moments, strict=True):
        layers[stage.name] = one.layer(stage.name, neuron_of(stage), clock.window * dt)
        _check_rates(layers[stage.name], dt)
    looked = torch.tensor(sorted(clock.looks), dtype=torch.float64) * dt
    readout = Readout(looked, torch.stack(outputs, 3))
    return Spiking(layers, readout, dt, clock.burn_in * dt, clock.steps * dt)


def _checked_copies(copies: int, groups: int, clock: _Clock) -> int:
    """How many copies each group has."""
    each = check_groups(copies, groups)
    if each == 1 and clock.windows == 1:
        raise ValueError(
            "Variances need more than one window of one copy in each group. Take copies="
            f"{2 * groups}, or simulate for longer than a window."
        )
    return each


def _counted(
    network: _Network,
    moments: Sequence[CountMoments],
    last: Stage | None,
    clock: _Clock,
    dt: float,
    steps: Iterable[int],
    seed: int,
) -> list[Tensor]:
    """Run the network; give its output at each look. Counts of windows go into the moments."""
    generator = torch.Generator(network.counts[-1].device).manual_seed(seed)
    network.start(generator)
    totals = torch.zeros_like(network.counts[-1])
    outputs = []
    for step in steps:
        network.advance(generator)
        since = step - clock.burn_in
        if since == 0:
            network.forget_counts()
        if since > 0 and since in clock.looks:
            count = totals + network.counts[-1]
            outputs.append(_output(last, count / (since * dt)))
        if since > 0 and since % clock.window == 0:
            for one, counts in zip(moments, network.counts, strict=True):
                one.add(counts)
            totals += network.counts[-1]
            network.forget_counts()
    return outputs


class _Network:
    """All copies for all inputs, (groups, B, copies, n) of each layer."""

    def __init__(
        self,
        chain: Chain,
        hidden: Sequence[Stage],
        means: Tensor,
        shape: tuple[int, int, int],
        dt: float,
        crossing: str,
    ) -> None:
        self.counts = [means.new_zeros(*shape, len(stage.weight)) for stage in hidden]
        self.membranes = [
            Membranes(neuron_of(stage), counts, dt, crossing=crossing)
            for stage, counts in zip(hidden, self.counts, strict=True)
        ]
        first = hidden[0]
        drives = [stage.bias for stage in hidden]
        self.expected: Tensor | None = None  # spikes of inputs in a step
        if chain.poisson:
            self.expected = (means * dt)[None, :, None].expand(*shape, -1).contiguous()
        else:
            drives[0] = (means @ first.weight.mT + first.bias)[None, :, None]
        self.targets = [
            drive / neuron_of(stage).leak for drive, stage in zip(drives, hidden, strict=True)
        ]
        self.noises = [_Noise.of(stage, dt) for stage in hidden]
        if chain.noise:
            self.noises[0] = _Noise.of(first, dt, shared=chain.noise)
        # Weights and their squares in one product.
        self.weights = [torch.cat([s.weight, s.weight.square()]).mT.contiguous() for s in hidden]

    def start(self, generator: torch.Generator) -> None:
        """Potentials anywhere from reset to threshold."""
        for membranes in self.membranes:
            neuron = membranes.neuron
            membranes.potential.uniform_(neuron.v_res, neuron.v_th, generator=generator)

    def advance(self, generator: torch.Generator) -> None:
        """One step of all layers in order: spikes reach the next one in the same step."""
        spikes = None
        if self.expected is not None:
            spikes = torch.poisson(self.expected, generator=generator)
        for layer, membranes in enumerate(self.membranes):
            arrivals = None if spikes is None else _arrivals(spikes, self.weights[layer])
            noise = self.noises[layer]
            spikes, fired = membranes.advance(
                self.targets[layer],
                noise.draw(membranes.potential, membranes.kick, generator),
                noise.var,
                arrivals,
                generator,
            )
            self.counts[layer].view(-1)[fired] += 1

    def forget_counts(self) -> None:
        """Count from 0 again."""
        for counts in self.counts:
            counts.zero_()


@dataclass(frozen=True, eq=False)
class _Noise:
    """White noise of a layer, which neurons may share: intensity F F^T, in mV^2 per ms."""

    factor: Tensor | float  # F (n, r), or the sigma of independent noise
    var: Tensor | float  # (n,) of a step

    @classmethod
    def of(cls, stage: Stage, dt: float, *, shared: float = 0.0) -> _Noise:
        """Own noise of each neuron and, through the weights, ``shared`` of the inputs."""
        if not shared:
            return cls(stage.noise, stage.noise**2 * dt)
        weight = stage.weight.double()
        intensity = shared**2 * weight @ weight.mT
        intensity.diagonal().add_(stage.noise**2)
        values, vectors = torch.linalg.eigh(intensity)
        # Fewer inputs than neurons leave directions without noise: there is nothing to draw.
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        factor = vectors[:, kept] * values[kept].sqrt()
        return cls(factor.to(stage.weight), (intensity.diagonal() * dt).to(stage.weight))

    def draw(self, like: Tensor, kick: float, generator: torch.Generator) -> Tensor | None:
        """(..., n) what a step of it adds to a potential."""
        if isinstance(self.factor, float | int):
            if self.factor == 0:
                return None
            return torch.empty_like(like).normal_(std=self.factor * kick, generator=generator)
        normal = like.new_empty(*like.shape[:-1], self.factor.shape[1])
        return normal.normal_(std=kick, generator=generator) @ self.factor.mT


def _arrivals(spikes: Tensor, weights: Tensor) -> Arrivals:
    jumps, squares = (spikes @ weights).chunk(2, -1)
    return Arrivals(jumps, squares, spikes.sum(-1, keepdim=True))


def _output(last: Stage | None, rate: Tensor) -> Tensor:
    return rate if last is None else rate @ last.weight.mT + last.bias


def layers_of_neurons(chain: Chain) -> tuple[tuple[Stage, ...], Stage | None]:
    """Layers of neurons, and what reads them: nothing, where the last layer has neurons too."""
    *hidden, last = chain.stages
    if last.activation.neuron is not None:
        return chain.stages, None
    if not any(stage.activation.neuron for stage in hidden):
        raise ValueError(
            "A spiking network needs layers with activation 'lif'; this network has "
            f"{', '.join(str(stage.activation) for stage in chain.stages)}. Train one so: "
            "covary.mlp(..., activation='lif'), or covary train --activation lif."
        )
    for stage in hidden:
        if stage.activation.neuron is None:
            raise ValueError(
                f"{stage.name} has activation {stage.activation} among layers that spike; only the "
                "last weights may have none. Use 'lif' in all of them."
            )
    if last.noise or last.activation.name != "identity":
        raise ValueError(
            f"The output {last.name} of a spiking network reads spike counts, without noise or "
            f"activation of its own; got noise {last.noise:g} and activation {last.activation}."
        )
    return tuple(hidden), last


def neuron_of(stage: Stage) -> LIF:
    """Its constants."""
    neuron = stage.activation.neuron
    assert neuron is not None
    return neuron


@dataclass(frozen=True)
class _Clock:
    """Times as numbers of steps; ``looks`` are those at the output, since the end of burning in."""

    steps: int
    burn_in: int
    window: int
    looks: frozenset[int]

    @property
    def windows(self) -> int:
        """How many are complete."""
        return (self.steps - self.burn_in) // self.window


def _clock(
    duration: float, burn_in: float, window: float, dt: float, times: Sequence[float] | None
) -> _Clock:
    for name, value in {"duration": duration, "window": window}.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"A spiking network needs a {name} above 0 ms, got {value}.")
    if not (math.isfinite(burn_in) and burn_in >= 0):
        raise ValueError(f"Burning in takes a time of 0 ms or more, got burn_in={burn_in}.")
    steps, before, each = (round(time / dt) for time in (duration, burn_in, window))
    counted = steps - before
    if each < 1 or counted < each:
        raise ValueError(
            f"Of {duration:g} ms, {burn_in:g} ms are for burning in, which leaves no window of "
            f"{window:g} ms to count spikes in. Simulate for longer, or count in shorter windows."
        )
    looks = range(1, 11) if times is None else times
    scale = counted / 10 if times is None else 1 / dt
    places = [round(look * scale) for look in looks]
    if not places or min(places) < 1 or max(places) > counted:
        raise ValueError(
            f"The output can be looked at from {dt:g} to {counted * dt:g} ms after burning in, got "
            f"times={list(looks)}."
        )
    return _Clock(steps, before, each, frozenset(places))


def _check_step(dt: float, neuron: LIF, crossing: str) -> None:
    if crossing not in CROSSINGS:
        raise ValueError(f"Unknown crossing {crossing!r}; known are {' and '.join(CROSSINGS)}.")
    if not (math.isfinite(dt) and dt > 0):
        raise ValueError(f"A step takes a time above 0 ms, got dt={dt}.")
    most = _LARGEST_STEP / neuron.leak
    if neuron.t_ref:
        most = min(most, neuron.t_ref)
    if dt > most:
        raise ValueError(
            f"A step of dt={dt:g} ms is too long for {neuron}, which has a time constant of "
            f"{1 / neuron.leak:g} ms and a refractory period of {neuron.t_ref:g} ms. Take "
            f"{most:g} ms at most."
        )
    steps = neuron.t_ref / dt
    if crossing == "grid" and abs(steps - round(steps)) > 1e-6 * max(steps, 1):
        warnings.warn(
            f"A refractory period of {neuron.t_ref:g} ms is {steps:.4g} steps of {dt:g} ms, "
            f"rounded to {round(steps)}. Take a dt that divides it, or crossing='bridge'.",
            stacklevel=frames_to_caller(),
        )


def _checked_names(wanted: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in names:
        if name not in known:
            raise ValueError(
                f"There is no layer {name!r} to record covariances of; there are "
                f"{', '.join(known)}."
            )
    return names


def _check_rates(layer: SpikingLayer, dt: float) -> None:
    """Say where a layer cannot pass anything on."""
    rate, neuron = layer.rate, layer.neuron
    fastest = 1 / neuron.t_ref if neuron.t_ref else _MOST_PER_STEP / dt
    saturated = float((rate > (_SATURATED if neuron.t_ref else 1) * fastest).double().mean())
    if saturated > _MANY:
        why = (
            f"within 10% of 1 / t_ref = {fastest:g} spikes per ms, where they no longer depend on "
            "their input. Use smaller weights or inputs, batch norm before the neurons, or a "
            "shorter refractory period."
            if neuron.t_ref
            else f"more than {_MOST_PER_STEP:g} times in a step of {dt:g} ms, in which they can "
            "only once. Use a smaller dt, or a refractory period."
        )
        warnings.warn(
            f"{saturated:.0%} of the neurons of {layer.name} fire {why}",
            SaturationWarning,
            stacklevel=frames_to_caller(),
        )
    firing = float((rate > 0).double().mean())
    if firing < _FEW:
        warnings.warn(
            f"Layer {layer.name} is silent: {firing:.1%} of its neurons fired at all. Without "
            f"noise they need an input above {neuron.drive_at_threshold:g} mV per ms. Use larger "
            "weights or biases, batch norm before the neurons, more noise, or simulate for longer.",
            SilenceWarning,
            stacklevel=frames_to_caller(),
        )
