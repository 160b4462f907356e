"""The stochastic network as the authors' code has it: noise behind activations, not before them.

The paper's equations have v = h(W u + b + sigma z) for a layer behind u; its authors' code draws
v = h(W u + b) + sigma z. Moments are those of the former.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from covary import activations
from covary.stochastic import Chain, Estimate, Stage, StreamingMoments, sample_steady
from covary.stochastic.comparison import compare
from covary.stochastic.statistics import GROUPS

_COPIES = 64


def errors(
    chain: Chain, x: Tensor, moments: tuple[Tensor, Tensor], *, copies: int, steps: int, dt: float
) -> dict[str, float]:
    """Relative errors of an output's mean (n,) and covariance (n, n), by drawing for one input.

    Keys end in ``behind`` (of the steady state) and ``behind_in_time``; there is also the output's
    variance as a part of what moments say.
    """
    found = {
        "behind": list(sample_steady(noise_behind(chain), x, copies=copies).values())[-1],
        "behind_in_time": in_time(chain, x, steps=steps, dt=dt),
    }
    numbers = {}
    for name, estimate in found.items():
        compared = compare(estimate, *moments)
        numbers[f"mean_error_{name}"] = compared.mean.value
        numbers[f"covariance_error_{name}"] = compared.covariance.value
        whole = moments[1].diagonal().double().sum()
        numbers[f"variance_share_{name}"] = float(estimate.variance.sum() / whole)
    return numbers


def noise_behind(chain: Chain) -> Chain:
    """The same weights, with the noise of each layer behind its activation."""
    stages: list[Stage] = []
    for stage in chain.stages:
        stages.append(replace(stage, noise=0.0))
        if stage.noise:
            unit = torch.eye(stage.units).to(stage.weight)
            nothing = torch.zeros_like(stage.bias)
            identity = activations.get("identity")
            stages.append(Stage(f"{stage.name}+noise", unit, nothing, stage.noise, identity))
    return replace(chain, stages=tuple(stages))


@torch.no_grad()
def in_time(chain: Chain, x: Tensor, *, steps: int, dt: float, seed: int = 0) -> Estimate:
    """The network in time, from rest at 0: moments of its output after a tenth of the steps.

    dv = (h(W u + b) - v) dt + sqrt(2) sigma dB for each layer, by Euler-Maruyama, where u is the
    layer before, a step ahead; for the inputs, u is x and there are no weights.
    """
    chain, means = chain.prepared(x)
    centre = means[None, :, None].expand(GROUPS, -1, _COPIES // GROUPS, -1)
    sigmas = [chain.noise, *(stage.noise for stage in chain.stages)]
    widths = [centre.shape[-1], *(stage.units for stage in chain.stages)]
    states = [centre.new_zeros(*centre.shape[:-1], width) for width in widths]
    generator = torch.Generator().manual_seed(seed)
    moments = StreamingMoments(GROUPS, len(means), widths[-1])
    for step in range(steps):
        drive = centre
        for layer, (state, sigma) in enumerate(zip(states, sigmas, strict=True)):
            if layer:
                stage = chain.stages[layer - 1]
                drive = stage.activation.function(stage.drive(states[layer - 1]))
            state.lerp_(drive, dt)
            if sigma:
                noise = torch.empty_like(state).normal_(generator=generator)
                state.add_(noise, alpha=math.sqrt(2 * dt) * sigma)
        if step >= steps // 10:
            moments.add(states[-1])
    return moments.estimate()
