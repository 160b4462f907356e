"""The spiking network behind a moment neural network of leaky integrate-and-fire neurons."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from covary.activations import LIF
from covary.nn.fidelity import frames_to_caller
from covary.progress import Steps
from covary.stochastic.chain import Chain, Stage
from covary.stochastic.membrane import CROSSINGS, Arrivals, Membranes
from covary.stochastic.statistics import GROUPS, Estimate, StreamingMoments, check_groups, unshown

# The longest step, in time constants of a membrane.
_LARGEST_STEP = 0.1
# A neuron is saturated at so much of the rate that its refractory period allows, and a layer is
# if so many of its neurons are (over all inputs).
_SATURATED, _MANY = 0.9, 0.1
# A layer is silent if no more of its neurons fired at all.
_FEW = 0.01
# Spikes of a step at most, in neurons without refractory period, which fire once in it.
_MOST_PER_STEP = 0.2


class SaturationWarning(UserWarning):
    """Neurons fire as fast as they can, whatever their input: they pass on no information."""


class SilenceWarning(UserWarning):
    """Neurons do not fire at all, and pass on nothing."""


@dataclass(frozen=True, eq=False, repr=False)
class SpikingLayer:
    """Spike counts of n neurons for B inputs, in windows, with Monte-Carlo standard errors.

    Variances and covariances per ms, Cov[N_i, N_j] / window, tend to those of a moment neural
    network in long windows, with errors as 1 / window: a neuron that fires regularly has a variance
    of up to 1/4 in any window, and correlations take the time of a membrane to build up.

    Attributes:
        name: of the stage, as in ``covary.record``.
        neuron: its constants.
        window: in ms.
        has_covariance: whether covariances between neurons were asked for. If not, ``counts`` has
            each neuron as an input of one unit.
        shape: (B, n).
        counts: moments of the counts themselves.
    """

    name: str
    neuron: LIF
    window: float
    has_covariance: bool
    shape: tuple[int, int]
    counts: Estimate

    @property
    def rate(self) -> Tensor:
        """(B, n) spikes per ms."""
        return self._per_ms(self.counts.mean)

    @property
    def rate_error(self) -> Tensor:
        """(B, n) standard error."""
        return self._per_ms(self.counts.mean_error)

    @property
    def variance(self) -> Tensor:
        """(B, n) of the count, per ms."""
        return self._per_ms(self.counts.variance)

    @property
    def variance_error(self) -> Tensor:
        """(B, n) standard error."""
        return self._per_ms(self.counts.variance_error)

    def _per_ms(self, values: Tensor) -> Tensor:
        return values.reshape(self.shape) / self.window

    @property
    def fano(self) -> Tensor:
        """(B, n) variance of the count over its mean; NaN for neurons that never fired."""
        return _fano(self.counts.mean, self.counts.covariance_matrix).reshape(self.shape)

    @cached_property
    def fano_error(self) -> Tensor:
        """(B, n) standard error."""
        return self.counts.standard_error(_fano).reshape(self.shape)

    @property
    def covariance(self) -> Tensor:
        """(B, n, n) of the counts, per ms."""
        return self._with_covariance().covariance_matrix / self.window

    @property
    def covariance_error(self) -> Tensor:
        """(B, n, n) standard error."""
        return self._with_covariance().covariance_error / self.window

    def _with_covariance(self) -> Estimate:
        if not self.has_covariance:
            raise ValueError(
                f"Covariances of {self.name} were not recorded. Ask for them: "
                f"simulate_spikes(..., covariance=[{self.name!r}])."
            )
        return self.counts

    def __repr__(self) -> str:
        batch, units = self.shape
        windows = self.counts.groups * self.counts.count
        return f"SpikingLayer(inputs={batch}, units={units}, windows={windows:,})"


def _fano(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1) / mean


@dataclass(frozen=True, eq=False, repr=False)
class Readout:
    """The output of a spiking network from spikes so far, y(t) = W N(t) / t + b: how it decides.

    Attributes:
        times: (T,) in ms since the end of burning in.
        outputs: (groups, B, copies, T, m): of every copy, by groups of copies.
    """

    times: Tensor
    outputs: Tensor

    @property
    def mean(self) -> Tensor:
        """(B, T, m) over copies."""
        return self.outputs.mean((0, 2))

    @property
    def decisions(self) -> Tensor:
        """(groups, B, copies, T) the class of the largest output."""
        return self.outputs.argmax(-1)

    def accuracy(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) how often a copy decides for the label (B,), and its Monte-Carlo standard error.

        The error is that of drawing copies, for these inputs; that of drawing inputs comes on top.
        """
        right = self.decisions == labels.to(self.outputs.device)[:, None, None]
        of_groups = right.double().mean((1, 2))
        return of_groups.mean(0), of_groups.std(0) / len(of_groups) ** 0.5

    def covariance(self) -> Tensor:
        """(B, T, m, m) across copies, times t, so that it tends to that of the moments."""
        return torch.stack([one.covariance_matrix for one in self._estimates()], 1)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """(B, T) entropy of a Gaussian with that covariance, and its standard error.

        Corrected for the number of copies; NaN where there are no more of them than outputs.
        """
        found = [one.entropy() for one in self._estimates()]
        entropy, error = (torch.stack(values, 1) for values in zip(*found, strict=True))
        return entropy, error

    def _estimates(self) -> list[Estimate]:
        groups, batch, _, _, units = self.outputs.shape
        estimates = []
        for i, time in enumerate(self.times.tolist()):
            moments = StreamingMoments(groups, batch, units, device=self.outputs.device)
            moments.add(self.outputs[:, :, :, i] * time**0.5)
            estimates.append(moments.estimate())
        return estimates

    def __repr__(self) -> str:
        groups, batch, copies, times, units = self.outputs.shape
        return f"Readout(inputs={batch}, copies={groups * copies}, times={times}, outputs={units})"


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
    progress: Steps | None = None,
) -> Spiking:
    """Simulate the leaky integrate-and-fire neurons that a moment neural network describes.

    dV_i/dt = -L V_i + sum_j w_ij S_j + b_i + sigma noise; at V_th a spike, then V_res for T_ref;
    the paper's Eq. (LIF). Weights w, with batch norm folded in, are mV per spike, the bias b is a
    current in mV per ms, sigma^2 is the intensity of white noise in mV^2 per ms. Inputs x enter as
    a current, W (x + sigma noise) + b; or, if ``Lift`` has ``poisson``, as spikes of that rate. The
    last weights, with no neurons behind them, read the spike counts: y(t) = W N(t) / t + b.

    Potentials start anywhere from V_res to V_th. Times are in ms, rates in spikes per ms.

    Args:
        net: a moment neural network whose activations are all ``lif``, or its ``Chain``; ``x``,
            ``groups``, ``seed`` and ``progress`` are as in ``sample_steady``.
        duration: time to simulate, burning in included.
        burn_in: time before spikes are counted. 0 shows decisions from the very start.
        window: counts are those of windows of this length; a last one that is shorter is not used.
        copies: independent networks for each input; a multiple of ``groups``.
        dt: step. Rates are right to 0.1% up to 0.5 ms with Gaussian noise; with 0.25 ms, those of
            neurons driven by spikes to about 1%.
        crossing: ``"bridge"``, or ``"grid"`` for what simpler simulators do (``Membranes``).
        covariance: names of layers to record covariances of, each groups x B x n x n numbers.
        times: since the end of burning in, at which to look at the output; None: ten, evenly.

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
    chain, means = Chain.of(net).prepared(x)
    hidden, last = chain.neurons_and_readout()
    for stage in hidden:
        _check_step(dt, stage.neuron, crossing)
    clock = _clock(duration, burn_in, window, dt, times)
    recorded = _checked_names(covariance, [stage.name for stage in hidden])
    each = check_groups(copies, groups)
    if each == 1 and clock.steps - clock.burn_in < 2 * clock.window:
        raise ValueError(
            "Variances need more than one window of one copy in each group. Take copies="
            f"{2 * groups}, or simulate for longer than a window."
        )
    generator = torch.Generator(means.device).manual_seed(seed)
    shape = (groups, len(means), each)
    neurons = [
        _Neurons(stage, shape, dt, crossing, stage.name in recorded, generator) for stage in hidden
    ]
    neurons[0].feed(chain, means)
    steps = (progress or unshown)(range(1, clock.steps + 1), "spikes")
    rates = _rates(neurons, clock, dt, steps)
    outputs = [rate if last is None else last.drive(rate) for rate in rates]
    layers = {one.stage.name: one.layer(clock.window * dt) for one in neurons}
    for layer in layers.values():
        _check_rates(layer, dt)
    looked = torch.tensor(sorted(clock.looks), dtype=torch.float64) * dt
    readout = Readout(looked, torch.stack(outputs, 3))
    return Spiking(layers, readout, dt, clock.burn_in * dt, clock.steps * dt)


def _rates(
    neurons: Sequence[_Neurons], clock: _SpikeClock, dt: float, steps: Iterable[int]
) -> Iterator[Tensor]:
    """Run the network; give the rates of its last layer since burning in, at each look."""
    last = neurons[-1]
    before = torch.zeros_like(last.counts)  # in complete windows
    for step in steps:
        spikes = None
        for layer in neurons:  # spikes reach the next layer in the same step
            spikes = layer.advance(spikes)
        since = step - clock.burn_in
        if since in clock.looks:
            yield (before + last.counts) / (since * dt)
        if since > 0 and since % clock.window == 0:
            before += last.counts
            for layer in neurons:
                layer.take_in_counts()
        if since >= 0 and since % clock.window == 0:
            for layer in neurons:
                layer.counts.zero_()


class _Neurons:
    """A layer of neurons in all copies for all inputs, (groups, B, copies, n).

    White noise has the intensity F F^T, in mV^2 per ms; F is ``factor`` (n, r), or the sigma of
    noise that is independent for each neuron.
    """

    def __init__(
        self,
        stage: Stage,
        shape: tuple[int, int, int],
        dt: float,
        crossing: str,
        has_covariance: bool,
        generator: torch.Generator,
    ) -> None:
        self.stage, self.dt, self.has_covariance = stage, dt, has_covariance
        self.generator, neuron = generator, stage.neuron
        self.counts = stage.weight.new_zeros(*shape, stage.units)  # of this window
        self.membranes = Membranes(neuron, self.counts, dt, crossing=crossing)
        self.membranes.potential.uniform_(neuron.v_res, neuron.v_th, generator=generator)
        self.expected: Tensor | None = None  # spikes of Poisson inputs in a step
        self.target = stage.bias / stage.neuron.leak
        self.factor: Tensor | float = stage.noise
        self.var: Tensor | float = stage.noise**2 * dt  # of a step's noise
        # Weights and their squares in one product.
        self.weights = torch.cat([stage.weight, stage.weight.square()]).mT.contiguous()
        groups, batch, _ = shape
        # Without covariances each neuron is an input of one unit: no products of different ones.
        inputs = (batch, stage.units) if has_covariance else (batch * stage.units, 1)
        self.moments = StreamingMoments(groups, *inputs, device=stage.weight.device)

    def feed(self, chain: Chain, means: Tensor) -> None:
        """Let the inputs of the network reach this layer: as spikes, or as a noisy current."""
        stage = self.stage
        if chain.poisson:
            shape = (*self.counts.shape[:3], -1)
            self.expected = (means * self.dt)[None, :, None].expand(*shape).contiguous()
        else:
            self.target = stage.drive(means)[None, :, None] / stage.neuron.leak
        if not chain.noise:
            return
        weight = stage.weight.double()
        intensity = chain.noise**2 * weight @ weight.mT
        intensity.diagonal().add_(stage.noise**2)
        values, vectors = torch.linalg.eigh(intensity)
        # Fewer inputs than neurons leave directions without noise: there is nothing to draw.
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        self.factor = (vectors[:, kept] * values[kept].sqrt()).to(stage.weight)
        self.var = (intensity.diagonal() * self.dt).to(stage.weight)

    def advance(self, spikes: Tensor | None) -> Tensor:
        """One step: spikes of the layer before, if there is one, to those of this layer."""
        generator = self.generator
        if self.expected is not None:
            spikes = torch.poisson(self.expected, generator=generator)
        arrivals = None
        if spikes is not None:
            jumps, squares = (spikes @ self.weights).chunk(2, -1)
            arrivals = Arrivals(jumps, squares, spikes.sum(-1, keepdim=True))
        noise = self._noise()
        spikes, fired = self.membranes.advance(self.target, noise, self.var, arrivals, generator)
        self.counts.view(-1)[fired] += 1
        return spikes

    def _noise(self) -> Tensor | None:
        """(..., n) what a step of noise adds to potentials."""
        kick, generator = self.membranes.kick, self.generator
        if isinstance(self.factor, Tensor):
            normal = self.counts.new_empty(*self.counts.shape[:-1], self.factor.shape[1])
            return normal.normal_(std=kick, generator=generator) @ self.factor.mT
        if self.factor == 0:
            return None
        noise = torch.empty_like(self.counts)
        return noise.normal_(std=self.factor * kick, generator=generator)

    def take_in_counts(self) -> None:
        """Add those of a complete window to the moments."""
        counts = self.counts
        if not self.has_covariance:
            counts = counts.transpose(2, 3).flatten(1, 2)[..., None]
        self.moments.add(counts)

    def layer(self, window: float) -> SpikingLayer:
        """What was found."""
        stage, shape = self.stage, (self.counts.shape[1], self.stage.units)
        found = self.moments.estimate()
        return SpikingLayer(stage.name, stage.neuron, window, self.has_covariance, shape, found)


class _SpikeClock(NamedTuple):
    """Times as numbers of steps; ``looks`` are those at the output, since the end of burning in."""

    steps: int
    burn_in: int
    window: int
    looks: frozenset[int]


def _clock(
    duration: float, burn_in: float, window: float, dt: float, times: Sequence[float] | None
) -> _SpikeClock:
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
    return _SpikeClock(steps, before, each, frozenset(places))


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


def _checked_names(wanted: str | Sequence[str], known: Sequence[str]) -> Sequence[str]:
    wanted = [wanted] if isinstance(wanted, str) else wanted
    for name in set(wanted) - set(known):
        raise ValueError(
            f"There is no layer {name!r} to record covariances of; there are {', '.join(known)}."
        )
    return wanted


def _check_rates(layer: SpikingLayer, dt: float) -> None:
    """Say where a layer cannot pass anything on."""
    rate, neuron = layer.rate, layer.neuron
    fastest = 1 / neuron.t_ref if neuron.t_ref else _MOST_PER_STEP / dt
    saturated = float((rate > (_SATURATED if neuron.t_ref else 1) * fastest).double().mean())
    if saturated > _MANY:
        why = (
            f"more than {_MOST_PER_STEP:g} times in a step of {dt:g} ms, in which they can only "
            "once. Use a smaller dt, or a refractory period."
        )
        if neuron.t_ref:
            why = (
                f"within 10% of 1 / t_ref = {fastest:g} spikes per ms, where they no longer depend "
                "on their input. Use smaller weights or inputs, batch norm before the neurons, or "
                "a shorter refractory period."
            )
        words = f"{saturated:.0%} of the neurons of {layer.name} fire {why}"
        warnings.warn(words, SaturationWarning, stacklevel=frames_to_caller())
    firing = float((rate > 0).double().mean())
    if firing < _FEW:
        warnings.warn(
            f"Layer {layer.name} is silent: {firing:.1%} of its neurons fired at all. Without "
            f"noise they need an input above {neuron.drive_at_threshold:g} mV per ms. Use larger "
            "weights or biases, batch norm before the neurons, more noise, or simulate for longer.",
            SilenceWarning,
            stacklevel=frames_to_caller(),
        )
