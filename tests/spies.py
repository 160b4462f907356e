"""Functions that are watched while tests run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Grows by the arguments of every call of this function of a class or module."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(owner, name)

    def watched(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(owner, name, watched)
    return calls


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes of Python's objects and arrays that a call has at most at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
