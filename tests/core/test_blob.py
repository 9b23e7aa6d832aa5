"""Payloads go into a tier and come back right, or not at all, whatever happened to them there."""

import itertools
import time

import hypothesis.strategies as st
import pytest
from dict_tier import DictTier
from hypothesis import given, settings

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.core.codec import Codec
from lmcache.errors import CodecError, TierError

PAYLOAD = bytes(range(256)) * 40
"""10,240 bytes."""
DEADLINE = time.monotonic() + 1e6


class Xor(Codec):
    """With a key of one byte."""

    name = "xor"

    def __init__(self, key):
        self.key = key

    def encode(self, parts, about):
        return bytes([self.key]) + bytes(byte ^ self.key for byte in b"".join(parts))

    def decode(self, stored, into, about):
        if stored[0] != self.key or len(stored) != 1 + sum(map(len, into)):
            raise CodecError("wrong key")
        payload = bytes(byte ^ self.key for byte in stored[1:])
        for view in into:
            view[:], payload = payload[: len(view)], payload[len(view) :]


def identity(name="a", **changes):
    values = {"namespace": b"n" * 16, "facts": {"model": "m"}, "chain_hash": name.encode().ljust(16), "group": 0}
    return BlobIdentity(**{**values, "shard": 0, "tenant": "t", "chunk_size": 256, **changes})


def pieces(payload, *at):
    view = memoryview(bytearray(payload))
    ends = [0, *at, len(payload)]
    return [view[start:end] for start, end in itertools.pairwise(ends)]


def load(blobs, what, length=10_240):
    into = pieces(bytes(length), 3, 4096)
    return blobs.load(what, into, DEADLINE), b"".join(into)


@pytest.fixture(params=["as it is", "with a codec"])
def blobs(request):
    return BlobStore(DictTier(), Xor(5) if request.param == "with a codec" else None)


def test_what_was_stored_is_loaded(blobs):
    size = blobs.store(identity(), pieces(PAYLOAD, 100, 5000), DEADLINE)
    assert load(blobs, identity()) == (Loaded.LOADED, PAYLOAD)
    assert {blobs.key(identity()): size} == {key: len(blob) for key, blob in blobs.tier.blobs.items()}
    assert size == 4096 + len(PAYLOAD) + (blobs.codec is not None)


def test_without_a_codec_payloads_are_not_copied_on_their_way():
    class Watching(DictTier):
        def store(self, key, parts, deadline):
            self.parts = parts

        def load(self, key, into, deadline):
            self.into = into
            return 0

    blobs, payload = BlobStore(Watching()), pieces(PAYLOAD, 4096)
    blobs.store(identity(), payload, DEADLINE)
    blobs.load(identity(), payload, DEADLINE)
    for header, *rest in (blobs.tier.parts, blobs.tier.into):
        assert len(header) == 4096
        assert all(one is other for one, other in zip(rest, payload, strict=True))


def test_who_stored_it_does_not_matter(blobs):
    blobs.store(identity(tenant="one"), pieces(PAYLOAD), DEADLINE)
    assert load(blobs, identity(tenant="other", chunk_size=512))[0] is Loaded.LOADED


def test_the_key_of_an_identity_is_that_of_a_tier_without_a_codec():
    assert BlobStore(DictTier()).key(identity()) == identity().key
    assert BlobStore(DictTier(), Xor(1)).key(identity()) != identity().key


def test_only_what_was_stored_is_contained_and_deleting_ends_it(blobs):
    for name in "ac":
        blobs.store(identity(name), pieces(PAYLOAD), DEADLINE)
    assert blobs.contains([identity(name) for name in "abc"], DEADLINE) == [True, False, True]
    blobs.delete([identity("a"), identity("b")], DEADLINE)
    assert load(blobs, identity("a"))[0] is Loaded.ABSENT
    assert load(blobs, identity("c"))[0] is Loaded.LOADED


@pytest.mark.parametrize(
    "changes", [{"namespace": b"m" * 16}, {"chain_hash": b"c" * 16}, {"group": 1}, {"shard": 1}], ids=str
)
def test_another_blob_at_its_place_is_damage_and_deleted(blobs, changes):
    other = identity(**changes)
    blobs.store(other, pieces(PAYLOAD), DEADLINE)
    assert load(blobs, identity())[0] is Loaded.ABSENT
    blobs.tier.blobs[blobs.key(identity())] = blobs.tier.blobs[blobs.key(other)]
    assert load(blobs, identity())[0] is Loaded.DAMAGED
    assert list(blobs.tier.blobs) == [blobs.key(other)]


def test_a_payload_of_another_length_is_damage(blobs):
    blobs.store(identity(), pieces(PAYLOAD), DEADLINE)
    assert load(blobs, identity(), len(PAYLOAD) + 1)[0] is Loaded.DAMAGED
    blobs.store(identity(), pieces(PAYLOAD), DEADLINE)
    assert load(blobs, identity(), len(PAYLOAD) - 1)[0] is Loaded.DAMAGED


def test_a_header_of_another_length_is_damage_even_if_shifted_bytes_look_right(blobs):
    long, short = identity(facts={"model": "m" * 5000}), identity()
    for one, other in [(long, short), (short, long)]:
        blobs.store(one, pieces(bytes(10_240)), DEADLINE)
        reader = BlobStore(blobs.tier, blobs.codec)
        assert load(reader, other)[0] is Loaded.DAMAGED
        blobs = BlobStore(blobs.tier, blobs.codec)


@pytest.mark.parametrize("value", [b"x", b"somebody else's", bytes(20_000)])
@pytest.mark.parametrize("shared", [True, False])
def test_what_others_wrote_is_left_alone_where_others_may_write(blobs, value, shared):
    blobs.tier.shared = shared
    blobs.tier.blobs[blobs.key(identity())] = value
    assert load(blobs, identity())[0] is (Loaded.FOREIGN if shared else Loaded.DAMAGED)
    assert list(blobs.tier.blobs.values()) == ([value] if shared else [])
    assert blobs.contains([identity()], DEADLINE) == [False], "who is told that it is there never stores another"
    blobs.store(identity(), pieces(PAYLOAD), DEADLINE)
    assert blobs.contains([identity()], DEADLINE) == [True]
    assert load(blobs, identity()) == (Loaded.LOADED, PAYLOAD)


def test_foreign_keys_take_no_memory_without_end(blobs, monkeypatch):
    monkeypatch.setattr("lmcache.core.blob._FOREIGN", 10)
    for number in range(100):
        blobs.tier.blobs[blobs.key(identity(str(number)))] = b"somebody else's"
        assert load(blobs, identity(str(number)))[0] is Loaded.FOREIGN
        assert blobs.contains([identity(str(number))], DEADLINE) == [False]
    assert len(blobs._foreign) <= 10


def test_what_another_key_encrypted_is_foreign_and_left_alone():
    tier = DictTier(shared=False)
    BlobStore(tier, Xor(5)).store(identity(), pieces(PAYLOAD), DEADLINE)
    assert load(BlobStore(tier, Xor(6)), identity())[0] is Loaded.FOREIGN
    assert load(BlobStore(tier, Xor(5)), identity()) == (Loaded.LOADED, PAYLOAD)


def test_a_codec_that_writes_too_much_stores_nothing():
    class Verbose(Xor):
        def encode(self, parts, about):
            return bytes(2 * len(PAYLOAD))

    blobs = BlobStore(DictTier(), Verbose(1))
    with pytest.raises(CodecError, match="too many to be read back"):
        blobs.store(identity(), pieces(PAYLOAD), DEADLINE)
    assert blobs.tier.blobs == {}


def test_what_the_tier_raises_comes_through_and_deletes_nothing(blobs):
    blobs.store(identity(), pieces(PAYLOAD), DEADLINE)

    def fail(*_):
        raise TierError("cannot")

    blobs.tier.load = fail
    with pytest.raises(TierError, match="cannot"):
        load(blobs, identity())
    assert len(blobs.tier.blobs) == 1


def test_namespaces_that_come_without_end_take_no_memory_without_end(blobs):
    for number in range(3000):
        blobs.contains([identity(namespace=number.to_bytes(16, "big"))], DEADLINE)
        blobs.load(identity(namespace=number.to_bytes(16, "big")), [], DEADLINE)
    assert len(blobs._facts) <= 1024


# ---------------------------------------------------------------------------------------------------------- any damage

LENGTH = 9000


def _stored(codec, name):
    blobs = BlobStore(DictTier(), codec)
    blobs.store(identity(name), pieces(PAYLOAD[: LENGTH - len(name)] + name.encode()), DEADLINE)
    (blob,) = blobs.tier.blobs.values()
    return blob


@settings(max_examples=400, deadline=None)
@given(st.data(), st.booleans(), st.booleans())
def test_no_damage_is_ever_loaded(data, with_codec, shared):
    codec = Xor(5) if with_codec else None
    whole, other = _stored(codec, "a"), _stored(codec, "b")
    match data.draw(st.sampled_from(["flip", "cut", "extend", "swap", "mix", "zero"])):
        case "flip":
            place = data.draw(st.integers(0, len(whole) - 1))
            damaged = bytearray(whole)
            damaged[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
        case "extend":
            damaged = whole + data.draw(st.binary(min_size=1, max_size=5000))
        case "swap":
            damaged = other
        case "mix":  # the beginning of one, the rest of another
            place = data.draw(st.integers(17, len(whole) - 1))
            damaged = other[:place] + whole[place:]
        case "zero":
            place = data.draw(st.integers(0, len(whole) - 300))
            length = data.draw(st.integers(300, 5000))
            damaged = whole[:place] + bytes(len(whole[place : place + length])) + whole[place + length :]
    blobs = BlobStore(DictTier(shared), codec)
    blobs.tier.blobs[blobs.key(identity())] = bytes(damaged)
    answer, got = load(blobs, identity(), LENGTH)
    if bytes(damaged) == whole:
        assert (answer, got) == (Loaded.LOADED, PAYLOAD[: LENGTH - 1] + b"a")
        return
    if not damaged:
        assert answer is Loaded.ABSENT
    else:
        assert answer in (Loaded.DAMAGED, Loaded.FOREIGN)
    assert bool(blobs.tier.blobs) == (answer is Loaded.FOREIGN or not damaged)
