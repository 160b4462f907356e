"""The contract of a moment activation, and the one class that fulfils it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary.activations.neuron import LIF

Function = Callable[[Tensor], Tensor]
# Variances above this can be divided by.
_TINY = 1e-30


class ActivationMoments(NamedTuple):
    """Mean, variance and gain of h(x) for x ~ N(mu, var); docs/theory.md, eqs. (4) to (6)."""

    mean: Tensor  # E[h(x)]
    variance: Tensor  # Var[h(x)]
    gain: Tensor  # d mean / d mu = E[h'(x)] = Cov(h(x), x) / var


class LinearResponse(NamedTuple):
    """h(x) as ``mean + gain (x - mu)`` and what is left over, of variance ``excess``.

    ``excess = variance - gain^2 var``, never negative; docs/theory.md, eq. (7).
    """

    mean: Tensor
    gain: Tensor
    excess: Tensor


@dataclass(frozen=True, repr=False)
class MomentActivation:
    """An activation h that maps moments to moments.

    ``activation(mu, var)`` takes ``(B, n)`` means and ``(1 | B, n)`` variances and returns
    ``ActivationMoments``, each ``(B, n)``. ``function`` is h itself, ``slope`` its ordinary
    derivative, and ``moments`` the formula for ``var > 0``.

    Where ``var`` is 0 (or too small to divide by) the result is exactly h(mu), 0 and h'(mu), so a
    network without noise *is* the conventional network.

    ``respond(mu, var)`` gives what sums over units need. Where ``response`` is there, it is that
    formula in fewer passes over memory, with errors small beside sigma, if not beside the result.

    A ``neuron`` is there where the mean is the rate of a spiking neuron: then ``function`` is what
    is left without noise, and its variance is more than what a noisy ``function`` would have.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    moments: Callable[[Tensor, Tensor], ActivationMoments]
    neuron: LIF | None = None
    response: Callable[[Tensor, Tensor], LinearResponse] | None = None

    def __call__(self, mu: Tensor, var: Tensor) -> ActivationMoments:
        """Mean, variance and gain of h(x) for x ~ N(mu, var), var >= 0."""
        # Divisions by var, twice over in a backward pass, stay finite down to here.
        least = 100 * torch.finfo(var.dtype).tiny
        if _all_above(least, var):
            return self.moments(mu, var)
        noisy = var > least
        # Formulas see 1 in place of 0: not even the branch that is thrown away may make a NaN,
        # which would come back through the gradient of torch.where.
        mean, variance, gain = self.moments(mu, torch.where(noisy, var, 1.0))
        return ActivationMoments(
            torch.where(noisy, mean, self.function(mu)),
            torch.where(noisy, variance, 0.0),
            torch.where(noisy, gain, self.slope(mu)),
        )

    def respond(self, mu: Tensor, var: Tensor, *, least: float = 0.0) -> LinearResponse:
        """Mean, gain and excess of h(x) for x ~ N(mu, var), var >= least >= 0."""
        is_noisy = least > _TINY or _all_above(_TINY, var)
        if self.response is not None and is_noisy and not torch.is_grad_enabled():
            return self.response(mu, var)
        mean, variance, gain = self(mu, var)
        # Never negative but for round-off.
        excess = torch.addcmul(variance, gain * var, gain, value=-1).clamp(min=0)
        return LinearResponse(mean, gain, excess)

    def __repr__(self) -> str:
        return self.name

    def __copy__(self) -> MomentActivation:
        return self

    def __deepcopy__(self, _memo: dict[int, object]) -> MomentActivation:
        return self  # it cannot change, so a copy of a network may have the same

    def __getstate__(self) -> dict[str, object]:
        """What is pickled: the functions, which pickle finds by the name of their module."""
        for field, value in vars(self).items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise pickle.PicklingError(
                    f"The activation {self.name} cannot be pickled, because its {field} is or "
                    f"contains a lambda or local function ({error}). Define the function by `def` "
                    "at the top level of a module."
                ) from error
        return dict(vars(self))


def _all_above(least: float, var: Tensor) -> bool:
    """Whether all variances are above; False where finding out would wait for a device."""
    return _is_readable(var) and bool(var.min() > least)


def known_empty(mask: Tensor) -> bool:
    """Whether no element is True; False where finding out would wait for a device."""
    return _is_readable(mask) and not bool(mask.any())


def _is_readable(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or is_functorch_wrapped_tensor(x):
        return False
    return x.device.type == "cpu" and x.numel() > 0
