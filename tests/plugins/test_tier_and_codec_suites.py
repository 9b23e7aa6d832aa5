"""The conformance suites find what is wrong with a tier or a codec: each wrong one fails the test named beside it."""

import threading
import time
import zlib

import pytest
from dict_tier import DictTier
from hypothesis import Phase, settings

from lmcache.core.codec import Codec
from lmcache.core.tier import TierUsage
from lmcache.errors import CodecError, TierError
from lmcache.plugins.testing import CodecSuite, StorageTierSuite


class Shelf(DictTier):
    """Correct; the wrong tiers below are this one with one mistake."""

    scheme = "shelf"

    def __init__(self, limit=None):
        super().__init__()
        self.limit = limit
        self.evicted = 0
        self.lock = threading.Lock()

    def store(self, key, parts, deadline):
        blob = b"".join(parts)
        self.check(deadline)
        if self.limit is not None and len(blob) > self.limit:
            raise TierError("too large")
        with self.lock:
            self.blobs.pop(key, None)
            while self.limit is not None and sum(map(len, self.blobs.values())) + len(blob) > self.limit:
                del self.blobs[next(iter(self.blobs))]
                self.evicted += 1
            self.blobs[key] = blob

    def load(self, key, into, deadline):
        self.check(deadline)
        return super().load(key, into, deadline)

    def keys(self):
        with self.lock:
            return super().keys()

    def usage(self):
        with self.lock:
            return TierUsage(len(self.blobs), sum(map(len, self.blobs.values())), self.limit, self.evicted)

    @staticmethod
    def check(deadline):
        if time.monotonic() >= deadline:
            raise TierError("late")


class TestTheCorrectTier(StorageTierSuite):
    durable = False

    def open_tier(self):
        return Shelf()

    def open_small_tier(self, limit):
        return Shelf(limit=limit)


class KeepsReferences(Shelf):
    def store(self, key, parts, deadline):
        self.check(deadline)
        self.blobs[key] = memoryview(parts[0]) if len(parts) == 1 else b"".join(parts)


class SaysWhatWasCopied(Shelf):
    def load(self, key, into, deadline):
        return min(super().load(key, into, deadline), sum(map(len, into)))


class SaysEarly(Shelf):
    def load_in_pieces(self, key, into, deadline):
        yield len(self.blobs.get(key, b""))
        yield self.load(key, into, deadline)


class ForgetsTheLength(Shelf):
    def load_in_pieces(self, key, into, deadline):
        yield self.load(key, into, deadline) // 2


class FillsTheFirstBufferOnly(Shelf):
    def load(self, key, into, deadline):
        super().load(key, into[:1], deadline)
        return len(self.blobs.get(key, b""))


class NeverLate(Shelf):
    @staticmethod
    def check(deadline):
        pass


class LateAfterwards(Shelf):
    def store(self, key, parts, deadline):
        self.blobs[key] = b"".join(parts)
        self.check(deadline)


class Refuses(Shelf):
    def delete(self, keys, deadline):
        for key in keys:
            del self.blobs[key]


class Sorts(Shelf):
    def contains(self, keys, deadline):
        return super().contains(sorted(keys), deadline)


class KeepsTheFirst(Shelf):
    def store(self, key, parts, deadline):
        if key not in self.blobs:
            super().store(key, parts, deadline)


class Grows(Shelf):
    def store(self, key, parts, deadline):
        self.check(deadline)
        self.blobs[key] = b"".join(parts)


class Tears(Shelf):
    """Shows a blob half written."""

    def store(self, key, parts, deadline):
        blob = b"".join(parts)
        self.check(deadline)
        self.blobs[key] = blob[: len(blob) // 2]
        time.sleep(0.001)
        self.blobs[key] = blob


class Forgets(Shelf):
    def delete(self, keys, deadline):
        super().delete(keys[:1], deadline)


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (KeepsReferences, "what_becomes_of_the_callers_buffer_afterwards_does_not_matter", ()),
        (SaysWhatWasCopied, "a_blob_longer_than_the_buffers_is_cut_and_says_how_long_it_is", (5000,)),
        (SaysEarly, "what_is_said_to_be_there_while_a_blob_is_read_is_there", (10_000,)),
        (ForgetsTheLength, "what_is_said_to_be_there_while_a_blob_is_read_is_there", (10_000,)),
        (FillsTheFirstBufferOnly, "a_blob_may_come_and_go_in_pieces", ((4096,),)),
        (NeverLate, "a_store_whose_deadline_has_passed_raises_and_leaves_what_was_there", ()),
        (NeverLate, "a_load_whose_deadline_has_passed_raises_and_a_later_one_is_served", ()),
        (LateAfterwards, "a_store_whose_deadline_has_passed_raises_and_leaves_what_was_there", ()),
        (Refuses, "what_is_deleted_is_gone_and_the_rest_stays", ()),
        (Forgets, "what_is_deleted_is_gone_and_the_rest_stays", ()),
        (Sorts, "contains_answers_for_each_key_in_order", ()),
        (KeepsTheFirst, "a_store_replaces_what_was_there", (100_000, 5_000)),
        (Tears, "threads_that_store_and_load_the_same_keys_see_whole_blobs_only", ()),
        (KeepsTheFirst, "no_sequence_of_calls_confuses_it", ()),
    ],
)
def test_a_wrong_tier_fails(wrong, test, arguments):
    class Suite(StorageTierSuite):
        search = settings(StorageTierSuite.search, phases=[Phase.generate], database=None)

        def open_tier(self):
            return wrong()

    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        getattr(Suite(), f"test_{test}")(wrong(), *arguments)


def test_a_tier_that_grows_beyond_its_limit_fails():
    class Suite(StorageTierSuite):
        def open_tier(self):
            return Grows()

        def open_small_tier(self, limit):
            return Grows(limit=limit)

    with pytest.raises(AssertionError):
        Suite().test_a_bounded_tier_stays_within_its_limit_and_keeps_what_came_last()


def test_a_tier_that_says_it_is_durable_and_is_not_fails():
    class Suite(StorageTierSuite):
        def open_tier(self):
            return Shelf()

    with pytest.raises(AssertionError):
        Suite().test_a_durable_tier_has_its_blobs_again_when_it_is_opened_again()


# -------------------------------------------------------------------------------------------------------------- codecs


class Plain(Codec):
    """Correct, and of no use: four bytes of checksum, then the payload."""

    name = "plain"

    def __init__(self, options=None):
        pass

    def encode(self, parts, about):
        payload = b"".join(parts)
        return zlib.crc32(payload + about).to_bytes(4, "little") + payload

    def decode(self, stored, into, about):
        if len(stored) != 4 + sum(map(len, into)) or self.encode([bytes(stored[4:])], about)[:4] != stored[:4]:
            raise CodecError("no such payload")
        payload = stored[4:]
        for view in into:
            view[:], payload = payload[: len(view)], payload[len(view) :]


class TestTheCorrectCodec(CodecSuite):
    authenticates = True

    def make_codec(self):
        return Plain()


class RaisesAnythingAtAll(Plain):
    def decode(self, stored, into, about):
        if len(stored) != 4 + sum(map(len, into)):
            raise ValueError("no such payload")
        super().decode(stored, into, about)


class Trusts(Plain):
    def decode(self, stored, into, about):
        payload = bytes(stored[4:])
        for view in into:
            view[:], payload = payload[: len(view)].ljust(len(view), b"\0"), payload[len(view) :]


class ForAnyBlob(Plain):
    def encode(self, parts, about):
        return super().encode(parts, b"")


class Unpacks(Plain):
    """Takes what memory it is told to."""

    def encode(self, parts, about):
        return zlib.compress(b"".join(parts))

    def decode(self, stored, into, about):
        try:
            payload = zlib.decompress(stored)
        except zlib.error as error:
            raise CodecError("no such payload") from error
        if len(payload) != sum(map(len, into)):
            raise CodecError("another length")


class Doubles(Plain):
    def encode(self, parts, about):
        return super().encode(parts, about) * 2


class HasOneBuffer(Plain):
    def encode(self, parts, about):
        self.payload = b"".join(parts)
        time.sleep(0.001)
        return super().encode([self.payload], about)


class Spells(Plain):
    name = "Größe"


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (RaisesAnythingAtAll, "what_is_cut_off_is_refused", (-1,)),
        (RaisesAnythingAtAll, "any_bytes_are_read_or_refused", ()),
        (Trusts, "buffers_of_another_length_are_refused", (1, "odd")),
        (Trusts, "bytes_behind_the_end_are_refused", ()),
        (Trusts, "a_flipped_bit_never_raises_anything_else", ()),
        (ForAnyBlob, "a_payload_that_was_written_for_another_blob_is_refused", ()),
        (Unpacks, "a_payload_that_grows_beyond_all_bounds_is_refused_before_it_does", ()),
        (Doubles, "it_does_not_make_much_more_of_what_it_cannot_make_smaller", ("noise",)),
        (HasOneBuffer, "threads_may_use_it_at_once", ()),
        (Spells, "its_name_fits_in_a_header", ()),
    ],
)
def test_a_wrong_codec_fails(wrong, test, arguments):
    class Suite(CodecSuite):
        authenticates = True
        search = settings(CodecSuite.search, phases=[Phase.generate], database=None)

        def make_codec(self):
            return wrong()

    call = getattr(Suite(), f"test_{test}")
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        call(*reversed(arguments)) if test.startswith("buffers") else call(*arguments)
