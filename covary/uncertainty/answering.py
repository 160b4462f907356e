"""Which rows to answer, and with which classes: thresholds and sets that held-out rows chose."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covary.covariance import Full
from covary.moments import Moments

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def with_doubt(logits: Moments, novelty: Tensor, variance: Tensor) -> Moments:
    """Calibrated logits (n, k), the less sure the farther from the data their rows are.

    Networks extrapolate, and are the surer the farther they do. So, at a distance d from the data,
    means are divided by (1 + d)^2, which keeps their order, and d^2 times the variance that logits
    have over the data is added to each.

    Args:
        logits: of n rows.
        novelty: (n,) d.
        variance: () of logits over the data.
    """
    d = novelty.to(logits.mean)[:, None]
    near = (1 + d) ** -2
    added = torch.diag_embed((d.square() * variance.to(d)).expand_as(logits.mean))
    return Moments(
        near * logits.mean, Full(near[..., None].square() * logits.covariance_matrix + added)
    )


def prediction_sets(probability: Floats, strange: Floats, level: float) -> Bools:
    """(n, k) which classes to reckon with, so that a share ``level`` of rows has its own.

    Conformal: a class belongs to the set if it is at least as probable as their own class was for a
    share ``level`` of the held-out rows. The most probable class always does. The share is that of
    all rows together: of a rare class it may be much less.

    Args:
        probability: (n, k) of the classes.
        strange: one minus the probability of their own class, of held-out rows, in order.
        level: between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"The level of prediction sets is between 0 and 1, got {level}.")
    place = math.ceil((len(strange) + 1) * level)
    most = strange[place - 1] if place <= len(strange) else 1.0
    found: Bools = 1 - probability <= most
    found[np.arange(len(found)), probability.argmax(-1)] = True
    return found


def threshold_of_risk(uncertainty: Floats, wrong: Bools, risk: float) -> float:
    """The uncertainty up to which rows may be answered with at most this share of errors.

    As held-out rows have it, of uncertainty (n,) and wrong or not (n,): as many of them as possible
    are below, and at most this share of those is wrong. Minus infinity where no threshold keeps the
    risk.
    """
    if not 0 < risk < 1:
        raise ValueError(f"A risk is a share of errors between 0 and 1, got {risk}.")
    order = np.argsort(uncertainty, kind="stable")
    values = uncertainty[order]
    shares = np.cumsum(wrong[order]) / np.arange(1, len(order) + 1)
    is_last = np.append(values[1:] > values[:-1], True)  # equal ones are answered all or none
    kept = np.flatnonzero((shares <= risk) & is_last)
    return float(values[kept[-1]]) if len(kept) else -math.inf


def threshold_of_coverage(uncertainty: Floats, coverage: float) -> float:
    """The uncertainty up to which this share of held-out rows (n,) is answered, the surest ones."""
    if not 0 < coverage <= 1:
        raise ValueError(f"A coverage is a share of rows, above 0 and at most 1, got {coverage}.")
    return float(np.sort(uncertainty)[math.ceil(len(uncertainty) * coverage) - 1])
