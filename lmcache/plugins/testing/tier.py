"""The conformance suite of storage tiers."""

import abc
import hashlib
import itertools
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lmcache.core.tier import KEY_DIGITS, Buffer, StorageTier
from lmcache.plugins.testing.long_bytes import assert_same_bytes

SIZES = (1, 2, 511, 4095, 4096, 4097, 65_536, 1_000_000, 10 << 20)
"""Lengths of blobs in bytes."""

_PAGE = 4096
_THREADS = 4
_ROUNDS = 20


def make_key(name: object) -> str:
    """A key as the server makes them."""
    return hashlib.sha256(repr(name).encode()).hexdigest()[:KEY_DIGITS]


def make_blob(length: int, seed: object = 0) -> bytes:
    """Bytes that do not repeat, equal for equal arguments."""
    return random.Random(repr(seed)).randbytes(length)  # noqa: S311  # no secret


def _soon() -> float:
    return time.monotonic() + 60


def _cut(blob: bytes, *at: int) -> list[memoryview]:
    """A blob in several writable buffers, cut at these places."""
    whole = memoryview(bytearray(blob))
    ends = [min(each, len(blob)) for each in (0, *at, len(blob))]
    return [whole[start:end] for start, end in itertools.pairwise(ends) if start < end]


def _pages(length: int) -> memoryview:
    """Writable memory that begins at a page, as the arena's cells do."""
    return memoryview(mmap.mmap(-1, max(length, 1)))[:length]


def read_blob(tier: StorageTier, key: str, most: int = 16 << 20) -> bytes | None:
    """The blob under a key, or None; more than `most` bytes are an error of the test."""
    buffer = memoryview(bytearray(most))
    length = tier.load(key, [buffer], _soon())
    assert length <= most
    return bytes(buffer[:length]) if length else None


class _TierMachine(RuleBasedStateMachine):
    """Any sequence of calls, beside a dict."""

    tier: StorageTier
    number = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.blobs: dict[str, bytes] = {}
        self.tier.delete([key for key, _ in self.tier.keys()], _soon())

    @rule(number=number, length=st.integers(1, 9000), seed=st.integers(0, 99), at=st.integers(1, 9000))
    def store(self, number: int, length: int, seed: int, at: int) -> None:
        blob = make_blob(length, seed)
        self.tier.store(make_key(number), _cut(blob, at), _soon())
        self.blobs[make_key(number)] = blob

    @rule(numbers=st.lists(number, max_size=3))
    def delete(self, numbers: list[int]) -> None:
        keys = [make_key(number) for number in numbers]
        self.tier.delete(keys, _soon())
        for key in keys:
            self.blobs.pop(key, None)

    @rule(number=number)
    def load(self, number: int) -> None:
        assert_same_bytes(read_blob(self.tier, make_key(number), 9000), self.blobs.get(make_key(number)))

    @invariant()
    def it_holds_what_was_stored_and_not_deleted(self) -> None:
        keys = [make_key(number) for number in range(5)]
        assert self.tier.contains(keys, _soon()) == [key in self.blobs for key in keys]
        assert sorted(self.tier.keys()) == sorted((key, len(blob)) for key, blob in self.blobs.items())


class StorageTierSuite(abc.ABC):
    """What every storage tier must pass. Derive a class named `Test…` and say how to open the tier.

    Every test has an instance of its own, so `open_tier` may use what a fixture of your class has put on `self`: a
    folder, the address of a server.
    """

    durable: ClassVar[bool] = True
    """Whether blobs are there again after `close` and `open_tier`."""

    search: ClassVar[settings] = settings(max_examples=20, stateful_step_count=15, deadline=None)
    """How long hypothesis looks for calls that confuse the tier: more `max_examples` look longer."""

    @abc.abstractmethod
    def open_tier(self) -> StorageTier:
        """Open the tier. Empty at a test's first call; a later one, after `close`, opens the same place again."""

    def open_small_tier(self, limit: int) -> StorageTier | None:
        """Open a tier that may take `limit` bytes (some MiB) and is empty; None for a tier without a limit."""
        return None

    @pytest.fixture
    def tier(self) -> Iterator[StorageTier]:
        """An empty tier, closed after the test."""
        tier = self.open_tier()
        yield tier
        tier.close()

    # --------------------------------------------------------------------------------------------------- store and load

    @pytest.mark.parametrize("length", SIZES)
    def test_what_was_stored_comes_back(self, tier: StorageTier, length: int) -> None:
        blob = make_blob(length)
        tier.store(make_key("a"), [blob], _soon())
        assert_same_bytes(read_blob(tier, make_key("a")), blob)

    @pytest.mark.parametrize("at", [(1,), (4096,), (4095, 4097), (3, 70_000, 70_001, 140_000)])
    def test_a_blob_may_come_and_go_in_pieces(self, tier: StorageTier, at: tuple[int, ...]) -> None:
        blob = make_blob(200_000)
        tier.store(make_key("a"), _cut(blob, *at), _soon())
        into = _cut(bytes(200_000), *[each + 17 for each in at])
        assert tier.load(make_key("a"), into, _soon()) == 200_000
        assert_same_bytes(b"".join(into), blob)

    @pytest.mark.parametrize("length", [_PAGE, 64 * _PAGE, 64 * _PAGE + 1, 3 << 20])
    def test_buffers_may_lie_as_the_arena_does(self, tier: StorageTier, length: int) -> None:
        head, body, into = _pages(_PAGE), _pages(length), _pages(length + 5 * _PAGE)
        head[:], body[:] = make_blob(_PAGE, "head"), make_blob(length, "body")
        tier.store(make_key("a"), [head, body], _soon())
        buffers = [into[_PAGE : 2 * _PAGE], into[4 * _PAGE : 4 * _PAGE + length]]
        assert tier.load(make_key("a"), buffers, _soon()) == _PAGE + length
        assert_same_bytes(b"".join(buffers), bytes(head) + bytes(body))
        assert not any(into[:_PAGE]), "memory before a buffer was written to"
        assert not any(into[4 * _PAGE + length :]), "memory behind a buffer was written to"

    def test_parts_may_be_of_any_kind(self, tier: StorageTier) -> None:
        parts: list[Buffer] = [
            b"bytes",
            bytearray(b"bytearray"),
            memoryview(b"view"),
            memoryview(bytearray(b"writable view")),
        ]
        tier.store(make_key("a"), parts, _soon())
        assert_same_bytes(read_blob(tier, make_key("a")), b"bytesbytearrayviewwritable view")

    def test_hundreds_of_parts_are_one_blob(self, tier: StorageTier) -> None:
        blob = make_blob(1500 * 100)
        tier.store(make_key("a"), _cut(blob, *range(100, len(blob), 100)), _soon())
        into = _cut(bytes(len(blob)), *range(90, len(blob), 90))
        assert tier.load(make_key("a"), into, _soon()) == len(blob)
        assert_same_bytes(b"".join(into), blob)

    def test_what_becomes_of_the_callers_buffer_afterwards_does_not_matter(self, tier: StorageTier) -> None:
        blob = bytearray(make_blob(100_000))
        kept = bytes(blob)
        tier.store(make_key("a"), [blob], _soon())
        blob[:] = bytes(len(blob))
        assert_same_bytes(read_blob(tier, make_key("a")), kept)

    @pytest.mark.parametrize("room", [1, 4096, 5000, 8192, 9_999])
    def test_a_blob_longer_than_the_buffers_is_cut_and_says_how_long_it_is(self, tier: StorageTier, room: int) -> None:
        blob = make_blob(10_000)
        tier.store(make_key("a"), [blob], _soon())
        memory = _pages(room + _PAGE)
        assert tier.load(make_key("a"), [memory[:room]], _soon()) == 10_000
        assert_same_bytes(memory[:room], blob[:room])
        assert not any(memory[room:]), "memory behind the buffer was written to"

    def test_buffers_longer_than_the_blob_are_filled_to_its_end(self, tier: StorageTier) -> None:
        blob = make_blob(10_000)
        tier.store(make_key("a"), [blob], _soon())
        into = _cut(bytes(50_000), 7_000, 20_000)
        assert tier.load(make_key("a"), into, _soon()) == 10_000
        assert_same_bytes(b"".join(into)[:10_000], blob)

    @pytest.mark.parametrize("length", [1, 10_000, (9 << 20) + 17])
    def test_what_is_said_to_be_there_while_a_blob_is_read_is_there(self, tier: StorageTier, length: int) -> None:
        blob, before = make_blob(length), 0
        tier.store(make_key("a"), [blob], _soon())
        into = [_pages(_PAGE), _pages(-(-length // _PAGE) * _PAGE)]
        for count in tier.load_in_pieces(make_key("a"), into, _soon()):
            assert before <= count <= length
            assert_same_bytes(b"".join(into)[:count], blob[:count])
            before = count
        assert before == length
        assert list(tier.load_in_pieces(make_key("b"), into, _soon()))[-1] == 0

    @pytest.mark.parametrize(("first", "second"), [(100_000, 5_000), (5_000, 100_000), (8192, 8192)])
    def test_a_store_replaces_what_was_there(self, tier: StorageTier, first: int, second: int) -> None:
        tier.store(make_key("a"), [make_blob(first, 1)], _soon())
        tier.store(make_key("a"), [make_blob(second, 2)], _soon())
        assert_same_bytes(read_blob(tier, make_key("a")), make_blob(second, 2))
        assert list(tier.keys()) == [(make_key("a"), second)]

    # --------------------------------------------------------------------------------------- absent, contained, deleted

    def test_where_there_is_no_blob_nothing_is_loaded(self, tier: StorageTier) -> None:
        assert tier.load(make_key("a"), [memoryview(bytearray(100))], _soon()) == 0

    def test_contains_answers_for_each_key_in_order(self, tier: StorageTier) -> None:
        for name in range(0, 20, 3):
            tier.store(make_key(name), [b"blob"], _soon())
        names = [*range(20), 3, 3, 4]
        assert tier.contains([make_key(name) for name in names], _soon()) == [name % 3 == 0 for name in names]
        assert tier.contains([], _soon()) == []

    def test_what_is_deleted_is_gone_and_the_rest_stays(self, tier: StorageTier) -> None:
        for name in "abc":
            tier.store(make_key(name), [name.encode()], _soon())
        tier.delete([make_key(name) for name in "axc"], _soon())
        tier.delete([], _soon())
        assert [read_blob(tier, make_key(name), 10) for name in "abc"] == [None, b"b", None]
        assert list(tier.keys()) == [(make_key("b"), 1)]

    def test_keys_are_all_that_is_there_with_lengths(self, tier: StorageTier) -> None:
        for length in range(1, 40):
            tier.store(make_key(length), [bytes(length)], _soon())
        assert sorted(tier.keys()) == sorted((make_key(length), length) for length in range(1, 40))

    def test_usage_is_right_where_it_is_known(self, tier: StorageTier) -> None:
        for name in "abc":
            tier.store(make_key(name), [make_blob(10_000, name)], _soon())
        tier.store(make_key("a"), [make_blob(20_000)], _soon())
        tier.delete([make_key("b")], _soon())
        usage = tier.usage()
        assert usage.blobs in (None, 2)
        assert usage.bytes is None or 30_000 <= usage.bytes <= 60_000
        assert usage.evicted == 0

    # ----------------------------------------------------------------------------------------------- late, full, closed

    def test_a_store_whose_deadline_has_passed_raises_and_leaves_what_was_there(self, tier: StorageTier) -> None:
        tier.store(make_key("a"), [b"old"], _soon())
        for name in "ab":
            with pytest.raises(OSError):  # noqa: PT011  # a TierError, or what the operating system says
                tier.store(make_key(name), [make_blob(1 << 20)], time.monotonic() - 1)
        assert_same_bytes(read_blob(tier, make_key("a"), 1 << 21), b"old")
        assert tier.contains([make_key("b")], _soon()) == [False]

    def test_a_load_whose_deadline_has_passed_raises_and_a_later_one_is_served(self, tier: StorageTier) -> None:
        tier.store(make_key("a"), [b"blob"], _soon())
        with pytest.raises(OSError):  # noqa: PT011  # as above
            tier.load(make_key("a"), [memoryview(bytearray(4))], time.monotonic() - 1)
        assert_same_bytes(read_blob(tier, make_key("a"), 4), b"blob")

    def test_a_bounded_tier_stays_within_its_limit_and_keeps_what_came_last(self) -> None:
        limit = 4 << 20
        tier = self.open_small_tier(limit)
        if tier is None:
            pytest.skip("open_small_tier says that this tier has no limit")
        for number in range(60):
            tier.store(make_key(number), [make_blob(300_000, number)], _soon())
            usage = tier.usage()
            assert usage.bytes is None or usage.bytes <= limit
            assert sum(length for _, length in tier.keys()) <= limit
            assert_same_bytes(read_blob(tier, make_key(number)), make_blob(300_000, number))
        assert 1 < len(list(tier.keys())) < 14
        assert tier.usage().evicted > 0
        with pytest.raises(OSError):  # noqa: PT011  # as above
            tier.store(make_key("large"), [make_blob(limit + 1)], _soon())
        tier.store(make_key("small"), [b"small"], _soon())
        assert_same_bytes(read_blob(tier, make_key("small")), b"small")
        tier.close()

    def test_a_durable_tier_has_its_blobs_again_when_it_is_opened_again(self) -> None:
        if not self.durable:
            pytest.skip("the class says that this tier is not durable")
        tier = self.open_tier()
        for length in (1, 5_000, 1 << 20):
            tier.store(make_key(length), [make_blob(length)], _soon())
        tier.delete([make_key(5_000)], _soon())
        before = tier.usage()
        tier.close()
        tier = self.open_tier()
        assert sorted(tier.keys()) == sorted((make_key(length), length) for length in (1, 1 << 20))
        assert_same_bytes(read_blob(tier, make_key(1 << 20)), make_blob(1 << 20))
        assert (tier.usage().blobs, tier.usage().bytes) == (before.blobs, before.bytes)
        tier.close()

    # -------------------------------------------------------------------------------------------------- several threads

    def test_threads_that_store_and_load_the_same_keys_see_whole_blobs_only(self, tier: StorageTier) -> None:
        blobs = {make_blob(length, length): length for length in (4096, 70_000, 300_000, 300_001)}
        for number in range(2):
            tier.store(make_key(number), [next(iter(blobs))], _soon())

        def work(thread: int) -> None:
            order = list(blobs)
            for turn in range(_ROUNDS):
                tier.store(make_key(turn % 2), _cut(order[(thread + turn) % len(order)], 4096), _soon())
                seen = read_blob(tier, make_key((turn + 1) % 2), 400_000)
                assert seen in blobs, f"{len(seen or b'')} bytes that nobody stored"

        _in_threads(work)
        assert sorted(key for key, _ in tier.keys()) == sorted(make_key(number) for number in range(2))

    def test_threads_that_store_load_and_delete_hurt_nobody(self, tier: StorageTier) -> None:
        def work(thread: int) -> None:
            own, shared = make_key(("own", thread)), make_key("shared")
            for turn in range(_ROUNDS):
                tier.store(own, [make_blob(5_000, (thread, turn))], _soon())
                tier.store(shared, [make_blob(5_000, "shared")], _soon())
                assert_same_bytes(read_blob(tier, own, 5_000), make_blob(5_000, (thread, turn)))
                assert read_blob(tier, shared, 5_000) in (None, make_blob(5_000, "shared"))
                tier.delete([shared], _soon())
                assert tier.contains([own], _soon()) == [True]

        _in_threads(work)

    def test_no_sequence_of_calls_confuses_it(self, tier: StorageTier) -> None:
        machine = type("Machine", (_TierMachine,), {"tier": tier})
        run_state_machine_as_test(machine, settings=self.search)


def _in_threads(work: Callable[[int], None]) -> None:
    """Run `work` in several threads; whatever one of them raises is raised here."""
    failures: list[BaseException] = []

    def guarded(thread: int) -> None:
        try:
            work(thread)
        except BaseException as error:  # noqa: BLE001  # raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
