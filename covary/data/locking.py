"""A lock that lets one process at a time into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Keep other processes that ask for the same folder out of it within this block.

    The folder is made if it is not there, and nothing is left of the lock, however the process
    ends. Waits until others are done, or raises a ``BlockingIOError``. Where the system has no such
    locks (Windows, some network drives), nobody is kept out, and the value is False.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    is_alone = True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            is_alone = False  # a file system without locks
        yield is_alone
    finally:
        os.close(handle)
