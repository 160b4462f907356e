"""Checks of layer inputs, with error messages that name the remedy."""

from __future__ import annotations

import math
import operator

from torch import Tensor, nn

from covary.covariance import Kind
from covary.moments import Moments


def check_noise(noise: float, layer: str) -> float:
    """The noise as a float; an error unless it is a finite number, 0 or more."""
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
    """``exact_width`` as it is; an error unless it is None, or 0 or more and for ``"tracked"``."""
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
    """Raise an error unless these are Moments, of so many features if a number is given."""
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
            "before it; right after Lift, that of the input, whose features are last."
        )


def check_flat(moments: Moments, layer: nn.Module) -> None:
    """Raise an error unless a sample is one row of features."""
    if len(moments.event_shape) > 1:
        raise ValueError(
            f"{type(layer).__name__} takes Moments of shape (batch, features), got "
            f"{tuple(moments.mean.shape)}. Put a covary.nn.Flatten before it."
        )
