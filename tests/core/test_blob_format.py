"""The header of a blob: written and read as documented, and refused when a single bit of it is wrong."""

import hashlib
import json

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings

from lmcache.core import blob_format
from lmcache.core.blob_format import BlobHeader, Finding, blob_key, claimed_header_bytes, encode_facts, read_header
from lmcache.errors import TierError

NAMESPACE, CHAIN = b"namespace digest", b"chain hash 16 by"
FACTS = {"model": "org/model", "dtype": "bfloat16"}


def header(**changes):
    values = {
        "namespace": NAMESPACE,
        "chain_hash": CHAIN,
        "group": 3,
        "shard": 1,
        "chunk_size": 256,
        "raw_bytes": 5000,
        "stored_bytes": 4000,
        "codec": "zstd",
        "checksum": b"checksum of data",
        "tenant": "tenant",
        "facts": encode_facts(FACTS),
        **changes,
    }
    key = blob_key(*(values[name] for name in ("namespace", "chain_hash", "group", "shard", "codec")))
    return BlobHeader(key=key, **values)


def written(of):
    buffer = bytearray(b"\xaa" * of.header_bytes)
    of.write_into(memoryview(buffer))
    return buffer


def test_what_is_written_is_read():
    for each in (header(), header(codec=""), header(tenant=""), header(tenant="ümlaut"), header(facts=b"{}")):
        assert read_header(written(each)) == each


def test_it_stands_where_the_document_says():
    data = bytes(written(header()))
    assert len(data) == 4096
    assert data[:8] == b"LMCBLOB\n"

    def number(at, width):
        return int.from_bytes(data[at : at + width], "little")

    assert (number(8, 4), number(12, 4)) == (1, 4096)
    facts = b"namespace digestchain hash 16 by" + (3).to_bytes(4, "little") + (1).to_bytes(4, "little")
    assert data[16:36] == hashlib.sha256(b"lmcache blob 1" + facts + b"zstd").digest()[:20]
    assert data[36:68] == b"namespace digestchain hash 16 by"
    assert (number(68, 4), number(72, 4), number(76, 4)) == (3, 1, 256)
    assert (number(80, 8), number(88, 8)) == (5000, 4000)
    assert data[96:128] == b"zstd".ljust(32, b"\0")
    assert data[128:144] == b"checksum of data"
    assert data[144:160] == xxhash.xxh3_128_digest(data[:144] + bytes(16) + data[160:])
    assert (number(160, 4), number(164, 4)) == (6, len(encode_facts(FACTS)))
    assert data[168:424] == b"tenant".ljust(256, b"\0")
    assert data[424:].rstrip(b"\0") == b'{"dtype":"bfloat16","model":"org/model"}'
    assert read_header(data).facts_in_clear() == FACTS


def test_the_document_lists_every_byte_once():
    rows = [line.split() for line in blob_format.__doc__.splitlines() if line.strip()[:1].isdigit()]
    at = 0
    for offset, length, *_ in rows[:-1]:
        assert int(offset) == at
        at += int(length)
    assert int(rows[-1][0]) == at == 424


def test_many_facts_make_it_longer_in_steps_of_4096_and_too_many_are_refused():
    facts = encode_facts({"a": "x" * 5000, "lone surrogate": "\ud800"})
    assert header(facts=facts).header_bytes == 8192
    assert read_header(written(header(facts=facts))).facts_in_clear()["lone surrogate"] == "\ud800"
    with pytest.raises(TierError, match="do not fit in the header"):
        header(facts=b"x" * (1 << 20)).header_bytes  # noqa: B018  # raises


def test_a_long_tenant_is_cut_between_characters():
    assert read_header(written(header(tenant="ä" * 200))).tenant == "ä" * 128
    assert read_header(written(header(tenant="x" + "ä" * 200))).tenant == "x" + "ä" * 127
    assert read_header(written(header(tenant="\ud800"))).tenant == "?"


def test_keys_differ_in_all_that_makes_a_blob_another_and_in_nothing_else():
    one = (NAMESPACE, CHAIN, 0, 0, "")
    others = [
        (CHAIN, CHAIN, 0, 0, ""),
        (NAMESPACE, NAMESPACE, 0, 0, ""),
        (NAMESPACE, CHAIN, 1, 0, ""),
        (NAMESPACE, CHAIN, 0, 1, ""),
        (NAMESPACE, CHAIN, 0, 0, "zstd"),
    ]
    assert len({blob_key(*each) for each in (one, *others)}) == 6
    assert blob_key(*one) == "a32ee039b14bdf12fa46eda2beb28e7aa0ca1763"  # never changes: others have stored under it


def test_every_flipped_bit_is_found():
    data = written(header())
    for place in [*range(430), *range(430, 4096, 97)]:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert read_header(data) is (Finding.FOREIGN if place < 12 else Finding.DAMAGED), (place, bit)
            data[place] ^= 1 << bit
    assert read_header(data) == header()


def test_a_header_that_is_cut_off_is_found():
    data = written(header())
    assert read_header(b"") is Finding.FOREIGN
    for length in range(1, 4096):
        assert read_header(data[:length]) is Finding.DAMAGED


def test_other_versions_and_other_peoples_bytes_are_foreign():
    data = written(header())
    data[8] = 2
    for foreign in (data, b"hello world", bytes(5000), b'{"json": 1}' * 500):
        assert read_header(foreign) is Finding.FOREIGN


def resealed(data):
    """With the checksum that its bytes have, as somebody writes it who means us harm."""
    data[144:160] = bytes(16)
    data[144:160] = xxhash.xxh3_128_digest(bytes(data))
    return data


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (16, b"\0"),  # the key
        (36, b"\0"),  # the namespace
        (72, b"\7"),  # the shard
        (96, b"\xff"),  # a codec that is not ASCII
        (97, b"\0"),  # a codec with a hole
        (160, b"\xff\xff"),  # a tenant longer than its field
        (164, b"\xff\xff\xff\xff"),  # facts longer than the header
        (164, b"\xff\xff"),
    ],
)
def test_a_header_that_contradicts_itself_is_damaged_even_with_the_right_checksum(at, value):
    data = written(header())
    data[at : at + len(value)] = value
    assert read_header(resealed(data)) is Finding.DAMAGED


def test_facts_that_are_no_json_are_shown_as_none():
    for facts in (b"{", b"[1]", b"\xff", b"[" * 3000):
        assert read_header(written(header(facts=facts))).facts_in_clear() == {}
    assert read_header(written(header(facts=b'{"a": 1}'))).facts_in_clear() == {"a": "1"}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600), st.booleans(), st.booleans())
def test_any_bytes_can_be_read(tail, with_magic, with_checksum):
    data = bytearray(tail)
    if with_magic:
        data = bytearray(b"LMCBLOB\n\1\0\0\0\0\20\0\0" + tail).ljust(4096, b"\0")
        if with_checksum:
            resealed(data)
    answer = read_header(data)
    assert answer in Finding or json.dumps(answer.facts_in_clear())
    assert claimed_header_bytes(data) in (0, 4096)
