"""What layers refuse, in words."""

from __future__ import annotations

import math
import operator

from torch import Tensor, nn

from covary.covariance import Kind
from covary.moments import Moments


def check_noise(noise: float, layer: str) -> float:
    """The noise as a number, if it is a standard deviation."""
    try:
        sigma = float(noise)
    except (TypeError, ValueError):
        sigma = None
    # float() reads strings, but "0.2" where a number belongs is a mistake all the same.
    if sigma is None or isinstance(noise, str):
        raise TypeError(f"{layer} needs a number as noise, got {noise!r}.")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"{layer} needs a finite noise >= 0 (a standard deviation), got {noise}.")
    return sigma


def check_exact_width(width: int | None, covariance: Kind) -> int | None:
    """The width itself, if it is one, and the covariance one that has it."""
    if width is None:
        return None
    try:
        number = operator.index(width)
    except TypeError:
        number = -1
    if number < 0 or isinstance(width, bool):
        raise ValueError(f"exact_width is a number of units, 0 or more, got {width!r}.")
    if covariance != "tracked":
        raise ValueError(f"exact_width is for tracked covariances, and these are {covariance}.")
    return number


def check_moments(moments: Moments, layer: nn.Module, features: int | None = None) -> None:
    """Refuse what is not Moments, or not of so many features."""
    name = type(layer).__name__
    if not isinstance(moments, Moments):
        got = (
            f"a Tensor of shape {tuple(moments.shape)}"
            if isinstance(moments, Tensor)
            else type(moments).__name__
        )
        raise TypeError(f"{name} takes Moments and got {got}. Put a covary.nn.Lift before it.")
    if features is not None and moments.mean.shape[-1] != features:
        got_features = moments.mean.shape[-1]
        raise ValueError(
            f"{name} expects {features} features, got {got_features}. Check the width of the layer "
            "before it, or, if it comes right after Lift, whether a Flatten is missing."
        )
