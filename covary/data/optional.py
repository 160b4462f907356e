"""Libraries that only some of the data need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(library: str, purpose: str, extra: str) -> Iterator[None]:
    """Around an import: say what the library is needed for and how to install it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose} needs {library}: pip install 'covary[{extra}]'") from error
