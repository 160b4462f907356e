"""The HTTP interface of a served run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from covary.data import DataError
from covary.data.dataset import needed
from covary.progress import Steps
from covary.server import documented
from covary.server.batching import Batcher
from covary.server.bodies import content_type, read_body
from covary.server.counting import Counts
from covary.server.guard import Guard
from covary.server.limits import Limits, Refused
from covary.server.logs import log
from covary.server.page import PAGE, POLICY
from covary.server.served import Question, Reply, Served, encoded, replies, stamps_of

with needed("fastapi", "covary serve", "serve"):
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

# Long bodies that are read at the same time, and bytes that are not long.
_READERS, _SHORT = 2, 2**15


class Serving:
    """A run while it is served: the model that answers, what waits, and what is counted.

    Args:
        load: gives the run as it is in its folder now; what takes long goes through the steps
            that it is given.
        limits: what is taken at most.
        folder: of the run; a change of its files is noticed.
        look: seconds between two looks at them.
    """

    def __init__(
        self, load: Callable[[Steps], Served], limits: Limits, folder: Any, *, look: float = 2.0
    ) -> None:
        self._has_ended = False
        self.served, self.limits, self.counts = load(self._steps), limits, Counts()
        self.trouble = ""  # why files that were exchanged are not what answers
        self.pending = 0
        self.batcher: Batcher[Question, Reply] = Batcher(
            replies, most=limits.batch, wait=limits.wait
        )
        self._load, self._folder, self._look = load, folder, look
        self._readers = ThreadPoolExecutor(_READERS, "covary-bodies")
        self._asked_to_reload = False

    def check_room(self) -> None:
        """Refuse a request if as many wait as are taken, before anything is done for it."""
        if self.pending >= self.limits.queue:
            raise Refused(
                429,
                f"{self.pending} requests wait, as many as are taken: try again in a moment.",
                Retry_After="1",
            )

    async def predict(self, request: Request, *, explained: bool) -> Reply:
        """The reply to a request, within its limits."""
        self.pending += 1
        try:
            return await self._predicted(request, explained)
        finally:
            self.pending -= 1

    async def _predicted(self, request: Request, explained: bool) -> Reply:
        served, limits, headers = self.served, self.limits, request.headers
        kind = content_type(headers.get("content-type", ""), served.predictor.schema)
        until = asyncio.get_running_loop().time() + limits.seconds
        try:
            async with asyncio.timeout_at(until):
                body = await _body(request, limits.body)
        except TimeoutError:
            told = f"The body did not come within {limits.seconds:g} seconds."
            raise Refused(408, told, Connection="close") from None
        most = 1 if explained else limits.rows
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until):
                read = partial(read_body, served.predictor, kind, body, most)
                # To hand a short body to a thread takes longer than to read it.
                is_short = len(body) <= _SHORT
                chunk = read() if is_short else await loop.run_in_executor(self._readers, read)
                question = Question(served, chunk, explained)
                reply = await self.batcher(
                    question,
                    size=limits.batch if explained else len(chunk.x),
                    kind=(id(served), explained),
                )
        except DataError as error:
            raise Refused(422, str(error)) from None
        except TimeoutError:
            raise Refused(
                503,
                f"No answer within {limits.seconds:g} seconds: try again, or send fewer rows.",
                Retry_After="1",
            ) from None
        if served is self.served:
            scores = {"novelty": reply.novelty, "uncertainty": reply.uncertainty}
        else:
            scores = {}
        self.counts.answered(reply.rows, reply.asked, **scores)
        return reply

    def reload_soon(self) -> None:
        """Load the run again at the next look, whether or not its files have changed."""
        self._asked_to_reload = True

    async def watch(self) -> None:
        """Load the run again whenever its files change; what cannot be loaded changes nothing."""
        tried = before = self.served.stamps
        while True:
            await asyncio.sleep(self._look)
            now = await asyncio.to_thread(stamps_of, self._folder)
            # Files are exchanged one after the other: they must have been the same for one look.
            has_settled, before = now == before, now
            if self._asked_to_reload or (has_settled and now != tried):
                self._asked_to_reload, tried = False, now
                await self._reload()
                if not self.trouble:
                    tried = before = self.served.stamps

    async def _reload(self) -> None:
        try:
            found = await asyncio.to_thread(self._load, self._steps)
        except Exception as error:
            self.counts.failed_reloads += 1
            self.trouble = (
                "The files of the run changed and could not be loaded: the earlier model answers."
            )
            log("reload failed", model=self.served.digest, error=f"{type(error).__name__}: {error}")
            return
        self.trouble = ""
        self.counts.reloads += 1
        self.counts.forget_scores()
        log("reloaded", model=found.digest, before=self.served.digest)
        self.served = found

    def _steps(self, items: Sequence[Any], _: str) -> Iterator[Any]:
        """The steps of loading a run, until the server ends: its fit may take minutes."""
        for item in items:
            if self._has_ended:
                raise RuntimeError("The server ended while the run was loaded again.")
            yield item

    @asynccontextmanager
    async def running(self, _: Any = None) -> AsyncIterator[None]:
        """While requests are answered; what was taken is answered before it ends."""
        self.batcher.start()
        watching = asyncio.create_task(self.watch())
        try:
            yield
        finally:
            self._has_ended = True
            watching.cancel()
            await self.batcher.close()
            self._readers.shutdown(cancel_futures=True)
            log("stopped", model=self.served.digest)


async def _body(request: Request, most: int) -> bytes:
    """All of a body, if it is not too long."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        told = f"The body is compressed ({encoding[:40]!r}), which is not taken: send it as it is."
        raise Refused(415, told, Connection="close")
    told = f"The body is longer than {most:,} bytes, the most that is taken: send fewer rows."
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > most:
        raise Refused(413, told, Connection="close")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refused(413, told, Connection="close")
        parts.append(part)
    return b"".join(parts)


def application(serving: Serving, *, token: str = "", is_local: bool = True) -> Any:
    """An ASGI application that serves a run.

    Args:
        serving: the run.
        token: what clients must know; there is none if it is empty.
        is_local: whether it is for this machine alone: names of other hosts are refused then, as
            pages of the web could reach it by them.
    """
    app = FastAPI(
        title="covary serve",
        version=version("covary"),
        description=documented.DESCRIPTION,
        lifespan=serving.running,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=documented.REFUSALS,
    )

    _answer_errors(app)
    _add_pages(app, serving)
    predictions = {
        "/predict": _without_routing(app, partial(_answered, serving, explained=False)),
        "/explain": _without_routing(app, partial(_answered, serving, explained=True)),
    }

    async def routed(scope: Any, receive: Any, send: Any) -> None:
        known = predictions.get(scope.get("path")) if scope.get("method") == "POST" else None
        await (known or app)(scope, receive, send)

    return Guard(
        routed,
        count=serving.counts.request,
        check_room=serving.check_room,
        token=token,
        is_local=is_local,
    )


def _as_json(content: Any, status: int = 200, **headers: str) -> Response:
    return Response(encoded(content), status, headers, "application/json")


def _answer_errors(app: FastAPI) -> None:
    """Errors as an object with one sentence."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Any) -> Response:
        return _as_json({"error": error.sentence}, error.status, **error.headers)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: Any) -> Response:
        return _as_json({"error": documented.told(error.status_code)}, error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Any) -> Response:
        return Response(status_code=499)  # which nobody reads

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Any) -> Response:
        return _as_json({"error": documented.told(500)}, 500)


async def _answered(serving: Serving, request: Request, *, explained: bool) -> Response:
    reply = await serving.predict(request, explained=explained)
    request.scope["covary"] = {"rows": reply.rows, "model": reply.model}
    return Response(reply.body, media_type="application/json")


def _without_routing(app: FastAPI, answer: Callable[[Request], Awaitable[Response]]) -> Any:
    """An ASGI application of one page: what is asked most does without the layers of FastAPI.

    They take longer than a prediction does in a batch. Errors have the answers of ``app``, whose
    own page of that path describes it, and answers other methods.
    """

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send)
        try:
            response = await answer(request)
        except Exception as error:
            kind = next(kind for kind in type(error).__mro__ if kind in app.exception_handlers)
            told: Any = app.exception_handlers[kind]
            response = await told(request, error)
            await response(scope, receive, send)
            if kind is Exception:
                raise  # to whoever logs it
            return
        await response(scope, receive, send)

    return answered


def _add_pages(app: FastAPI, serving: Serving) -> None:
    """All that can be asked."""

    @app.post("/predict", **documented.PREDICT)
    async def predict(request: Request) -> Response:
        return await _answered(serving, request, explained=False)

    @app.post("/explain", **documented.EXPLAIN)
    async def explain(request: Request) -> Response:
        return await _answered(serving, request, explained=True)

    @app.get("/schema", summary="What may be asked, and what answers mean")
    async def schema() -> Response:
        limits = {name: getattr(serving.limits, name) for name in ("body", "rows", "seconds")}
        return _as_json({**serving.served.described(), "limits": limits})

    @app.get("/health", summary="Whether the server runs")
    async def health() -> Response:
        return _as_json({"status": "ok"})

    @app.get("/ready", summary="Whether it answers, and by which model")
    async def ready() -> Response:
        found = {"status": "ready", "model": serving.served.digest}
        return _as_json({**found, "trouble": serving.trouble} if serving.trouble else found)

    @app.get("/metrics", summary="Counts, in the text format of Prometheus")
    async def metrics() -> Response:
        told = serving.counts.text(
            serving.served.held_out,
            digest=serving.served.digest,
            waiting=serving.pending,
            batches=serving.batcher.batches,
        )
        return PlainTextResponse(told, media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(documented.page(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE, headers={"content-security-policy": POLICY})
