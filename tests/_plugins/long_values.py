"""Says at once where long values differ that a bare `assert one == other` compares.

pytest would show them line by line, and takes minutes for some kilobytes of bytes. A plugin that only explains cannot
spare it the work, so this one stands before pytest's own explanation.
"""

import contextlib
import reprlib
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.assertion import util

LONG = 2000
"""Bytes or items, from which on values are long."""

BYTES = (bytes, bytearray, memoryview)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    slow = util._reprcompare  # made by pytest for each test
    assert slow is not None

    def explain(op: str, left: object, right: object) -> str | None:
        if op == "==" and max(_weight(left), _weight(right)) >= LONG:
            with contextlib.suppress(ImportError):  # of hypothesis, which tests of a GPU do without
                return f"left == right: {_difference(left, right)}".replace("\n", "\\n").replace("%", "%%")
        return slow(op, left, right)

    util._reprcompare = explain
    return (yield)  # and pytest takes away what is there now


def _weight(value: object) -> int:
    """Bytes, or items of whatever weight."""
    match value:
        case bytes() | bytearray():
            return len(value)
        case memoryview():
            return value.nbytes
        case list() | tuple():
            return sum(map(_weight, value), start=len(value))
        case dict():
            return sum(map(_weight, value.values()), start=len(value))
        case _:
            return 0


def _difference(left: Any, right: Any) -> str:
    if isinstance(left, BYTES) and isinstance(right, BYTES):
        from lmcache.plugins.testing import assert_same_bytes

        try:
            assert_same_bytes(left, right)
        except AssertionError as error:
            return str(error)
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next(_in_items((key, left[key], right[key]) for key in left))
    if isinstance(left, list | tuple) and isinstance(right, type(left)):
        found = next(_in_items(zip(range(len(left)), left, right, strict=False)), "")
        return found or f"{len(left):,} items where {len(right):,} were expected; as far as both go they are equal"
    return f"{reprlib.repr(left)} where {reprlib.repr(right)} was expected"


def _in_items(items: Iterator[tuple[object, Any, Any]]) -> Iterator[str]:
    """What differs, beginning with the first."""
    return (f"[{key!r}]: {_difference(one, other)}" for key, one, other in items if one != other)
