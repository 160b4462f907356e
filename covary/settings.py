"""Two switches, each a context manager: what gradients reach, and which checks run.

Both apply to the forward pass made inside the ``with`` block; ``backward()`` may be called outside
it, unless activation checkpointing repeats the forward pass there. A thread starts with the
defaults, an asyncio task with the switches of its creator, and a generator shares its caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache

import torch

from covary.tracing import is_traced

_current: ContextVar[_Settings] = ContextVar("covary settings")


class _Settings:
    """The switches as the open blocks, (name, enabled) each, have set them, the innermost last."""

    # property() calls its function with the object, and ContextVar.get takes that as the default:
    # _defaults.current is _defaults itself where no block was ever opened. torch.compile cannot
    # trace ContextVar.get, but it looks up a property that is made of a C function each time it
    # checks a compiled graph, and so compiles again when a switch is turned.
    current = property(_current.get)

    def __init__(self, *blocks: tuple[str, bool]) -> None:
        self.blocks = blocks
        self.supervise_covariance = False
        self.check_values = True
        for name, enabled in blocks:
            setattr(self, name, enabled)
        self.traced: _Settings | None = None


_defaults = _Settings()


def _now() -> _Settings:
    settings: _Settings = _defaults.traced or _defaults.current
    return settings


@contextmanager
def _block(name: str, enabled: bool) -> Iterator[None]:
    block = (name, enabled)
    after = _Settings(*_now().blocks, block)
    if torch.compiler.is_compiling():
        # Nothing else runs before the block of a compiled function ends; attributes can be traced.
        before, _defaults.traced = _defaults.traced, after
        try:
            yield
        finally:
            _defaults.traced = before
        return
    _current.set(after)
    try:
        yield
    finally:
        # Not what was before: blocks of generators may end in any order.
        left = [each for each in _now().blocks if each is not block]
        _current.set(_Settings(*left) if left else _defaults)


def supervise_covariance(enabled: bool = True) -> AbstractContextManager[None]:
    """Let gradients flow through the covariance too (SMSC) within this block.

    The default is SMUC, supervised mean and unsupervised covariance: gradients reach the parameters
    through the mean alone (docs/theory.md, eq. 23). Losses that contain the covariance, such as
    ``mse + out.variance.sum(-1)`` (eq. 24) or a Gaussian negative log-likelihood, need this switch.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 1], noise=0.2)
        >>> with covary.supervise_covariance():
        ...     out = net(torch.ones(3, 4))
        >>> out.variance.sum().backward()
        >>> net.linear1.weight.grad.shape
        torch.Size([8, 4])
    """
    return _block("supervise_covariance", enabled)


def check_values(enabled: bool) -> AbstractContextManager[None]:
    """Switch the checks that read every input value (is it NaN or infinite?) on or off.

    Checks of types and shapes always run. Within ``torch.compile`` and ``torch.func.vmap``, where
    values cannot be looked at, this check is always off.
    """
    return _block("check_values", enabled)


def covariance_is_supervised() -> bool:
    """Whether gradients flow through the covariance at this moment (SMSC)."""
    return _now().supervise_covariance and torch.is_grad_enabled()


def values_are_checked() -> bool:
    """Whether layers look for NaN and infinity in their input at this moment."""
    # A graph must not depend on the values it is given.
    return not is_traced() and _now().check_values


def covariance_grad() -> AbstractContextManager[None]:
    """The gradient mode in which layers compute covariances: off in SMUC, as it is in SMSC."""
    return torch.set_grad_enabled(covariance_is_supervised())


# Devices without values, such as "meta", have no autocast to ask for.
_has_autocast = cache(torch.amp.is_autocast_available)


def is_autocast(device: torch.device) -> bool:
    """Whether operations on this device would run in half precision at this moment."""
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Full precision within a block: half has not the digits for variances of small noise."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()
