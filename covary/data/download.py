"""Fetching one file: checked, bounded in size and time, in place only when it is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from covary.data.dataset import DataError, needed
from covary.data.locking import locked
from covary.files import check_is_file

if TYPE_CHECKING:
    import requests

TRIES = 3  # of each address
PAUSE_SECONDS = 1.0
CONNECT_AND_READ_SECONDS = (10, 60)
CHUNK_BYTES = 1 << 14
# A file may be 5 % and 64 kB larger than the catalogue says; one of unknown size at most 1 GB.
MARGIN, MARGIN_BYTES, MOST_BYTES = 0.05, 1 << 16, 1 << 30
# All tries together take no longer than a slow connection does.
LEAST_BYTES_PER_SECOND, LEAST_SECONDS = 50_000, 300.0


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    check_is_file(path, DataError)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class File:
    """A file below a data folder."""

    path: str  # where it lies below the folder, e.g. mnist/t10k-labels-idx1-ubyte.gz
    sha256: str | None  # what `digest` gives for the right file; None where it is not known
    urls: tuple[str, ...] = ()  # addresses of the same bytes, tried in turn
    size: int = 0  # in bytes, 0 where it is not known; a larger file is not fetched
    digest: Callable[[Path], str] = file_sha256  # of the values, where the bytes may differ
    made_from: tuple[File, ...] = ()  # files to fetch in its stead, from which `make` writes it
    make: Callable[[Sequence[Path], Path], None] | None = None  # make(sources, path)

    def check(self, path: Path) -> None:
        """Raise a ``DataError`` unless ``path`` has the right content."""
        if self.sha256 is not None and (got := self.digest(path)) != self.sha256:
            raise DataError(
                f"{path} is damaged or another version: its SHA-256 is {got}, expected "
                f"{self.sha256}; delete it, and fetch it again with `covary data fetch`."
            )

    @property
    def most_bytes(self) -> int:
        """A download that is larger is given up."""
        return round(self.size * (1 + MARGIN)) + MARGIN_BYTES if self.size else MOST_BYTES

    @property
    def most_seconds(self) -> float:
        """A download that takes longer is given up, with all its tries."""
        return LEAST_SECONDS + self.most_bytes / LEAST_BYTES_PER_SECOND


def fetch_file(file: File, folder: Path, *, progress: bool = True) -> Path:
    """Have ``folder / file.path``; a file that is there and right is left alone."""
    target = folder / file.path
    if _is_right(file, target):
        return target
    try:
        # of several processes that miss the same file one fetches it
        with locked(target.parent, wait=True) as alone:
            # where there are no locks, each has parts of its own
            part = target.with_name(target.name + ("" if alone else f".{os.getpid()}") + ".part")
            if not _is_right(file, target):
                obtain = _assemble if file.make else _download
                obtain(file, target, part, progress)
    except OSError as error:
        raise DataError(
            f"Cannot write {target} ({error.strerror or error}); make room for it there, or choose "
            "another folder with --data-dir."
        ) from error
    return target


def _is_right(file: File, target: Path) -> bool:
    """Whether it is there, and what it should be; else it is replaced, once there is another."""
    if not target.exists():
        return False
    check_is_file(target, DataError)
    try:
        file.check(target)
    except DataError:
        return False
    return True


def _assemble(file: File, target: Path, workshop: Path, progress: bool) -> None:
    """Fetch what the file is made from into a folder beside it, make it, check it, move it."""
    sources = [fetch_file(source, workshop, progress=progress) for source in file.made_from]
    try:
        made = workshop / target.name
        assert file.make is not None
        file.make(sources, made)
        file.check(made)
        made.replace(target)
    finally:
        shutil.rmtree(workshop)


class GaveUpError(DataError):
    """A download that another try would not mend."""


def _download(file: File, target: Path, part: Path, progress: bool) -> None:
    """Try one address after the other; the part that one gave is continued at the next."""
    with needed("requests", "fetching data", "data"):
        import requests
    if part.exists():
        check_is_file(part, DataError)
    deadline = time.monotonic() + file.most_seconds
    failures = []
    for url in file.urls:
        failure = ""
        for attempt in range(TRIES):
            if time.monotonic() > deadline:
                break
            if attempt:
                time.sleep(PAUSE_SECONDS)
            try:
                _receive(file, url, part, deadline, progress)
                part.replace(target)
                return
            except GaveUpError as error:
                failure = str(error)
                break
            except DataError as error:
                failure = str(error)
            except requests.RequestException as error:
                failure = f"{url} ({_reason(error)})"
        failures += [failure] if failure else []
    raise DataError(
        f"Could not fetch {target.name}: {'; '.join(failures)}; try again later (a download that "
        f"was cut is continued), put the file into {target.parent} by hand, or name a folder that "
        "has it: --data-dir or $COVARY_DATA (data_dir= in Python)."
    )


def _receive(file: File, url: str, part: Path, deadline: float, progress: bool) -> None:
    """Have the whole file in ``part``, which keeps what arrived when a connection is cut."""
    import requests

    start = part.stat().st_size if part.exists() else 0
    # no compression on the way: the bytes themselves are counted and hashed
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with requests.get(
        url, headers=headers, stream=True, timeout=CONNECT_AND_READ_SECONDS
    ) as response:
        # 416: nothing is left to send, so the part is whole, or wrong, as its hash will tell
        if response.status_code != 416:
            response.raise_for_status()
            # a server that ignores the range sends everything, with status 200
            resumed = response.status_code == 206
            sent = response.headers.get("Content-Range", "")
            if resumed and not sent.startswith(f"bytes {start}-"):
                part.unlink(missing_ok=True)
                raise DataError(f"{url} sent another part of the file than it was asked for")
            _write(response, file, part, start if resumed else 0, deadline, progress)
    if file.sha256 and (got := file_sha256(part)) != file.sha256:
        part.unlink()
        raise DataError(
            f"{url} gave a file with SHA-256 {got}, expected {file.sha256}, and it was deleted"
        )


def _write(
    response: requests.Response, file: File, part: Path, done: int, deadline: float, progress: bool
) -> None:
    """Append what arrives to the part, as long as it stays within the limits."""
    import requests
    from urllib3.exceptions import HTTPError

    length = response.headers.get("Content-Length", "")
    total = done + int(length) if length.isdecimal() else 0
    _check_limits(file, response.url, part, total, deadline)
    # what has arrived at once, so that a server that hardly sends anything cannot hold us here
    read = getattr(response.raw, "read1", response.raw.read)
    with (
        part.open("ab" if done else "wb") as output,
        _bar(part.stem, done, total, show=progress) as advance,
    ):
        try:
            while chunk := read(CHUNK_BYTES, decode_content=False):
                done += len(chunk)
                output.write(chunk)
                advance(len(chunk))
                _check_limits(file, response.url, part, done, deadline)
        except HTTPError as error:
            raise requests.exceptions.ChunkedEncodingError from error
    if done < total:
        raise requests.exceptions.ChunkedEncodingError


def _check_limits(file: File, url: str, part: Path, size: int, deadline: float) -> None:
    megabytes = f"{size / 1e6:.3g} MB"
    if size > file.most_bytes:
        part.unlink(missing_ok=True)
        expected = f"{file.size / 1e6:.3g} MB" if file.size else "1 GB at most"
        raise GaveUpError(f"{url} sends {megabytes} or more, expected {expected}")
    if time.monotonic() > deadline:
        minutes = file.most_seconds / 60
        raise GaveUpError(f"{url} took longer than {minutes:.0f} minutes for {megabytes}")


def _reason(error: requests.RequestException) -> str:
    """Why a request failed, in a few words; the library's own messages fill paragraphs."""
    from requests import exceptions

    if error.response is not None:
        return f"HTTP status {error.response.status_code}"
    reasons = {
        exceptions.Timeout: "no answer in time",
        exceptions.ChunkedEncodingError: "the connection was cut",
        exceptions.ConnectionError: "no connection",
    }
    known = (reason for kind, reason in reasons.items() if isinstance(error, kind))
    return next(known, type(error).__name__)


@contextmanager
def _bar(name: str, done: int, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere; gives a function that advances it."""
    if not (show and sys.stderr.isatty() and find_spec("rich")):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total or None, completed=done)
        yield lambda count: bar.advance(task, count)
