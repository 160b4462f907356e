"""One registry from torch function to rule.

A rule is a short function of the same arguments as the torch function, some of them ``Varying``. It
says what becomes of mean and covariance, with the helpers of ``covary.rules.helpers``:

    @rule("conv2d")
    def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        ...

A name stands for all spellings of it: ``torch.relu``, ``F.relu``, ``Tensor.relu`` and, for rules
of elementwise functions, ``Tensor.relu_``.
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

    Attributes:
        apply: takes the arguments of the call. None: the function is asked about the mean, and
            answers with something that does not vary (a shape, a tensor of zeros).
        activation: of an elementwise nonlinearity, the moment activation for the arguments behind
            the first.
        has_noise: whether noise enters before the activation.
        increasing: whether the activation never falls, given the arguments behind the first: the
            largest of several results is then the result of the largest.
        is_composed: ``apply`` is made of other torch functions, which have rules of their own.
        is_pair: with two arguments that vary, their covariance has to be measured.
        is_moving: elements are put elsewhere, each with the sample that it belongs to.
        is_choice: what it gives holds for the means, and does not vary.
        lifts: noise enters what it makes of values that do not vary.
        in_place: the result is written into the first argument.
    """

    apply: Function | None = None
    activation: Callable[..., MomentActivation] | None = None
    has_noise: bool = True
    increasing: Callable[..., bool] | None = None
    is_composed: bool = False
    is_pair: bool = False
    is_moving: bool = False
    is_choice: bool = False
    lifts: bool = False
    in_place: bool = False


RULES: dict[Any, Rule] = {}
_PLACES = (torch, F, Tensor, torch.special, torch.linalg)


def spellings(name: str) -> list[Any]:
    """The functions of this name: in torch, in its functional interface, as a method."""
    found = []
    for place in _PLACES:
        function = getattr(place, name, None)
        if isinstance(function, property) or type(function).__name__ == "getset_descriptor":
            function = function.__get__  # type: ignore[union-attr]
        if callable(function) and function not in found:
            found.append(function)
    return found


def register(functions: tuple[str | Function, ...], entry: Rule) -> None:
    """Let calls of these functions, or of all spellings of these names, follow a rule."""
    for function in functions:
        if not isinstance(function, str):
            RULES[function] = entry
            continue
        found = spellings(function)
        if not found:
            raise ValueError(f"torch has no function called {function!r}.")
        for each in found:
            RULES[each] = entry
        for each in spellings(f"{function}_"):
            RULES[each] = entry._replace(in_place=True)


def rule(*functions: str | Function) -> Callable[[Function], Function]:
    """Decorate the rule of these torch functions (or names, for all their spellings).

    The decorated function takes the arguments of the torch function and returns Varying values.
    """

    def decorate(apply: Function) -> Function:
        register(functions, Rule(apply))
        return apply

    return decorate


def composed(*functions: str | Function) -> Callable[[Function], Function]:
    """Decorate a function that does the same by other torch functions, which have rules."""

    def decorate(apply: Function) -> Function:
        register(functions, Rule(apply, is_composed=True))
        return apply

    return decorate


def elementwise(
    *functions: str | Function,
    has_noise: bool = True,
    increasing: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., MomentActivation]], Callable[..., MomentActivation]]:
    """Decorate what gives the moment activation of an elementwise nonlinearity.

    The decorated function takes the arguments behind the first, by the names that torch gives them;
    an argument ``inplace`` says that the result is written into the first. ``has_noise`` and
    ``increasing`` are those of ``Rule``.

    Examples:
        >>> import torch, covary
        >>> @elementwise(torch.special.expit)
        ... def expit():
        ...     return covary.activations.get("sigmoid")
    """

    def decorate(activation: Callable[..., MomentActivation]) -> Callable[..., MomentActivation]:
        register(functions, Rule(None, activation, has_noise, increasing))
        return activation

    return decorate


def about_the_mean(*functions: str | Function) -> None:
    """Let these functions be asked about the mean; what they answer does not vary."""
    register(functions, Rule())
