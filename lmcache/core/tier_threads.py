"""A tier's threads: calls go in, what came of them comes out. They block so that the server's thread never does.

Nothing here knows the cache. A call that does not come back is given up on by whoever waits for it, but its thread is
not: it stays taken, for the call may still write to the buffers that it was given.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import attrs

from lmcache.errors import TierError

T = TypeVar("T")

PATIENT_TURN = 4
"""Of so many calls one is of those that nobody waits for, if any are there: else a tier that is read all the time would
never be written."""

GRACE = 1.5
"""A call that takes so many times as long as it may is overdue: its tier is taken to hang."""


@attrs.define(eq=False)
class Call:
    """One call of a tier, from when it was submitted."""

    work: Callable[[float], Any]
    """Given the deadline. Runs in a thread of the tier; may raise anything."""
    then: Callable[[Any], None]
    """Given what `work` returned, or the exception that it raised. Runs in the server's thread."""
    started: float = 0.0
    """When a thread took it; 0 before."""
    overdue: bool = False
    """Whether the tier's owner has been told that it hangs."""
    outcome: Any = None


class TierThreads:
    """Threads of one tier, made as they are needed. All methods are the server thread's."""

    def __init__(self, name: str, threads: int, timeout: float, wake: Callable[[], None]) -> None:
        """`wake` is called in a thread of the tier when `finished` has something to tell."""
        self._name = name
        self._most = threads
        self._timeout = timeout
        self._wake = wake
        self._state = threading.Condition()
        self._urgent: deque[Call] = deque()
        self._patient: deque[Call] = deque()
        self._running: set[Call] = set()
        self._done: deque[Call] = deque()
        self._threads = 0
        self._turn = 0
        self._closing = False

    @property
    def busy(self) -> int:
        """Calls that wait or are in progress."""
        return len(self._urgent) + len(self._patient) + len(self._running)

    @property
    def stuck(self) -> bool:
        """Whether every thread is taken by a call that is overdue."""
        return sum(call.overdue for call in list(self._running)) >= self._most

    def submit(self, work: Callable[[float], T], then: Callable[[T | Exception], None], *, urgent: bool) -> None:
        """Have `work` done: what somebody waits for (`urgent`) before most of what nobody does."""
        call = Call(work, cast("Callable[[Any], None]", then))
        with self._state:
            (self._urgent if urgent else self._patient).append(call)
            if self._threads < self._most and self._threads < self.busy:
                self._one_more()
            self._state.notify()

    def _one_more(self) -> None:
        # a daemon: a tier that hangs must not keep the process
        thread = threading.Thread(target=self._run, name=f"lmcache-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads for this process
            if not self._threads:  # nobody would ever come
                for call in self.withdraw():
                    call.outcome = TierError(f"no thread can be started: {error}")
                    self._done.append(call)
                self._wake()
        else:
            self._threads += 1

    def finished(self) -> Iterator[Call]:
        """Calls that have come back since it was asked last."""
        while self._done:
            yield self._done.popleft()

    def withdraw(self) -> list[Call]:
        """Calls that wait, which will not be made any more."""
        with self._state:
            calls = [*self._urgent, *self._patient]
            self._urgent.clear()
            self._patient.clear()
        return calls

    def newly_overdue(self, now: float) -> int:
        """How many more calls are overdue than when it was asked last."""
        found = 0
        for call in list(self._running):
            if not call.overdue and call.started and now > call.started + self._timeout * GRACE:
                call.overdue = True
                found += 1
        return found

    def close(self, seconds: float) -> None:
        """Let calls come back for so long; those that wait and are not urgent have their turn, too."""
        until = time.monotonic() + seconds
        with self._state:
            self._urgent.clear()
            while self.busy and not self.stuck and (left := until - time.monotonic()) > 0:
                self._state.wait(min(left, 0.1))
            self._closing = True
            self._patient.clear()
            self._state.notify_all()

    def _run(self) -> None:
        while call := self._next():
            try:
                call.outcome = call.work(call.started + self._timeout)
            except Exception as error:  # noqa: BLE001 - a plugin's code; whoever submitted the call hears of it
                call.outcome = error
            except BaseException as error:  # noqa: BLE001 - a thread that ends would take its call with it
                call.outcome = TierError(f"{type(error).__name__}: {error}")
            with self._state:
                self._running.discard(call)
                self._done.append(call)
                self._state.notify_all()
            self._wake()

    def _next(self) -> Call | None:
        with self._state:
            while not self._closing and not self._urgent and not self._patient:
                self._state.wait()
            if self._closing:
                return None
            self._turn += 1
            first, second = self._urgent, self._patient
            if self._turn % PATIENT_TURN == 0:
                first, second = second, first
            call = (first or second).popleft()
            call.started = time.monotonic()
            self._running.add(call)
            return call
