"""Membrane potentials of leaky integrate-and-fire neurons, one step of time after another."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from covary.activations import LIF

# How it is decided who fires: see ``Membranes``.
CROSSINGS = ("bridge", "grid")
# By so many standard deviations of a jump a walk of jumps overshoots a threshold on average:
# -zeta(1/2) / sqrt(2 pi), after Chernoff and Siegmund.
_OVERSHOOT = 0.5826
# Crossings with a probability below exp(-20) are not drawn.
_UNLIKELY = 20.0
# Time that a neuron without refractory period may have left of the step in which it fired.
_LONGEST_STEP = 2.0


class Arrivals(NamedTuple):
    """What spikes of the layer before bring to every neuron in a step, each tensor (..., n)."""

    jumps: Tensor  # sum_j w_ij s_j, in mV
    squares: Tensor  # sum_j w_ij^2 s_j, in mV^2
    spikes: Tensor  # (..., 1) how many of them


class Membranes:
    """Neurons with equal constants: dV = (-leak V + drive) dt + noise + spikes; eq. (32).

    Below threshold a step is exact, as V relaxes exponentially. The question is who fires.

    ``"grid"`` looks at the end of each step, as most simulators do. Crossings in between are
    missed, so that rates are too low by an amount that goes down as sqrt(dt) only, and a spike is
    put at the end of its step, so that every interval is half a step too long. A refractory period
    is a whole number of steps.

    ``"bridge"`` (for ``dt`` as large as 0.5 ms) draws whether V reached the threshold in between:
    given both ends, it is a Brownian bridge, which did with probability
    exp(-2 (V_th - V_0) (V_th - V_1) / var). Then it draws when (``time_of_crossing``); the rest of
    the step counts as refractory, or is lived through in the next step. Any refractory period is
    exact. Of the spikes that arrive in a step, one comes first; the others come in any order, which
    makes a bridge of them too, with their squares as variance. As they are jumps, not a continuous
    path, the threshold is 0.58 rms jumps further away for it.

    Attributes:
        potential: V in mV, all at reset at first.
        resting: steps that are left of the refractory period; negative: time that is left over.
    """

    def __init__(self, neuron: LIF, like: Tensor, dt: float, *, crossing: str = "bridge") -> None:
        self.neuron, self.bridged = neuron, crossing == "bridge"
        steps = neuron.t_ref / dt
        self.refractory = steps if self.bridged else float(round(steps))
        self.relaxed = -math.expm1(-neuron.leak * dt)  # of the way to where V goes
        self.bend = self.relaxed * neuron.leak * dt / 2
        # Standard deviation of a step's noise of intensity 1.
        self.kick = math.sqrt(-math.expm1(-2 * neuron.leak * dt) / (2 * neuron.leak))
        # What is left at the end of a step of a jump in the middle of it.
        self.jump_left = 1 - self.relaxed / 2
        self.potential = torch.full_like(like, neuron.v_res)
        self.resting = torch.zeros_like(like)
        self._spikes = torch.zeros_like(like)

    def advance(
        self,
        target: Tensor,
        noise: Tensor | None,
        var: Tensor | float,
        arrivals: Arrivals | None,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            target: drive / leak, what V relaxes to; anything that can be expanded to (..., n).
            noise: (..., n) what a step of white noise adds to V, if there is any.
            var: of that noise, (n,) or for all.
            arrivals: spikes of the layer before.
            generator: for what is random in crossings.

        Returns:
            1 for those that fired, else 0, valid until the next step; and where the ones are, as
            indices of the flattened tensor.
        """
        change = torch.sub(target, self.potential)
        if self.bridged:
            fired, resting = self._bridged(change, noise, var, arrivals, generator)
        else:
            fired, resting = self._on_grid(change, noise, arrivals)
        self.potential.view(-1)[fired] = self.neuron.v_res
        self.resting.sub_(1).clamp_(min=0).view(-1)[fired] = resting
        self._spikes.zero_().view(-1)[fired] = 1.0
        return self._spikes, fired

    def _on_grid(
        self, change: Tensor, noise: Tensor | None, arrivals: Arrivals | None
    ) -> tuple[Tensor, Tensor | float]:
        """Who fires, and for how long they rest."""
        change.mul_(self.relaxed)
        if noise is not None:
            change += noise
        if arrivals is not None:
            change += arrivals.jumps
        self.potential.add_(change.mul_(self.resting <= 0))
        fired = (self.potential >= self.neuron.v_th).view(-1).nonzero().squeeze(1)
        return fired, self.refractory

    def _bridged(
        self,
        change: Tensor,
        noise: Tensor | None,
        var: Tensor | float,
        arrivals: Arrivals | None,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor | float]:
        """Who fires, and for how long they rest."""
        awake = (1 - self.resting).clamp_(0, _LONGEST_STEP)  # part of the step
        before = torch.sub(self.neuron.v_th, self.potential)
        # Times awake, below: 1 - exp(-leak dt awake), to the second order in leak dt.
        change.mul_(torch.rsub(awake, 1).mul_(self.bend).add_(self.relaxed))
        spread = awake * var
        margin: Tensor | float = 0.0
        if arrivals is not None:
            change.add_(arrivals.jumps, alpha=self.jump_left)
            part = 1 / arrivals.spikes.clamp_min(1)
            # One of the jumps comes first, the others make a bridge.
            before.addcmul_(arrivals.jumps * part, awake, value=-1)
            bridged = (arrivals.squares * (1 - part)).mul_(awake)
            spread += bridged
            # Jumps in a path that is continuous otherwise overshoot less, by their share.
            share = bridged.div_(spread.clamp_min(torch.finfo(spread.dtype).tiny))
            margin = share.mul_((arrivals.squares * part).sqrt_()).mul_(_OVERSHOOT)
        change.mul_(awake)
        if noise is not None:
            change.addcmul_(noise, awake.sqrt())
        self.potential += change
        after = torch.sub(self.neuron.v_th, self.potential)
        # Twice the product over the spread: minus the logarithm of the probability to cross.
        product = (before + margin).mul_(after + margin).mul_(2)
        sure = torch.minimum(before, after) <= 0
        likely = ((product <= _UNLIKELY * spread) | sure).view(-1).nonzero().squeeze(1)
        spread = spread.view(-1)[likely]
        level = torch.empty_like(spread).exponential_(generator=generator)
        crossed = (product.view(-1)[likely] <= level * spread) | sure.view(-1)[likely]
        fired = likely[crossed]
        time = time_of_crossing(
            before.view(-1)[fired], after.view(-1)[fired], spread[crossed], generator
        )
        left = awake.view(-1)[fired].mul_(1 - time)
        return fired, self.refractory - left


def time_of_crossing(
    before: Tensor, after: Tensor, spread: Tensor, generator: torch.Generator
) -> Tensor:
    """When a Brownian bridge first reached a level, as part of its duration, given that it did.

    The part t from a distance ``before`` to a distance ``after`` (on either side): t / (1 - t) has
    an inverse Gaussian distribution with mean before / after and shape before^2 / spread. Drawn
    after Michael, Schucany and Haas; without spread it is where a straight line crosses.
    """
    tiny = torch.finfo(before.dtype).tiny ** 0.5
    before, after = before.clamp_min(0), after.abs().clamp_min(tiny)
    normal = torch.empty_like(before).normal_(generator=generator)
    a = normal.square_().mul_(spread) / (2 * before * after).clamp_min(tiny)
    # The smaller root over the mean, written so that nothing cancels.
    root = 1 / (1 + a + (a * (a + 2)).sqrt_())
    larger = torch.empty_like(root).uniform_(generator=generator) * (1 + root) > 1
    ratio = before / after * torch.where(larger, 1 / root, root)
    return torch.where(torch.isfinite(ratio), ratio / (1 + ratio), 1.0)
