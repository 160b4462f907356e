"""The leaky integrate-and-fire neuron: rate, variance of the spike count, and gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covary.activations.activation import ActivationMoments, MomentActivation, register
from covary.activations.dawson import FAMILIES, REACH, Place, place, prepare
from covary.tracing import is_traced


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

        With it, zeta at threshold is 1 above zeta at reset (docs/theory.md, eq. (33)).
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


@register
def lif(
    *, v_th: float = 20.0, v_res: float = 0.0, t_ref: float = 5.0, leak: float = 0.05
) -> MomentActivation:
    """The moment activation of leaky integrate-and-fire neurons; docs/theory.md, eqs. (32) to (36).

    Its input is a current of mean ``mu`` (mV/ms) and white noise of intensity ``var`` (mV^2/ms);
    its mean is a rate in spikes per ms, its variance that of the spike count per ms, counted over
    long times. Without noise (``var = 0``) it fires regularly: the rate is exact, the variance 0.
    All three have first derivatives; there are no second ones, and no forward mode. The constants
    are those of ``LIF``.

    Examples:
        >>> import torch
        >>> moments = lif()(torch.tensor([[0.5, 1.0, 2.0]]), torch.ones(1, 1))
        >>> 1000 * moments.mean  # spikes per second
        tensor([[ 0.3667, 18.2369, 53.5230]])
    """
    neuron = LIF(v_th, v_res, t_ref, leak)
    prepare()
    name = "lif" if neuron == LIF() else repr(neuron)
    moments = partial(_moments, neuron=neuron)
    return MomentActivation(name, neuron.rate, neuron.rate_slope, moments, neuron)


def _moments(mu: Tensor, var: Tensor, *, neuron: LIF) -> ActivationMoments:
    """docs/theory.md, eqs. (33) to (35)."""
    both = torch.broadcast_tensors(mu, var)  # type: ignore[no-untyped-call]
    return ActivationMoments(*_NeuronMoments.apply(*both, neuron))  # type: ignore[no-untyped-call]


class _Passage(NamedTuple):
    """The way from reset to threshold: both ends of the integrals, and the rate that follows.

    Functions of the ends may overflow; ``damped`` is what keeps numerators and denominators finite.
    """

    ends: Place  # upper ends, then lower ones: (2, ...)
    per_noise: Tensor  # 1 / sqrt(leak var)
    ratio: Tensor  # e^{q^2 - p^2} for p = max(upper, 0), q = max(lower, 0)
    rate: Tensor  # spikes per ms
    rate_by_integral: Tensor  # how the rate falls with that of f1, over rate and e^{-p^2}

    def difference(self, name: str) -> Tensor:
        """The function at the upper end minus that at the lower, times e^{-growth p^2}."""
        upper, lower = self.ends.look_up(name).unbind()
        ratio = self.ratio if FAMILIES[name].growth == 1 else self.ratio.square()
        # In a graph, what is written into a part is copied into the whole, which costs more.
        subtract = upper.addcmul if is_traced() else upper.addcmul_
        return subtract(ratio, lower, value=-1)


def _passage(mu: Tensor, var: Tensor, neuron: LIF) -> _Passage:
    finfo = torch.finfo(mu.dtype)
    mu = mu.clamp(-(finfo.max**0.45), finfo.max**0.45)  # so that no end is infinite
    per_noise = torch.rsqrt(neuron.leak * var)
    bounds = mu.new_tensor([neuron.v_th, neuron.v_res]) * neuron.leak
    ends = place((bounds.view(2, *[1] * mu.dim()) - mu) * per_noise)
    (p, q), below = ends.above, ends.below
    damped = p.square().neg_().exp_()
    # As a product of two differences, not as one of squares, which would lose digits.
    ratio = (q - p).mul_(q + p).exp_()
    found = _Passage(ends, per_noise, ratio, damped, damped)
    # What was taken out of F1: the logarithm of s at the upper end over s at the lower.
    logarithm = (below[0] - below[1]).mul_(ends.s[0]).div_(REACH).log1p_()
    integral = found.difference("F1").addcmul_(damped, logarithm, value=0.5)
    # Never negative but for round-off; where all is lost in it, the neuron is silent, not NaN.
    interval = integral.clamp_(min=0).mul_(2 / neuron.leak).add_(damped, alpha=neuron.t_ref)
    over = interval.clamp_(min=finfo.tiny**0.25).reciprocal_()
    return found._replace(rate=damped * over, rate_by_integral=over.mul_(2 / neuron.leak))


class _NeuronMoments(torch.autograd.Function):
    """Mean, variance and gain, and their derivatives: all by the same tables.

    In float64 whatever the arguments are, where the device has it: sub-threshold rates go like
    e^{-x^2}, which multiplies the rounding error of x by up to 50 where rates still count.
    """

    @staticmethod
    def vmap(
        _info: Any, in_dims: tuple[int | None, ...], mu: Tensor, var: Tensor, neuron: LIF
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # Unit by unit, so what is stacked is just more of the same.
        stacked = [
            argument[None] if dim is None else argument.movedim(dim, 0)
            for argument, dim in zip((mu, var), in_dims, strict=False)
        ]
        both = torch.broadcast_tensors(*stacked)  # type: ignore[no-untyped-call]
        return _NeuronMoments.apply(*both, neuron), (0, 0, 0)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(mu: Tensor, var: Tensor, neuron: LIF) -> tuple[Tensor, Tensor, Tensor]:
        fine = _widest(mu)
        passage = _passage(mu.to(fine), var.to(fine), neuron)
        found = _rates(passage)
        return found.mean.to(mu.dtype), found.variance.to(mu.dtype), found.gain.to(mu.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        mu, var, ctx.neuron = inputs
        ctx.save_for_backward(mu, var)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_mean: Tensor, grad_variance: Tensor, grad_gain: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        mu, var = ctx.saved_tensors
        fine = _widest(mu)
        by_mu, by_var = _derivatives(mu.to(fine), var.to(fine), ctx.neuron)
        grads = torch.stack([grad_mean, grad_variance, grad_gain]).to(fine)
        grad_mu = (grads * torch.stack(by_mu)).sum(0)
        grad_var = (grads * torch.stack(by_var)).sum(0)
        return grad_mu.to(mu.dtype), grad_var.to(mu.dtype), None


def _widest(x: Tensor) -> torch.dtype:
    return x.dtype if x.device.type == "mps" else torch.float64


def _rates(passage: _Passage) -> ActivationMoments:
    rate, by_integral = passage.rate, passage.rate_by_integral
    once = rate * by_integral
    gain = passage.difference("f1").mul_(passage.per_noise).mul_(once)
    variance = passage.difference("F2").mul_(by_integral).mul_(once).mul_(2)
    return ActivationMoments(rate, variance, gain)


def _derivatives(
    mu: Tensor, var: Tensor, neuron: LIF
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Derivatives of mean, variance and gain by mu and by var; docs/theory.md, eq. (36).

    Its identities spare differences of almost equal products where zeta is large and negative.
    """
    passage = _passage(mu, var, neuron)
    rate, variance, gain = _rates(passage)
    by_integral, per_noise = passage.rate_by_integral, passage.per_noise
    f1, df1, ddf1, f2, df2 = map(passage.difference, ("f1", "df1", "ddf1", "f2", "df2"))
    upper, lower = passage.ends.look_up("f1").unbind()
    square = upper.square() - (passage.ratio * lower).square()
    once = rate * by_integral
    twice = 2 * once * by_integral
    # Of the rate's logarithm, which has derivatives where the rate itself vanishes.
    log_by_mu, log_by_var = by_integral * per_noise * f1, by_integral * df1 / (4 * var)
    by_mu = (
        gain,
        3 * variance * log_by_mu - twice * per_noise * f2,
        2 * gain * log_by_mu - once * per_noise.square() * df1,
    )
    by_var = (
        rate * log_by_var,
        3 * variance * log_by_var - twice * (df2 - square) / (4 * var),
        2 * gain * log_by_var - gain / (2 * var) - once * per_noise * (ddf1 / 2 - f1) / (2 * var),
    )
    return by_mu, by_var
