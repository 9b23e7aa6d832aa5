"""The conformance suite of codecs."""

import abc
import array
import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lmcache.core.blob_format import CODEC_BYTES
from lmcache.core.codec import Codec
from lmcache.core.tier import Buffer
from lmcache.errors import CodecError
from lmcache.plugins.testing.long_bytes import assert_same_bytes

ABOUT = bytes(range(20))
"""Identifies a blob."""

_THREADS = 4


def _payloads() -> dict[str, bytes]:
    source = random.Random(5)  # noqa: S311  # no secret
    numbers = array.array("f", (source.gauss(0, 1) for _ in range(50_000))).tobytes()
    return {
        "one byte": b"x",
        "odd": source.randbytes(4097),
        "noise": source.randbytes(1 << 20),
        "zeros": bytes(3_000_001),
        "bfloat16": b"".join(numbers[at + 2 : at + 4] for at in range(0, len(numbers), 4)),
    }


PAYLOADS = _payloads()


def _decoded(codec: Codec, stored: Buffer, length: int, about: bytes = ABOUT) -> bytes:
    into = memoryview(bytearray(length))
    codec.decode(stored, [into], about)
    return bytes(into)


class CodecSuite(abc.ABC):
    """What every codec must pass. Derive a class named `Test…` and say how to make the codec."""

    authenticates: ClassVar[bool] = False
    """Whether it must find out any change of what it wrote, and that it was written for another blob."""

    search: ClassVar[settings] = settings(max_examples=100, deadline=None)
    """How long hypothesis looks for bytes that confuse the codec: more `max_examples` look longer."""

    @abc.abstractmethod
    def make_codec(self) -> Codec:
        """A codec, as a server would make it. Each can read what another one wrote."""

    def test_its_name_fits_in_a_header(self) -> None:
        name = self.make_codec().name
        assert name.isascii()
        assert name.isprintable()
        assert 0 < len(name) <= CODEC_BYTES
        assert name.split() == [name]

    @pytest.mark.parametrize("kind", PAYLOADS)
    def test_what_it_wrote_it_reads_back(self, kind: str) -> None:
        payload = PAYLOADS[kind]
        stored = self.make_codec().encode([payload], ABOUT)
        assert_same_bytes(_decoded(self.make_codec(), stored, len(payload)), payload)

    @pytest.mark.parametrize("kind", PAYLOADS)
    def test_it_does_not_make_much_more_of_what_it_cannot_make_smaller(self, kind: str) -> None:
        payload = PAYLOADS[kind]
        assert len(self.make_codec().encode([payload], ABOUT)) <= len(payload) + len(payload) // 64 + 4096

    @pytest.mark.parametrize("pieces", [2, 3, 100])
    def test_payloads_may_come_and_go_in_pieces(self, pieces: int) -> None:
        payload = PAYLOADS["bfloat16"][:-1]
        step = len(payload) // pieces
        parts = [memoryview(payload)[at : at + step] for at in range(0, len(payload), step)]
        whole = memoryview(bytearray(len(payload)))
        into = [whole[:1], whole[1 : step + 2], whole[step + 2 :]]
        codec = self.make_codec()
        codec.decode(codec.encode(parts, ABOUT), into, ABOUT)
        assert_same_bytes(whole, payload)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_what_was_stored_may_come_in_any_buffer(self, kind: Callable[[bytes], bytes]) -> None:
        stored = self.make_codec().encode([kind(b"payload" * 99)], ABOUT)
        assert_same_bytes(_decoded(self.make_codec(), kind(stored), 7 * 99), b"payload" * 99)

    @pytest.mark.parametrize("kind", ["odd", "zeros", "bfloat16"])
    @pytest.mark.parametrize("wrong", [-1000, -1, 1, 1000])
    def test_buffers_of_another_length_are_refused(self, kind: str, wrong: int) -> None:
        payload = PAYLOADS[kind]
        stored = self.make_codec().encode([payload], ABOUT)
        with pytest.raises(CodecError):
            _decoded(self.make_codec(), stored, len(payload) + wrong)

    @pytest.mark.parametrize("cut", [0, 1, 20, -20, -1])
    def test_what_is_cut_off_is_refused(self, cut: int) -> None:
        payload = PAYLOADS["odd"]
        stored = self.make_codec().encode([payload], ABOUT)
        with pytest.raises(CodecError):
            _decoded(self.make_codec(), stored[:cut], len(payload))

    def test_bytes_behind_the_end_are_refused(self) -> None:
        payload = PAYLOADS["odd"]
        with pytest.raises(CodecError):
            _decoded(self.make_codec(), self.make_codec().encode([payload], ABOUT) + b"more", len(payload))

    def test_a_flipped_bit_never_raises_anything_else(self) -> None:
        payload = PAYLOADS["bfloat16"][:5000]
        stored = self.make_codec().encode([payload], ABOUT)
        for place in range(0, len(stored), max(1, len(stored) // 200)):
            damaged = bytearray(stored)
            damaged[place] ^= 1 << place % 8
            try:
                _decoded(self.make_codec(), damaged, len(payload))
            except CodecError:
                continue
            assert not self.authenticates, f"byte {place} was changed, and nobody noticed"

    def test_a_payload_that_was_written_for_another_blob_is_refused(self) -> None:
        if not self.authenticates:
            pytest.skip("the class says that this codec does not authenticate")
        stored = self.make_codec().encode([b"payload"], ABOUT)
        with pytest.raises(CodecError):
            _decoded(self.make_codec(), stored, 7, about=ABOUT[::-1])

    def test_any_bytes_are_read_or_refused(self) -> None:
        codec = self.make_codec()

        @self.search
        @given(st.binary(max_size=300), st.integers(1, 300))
        def decode(stored: bytes, length: int) -> None:
            with contextlib.suppress(CodecError):
                _decoded(codec, stored, length)

        decode()

    def test_any_payload_comes_back(self) -> None:
        codec = self.make_codec()

        @self.search
        @given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4))
        def check(parts: list[bytes]) -> None:
            payload = b"".join(parts)
            assert_same_bytes(_decoded(codec, codec.encode(parts, ABOUT), len(payload)), payload)

        check()

    def test_a_payload_that_grows_beyond_all_bounds_is_refused_before_it_does(self) -> None:
        most = 64 << 20
        codec = self.make_codec()
        stored = codec.encode([bytes(most)], ABOUT)
        with pytest.raises(CodecError):
            _decoded(codec, stored, 1000)  # what it needs the first time is not counted
        if not _forget_peak():
            pytest.skip("this system does not measure the most memory that a process has had")
        before = _peak()
        with pytest.raises(CodecError):
            _decoded(codec, stored, 1 << 20)
        assert _peak() - before < most // 4

    def test_threads_may_use_it_at_once(self) -> None:
        codec = self.make_codec()
        right = []

        def work(number: int) -> None:
            payload = bytes([number]) * 10_000 + PAYLOADS["bfloat16"][number:]
            with contextlib.suppress(CodecError):
                came_back = [_decoded(codec, codec.encode([payload], ABOUT), len(payload)) for _ in range(5)]
                right.append(came_back == [payload] * 5)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True] * _THREADS


def _forget_peak() -> bool:
    """Make the kernel measure the most memory anew; whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int:
    """The most bytes of memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
