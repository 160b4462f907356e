"""A server from its start to its end."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from covary.data.dataset import needed
from covary.runs import RunError
from covary.server.application import Serving, application
from covary.server.guard import is_loopback
from covary.server.http import Http
from covary.server.limits import Limits
from covary.server.logs import log, say_all
from covary.server.served import Served

with needed("uvicorn", "covary serve", "serve"):
    import uvicorn

TOKEN = "COVARY_TOKEN"
_LEAST_TOKEN = 16  # characters
_BACKLOG = 512


def serve(
    run: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    requests: bool = True,
    started: Callable[[str, Served], None] | None = None,
    **options: Any,
) -> None:
    """Answer requests until a signal ends it; then those that were taken are answered.

    SIGHUP loads the run again, and so does a change of its files.

    Args:
        run: the folder.
        host: an address of this machine. Of any but loopback the environment variable
            ``COVARY_TOKEN`` must have a token, which clients send.
        port: 0 is any that is free.
        limits: what is taken at most.
        requests: whether each request has a line in the log.
        started: told the address and the model when requests are answered.
        options: of ``covary.Predictor.load``.
    """
    token = checked_token(os.environ.get(TOKEN, ""), host)
    with bound(host, port) as listening:
        say_all(requests)
        load = partial(Served.load, run, **options)
        serving = Serving(lambda steps: load(progress=steps), limits or Limits(), Path(run))
        app = application(serving, token=token, is_local=is_loopback(host))
        config = configured(app, timeout_graceful_shutdown=int(serving.limits.seconds) + 1)
        address = _address(listening)
        _listen(listening, host, port)
        with _reloading(serving), _without_pauses():
            log("started", url=address, model=serving.served.digest, pid=os.getpid())
            if started is not None:
                started(address, serving.served)
            uvicorn.Server(config).run(sockets=[listening])


def configured(app: Any, **more: Any) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        app,
        http=Http,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="none",
        **more,
    )


@contextmanager
def _without_pauses() -> Iterator[None]:
    """What is there now is not searched for garbage, which takes a tenth of a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def checked_token(token: str, host: str) -> str:
    """The token, if it is one that keeps others out of a server at this address."""
    if not token and not is_loopback(host):
        raise RunError(
            f"A server at {host} answers whoever reaches it: set a token that clients have to send "
            f"({TOKEN}=$(openssl rand -hex 24)), or keep to 127.0.0.1."
        )
    if token and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        raise RunError(
            f"The token in {TOKEN} must have {_LEAST_TOKEN} printable characters of ASCII or more; "
            "make one with: openssl rand -hex 24"
        )
    return token


def bound(host: str, port: int) -> socket.socket:
    """A socket that nobody else has; it does not listen yet."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise RunError(
            f"There is no address {host!r} on this machine ({error.strerror})."
        ) from None
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
    except OSError as error:
        found.close()
        raise _told(error, host, port) from None
    return found


def _listen(listening: socket.socket, host: str, port: int) -> None:
    try:
        listening.listen(_BACKLOG)
    except OSError as error:  # another began to listen while the run was loaded
        raise _told(error, host, port) from None


def _told(error: OSError, host: str, port: int) -> RunError:
    if error.errno == errno.EADDRINUSE:
        return RunError(
            f"Port {port} of {host} is in use. Choose another (--port), or any that is free "
            "(--port 0)."
        )
    if error.errno == errno.EACCES:
        return RunError(f"Port {port} is not for all users. Choose one from 1024 on (--port).")
    return RunError(f"Nothing can listen at {host}, port {port}: {error.strerror}.")


def _address(listening: socket.socket) -> str:
    name, port = listening.getsockname()[:2]
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"


@contextmanager
def _reloading(serving: Serving) -> Iterator[None]:
    """SIGHUP loads the run again, where there is such a signal."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: serving.reload_soon())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
