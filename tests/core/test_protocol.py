"""Messages: every one comes back as it was, and no bytes whatever raise anything but ProtocolError."""

import contextlib
import random
import typing

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from lmcache.core import protocol
from lmcache.core.hints import Hints, Priority
from lmcache.core.protocol import (
    PROTOCOL,
    Confirm,
    Error,
    ErrorCode,
    Found,
    Hello,
    Lookup,
    Message,
    Opened,
    Register,
    Reply,
    Request,
    Reserve,
    Role,
    StatusReport,
    decode_reply,
    decode_request,
    encode,
)
from lmcache.errors import ProtocolError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

REQUESTS = typing.get_args(Request)
REPLIES = typing.get_args(Reply)

IDS = st.integers(0, 2**64 - 1)
KINDS = st.sampled_from([GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL, GroupKind.RECURRENT])


@st.composite
def groups(draw: st.DrawFn) -> KVGroup:
    kind = draw(KINDS)
    pages = tuple(draw(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=4)))
    return KVGroup(
        kind,
        draw(st.integers(1, 200)),
        pages,
        window=draw(st.integers(1, 1 << 20)) if kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL) else 0,
        shards=draw(st.sampled_from([1, 2, 4])),
        layers=tuple(f"layer.{number}" for number in range(len(pages))),
    )


GEOMETRIES = st.lists(groups(), min_size=1, max_size=3).map(
    lambda found: Geometry((*found, KVGroup(GroupKind.SCRATCH, 0, ())), ranks=4)
)

FIELDS = {
    int: st.integers(0, 2**63 - 1),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=64),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    Hints: st.builds(
        Hints,
        ttl_s=st.none() | st.floats(0, 1e12, allow_nan=False),
        priority=st.none() | st.sampled_from(Priority),
        ends_session=st.booleans(),
    ),
    Role: st.sampled_from(Role),
    Geometry: GEOMETRIES,
    dict[str, str]: st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
    dict[str, typing.Any]: st.dictionaries(st.text(max_size=9), st.integers(0, 9) | st.lists(st.text()), max_size=3),
    list[int]: st.lists(st.integers(0, 2**40), max_size=4),
    list[bytes]: st.lists(st.binary(max_size=9), max_size=4),
}


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = typing.get_type_hints(kind)
    fields = {name: IDS if name == "id" else FIELDS[hints[name]] for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_request_comes_back_as_it_was_sent(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))

    assert decode_request(encode(message)) == message


@pytest.mark.parametrize("kind", REPLIES, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_reply_comes_back_as_it_was_sent(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))

    assert decode_reply(encode(message)) == message


def test_every_message_is_a_request_or_a_reply_and_none_is_both() -> None:
    every = {each for each in vars(protocol).values() if isinstance(each, type) and issubclass(each, Message)} - {
        Message
    }

    assert set(REQUESTS) | set(REPLIES) == every
    assert not set(REQUESTS) & set(REPLIES)
    with pytest.raises(ProtocolError):
        decode_reply(encode(protocol.Ping(1)))
    with pytest.raises(ProtocolError):
        decode_request(encode(protocol.Pong(1, "e")))


def decoded_or_refused(data: bytes) -> None:
    """Whatever the bytes are, the answer is a message or a ProtocolError."""
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode(data), Message)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_a_protocol_error(data: bytes) -> None:
    decoded_or_refused(data)


SAMPLES = [
    encode(message)
    for message in (
        Hello(1, PROTOCOL, "1.2"),
        Register(
            2,
            PROTOCOL,
            {"model": "m"},
            Geometry((KVGroup(GroupKind.FULL, 16, (64, 64), shards=2), KVGroup(GroupKind.SCRATCH, 0, ())), ranks=2),
            Role.WORKER,
            1,
        ),
        Reserve(3, "tenant", b"p" * 16, b"h" * 64, 0, 1),
        Lookup(4, "tenant", b"h" * 64, 1000),
        Confirm(5, 77, "epoch"),
        Error(6, ErrorCode.STALE, "no", "again"),
        Found(7, 2**60, 4096),
        Opened(8, 4096, [0, 3], [b"c" * 16, b""], 99),
        StatusReport(9, {"gauges": {"cells_used": 1}, "clients": [{"pid": 2}]}),
    )
]


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_a_message_cut_off_anywhere_is_refused(sample: bytes) -> None:
    for length in range(len(sample)):
        with pytest.raises(ProtocolError):
            decode_request(sample[:length])
        with pytest.raises(ProtocolError):
            decode_reply(sample[:length])


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_a_message_with_changed_bytes_is_a_message_or_is_refused(sample: bytes) -> None:
    chance = random.Random(5)
    for _ in range(300):
        mutant = bytearray(sample)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(mutant))
            match chance.randrange(3):
                case 0:
                    mutant[at] = chance.randrange(256)
                case 1:
                    mutant[at:at] = chance.randbytes(chance.randint(1, 5))
                case _:
                    del mutant[at]
            if not mutant:
                break
        decoded_or_refused(bytes(mutant))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array that claims four billion elements"),
        pytest.param(b"\x97\xa8Register\x01\x01\xdf\xff\xff\xff\xff", id="facts that claim as many"),
        pytest.param(b"\x97\xa8Register\x01\x01\x80\x81\xa6groups\xdd\xff\xff\xff\xff", id="groups that claim as many"),
        pytest.param(b"\x95\xa6Lookup\x01\xa0\xc6\xff\xff\xff\xff", id="hashes that claim four gigabytes"),
        pytest.param(b"\x93\xacStatusReport\x01\x81\xa1a" + b"\x91" * 100_000, id="lists in lists in lists"),
        pytest.param(b"\x91" * 1_000_000, id="a million arrays in each other"),
        pytest.param(b"\x94\xa5Hello\x01\x01\xa2\xff\xfe", id="text that is no UTF-8"),
        pytest.param(b"\x94\xa5Hello\x01\x01\xc7\x04\x05abcd", id="an extension type"),
        pytest.param(b"\x92\xa4Ping\xcb\x7f\xf0\0\0\0\0\0\0", id="an id of infinity"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x02os\x94.", id="a pickle"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_hostile_bytes_are_refused_at_no_cost(data: bytes) -> None:
    decoded_or_refused(data)


def test_a_geometry_that_cannot_be_is_refused_in_its_own_words() -> None:
    bad = SAMPLES[1].replace(b"\xb0tokens_per_block\x10", b"\xb0tokens_per_block\x00")

    with pytest.raises(ProtocolError, match="has 0 tokens per block; give at least 1"):
        decode_request(bad)


def test_what_a_later_version_appends_to_a_message_is_ignored() -> None:
    longer = msgspec.msgpack.encode(["Hello", 1, 7, "9.9", "new field", {"and": "more"}])

    assert decode_request(longer) == Hello(1, 7, "9.9")


def test_the_document_names_every_message() -> None:
    document = protocol.__doc__ or ""
    unnamed = [kind.__name__ for kind in REQUESTS if f"`{kind.__name__}`" not in document]

    assert unnamed == []


@pytest.mark.parametrize("hints", [[-1.0, None, False], [None, 7, False], [None, None, 3], ["soon", None, False]])
def test_hints_that_mean_nothing_are_no_message(hints: list[object]) -> None:
    frame = msgspec.msgpack.encode(["Lookup", 1, "", b"", 0, hints])
    with pytest.raises(ProtocolError):
        decode_request(frame)
