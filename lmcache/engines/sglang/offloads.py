"""Stores on a thread of their own, in order: SGLang keeps the pages locked until it is told that they are done."""

import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

log = logging.getLogger(__name__)

Work = Callable[[], bool]
"""Stores something; says whether all of it is stored. One that raises has stored nothing."""


class Offloads:
    """Work that waits, work that is done, and how it went. SGLang's scheduler thread calls every method."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]], most: int) -> None:
        """`context` is entered by the thread; `most` pages may wait at a time, for all of them are locked."""
        self._context = context
        self._most = most
        self._work: queue.SimpleQueue[tuple[Work, int] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._waiting = 0
        self._under_way = 0
        self._done: deque[bool] = deque()
        self._thread = threading.Thread(target=self._run, name="lmcache-offload", daemon=True)
        self._thread.start()

    def put(self, work: Work, pages: int) -> None:
        """Do it later; where too much waits, give it up at once: it is offered again. Answered in order either way."""
        with self._lock:
            if self._waiting + pages > self._most and self._under_way:
                work, pages = _given_up, 0
            self._waiting += pages
            self._under_way += 1
        self._work.put((work, pages))

    def completed(self) -> int:
        """How many answers are there to be taken."""
        return len(self._done)

    def take(self) -> bool:
        """The oldest answer."""
        return self._done.popleft()

    def drain(self) -> None:
        """Return when nothing is under way."""
        with self._lock:
            self._lock.wait_for(lambda: not self._under_way)

    def settle(self) -> None:
        """As `drain`, and forget the answers."""
        self.drain()
        self._done.clear()

    def close(self) -> None:
        """Finish what is under way and end the thread. Idempotent."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._context():
            while (entry := self._work.get()) is not None:
                work, pages = entry
                stored = _outcome(work)
                with self._lock:
                    self._waiting -= pages
                    self._under_way -= 1
                    self._done.append(stored)
                    self._lock.notify_all()


def _outcome(work: Work) -> bool:
    """Its answer, whatever goes wrong: SGLang keeps the pages locked until there is one."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - a device's, a driver's: the next store may work
        log.error("lmcache: a store failed; SGLang goes on without it\n%s", traceback.format_exc())  # noqa: TRY400
        return False


def _given_up() -> bool:
    return False
