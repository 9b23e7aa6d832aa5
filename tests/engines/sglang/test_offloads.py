"""Stores on a thread of their own: every one is answered, in order, whatever becomes of it."""

import contextlib
import threading

import pytest

from lmcache.engines.sglang.offloads import Offloads


def test_a_store_that_raises_is_answered_and_the_next_one_is_done(caplog: pytest.LogCaptureFixture) -> None:
    offloads = Offloads(contextlib.nullcontext, 100)
    offloads.put(lambda: True, 1)
    offloads.put(lambda: bool(1 / 0), 1)
    offloads.put(lambda: True, 1)
    offloads.drain()
    assert [offloads.take() for _ in range(offloads.completed())] == [True, False, True]
    assert "ZeroDivisionError" in caplog.text
    offloads.close()


def test_where_too_much_waits_a_store_is_given_up_and_answered_in_its_turn() -> None:
    offloads = Offloads(contextlib.nullcontext, 10)
    done, go = [], threading.Event()
    offloads.put(lambda: go.wait(30), 6)
    offloads.put(lambda: done.append("too many") is None, 6)
    offloads.put(lambda: done.append("enough room") is None, 4)
    assert offloads.completed() == 0
    go.set()
    offloads.drain()
    assert [offloads.take() for _ in range(offloads.completed())] == [True, False, True]
    assert done == ["enough room"]
    offloads.close()
