"""How the covariance of a layer is stored, and what layers do to it.

Each class answers the same questions (``Covariance``); ``dense()`` is the truth they are tested
against. Covariances are immutable values made of tensors, and pytrees, so they pass through
``torch.func.vmap`` and ``torch.compile``.
"""

from __future__ import annotations

from covary.covariance.base import Covariance, Selection, register_value
from covary.covariance.exact import Diagonal, Full, LowRank, Rows, Shared
from covary.covariance.tracked import Probe, Tracked

__all__ = [
    "Covariance",
    "Diagonal",
    "Full",
    "Kind",
    "LowRank",
    "Probe",
    "Rows",
    "Selection",
    "Shared",
    "Tracked",
    "check_kind",
    "class_name",
    "exact_units",
    "names",
    "register_value",
    "start",
]

# How a network may store its covariance: by name ("tracked:N" has an option), or as a class.
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
    if isinstance(covariance, str):
        name, colon, units = covariance.partition(":")
        if name in _CLASSES and (not colon or (name == "tracked" and units.isdecimal())):
            return covariance
    raise ValueError(
        f"Unknown covariance {covariance!r}; known are {', '.join(names())}, tracked:N (tracked, "
        "with exact variances in layers of up to N units), and subclasses of "
        "covary.covariance.Covariance."
    )


def class_name(covariance: Kind) -> Kind:
    """The same without its option: ``"tracked"`` for ``"tracked:32"``."""
    return covariance.partition(":")[0] if isinstance(covariance, str) else covariance


def exact_units(covariance: Kind) -> int | None:
    """N of ``"tracked:N"``: layers of up to so many units have exact variances. Else None."""
    units = covariance.partition(":")[2] if isinstance(covariance, str) else ""
    return int(units) if units else None


def start(covariance: Kind, inputs: Full) -> Covariance:
    """The covariance of the inputs, stored as this kind."""
    kind = check_kind(covariance)
    if not isinstance(kind, str):
        return kind.of(inputs)
    units = exact_units(kind)
    return _CLASSES[kind].of(inputs) if units is None else Tracked.of(inputs, units)
