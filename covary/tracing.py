"""Whether what runs is being made into a graph.

A graph has to fit all values and batches of all sizes: what runs must not look at either then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_is_tracing: ContextVar[bool] = ContextVar("covary makes a graph", default=False)


def is_traced() -> bool:
    """Whether ``torch.compile``, ``torch.export`` or ``covary.export`` makes a graph of this."""
    return torch.compiler.is_compiling() or _is_tracing.get()


def is_exported() -> bool:
    """The same without ``torch.compile``: weights will stay as they are."""
    if torch.compiler.is_compiling():  # which cannot follow ContextVar.get
        return torch.compiler.is_exporting()
    return _is_tracing.get()


@contextmanager
def tracing() -> Iterator[None]:
    """Whatever runs in this block is being made into a graph."""
    before = _is_tracing.set(True)
    try:
        yield
    finally:
        _is_tracing.reset(before)
