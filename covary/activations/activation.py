"""The contract of a moment activation, the one class that fulfils it, and the registry of names."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from covary.tracing import is_traced

if TYPE_CHECKING:
    from covary.activations.neuron import LIF

Function = Callable[[Tensor], Tensor]
Formula = Callable[[Tensor, Tensor], "ActivationMoments"]
# Variances above this can be divided by.
_TINY = 1e-30
_all_positive: ContextVar[bool] = ContextVar("variances are positive", default=False)


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
    ``ActivationMoments``, each ``(B, n)``. Where ``var`` is 0 (or too small to divide by) they are
    exactly h(mu), 0 and h'(mu), so a network without noise *is* the conventional network.

    Attributes:
        name: what it is shown as.
        function: h itself; of a spiking neuron, its rate without noise.
        slope: the ordinary derivative h'.
        moments: the formula for ``var > 0``.
        neuron: the spiking neuron whose rate is the mean, and whose spike count has the variance.
        response: the formula of ``respond`` in fewer passes over memory, with errors small beside
            sigma, if not beside the result.
        mean_and_gain: the formula of ``first`` for ``var > 0``, where the variance costs much more.
    """

    name: str
    function: Function
    slope: Function
    moments: Formula
    neuron: LIF | None = None
    response: Callable[[Tensor, Tensor], LinearResponse] | None = None
    mean_and_gain: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __call__(self, mu: Tensor, var: Tensor) -> ActivationMoments:
        """Mean, variance and gain of h(x) for x ~ N(mu, var), var >= 0."""
        noisy = _above_zero(var)
        if noisy is None:
            return self.moments(mu, var)
        mean, variance, gain = self.moments(mu, torch.where(noisy, var, 1.0))
        return ActivationMoments(
            torch.where(noisy, mean, self.function(mu)),
            torch.where(noisy, variance, 0.0),
            torch.where(noisy, gain, self.slope(mu)),
        )

    def first(self, mu: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and gain alone, (B, n) each."""
        if self.mean_and_gain is None:
            found = self(mu, var)
            return found.mean, found.gain
        noisy = _above_zero(var)
        if noisy is None:
            return self.mean_and_gain(mu, var)
        mean, gain = self.mean_and_gain(mu, torch.where(noisy, var, 1.0))
        return torch.where(noisy, mean, self.function(mu)), torch.where(noisy, gain, self.slope(mu))

    def respond(self, mu: Tensor, var: Tensor, *, least: float = 0.0) -> LinearResponse:
        """Mean, gain and excess of h(x) for x ~ N(mu, var), var >= least >= 0."""
        is_noisy = least > _TINY or (is_readable(var) and bool(var.min() > _TINY))
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

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: a name of the registry, or else functions, found by their modules."""
        if _REGISTRY.get(self.name) is self:
            return get, (self.name,)
        for field, value in vars(self).items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise pickle.PicklingError(
                    f"The activation {self.name} cannot be pickled, because its {field} is or "
                    f"contains a lambda or local function ({error}). Define the function by `def` "
                    "at the top level of a module."
                ) from error
        return MomentActivation, tuple(vars(self).values())


Maker = Callable[..., MomentActivation]
Registered = TypeVar("Registered", bound=MomentActivation | Maker)
_REGISTRY: dict[str, MomentActivation | Maker] = {}
_FUNCTIONS: set[str] = set()  # names that are not for networks


def register(found: Registered, *, for_networks: bool = True) -> Registered:
    """Let ``get`` find an activation by its name, or by that of the function that makes it."""
    name = found.name if isinstance(found, MomentActivation) else found.__name__
    _REGISTRY[name] = found
    if not for_networks:
        _FUNCTIONS.add(name)
    return found


def names() -> list[str]:
    """The names of activations for networks: defined everywhere, growing at most linearly."""
    return sorted(_REGISTRY.keys() - _FUNCTIONS)


def functions() -> list[str]:
    """The other names that ``get`` takes: functions that grow faster, or have a limited domain."""
    return sorted(_FUNCTIONS)


def get(activation: str | MomentActivation) -> MomentActivation:
    """The moment activation of this name; a moment activation is returned as it is.

    Examples:
        >>> get("relu")
        relu
    """
    if isinstance(activation, MomentActivation):
        return activation
    found = _REGISTRY.get(activation) if isinstance(activation, str) else None
    if found is None:
        raise ValueError(
            f"Unknown activation {activation!r}{_hint(activation)}; known are {', '.join(names())},"
            f" and the functions {', '.join(functions())}. Any other function h works as "
            "covary.activations.quadrature(h)."
        )
    return found if isinstance(found, MomentActivation) else found()


def _hint(activation: object) -> str:
    """A suggestion for what is no activation: the name that was probably meant."""
    maker = getattr(activation, "__name__", None)
    if maker and activation.__module__.startswith(__package__):
        return f" (did you mean {maker}(), called?)"
    name = activation if isinstance(activation, str) else type(activation).__name__
    close = difflib.get_close_matches(name.lower(), _REGISTRY, n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _above_zero(var: Tensor) -> Tensor | None:
    """Which variances formulas may divide by; None if it is certain that these are all.

    Formulas see 1 in place of the others: not even the branch that is thrown away may make a NaN,
    which would come back through the gradient of torch.where.
    """
    # Divisions by var, twice over in a backward pass, stay finite down to here.
    least = 100 * torch.finfo(var.dtype).tiny
    # torch.compile cannot trace ContextVar.get.
    is_known = not is_traced() and _all_positive.get()
    if is_known or (is_readable(var) and bool(var.min() > least)):
        return None
    return var > least


@contextmanager
def positive_variances() -> Iterator[None]:
    """The caller knows that all variances in this block are above 0 by far.

    Where values cannot be looked at (under vmap), activations would compute h(mu), too, for those
    that might be 0.
    """
    before = _all_positive.set(True)
    try:
        yield
    finally:
        _all_positive.reset(before)


def is_readable(x: Tensor) -> bool:
    """Whether values can be looked at now, without waiting for a device."""
    if is_traced() or is_functorch_wrapped_tensor(x):
        return False
    return x.device.type == "cpu" and x.numel() > 0


def in_blocks(
    moments: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    mu: Tensor,
    var: Tensor,
    *,
    size: int = 16384,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """``moments(mu, var)`` of so many elements at a time, which stay in a processor's cache.

    They are computed in ``dtype``, which is float64 unless given, where the device has it.
    """
    if dtype is None:
        dtype = mu.dtype if mu.device.type == "mps" else torch.float64
    if mu.device.type != "cpu":
        size *= 64  # no cache to keep to, but memory
    if is_traced() or mu.numel() <= size:
        return tuple(value.to(mu.dtype) for value in moments(mu.to(dtype), var.to(dtype)))
    # In the order in which elements lie in memory: channels may be last there.
    order = sorted(range(mu.dim()), key=mu.stride, reverse=True)
    flat = (x.permute(order).reshape(-1) for x in (mu, var.expand_as(mu)))
    blocks = zip(*(torch.split(x, size) for x in flat), strict=True)
    parts = [[value.to(mu.dtype) for value in moments(m.to(dtype), v.to(dtype))] for m, v in blocks]
    shape = [mu.shape[dim] for dim in order]
    back = sorted(range(mu.dim()), key=order.__getitem__)
    joined = (torch.cat(some) for some in zip(*parts, strict=True))
    return tuple(value.view(shape).permute(back) for value in joined)
