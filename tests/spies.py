"""Functions that are watched while tests run."""

from __future__ import annotations

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
