"""How the covariance of a layer is held.

Each class answers the same questions (``Covariance``); ``dense()`` is the truth they are
tested against. The batch dimension is 1 where the whole batch has the same covariance and B where
each sample has its own; nothing is expanded from one to the other before a layer needs it.

Covariances are immutable values made of tensors, and pytrees, so they pass through
``torch.func.vmap`` and ``torch.compile``. What vmap stacks in front of the batch dimension, the
methods that look at a covariance (``variance``, ``dense``, ``log_determinant``, ``color``) accept.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from covary.covariance.base import Covariance, register_value
from covary.covariance.exact import Diagonal, Full, Gated, Independent, Isotropic, Shared
from covary.covariance.tracked import Probe, Tracked, start_tracked

__all__ = [
    "Covariance",
    "Diagonal",
    "Full",
    "Gated",
    "Independent",
    "Isotropic",
    "Probe",
    "Shared",
    "Tracked",
    "check_name",
    "names",
    "register_value",
    "start",
]


def _full(var: Tensor, n: int) -> Isotropic | Independent:
    return Isotropic(var, n) if tuple(var.shape) == (1, 1) else Independent(var)


def _shared(var: Tensor, n: int) -> Covariance:
    return Shared(_full(var.mean(0, keepdim=True), n))


def _diagonal(var: Tensor, n: int) -> Covariance:
    return Diagonal(var.expand(len(var), n))


def _tracked(var: Tensor, n: int) -> Covariance:
    return start_tracked(_full(var, n))


# How a network may hold its covariance, by what its input's covariance starts as.
_STARTS: dict[str, Callable[[Tensor, int], Covariance]] = {
    "full": _full,
    "diagonal": _diagonal,
    "shared": _shared,
    "tracked": _tracked,
}


def names() -> list[str]:
    """The ways to hold a covariance that ``start`` knows."""
    return list(_STARTS)


def check_name(covariance: str) -> str:
    """The name itself, if it is one."""
    if not isinstance(covariance, str) or covariance not in _STARTS:
        raise ValueError(f"Unknown covariance {covariance!r}; known are {', '.join(names())}.")
    return covariance


def start(covariance: str, var: Tensor, n: int) -> Covariance:
    """The covariance of n independent inputs, to be held in the way of this name.

    Their variance is (1, 1) where all inputs have the same, else (B, n).
    """
    return _STARTS[check_name(covariance)](var, n)
