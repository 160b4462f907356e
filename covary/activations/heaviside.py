"""The Heaviside step, 1 for x >= 0 and 0 below."""

from __future__ import annotations

import torch
from torch import Tensor

from covary.activations.activation import ActivationMoments, MomentActivation
from covary.activations.gaussian import below, tail


def moments(mu: Tensor, var: Tensor) -> ActivationMoments:
    """Mean, variance and gain of the step for x ~ N(mu, var); docs/theory.md, eq. (10)."""
    sigma = var.sqrt()
    beyond = tail(mu, sigma)
    mean = below(mu, beyond)
    variance = beyond.mass * (1 - beyond.mass)
    return ActivationMoments(mean, variance, beyond.density / sigma)


def step(x: Tensor) -> Tensor:
    """1 where x >= 0, else 0."""
    return (x >= 0).to(x.dtype)


HEAVISIDE = MomentActivation("heaviside", step, torch.zeros_like, moments)
