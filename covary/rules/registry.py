"""One registry from torch function to rule.

A rule is a function of the same arguments as the torch function, some of them ``Varying``. It says
what becomes of mean and covariance, with the helpers of ``covary.rules.helpers``. A name stands for
all spellings of it: ``torch.relu``, ``F.relu``, ``Tensor.relu`` and ``Tensor.relu_``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations import MomentActivation

Function = Callable[..., Any]

# How covariances treat a call, as print(net) says it.
EXACT = "exact"
MATCHED = "moment matched"
PRODUCT = "product"
LINEARISED = "linearised"
CHOICE = "choice at the mean"
BATCH = "batch statistics"  # of the means, taken for constant


class Rule(NamedTuple):
    """What becomes of a call with values that vary.

    Without ``apply`` and ``activation``, the function is asked about the mean, and answers with
    something that does not vary (a shape, zeros).
    """

    apply: Function | None = None  # takes the arguments of the call
    # Of an elementwise function, its moment activation for the arguments behind the first.
    activation: Callable[..., MomentActivation] | None = None
    has_noise: bool = True  # whether noise enters before the activation
    # Whether the activation never falls, for the arguments behind the first: the largest of several
    # results is then the result of the largest.
    increasing: Callable[..., bool] | None = None
    is_composed: bool = False  # ``apply`` is made of other torch functions, which have rules
    is_pair: bool = False  # of two arguments that vary, the covariance has to be measured
    is_observed: bool = False  # the variance of the first argument has to be measured
    is_moving: bool = False  # elements are put elsewhere, each with its sample
    is_choice: bool = False  # the result holds for the means, and does not vary
    lifts: bool = False  # noise enters what it makes of values that do not vary
    has_weights: bool = False  # the second argument is a weight, which may vary by itself
    in_place: bool = False  # the result is written into the first argument


RULES: dict[Any, Rule] = {}


def spellings(name: str) -> list[Any]:
    """The functions of this name: in torch, in its functional interface, as a method."""
    found = []
    for place in (torch, F, Tensor, torch.special, torch.linalg):
        function = getattr(place, name, None)
        if isinstance(function, property) or type(function).__name__ == "getset_descriptor":
            function = function.__get__  # type: ignore[union-attr]
        if callable(function) and function not in found:
            found.append(function)
    return found


def _register(functions: tuple[str | Function, ...], entry: Rule) -> None:
    for function in functions:
        if not isinstance(function, str):
            RULES[function] = entry
            continue
        found = spellings(function)
        if not found:
            raise ValueError(f"torch has no function called {function!r}.")
        RULES.update(dict.fromkeys(found, entry))
        RULES.update(dict.fromkeys(spellings(f"{function}_"), entry._replace(in_place=True)))


def rule(*functions: str | Function, **flags: Any) -> Callable[[Function], Function]:
    """Decorate the rule of these torch functions (or names, for all their spellings).

    The decorated function takes the arguments of the torch function (but for ``inplace``) and
    returns Varying values. ``flags`` are those of ``Rule``.
    """

    def decorate(apply: Function) -> Function:
        _register(functions, Rule(apply, **flags))
        return apply

    return decorate


def composed(*functions: str | Function) -> Callable[[Function], Function]:
    """Decorate a function that does the same by other torch functions, which have rules."""
    return rule(*functions, is_composed=True)


def elementwise(
    *functions: str | Function, **flags: Any
) -> Callable[[Callable[..., MomentActivation]], Callable[..., MomentActivation]]:
    """Decorate what gives the moment activation of an elementwise nonlinearity.

    The decorated function takes the arguments behind the first (but for ``inplace``), by the names
    that torch gives them. ``flags`` (``has_noise``, ``increasing``) are those of ``Rule``.

    Examples:
        >>> import torch, covary
        >>> @elementwise(torch.special.expit)
        ... def expit():
        ...     return covary.activations.get("sigmoid")
    """

    def decorate(activation: Callable[..., MomentActivation]) -> Callable[..., MomentActivation]:
        _register(functions, Rule(None, activation, **flags))
        return activation

    return decorate


def about_the_mean(*functions: str | Function) -> None:
    """Let these functions be asked about the mean; what they answer does not vary."""
    _register(functions, Rule())
