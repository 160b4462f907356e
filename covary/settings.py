"""Two switches, each a context manager: what gradients reach, and which checks run.

Both hold for the current thread and for the forward pass made inside the ``with`` block;
``backward()`` may be called outside it, unless activation checkpointing makes it repeat the forward
pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class _Settings(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        # On the instance, not on the class: torch.compile guards what it finds there, and compiles
        # again when a switch is turned.
        self.supervise_covariance = False
        self.check_values = True


_settings = _Settings()


@contextmanager
def supervise_covariance(enabled: bool = True) -> Iterator[None]:
    """Let gradients flow through the covariance too (SMSC) within this block.

    The default everywhere in covary is SMUC, supervised mean and unsupervised covariance: gradients
    reach the parameters through the mean alone and covariances count as constants (docs/theory.md,
    eq. 18). Losses that contain the covariance, such as ``mse + out.variance.sum(-1)`` (eq. 19) or
    a Gaussian negative log-likelihood, need this switch:

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 1], noise=0.2)
        >>> with covary.supervise_covariance():
        ...     out = net(torch.ones(3, 4))
        >>> out.variance.sum().backward()
        >>> net.linear1.weight.grad.shape
        torch.Size([8, 4])
    """
    previous = _settings.supervise_covariance
    _settings.supervise_covariance = enabled
    try:
        yield
    finally:
        _settings.supervise_covariance = previous


@contextmanager
def check_values(enabled: bool) -> Iterator[None]:
    """Switch the checks that read every input value (is it NaN or infinite?) on or off.

    Checks of types and shapes cost nothing and always run. Within ``torch.compile`` and
    ``torch.func.vmap``, where values cannot be looked at, this check is always off.
    """
    previous = _settings.check_values
    _settings.check_values = enabled
    try:
        yield
    finally:
        _settings.check_values = previous


def covariance_is_supervised() -> bool:
    """Whether gradients flow through the covariance at this moment (SMSC)."""
    return _settings.supervise_covariance and torch.is_grad_enabled()


def values_are_checked() -> bool:
    """Whether layers look for NaN and infinity in their input at this moment."""
    # A compiled graph must not depend on the values it is given.
    return _settings.check_values and not torch.compiler.is_compiling()


def covariance_grad() -> AbstractContextManager[None]:
    """The gradient mode in which layers compute covariances: off in SMUC, as it is in SMSC."""
    return torch.set_grad_enabled(covariance_is_supervised())


def is_autocast(device: torch.device) -> bool:
    """Whether operations on this device would run in half precision at this moment."""
    # Devices without values, such as "meta", have no autocast to ask for.
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Full precision within a block that autocast would run in half.

    Half precision has neither the range nor the digits for the variances of small noise.
    """
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()
