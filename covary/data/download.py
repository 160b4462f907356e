"""Fetching one file: checked, resumed where it was cut, and in place only when it is whole."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covary.data.dataset import DataError, needed
from covary.data.locking import held

if TYPE_CHECKING:
    import requests

Maker = Callable[[Sequence[Path], Path], None]

RETRIES = 2
CONNECT_AND_READ_SECONDS = (10, 60)
CHUNK_BYTES = 1 << 14  # small, as the chunk that was under way is lost when a connection is cut


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
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
        digest: SHA-256 of the bytes, or of the values where the bytes may differ.
        made_from: files to fetch in its stead, from which ``make`` writes it.
        make: ``make(sources, path)``.
    """

    path: str
    sha256: str | None
    urls: tuple[str, ...] = ()
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


def fetch_file(file: File, folder: Path, *, progress: bool = True) -> Path:
    """Have ``folder / file.path``; a file that is there and right is left alone."""
    target = folder / file.path
    if _is_right(file, target):
        return target
    try:
        # of several processes that miss the same file one fetches it
        with held(target.parent, wait=True):
            if _is_right(file, target):
                pass
            elif file.make:
                _assemble(file, file.make, target, progress=progress)
            else:
                _download(file, target, progress=progress)
    except OSError as error:
        raise DataError(
            f"Cannot write {target} ({error.strerror or error}); choose another folder with "
            "--data-dir."
        ) from error
    return target


def _is_right(file: File, target: Path) -> bool:
    """Whether it is there, and what it should be; else it is replaced, once there is another."""
    if not target.exists():
        return False
    try:
        file.check(target)
    except DataError:
        return False
    return True


def _assemble(file: File, make: Maker, target: Path, *, progress: bool) -> None:
    """Fetch what the file is made from into a folder beside it, make it, check it, move it."""
    workshop = target.with_name(target.name + ".parts")
    sources = [fetch_file(source, workshop, progress=progress) for source in file.made_from]
    try:
        made = workshop / target.name
        make(sources, made)
        file.check(made)
        made.replace(target)
    finally:
        shutil.rmtree(workshop)


def _download(file: File, target: Path, *, progress: bool) -> None:
    """Try one address after the other; the part that one gave is continued at the next."""
    with needed("pooch", "fetching data", "data"):
        import pooch
        import requests
    failures = []
    for url in file.urls:
        # pooch tries again where a try fails, and moves the file into place when its hash is right
        store = pooch.create(
            path=target.parent,
            base_url="",
            registry={target.name: file.sha256},
            urls={target.name: url},
            retry_if_failed=RETRIES,
        )
        try:
            with _quiet(pooch.get_logger()):
                store.fetch(target.name, downloader=Resuming(file, target, progress=progress))
            return
        except DataError as error:
            failures.append(str(error))
        except requests.RequestException as error:
            failures.append(f"{url} ({_reason(error)})")
    raise DataError(
        f"Could not fetch {target.name}: {'; '.join(failures)}; try again later (a download that "
        f"was cut is continued), put the file into {target.parent} by hand, or name a folder that "
        "has it: --data-dir or $COVARY_DATA (data_dir= in Python)."
    )


class Resuming:
    """A pooch downloader that keeps what has arrived in ``<file>.part`` and asks for the rest."""

    def __init__(self, file: File, target: Path, *, progress: bool) -> None:
        self.file = file
        self.part = target.with_name(target.name + ".part")
        self.progress = progress

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        """Fetch ``url`` into ``output_file``, which exists only when the content is right."""
        import requests

        start = self.part.stat().st_size if self.part.exists() else 0
        # no compression on the way: the bytes themselves are counted and hashed
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with requests.get(
            url, headers=headers, stream=True, timeout=CONNECT_AND_READ_SECONDS
        ) as response:
            # 416: nothing is left to send, so the part is whole, or wrong, as its hash will tell
            if response.status_code != 416:
                response.raise_for_status()
                self._write(response, start)
        if self.file.sha256 and (got := file_sha256(self.part)) != self.file.sha256:
            self.part.unlink()
            raise DataError(
                f"{url} gave a file with SHA-256 {got}, expected {self.file.sha256}, "
                "and it was deleted"
            )
        self.part.replace(output_file)

    def _write(self, response: requests.Response, start: int) -> None:
        # a server that ignores the range sends everything, with status 200
        resumed = response.status_code == 206
        length = int(response.headers.get("Content-Length", 0))
        done = start if resumed else 0
        with (
            self.part.open("ab" if resumed else "wb") as part,
            _bar(self.part.stem, done, done + length, show=self.progress) as advance,
        ):
            for chunk in response.iter_content(CHUNK_BYTES):
                part.write(chunk)
                advance(len(chunk))


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
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Without pooch's account of its doings."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


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
