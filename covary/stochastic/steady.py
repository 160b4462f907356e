"""The steady state of a stochastic network, drawn layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covary.stochastic.chain import Chain
from covary.stochastic.statistics import (
    GROUPS,
    Estimate,
    Progress,
    StreamingMoments,
    check_groups,
    unshown,
)

# Rows of all inputs, groups and copies that are drawn together: what fits a cache.
_ROWS = 4096


@torch.no_grad()
def sample_steady(
    net: nn.Module | Chain,
    x: Tensor,
    *,
    copies: int = 16_384,
    groups: int = GROUPS,
    seed: int = 0,
    progress: Progress | None = None,
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
    chain, means = prepared(net, x)
    each = check_groups(copies, groups)
    batch = len(means)
    generator = torch.Generator(means.device).manual_seed(seed)
    spread = input_stddev(chain, means)[None, :, None]
    moments = accumulators(chain, groups, batch)
    step = max(1, _ROWS // (groups * batch))
    starts = range(0, each, step)
    for start in (progress or unshown)(starts, "steady state"):
        count = min(step, each - start)
        shape = (groups, batch, count, means.shape[-1])
        signal = means[None, :, None] + spread * _noise(shape, means, generator)
        for stage in chain.stages:
            signal = signal @ stage.weight.mT + stage.bias
            if stage.noise:
                signal += stage.noise * _noise(signal.shape, means, generator)
            signal = stage.activation.function(signal)
            moments[stage.name].add(signal)
    return {name: one.estimate() for name, one in moments.items()}


def prepared(net: nn.Module | Chain, x: Tensor) -> tuple[Chain, Tensor]:
    """The network taken apart, all of one dtype, and the means (B, n) of its first units.

    Raises:
        ValueError: for neurons that fire, whose rate is no function of a noisy input.
    """
    chain = net if isinstance(net, Chain) else Chain.of(net)
    for stage in chain.stages:
        if stage.activation.neuron is not None:
            raise ValueError(
                f"{stage.name} ({stage.activation}) is a neuron that fires: its rate is no "
                "function of its noisy input at one time, which a steady state or an "
                "Ornstein-Uhlenbeck network would apply. Use simulate_spikes instead."
            )
    return chain.prepared(x)


def input_stddev(chain: Chain, means: Tensor) -> Tensor:
    """(B, n) of the inputs: their noise, and the root of the rate where they are Poisson's."""
    rates = means if chain.poisson else torch.zeros_like(means)
    return (rates + chain.noise**2).sqrt()


def accumulators(chain: Chain, groups: int, batch: int) -> dict[str, StreamingMoments]:
    """Empty ones for every stage."""
    return {
        stage.name: StreamingMoments(groups, batch, len(stage.weight), device=stage.weight.device)
        for stage in chain.stages
    }


def _noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
