"""What stands around every request: who may ask, what is logged, and errors as one sentence."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from covary.server.limits import Refused
from covary.server.logs import log, told_error

# Paths that are counted and logged by their name; all others are "other".
PATHS = (
    "/", "/predict", "/explain", "/health", "/ready", "/schema", "/metrics", "/docs",
    "/openapi.json",
)  # fmt: skip
# Whoever watches the server, and the page, which has nothing of the run in it, need no token.
OPEN = ("/", "/health", "/ready")
# Seconds until a request for which there is no room is told so: clients that ask again at once
# would take the time of those that wait.
_PAUSE = 0.5
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


def is_loopback(host: str) -> bool:
    """Whether a name of a host is this machine's own."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """An ASGI application around another.

    Args:
        app: the other.
        count: told the path, the status and the seconds of each request.
        check_room: refuses a prediction if too many wait.
        token: what requests need; none if it is empty.
        is_local: whether requests must name this machine as their host.
    """

    def __init__(
        self,
        app: Any,
        *,
        count: Callable[[str, int, float], None],
        check_room: Callable[[], None],
        token: str,
        is_local: bool,
    ) -> None:
        self.app, self._count, self._check_room, self._is_local = app, count, check_room, is_local
        self._token = token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """An exchange by HTTP; lifespan goes through, other protocols are refused."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        began, status = time.perf_counter(), 0

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            try:
                self._check(scope)
            except Refused as refused:
                if refused.status == 429:
                    await asyncio.sleep(_PAUSE)
                await _refuse(refused, answer)
                return
            try:
                await self.app(scope, receive, answer)
            except Exception as error:  # which was answered by the application
                log("error", **told_error(error))
        finally:
            self._told(scope, status, time.perf_counter() - began)

    def _check(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        if self._is_local and not self._token:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if not is_loopback(name):
                raise Refused(
                    403,
                    "Without a token this server answers requests to localhost alone; set "
                    "COVARY_TOKEN for requests by another name.",
                )
        if self._token and scope["path"] not in OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                raise Refused(
                    401,
                    "A token is needed: send it in the header 'Authorization: Bearer TOKEN'.",
                    WWW_Authenticate="Bearer",
                    Connection="close",
                )
        if scope["path"] in ("/predict", "/explain"):
            self._check_room()

    def _told(self, scope: Any, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"
        self._count(path, status, seconds)
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
        about = {"method": method, "path": path, "status": status, "ms": round(1e3 * seconds, 2)}
        log("request", **about, **scope.get("covary", {}))


async def _refuse(refused: Refused, send: Any) -> None:
    body = json.dumps({"error": refused.sentence}).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **refused.headers,
    }
    listed = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": listed})
    await send({"type": "http.response.body", "body": body})
