"""A stochastic network drawn: its steady state, and Ornstein-Uhlenbeck units in time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from covary.progress import Steps
from covary.stochastic.chain import Chain
from covary.stochastic.statistics import GROUPS, Estimate, StreamingMoments, check_groups, unshown

# Rows of all inputs, groups and copies that are drawn together: what fits a cache.
_ROWS = 4096
METHODS = ("euler-maruyama", "exponential")
# A step of a twentieth makes Euler-Maruyama's variances 2.6% too large.
_USUAL_STEP = 0.05
_LARGEST_STEP = 0.2
_MOST_STEPS = 1_000_000
# What is left of the start when burning in ends: less than other errors.
_FORGOTTEN = 1e-3
# Between two looks, in time constants: closer ones would tell little that is new.
_BETWEEN_LOOKS = 0.5


@torch.no_grad()
def sample_steady(
    net: nn.Module | Chain,
    x: Tensor,
    *,
    copies: int = 16_384,
    groups: int = GROUPS,
    seed: int = 0,
    progress: Steps | None = None,
) -> dict[str, Estimate]:
    """Draw the network that a moment neural network describes, and estimate its moments.

    v = x + sigma z, then v = h(W v + b + sigma z) again and again, each z a draw of its own: the
    paper's Eq. (multi_network). Weights and noise are those of ``net`` in evaluation mode.

    Args:
        net: a moment neural network, or what ``Chain.of`` made of one.
        x: (B, ...) raw inputs, as the network takes them.
        copies: draws for each input; a multiple of ``groups``, twice as many at least.
        groups: standard errors come from the spread between so many of them. Of each layer and
            input they keep a covariance: groups x B x n x n numbers of 8 bytes.
        seed: decides the draws.
        progress: wraps what is done step by step, given a name, to show how far it is.

    Returns:
        Estimates of h(x) of every stage, by its name in ``covary.record``; the output comes last.

    Examples:
        >>> import covary
        >>> net = covary.mlp([4, 8, 3], noise=0.2)
        >>> found = sample_steady(net, torch.ones(2, 4), copies=160)
        >>> found
        {'activation1': Estimate(inputs=2, units=8, count=160), \
'linear2': Estimate(inputs=2, units=3, count=160)}
    """
    chain, means = _without_neurons(net).prepared(x)
    each = check_groups(copies, groups)
    generator = torch.Generator(means.device).manual_seed(seed)
    centre, spread = (value[None, :, None] for value in (means, chain.input_stddev(means)))
    moments = _accumulators(chain, groups, len(means))
    step = max(1, _ROWS // (groups * len(means)))
    for start in (progress or unshown)(range(0, each, step), "steady state"):
        signal = centre.expand(groups, -1, min(step, each - start), -1)
        signal = signal + spread * _noise(signal, generator)
        for stage in chain.stages:
            signal = stage.drive(signal)
            if stage.noise:
                signal += stage.noise * _noise(signal, generator)
            signal = stage.activation.function(signal)
            moments[stage.name].add(signal)
    return {name: one.estimate() for name, one in moments.items()}


@dataclass(frozen=True, eq=False)
class Dynamics:
    """What an Ornstein-Uhlenbeck network did.

    Attributes:
        stages: estimates of h(x) of every stage, by its name in ``covary.record``; the output last.
        time_constants: of the inputs, then of every stage; 0 for one that follows at once.
        dt: step.
        burn_in: time before anything was recorded.
        looks: how many times each copy was looked at.
        times: (T,) of the trace, from the end of burning in.
        trace: for chosen stages, (T, B, units) h(x) of chosen units in the first copy.
    """

    stages: Mapping[str, Estimate]
    time_constants: tuple[float, ...]
    dt: float
    burn_in: float
    looks: int
    times: Tensor = field(default_factory=lambda: torch.empty(0))
    trace: Mapping[str, Tensor] = field(default_factory=dict)


class _Clock(NamedTuple):
    """Times, checked and in steps."""

    time_constants: tuple[float, ...]
    dt: float
    burn_in: int  # steps
    steps: int  # all of them
    thin: int
    keep: list[float]  # of each layer: what a step leaves of its state
    kick: list[float]  # and what it adds in noise, for sigma = 1


@torch.no_grad()
def simulate_ou(
    net: nn.Module | Chain,
    x: Tensor,
    *,
    duration: float,
    dt: float | None = None,
    copies: int = 64,
    tau: float = 1.0,
    ratio: float = 0.0,
    method: str = "euler-maruyama",
    burn_in: float | None = None,
    thin: int | None = None,
    groups: int = GROUPS,
    seed: int = 0,
    progress: Steps | None = None,
    record_trace: Mapping[str, Sequence[int]] | None = None,
    trace_duration: float = 20.0,
) -> Dynamics:
    """Simulate the network behind a moment neural network in time, and estimate its moments.

    tau_l dx = (-x + W v + b) dt + sqrt(2 tau_l) sigma dB, v = h(x): the paper's Eq. (stoc_network)
    for all tau_l = 1 (``ratio=1``). There each layer averages over the fluctuations of the one
    before it, which can halve their variance. Moments as a moment neural network has them are
    those of layers that are much faster than the ones before them: tau_l = tau ratio^(l - 1) in
    the limit ``ratio=0``, where x = W v + b + (an Ornstein-Uhlenbeck process of variance sigma^2).

    Args:
        net: a moment neural network, or its ``Chain``; this and ``x``, ``groups``, ``seed`` and
            ``progress`` are as in ``sample_steady``.
        duration: time to simulate, burning in included.
        dt: step; a twentieth of the smallest time constant if None.
        copies: independent networks for each input; a multiple of ``groups``.
        tau: time constant of the inputs.
        ratio: of a layer's time constant and that of the layer before it, 0 to 1.
        method: ``"euler-maruyama"``, where the variance of noise is sigma^2 / (1 - dt / 2 tau), or
            ``"exponential"``, where it is sigma^2 for any step: inputs are constant for it, and the
            rest is solved.
        burn_in: time before anything is recorded; None: until a thousandth is left of the start,
            which is the network's rest without noise (``relaxation_time``).
        thin: steps from one look at the network to the next; None: half a tau.
        record_trace: units of stages, by name, whose h(x) is kept at every step.
        trace_duration: for how long, from the end of burning in.

    Examples:
        >>> import covary
        >>> net = covary.mlp([4, 8, 3], noise=0.2)
        >>> simulate_ou(net, torch.ones(2, 4), duration=20.0, copies=32).stages["linear2"]
        Estimate(inputs=2, units=3, count=864)
    """
    chain, means = _without_neurons(net).prepared(x)
    clock = _clock(len(chain.stages) + 1, duration, dt, tau, ratio, method, burn_in, thin)
    chosen = _checked_trace(chain, record_trace or {})
    recorded = min(clock.steps - clock.burn_in, round(trace_duration / clock.dt)) if chosen else 0
    trace: dict[str, list[Tensor]] = {name: [] for name in chosen}
    network = _OUNetwork(chain, means, groups, check_groups(copies, groups), clock)
    generator = torch.Generator(means.device).manual_seed(seed)
    moments = _accumulators(chain, groups, len(means))
    looks = 0
    for step in (progress or unshown)(range(1, clock.steps + 1), f"ou, ratio {ratio:g}"):
        network.advance(generator)
        since = step - clock.burn_in
        is_traced, is_look = 0 <= since < recorded, since >= 0 and since % clock.thin == 0
        looks += is_look
        signals = network.signals() if is_traced or is_look else {}
        for stage, units in chosen.items() if is_traced else ():
            trace[stage].append(signals[stage][0, :, 0, units].cpu())
        for stage, signal in signals.items() if is_look else ():
            moments[stage].add(signal)
    return Dynamics(
        stages={stage: one.estimate() for stage, one in moments.items()},
        time_constants=clock.time_constants,
        dt=clock.dt,
        burn_in=clock.burn_in * clock.dt,
        looks=looks,
        times=clock.dt * torch.arange(recorded),
        trace={stage: torch.stack(values) for stage, values in trace.items()},
    )


def relaxation_time(time_constants: Sequence[float], *, left: float = _FORGOTTEN) -> float:
    """How long until a step at the first of several filters in a row has reached the last one.

    Of L equal filters, exp(-t) (1 + t + ... + t^(L - 1) / (L - 1)!) is left at time t.

    Examples:
        >>> round(relaxation_time([1.0]), 2), round(relaxation_time([1.0] * 6), 2)
        (6.91, 16.45)
    """
    rates = 1 / torch.tensor([tau for tau in time_constants if tau > 0], dtype=torch.float64)
    drift = torch.diag(-rates) + torch.diag(rates[1:], -1)

    def still_left(time: float) -> float:
        """What the last filter still has of a deviation of 1 in all filters, after this time."""
        return float(torch.linalg.matrix_exp(time * drift)[-1].sum())

    low, high = 0.0, float((1 / rates).sum())
    while still_left(high) > left:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if still_left(middle) > left else (low, middle)
    return high


class _OUNetwork:
    """All copies for all inputs: the state of every layer, the inputs' first.

    Where layers follow at once, the state is that of the noise alone.
    """

    def __init__(self, chain: Chain, means: Tensor, groups: int, each: int, clock: _Clock) -> None:
        self.chain, self.clock = chain, clock
        self.means, spread = (  # (groups, B, each, n)
            value[None, :, None].expand(groups, -1, each, -1).contiguous()
            for value in (means, chain.input_stddev(means))
        )
        sigmas: list[Tensor | float] = [spread, *(stage.noise for stage in chain.stages)]
        self.kicks = [sigma * kick for sigma, kick in zip(sigmas, clock.kick, strict=True)]
        self.states = [self.means.clone()]
        for layer in range(1, len(sigmas)):
            self.states.append(self._drive(layer))
        self.follows_at_once = clock.time_constants[-1] == 0
        if self.follows_at_once:
            self.states = [torch.zeros_like(state) for state in self.states]

    def advance(self, generator: torch.Generator) -> None:
        """One step."""
        # From the last layer to the first: each sees what the one before it was.
        for layer in reversed(range(len(self.states))):
            state, keep, kick = self.states[layer], self.clock.keep[layer], self.kicks[layer]
            drive = None if self.follows_at_once else self._drive(layer)
            state.mul_(keep)
            if drive is not None:
                state.add_(drive, alpha=1 - keep)
            if isinstance(kick, Tensor) or kick > 0:
                noise = torch.empty_like(state).normal_(generator=generator)
                state.add_(noise.mul_(kick))

    def signals(self) -> dict[str, Tensor]:
        """(groups, B, each, n) h(x) of every stage."""
        found: dict[str, Tensor] = {}
        signal = self.means + self.states[0]
        for stage, state in zip(self.chain.stages, self.states[1:], strict=True):
            current = stage.drive(signal) + state if self.follows_at_once else state
            signal = found[stage.name] = stage.activation.function(current)
        return found

    def _drive(self, layer: int) -> Tensor:
        """W v + b, or the inputs: what the state of a layer goes to without noise."""
        if layer == 0:
            return self.means
        signal = self.states[layer - 1]
        if layer > 1:
            signal = self.chain.stages[layer - 2].activation.function(signal)
        return self.chain.stages[layer - 1].drive(signal)


def _clock(
    layers: int,
    duration: float,
    dt: float | None,
    tau: float,
    ratio: float,
    method: str,
    burn_in: float | None,
    thin: int | None,
) -> _Clock:
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"A time constant is above 0, got tau={tau}.")
    if not 0 <= ratio <= 1:
        raise ValueError(
            "The ratio of a layer's time constant to that of the layer before it is from 0 (layers "
            f"follow at once, as moments assume) to 1 (all alike, as in the paper), got {ratio}."
        )
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}; known are {' and '.join(METHODS)}.")
    exponential = method == "exponential"
    time_constants = tuple(tau * ratio**layer for layer in range(layers))
    # Layers that follow at once have noise of the first one's time constant.
    filters = time_constants if ratio > 0 else (tau,) * layers
    dt = _checked_step(dt, min(filters), exact=exponential and ratio == 0)
    if burn_in is None:
        burn_in = relaxation_time(time_constants)
    if not (math.isfinite(burn_in) and burn_in >= 0):
        raise ValueError(f"Burning in takes a time of 0 or more, got burn_in={burn_in}.")
    if not (math.isfinite(duration) and duration > burn_in + dt):
        raise ValueError(
            f"Burning in takes {burn_in:.4g} of the duration, which leaves too little of "
            f"{duration:.4g} to record. Simulate for longer: {2 * burn_in + 20 * tau:.3g} or more."
        )
    steps = round(duration / dt)
    if steps > _MOST_STEPS:
        raise ValueError(
            f"That takes {steps:,} steps of {dt:.3g}, more than {_MOST_STEPS:,}: the smallest time "
            f"constant is {min(filters):.3g}. Take a shorter duration or a ratio closer to 1, or "
            "ratio=0, the limit of small ratios, which needs no small steps."
        )
    thin = max(1, round(_BETWEEN_LOOKS * tau / dt)) if thin is None else thin
    if thin < 1:
        raise ValueError(f"Looks are 1 step or more apart, got thin={thin}.")
    shares = [dt / each for each in filters]
    keep = [math.exp(-share) if exponential else 1 - share for share in shares]
    kick = [math.sqrt(-math.expm1(-2 * share) if exponential else 2 * share) for share in shares]
    return _Clock(time_constants, dt, math.ceil(burn_in / dt), steps, thin, keep, kick)


def _checked_step(dt: float | None, smallest: float, *, exact: bool) -> float:
    """The step, if no time constant is too small for it."""
    if dt is None:
        return _USUAL_STEP * smallest
    if not (math.isfinite(dt) and dt > 0):
        raise ValueError(f"A step takes a time above 0, got dt={dt}.")
    if exact or dt <= _LARGEST_STEP * smallest:
        return dt
    what = "diverges" if dt > 2 * smallest else "is inaccurate"
    raise ValueError(
        f"A step of dt={dt:.3g} {what} for a time constant of {smallest:.3g}. Take "
        f"{_LARGEST_STEP * smallest:.3g} at most, better {_USUAL_STEP * smallest:.3g} (None)."
    )


def _checked_trace(chain: Chain, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Units to trace, by stage."""
    widths = {stage.name: stage.units for stage in chain.stages}
    for name, units in wanted.items():
        if name not in widths:
            raise ValueError(f"There is no stage {name!r} to trace; there are {', '.join(widths)}.")
        if not units or min(units) < 0 or max(units) >= widths[name]:
            raise ValueError(
                f"{name} has units 0 to {widths[name] - 1} to trace, got {list(units)}."
            )
    return {name: list(units) for name, units in wanted.items()}


def _without_neurons(net: nn.Module | Chain) -> Chain:
    """The chain of a network, if a rate in it is a function of the input at the same time."""
    chain = Chain.of(net)
    for stage in chain.stages:
        if stage.activation.neuron is not None:
            raise ValueError(
                f"{stage.name} ({stage.activation}) is a neuron that fires: its rate is no "
                "function of its noisy input at one time, which a steady state or an "
                "Ornstein-Uhlenbeck network would apply. Use simulate_spikes instead."
            )
    return chain


def _accumulators(chain: Chain, groups: int, batch: int) -> dict[str, StreamingMoments]:
    """An empty ``StreamingMoments`` for every stage."""
    return {
        stage.name: StreamingMoments(groups, batch, stage.units, device=stage.weight.device)
        for stage in chain.stages
    }


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
