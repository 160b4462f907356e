"""Progress bars for long work, on a terminal that has ``rich``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Steps = Callable[[Sequence[Any], str], Iterator[Any]]


@contextmanager
def shown(wanted: bool) -> Iterator[Steps]:
    """Wraps steps to show how far they are, if wanted and possible; else leaves them alone."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        wanted = False
    if not wanted or not (console := Console(stderr=True)).is_terminal:
        yield lambda items, name: iter(items)
        return
    with Progress(console=console, transient=True) as bar:
        yield lambda items, name: iter(bar.track(items, description=f"{name:20}"))


def is_first_process() -> bool:
    """Whether this is the only process, or the first of several that run the same command.

    ``RANK`` counts those of all nodes, and is set by torchrun; ``LOCAL_RANK`` alone by a strategy
    that starts processes itself.
    """
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
