"""Comparing long bytes in tests."""

from lmcache.core.tier import Buffer


def assert_same_bytes(found: Buffer | None, expected: Buffer | None) -> None:
    """Fail with both lengths and the first offset that differs. None is where there is nothing.

    A bare `assert found == expected` says no more, and may take minutes to: pytest compares megabytes line by line.
    """
    __tracebackhide__ = True
    if found is None or expected is None:
        assert found is expected, f"{_size(found)} where {_size(expected)} were expected"
        return
    one, other = memoryview(found).cast("B"), memoryview(expected).cast("B")
    if one == other:
        return
    at = _first_difference(one, other)
    raise AssertionError(
        f"{_size(one)} are not the {_size(other)} expected, from offset {at:,} on: "
        f"{_excerpt(one, at)} instead of {_excerpt(other, at)}"
    )


def _first_difference(one: memoryview, other: memoryview) -> int:
    """How many bytes are the same before the first that differs, or before the end of the shorter."""
    same, end = 0, min(len(one), len(other)) + 1
    while end - same > 1:  # they are the same before `same`, and not before `end`
        middle = (same + end) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle
    return same


def _size(data: Buffer | None) -> str:
    return "no bytes at all" if data is None else f"{memoryview(data).nbytes:,} bytes"


def _excerpt(view: memoryview, at: int) -> str:
    return repr(bytes(view[at : at + 8])) if at < len(view) else "the end"
