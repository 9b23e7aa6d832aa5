"""Where long bytes differ is said, at once, in one line."""

import array
import random

import pytest

from lmcache.plugins.testing import assert_same_bytes

LONG = random.Random(1).randbytes(10 << 20)


def why(found, expected):
    with pytest.raises(AssertionError) as error:
        assert_same_bytes(found, expected)
    return str(error.value)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: array.array("Q", data)])
def test_equal_bytes_are_the_same_in_any_buffer(kind):
    assert_same_bytes(kind(LONG), LONG)
    assert_same_bytes(LONG, kind(LONG))


def test_nothing_is_the_same_as_nothing_and_as_nothing_else():
    assert_same_bytes(None, None)
    assert_same_bytes(b"", b"")
    assert why(None, LONG) == "no bytes at all where 10,485,760 bytes were expected"
    assert why(b"1234", None) == "4 bytes where no bytes at all were expected"
    assert why(b"", None) == "0 bytes where no bytes at all were expected"


@pytest.mark.parametrize("at", [0, 1, 7, 4095, 5_000_000, len(LONG) - 1])
def test_the_first_offset_that_differs_is_named(at):
    damaged = bytearray(LONG)
    damaged[at] ^= 1
    damaged[at + 100 :] = bytes(len(damaged[at + 100 :]))
    assert why(damaged, LONG) == (
        f"10,485,760 bytes are not the 10,485,760 bytes expected, from offset {at:,} on: "
        f"{bytes(damaged[at : at + 8])!r} instead of {LONG[at : at + 8]!r}"
    )


def test_what_ends_early_or_late_differs_at_the_end_of_the_shorter():
    assert why(LONG[:-3], LONG) == (
        "10,485,757 bytes are not the 10,485,760 bytes expected, from offset 10,485,757 on: "
        f"the end instead of {LONG[-3:]!r}"
    )
    assert why(b"12345", b"12") == "5 bytes are not the 2 bytes expected, from offset 2 on: b'345' instead of the end"
    assert why(b"", b"1").endswith("from offset 0 on: the end instead of b'1'")
