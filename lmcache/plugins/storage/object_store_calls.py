"""Calls of obstore with an end: an event loop in its own thread, so that a call can be given up in time."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lmcache.errors import TierError

T = TypeVar("T")


class Calls:
    """Runs asynchronous calls for threads that wait for them. Thread-safe."""

    def __init__(self, name: str, at_once: int) -> None:
        """Start the thread; `at_once` requests may be in progress together."""
        self._name = name
        self._free = asyncio.Semaphore(at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"lmcache {name}", daemon=True)
        self._thread.start()

    def run(self, request: Callable[[], Awaitable[T]], deadline: float) -> T:
        """What the request returns. When this has returned or raised, nothing of the request runs any more.

        Raises what the request raises, and TierError at the deadline.
        """
        left = deadline - time.monotonic()
        try:
            return self._wait(asyncio.wait_for(self._one(request), max(0.0, left)))
        except TimeoutError:
            raise TierError(f"{self._name} did not answer in time") from None

    def run_all(self, requests: Sequence[Callable[[], Awaitable[T]]], deadline: float) -> list[T | BaseException]:
        """What each request returns or raises, in their order; TierError for those that are late."""
        return self._wait(self._all(requests, deadline))

    def close(self) -> None:
        """Give up what is in progress, end the thread."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._wait(self._cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _one(self, request: Callable[[], Awaitable[T]]) -> T:
        async with self._free:
            return await request()

    async def _all(self, requests: Sequence[Callable[[], Awaitable[T]]], deadline: float) -> list[T | BaseException]:
        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        in_time = TierError(f"{self._name} did not answer in time")
        return [in_time if isinstance(answer, asyncio.CancelledError) else answer for answer in answers]

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
