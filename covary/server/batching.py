"""Requests of many connections, computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[Item, Found]):
    item: Item
    size: int
    kind: Hashable
    future: asyncio.Future[Found]


class Batcher(Generic[Item, Found]):
    """Items -> what is computed of each, many at a time, in one thread.

    The first item of a batch waits a moment for others; while a batch is computed the next one
    gathers. All but the computation happens on the event loop, so there are no locks. An item whose
    caller has given up is not computed. If a batch fails, its items are computed one by one, so
    that only the one that is the cause fails.

    Args:
        compute: items of one kind -> as many results.
        most: the size of a batch, in the sum of its items' sizes; an item may be larger alone.
        wait: seconds that the first item waits for others.
    """

    def __init__(
        self, compute: Callable[[Sequence[Item]], Sequence[Found]], *, most: int, wait: float
    ) -> None:
        self._compute, self._most, self._wait = compute, most, wait
        self._queue: asyncio.Queue[_Waiting[Item, Found] | None] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "covary-batches")
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.batches = 0

    def start(self) -> None:
        """Begin to compute; on the event loop that items come from."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Compute what was taken, then end."""
        self._is_closing = True
        self._queue.put_nowait(None)
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def __call__(self, item: Item, *, size: int, kind: Hashable) -> Found:
        """What is computed of an item; items of different kinds are never in one batch."""
        if self._task is None or self._task.done() or self._is_closing:
            raise RuntimeError("The batches have ended.")
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Waiting(item, size, kind, future))
        return await future

    async def _run(self) -> None:
        held: _Waiting[Item, Found] | None = None
        ended = False
        while held is not None or not ended:
            first = held or await self._queue.get()
            if first is None:
                return
            batch, held, ended = await self._gathered(first, ended)
            await self._computed([each for each in batch if not each.future.done()])

    async def _gathered(
        self, first: _Waiting[Item, Found], ended: bool
    ) -> tuple[list[_Waiting[Item, Found]], _Waiting[Item, Found] | None, bool]:
        """A batch; an item that came but belongs to the next one; and whether that was all."""
        batch, size = [first], first.size
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait
        while size < self._most and not ended:
            try:
                if self._queue.empty():
                    async with asyncio.timeout_at(until):
                        item = await self._queue.get()
                else:
                    item = self._queue.get_nowait()
            except TimeoutError:
                break
            if item is None:
                ended = True
            elif item.kind != first.kind or size + item.size > self._most:
                return batch, item, ended
            else:
                batch.append(item)
                size += item.size
        return batch, None, ended

    async def _computed(self, batch: list[_Waiting[Item, Found]]) -> None:
        if not batch:
            return
        loop = asyncio.get_running_loop()
        items = [each.item for each in batch]
        try:
            results = await loop.run_in_executor(self._thread, self._compute, items)
            pairs = list(zip(batch, results, strict=True))
        except Exception as error:
            if len(batch) > 1:
                for each in batch:
                    await self._computed([each] if not each.future.done() else [])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        self.batches += 1
        for each, result in pairs:
            if not each.future.done():
                each.future.set_result(result)
