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
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from covary.data.dataset import DataError, needed, regular_file
from covary.data.locking import held

if TYPE_CHECKING:
    import requests

Maker = Callable[[Sequence[Path], Path], None]

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
    digest = hashlib.sha256()
    with regular_file(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class File:
    """A file below a data folder.

    Attributes:
        path: where it lies below the folder, e.g. ``mnist/t10k-labels-idx1-ubyte.gz``.
        sha256: what ``digest`` gives for the right file; None where the bytes are not known.
        urls: addresses of the same bytes, tried in turn.
        size: in bytes, as far as it is known (0: not at all); a larger file is not fetched.
        digest: SHA-256 of the bytes, or of the values where the bytes may differ.
        made_from: files to fetch in its stead, from which ``make`` writes it.
        make: ``make(sources, path)``.
    """

    path: str
    sha256: str | None
    urls: tuple[str, ...] = ()
    size: int = 0
    digest: Callable[[Path], str] = file_sha256
    made_from: tuple[File, ...] = ()
    make: Maker | None = None

    def check(self, path: Path) -> None:
        """Raise a ``DataError`` unless ``path`` holds the right content."""
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


class GaveUpError(DataError):
    """A download that another try would not mend."""


def fetch_file(file: File, folder: Path, *, progress: bool = True) -> Path:
    """Have ``folder / file.path``; a file that is there and right is left alone."""
    target = folder / file.path
    if _is_right(file, target):
        return target
    try:
        # of several processes that miss the same file one fetches it
        with held(target.parent, wait=True) as alone:
            # where there are no locks, each has parts of its own
            part = target.with_name(target.name + ("" if alone else f".{os.getpid()}") + ".part")
            if _is_right(file, target):
                pass
            elif file.make:
                _assemble(file, file.make, target, part, progress=progress)
            else:
                _download(file, target, part, progress=progress)
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
    regular_file(target)
    try:
        file.check(target)
    except DataError:
        return False
    return True


def _assemble(file: File, make: Maker, target: Path, workshop: Path, *, progress: bool) -> None:
    """Fetch what the file is made from into a folder beside it, make it, check it, move it."""
    sources = [fetch_file(source, workshop, progress=progress) for source in file.made_from]
    try:
        made = workshop / target.name
        make(sources, made)
        file.check(made)
        made.replace(target)
    finally:
        shutil.rmtree(workshop)


def _download(file: File, target: Path, part: Path, *, progress: bool) -> None:
    """Try one address after the other; the part that one gave is continued at the next."""
    with needed("requests", "fetching data", "data"):
        import requests
    if part.exists():
        regular_file(part)
    deadline = time.monotonic() + file.most_seconds
    failures: dict[str, str] = {}
    hopeless = set()
    for url, attempt in product(file.urls, range(TRIES)):
        if url in hopeless or time.monotonic() > deadline:
            continue
        if attempt:
            time.sleep(PAUSE_SECONDS)
        try:
            _receive(file, url, part, deadline, progress=progress)
            part.replace(target)
            return
        except DataError as error:
            failures[url] = str(error)
            if isinstance(error, GaveUpError):
                hopeless.add(url)
        except requests.RequestException as error:
            failures[url] = f"{url} ({_reason(error)})"
    raise DataError(
        f"Could not fetch {target.name}: {'; '.join(failures.values())}; try again later (a "
        f"download that was cut is continued), put the file into {target.parent} by hand, or name "
        "a folder that has it: --data-dir or $COVARY_DATA (data_dir= in Python)."
    )


def _receive(file: File, url: str, part: Path, deadline: float, *, progress: bool) -> None:
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
            asked = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            resumed = response.status_code == 206 and asked
            if response.status_code == 206 and not resumed:
                part.unlink(missing_ok=True)
                raise DataError(f"{url} sent another part of the file than it was asked for")
            _write(response, file, part, start if resumed else 0, deadline, progress=progress)
    if file.sha256 and (got := file_sha256(part)) != file.sha256:
        part.unlink()
        raise DataError(
            f"{url} gave a file with SHA-256 {got}, expected {file.sha256}, and it was deleted"
        )


def _write(
    response: requests.Response,
    file: File,
    part: Path,
    done: int,
    deadline: float,
    *,
    progress: bool,
) -> None:
    """Append what arrives to the part, as long as it stays within the limits."""
    import requests
    from urllib3.exceptions import HTTPError

    url, length = response.url, response.headers.get("Content-Length", "")
    total = done + int(length) if length.isdecimal() else 0
    _check_size(file, url, part, total)
    # what has arrived at once, so that a server that hardly sends anything cannot hold us here
    read = getattr(response.raw, "read1", response.raw.read)
    with (
        part.open("ab" if done else "wb") as output,
        _bar(part.stem, done, total, show=progress) as advance,
    ):
        try:
            while chunk := read(CHUNK_BYTES, decode_content=False):
                done += len(chunk)
                _check_size(file, url, part, done)
                output.write(chunk)
                advance(len(chunk))
                if time.monotonic() > deadline:
                    raise GaveUpError(
                        f"{url} took longer than {file.most_seconds / 60:.0f} minutes for "
                        f"{done / 1e6:.3g} MB"
                    )
        except HTTPError as error:
            raise requests.exceptions.ChunkedEncodingError from error
    if done < total:
        raise requests.exceptions.ChunkedEncodingError


def _check_size(file: File, url: str, part: Path, size: int) -> None:
    if size > file.most_bytes:
        part.unlink(missing_ok=True)
        expected = f"{file.size / 1e6:.3g} MB" if file.size else "1 GB at most"
        raise GaveUpError(f"{url} sends {size / 1e6:.3g} MB or more, expected {expected}")


def _reason(error: requests.RequestException) -> str:
    """Why a request failed, in a few words; the library's own messages fill paragraphs."""
    import requests

    if error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection was cut"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return type(error).__name__


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
