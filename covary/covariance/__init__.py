"""How the covariance of a layer is stored, and what layers do to it.

Each class answers the same questions (``Covariance``); ``dense()`` is the truth they are
tested against. The batch dimension is 1 where the whole batch has the same covariance and B where
each sample has its own; nothing is expanded from one to the other before a layer needs it.

Covariances are immutable values made of tensors, and pytrees, so they pass through
``torch.func.vmap`` and ``torch.compile``. What vmap stacks in front of the batch dimension, the
methods that look at a covariance (``variance``, ``dense``, ``quadratic``, ``log_determinant``,
``color``) accept.
"""

from __future__ import annotations

from torch import Tensor

from covary.covariance.base import Covariance, Selection, register_value
from covary.covariance.exact import Diagonal, Full, Shared
from covary.covariance.rows import Rows
from covary.covariance.tracked import Probe, Tracked

__all__ = [
    "Covariance",
    "Diagonal",
    "Full",
    "Kind",
    "Probe",
    "Rows",
    "Selection",
    "Shared",
    "Tracked",
    "check_kind",
    "names",
    "register_value",
    "start",
]

# How a network may store its covariance: by name, or as a class.
Kind = str | type[Covariance]

_CLASSES: dict[str, type[Covariance]] = {
    "full": Full,
    "diagonal": Diagonal,
    "shared": Shared,
    "tracked": Tracked,
}


def names() -> list[str]:
    """The names of the covariance classes."""
    return list(_CLASSES)


def check_kind(covariance: Kind) -> Kind:
    """A name as it is; a class by its name, or as it is if it has none; else an error."""
    if isinstance(covariance, type) and issubclass(covariance, Covariance):
        return next((name for name, cls in _CLASSES.items() if cls is covariance), covariance)
    if not isinstance(covariance, str) or covariance not in _CLASSES:
        raise ValueError(
            f"Unknown covariance {covariance!r}; known are {', '.join(names())}, and subclasses of "
            "covary.covariance.Covariance."
        )
    return covariance


def start(covariance: Kind, var: Tensor, n: int) -> Covariance:
    """The covariance of n independent inputs, as an object of this class.

    Their variance is (1, 1) where all inputs have the same, else (B, n).
    """
    kind = check_kind(covariance)
    return (_CLASSES[kind] if isinstance(kind, str) else kind).start(var, n)
