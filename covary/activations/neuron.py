"""The leaky integrate-and-fire neuron: its constants, and how fast it fires without noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor


@dataclass(frozen=True)
class LIF:
    """A leaky integrate-and-fire neuron, in mV and ms; docs/theory.md, eq. (32).

    dV/dt = -leak V + input. At ``v_th`` it fires, goes to ``v_res`` and stays there for ``t_ref``.
    The default constants are those of the paper.

    Attributes:
        v_th: threshold, in mV.
        v_res: what it is reset to, in mV; below the threshold.
        t_ref: refractory period, in ms; no neuron fires faster than 1 / t_ref.
        leak: conductance L, in 1/ms; 1 / leak is the membrane's time constant.

    Examples:
        >>> LIF().drive_at_threshold  # mV per ms that it takes to fire without noise
        1.0
        >>> LIF(v_th=-5)
        Traceback (most recent call last):
        ...
        ValueError: A neuron needs a threshold above its reset: v_th > v_res, got -5.0 and 0.0 mV.
    """

    v_th: float = 20.0
    v_res: float = 0.0
    t_ref: float = 5.0
    leak: float = 0.05

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"A neuron needs a finite number as {name}, got {value!r}.")
            object.__setattr__(self, name, float(value))
        if self.v_th <= self.v_res:
            raise ValueError(
                "A neuron needs a threshold above its reset: v_th > v_res, got "
                f"{self.v_th} and {self.v_res} mV."
            )
        if self.t_ref < 0:
            raise ValueError(f"A refractory period is 0 ms or more, got t_ref={self.t_ref}.")
        if self.leak <= 0:
            raise ValueError(
                "A leaky neuron needs a conductance leak > 0 per ms (the inverse of its time "
                f"constant), got {self.leak}."
            )

    @property
    def drive_at_threshold(self) -> float:
        """The input, in mV per ms, above which it fires without noise."""
        return self.v_th * self.leak

    @property
    def irregular_noise(self) -> float:
        """Sigma, in mV per sqrt(ms), that makes it fire irregularly, by chance.

        With it, reset and threshold are 1 apart in standard units, docs/theory.md, eq. (33).
        """
        return math.sqrt(self.leak) * (self.v_th - self.v_res)

    def rate(self, mu: Tensor) -> Tensor:
        """Spikes per ms under constant input, elementwise: the limit of no noise."""
        above = mu > self.drive_at_threshold
        interval = self.t_ref + self._climb(torch.where(above, mu, torch.inf))
        return torch.where(above, 1 / interval, 0.0)

    def rate_slope(self, mu: Tensor) -> Tensor:
        """Derivative of ``rate``; 0 below and infinite just above the threshold."""
        above = mu > self.drive_at_threshold
        drive = torch.where(above, mu, self.drive_at_threshold + 1.0)
        start, end = drive - self.v_res * self.leak, drive - self.drive_at_threshold
        faster = (self.v_th - self.v_res) / (start * end)  # minus the derivative of the climb
        return torch.where(above, faster / (self.t_ref + self._climb(drive)).square(), 0.0)

    def _climb(self, mu: Tensor) -> Tensor:
        """Time, in ms, from reset to threshold under a constant input that gets it there."""
        start = mu - self.v_res * self.leak
        # -log(1 - ...) keeps its digits where the input is strong and the climb short.
        return -torch.log1p(-(self.v_th - self.v_res) * self.leak / start) / self.leak

    def __repr__(self) -> str:
        constants = ", ".join(f"{name}={value:.15g}" for name, value in vars(self).items())
        return f"lif({constants})"
