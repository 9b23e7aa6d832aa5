"""The protocol between engines, commands and the server. This docstring is the protocol document.

**Frames.** A message is one msgpack array `[tag, …fields]`; a request and its reply carry the same `id`, chosen by the
client. Requests never refer to memory addresses, names of code or files, and nothing in them is executed.

**Two transports, one protocol.** On TCP a ZeroMQ ROUTER answers `Hello` and commands: what needs no memory. The
reply to `Hello` names a Unix stream socket (abstract: no file is left). There every message is preceded by its length
(4 bytes, little endian, at most `MAX_FRAME`), the first reply carries the arena's memfd, and the connection *is* the
client's liveness: when it ends, whatever the client had reserved is freed and its tickets are dropped.

**On another host** no Unix socket is in reach. `Welcome` names a second TCP port, of the *bulk channel*, where a ZeroMQ
ROUTER takes everything that the Unix socket takes, one message a frame. The arena's bytes travel there, too: `Write`
fills granted cells and `Read` asks for cells of a ticket, each for a piece of one cell of at most `PIECE_BYTES`, which
is a second frame of the `Write` and of the answer to `Read`. Each carries a checksum. A writer sends the bytes of every
cell in order, from its first to the last that the object uses, then `Commit`. A frame of no bytes ends a conversation.

**Other servers** for which this one is a storage tier register as such, on the bulk channel. `Peek` tells them what
is in L1, `Take` pins one shard that they then `Read`, and `Confirm`. They store as any worker does.

**Commands** speak TCP: `Ping`, `Status`, and `Pin` and `Unpin`, which name a namespace by its digest, as `Status` does.

**Order.** On a Unix connection: `Register`, then anything. Replies may come in another order than requests: `id` ties
them.

**Store** (a worker, for one group): `Reserve` names chunks in chain order; the answer gives one `Placed` byte a chunk
for the leading run that fits, and the cells of those granted. The worker copies, then sends `Commit` (or `Abort`). An
object becomes readable when all its shards are committed. Cells of a reservation belong to the worker until it commits,
aborts or its connection ends.

**Load.** The scheduler sends `Lookup`; `Found` tells how many leading tokens every group and rank can serve and gives a
ticket that pins them. Where tiers have more, `Found` says `again`, and the scheduler sends `AskAgain` until the answer
is final. Each worker sends `Open` for the cells, copies, then `Confirm`; only `Confirmed(held=True)` makes the load
count. The ticket ends when every rank has confirmed, when the scheduler sends `Drop`, or with its connection.

**Hints.** `Reserve` and `Lookup` carry what the request says of its chunks: TTL, priority, end of its session
(`core/hints.py`). They are advice: what they do to a chunk that several requests use is in `core/residents.py`.

**Epoch.** The server's boot id, in `Welcome` and `Registered`. A ticket is good in its epoch only, so `Open` and
`Confirm` carry it. A client that sees another epoch than the one it registered with registers again.

**Errors.** Any request may be answered by `Error`: a code from `ErrorCode`, what went wrong, what to do. What cannot be
decoded at all is answered with id 0 where the transport allows an answer, and the connection is closed.

**Versions.** `Hello` and `Register` carry `PROTOCOL`. A server refuses any other, naming both.
"""

import enum
from typing import Any, TypeVar

import msgspec

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.errors import ProtocolError
from lmcache.geometry.groups import Geometry

T = TypeVar("T")

PROTOCOL = 2
"""Raised with every change that an older peer would misread."""

PIECE_BYTES = 1 << 20
"""Bytes of a cell that travel in one message, at most."""

MAX_FRAME = 16 << 20
"""Bytes of the largest message; far more than any that is answered with more than a refusal."""


MAX_CHUNKS = 1 << 16
"""Chunks of one request: more would make others wait."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; `id` ties a reply to its request."""

    id: int


class ErrorCode(enum.StrEnum):
    """Why a request was refused."""

    VERSION = "version"
    """The peer speaks another protocol version."""
    MALFORMED = "malformed"
    """Bytes or values that are no valid request."""
    GEOMETRY = "geometry"
    """The engine's groups cannot be served with this server's settings."""
    UNREGISTERED = "unregistered"
    """A request that needs a registered Unix connection."""
    STALE = "stale"
    """A ticket or reservation of another epoch, another client, or none."""
    FULL = "full"
    """More than may be held."""
    STOPPING = "stopping"
    """The server is shutting down."""
    INTERNAL = "internal"
    """A fault of the server's own; it is logged there."""


class Placed(enum.IntEnum):
    """What `Reserve` did with one chunk."""

    GRANTED = 0
    """Cells were reserved; write them."""
    PRESENT = 1
    """This shard is already stored; nothing to write."""
    BUSY = 2
    """Another client is writing it; nothing to write."""
    REFUSED = 3
    """An admission policy does not want it stored; this request should not offer it again, nor what follows it."""


class Role(enum.StrEnum):
    """What a client does."""

    SCHEDULER = "scheduler"
    """Looks up and drops; gets no memory."""
    WORKER = "worker"
    """Stores and loads as one rank; gets the arena."""
    PEER = "peer"
    """Another server, for which this one is a storage tier; on the bulk channel."""


# --------------------------------------------------------------------------------------------------------- on either


class Error(Message, frozen=True, array_like=True, tag=True):
    code: str
    message: str
    remedy: str


class Hello(Message, frozen=True, array_like=True, tag=True):
    """The first message of anybody; answered with `Welcome`."""

    protocol: int
    version: str
    """The sender's lmcache version, for messages."""


class Welcome(Message, frozen=True, array_like=True, tag=True):
    protocol: int
    version: str
    epoch: str
    socket: str
    """Address of the Unix socket; a leading `@` means abstract."""
    bulk_port: int = 0
    """TCP port of the bulk channel; 0 where the server has none."""


class Ping(Message, frozen=True, array_like=True, tag=True):
    pass


class Pong(Message, frozen=True, array_like=True, tag=True):
    epoch: str


class Status(Message, frozen=True, array_like=True, tag=True):
    pass


class StatusReport(Message, frozen=True, array_like=True, tag=True):
    report: dict[str, Any]
    """`metrics.py` documents every entry under `counters` and `gauges`."""


class Pin(Message, frozen=True, array_like=True, tag=True):
    """Keep the leading chunks of a prompt that are stored, for `seconds`: answered with `Pinned`."""

    namespace: bytes
    hashes: bytes
    """Joined chain hashes of the prompt's whole chunks."""
    seconds: float


class Pinned(Message, frozen=True, array_like=True, tag=True):
    pin: int
    """What `Unpin` names; 0 when nothing of the prompt is stored."""
    tokens: int
    """Tokens that it covers."""


class Unpin(Message, frozen=True, array_like=True, tag=True):
    """End a pin before its time: answered with `Done`."""

    pin: int


# ------------------------------------------------------------------------------------------------- on the Unix socket


class Register(Message, frozen=True, array_like=True, tag=True):
    """Say what this client is; the connection is bound to that namespace from then on."""

    protocol: int
    facts: dict[str, str]
    """The namespace, in clear. The server adds geometry and chunk size."""
    geometry: Geometry
    role: Role
    rank: int
    node: int = -1
    """NUMA node of the worker's device, which the arena is to lie near; -1 where nobody knows."""


class Registered(Message, frozen=True, array_like=True, tag=True):
    """Followed, for a worker, by the arena's memfd in the ancillary data of the frame's first byte."""

    epoch: str
    namespace: bytes
    """`keys.namespace_digest` of the facts, the geometry's and the chunk size's included."""
    chunk_size: int
    """Tokens."""
    cell_bytes: int
    arena_bytes: int
    """Size of the memfd."""


class Reserve(Message, frozen=True, array_like=True, tag=True):
    tenant: str
    parent: bytes
    """Chain hash of the chunk before the first one; empty when the first one starts the prompt."""
    hashes: bytes
    """Joined chain hashes, in chain order."""
    group: int
    shard: int
    hints: Hints = NO_HINTS


class Reserved(Message, frozen=True, array_like=True, tag=True):
    reservation: int
    """0 when nothing was granted."""
    placed: bytes
    """One `Placed` a chunk, for the leading run that could be placed; may be shorter than what was asked."""
    cells: bytes
    """Little-endian 32-bit cell numbers of the granted objects, in order."""
    backed: int
    """Cells from 0 that have memory now: no other may be touched."""


class Commit(Message, frozen=True, array_like=True, tag=True):
    """The cells of a reservation are written: answered with `Done`."""

    reservation: int


class Abort(Message, frozen=True, array_like=True, tag=True):
    """Give a reservation back unpublished: answered with `Done`."""

    reservation: int


class Lookup(Message, frozen=True, array_like=True, tag=True):
    tenant: str
    hashes: bytes
    """Joined chain hashes of the prompt's whole chunks."""
    limit: int
    """Tokens that the hit may cover at most (the prompt's length less one)."""
    hints: Hints = NO_HINTS
    prefill_speed: float = 0.0
    """Tokens a second that this engine computes of prompts, as far as it knows; 0 if it does not."""


class Found(Message, frozen=True, array_like=True, tag=True):
    ticket: int
    """0 when there is nothing to load, nor anything to ask for again."""
    tokens: int
    again: bool = False
    """The answer is not final, for tiers are being looked at: send `AskAgain`, later."""


class AskAgain(Message, frozen=True, array_like=True, tag=True):
    """What has become of a lookup: answered with `Found`. Once that is final, the lookup is forgotten."""

    ticket: int
    patience: float = 0.0
    """Seconds for which the answer may be kept back if it is not final: it comes as soon as it is."""


class Open(Message, frozen=True, array_like=True, tag=True):
    """Ask for the cells behind a ticket, for this connection's rank."""

    ticket: int
    epoch: str


class Opened(Message, frozen=True, array_like=True, tag=True):
    tokens: int
    first: list[int]
    """For each group, the number of the first chunk that the hit needs."""
    cells: list[bytes]
    """For each group, little-endian 32-bit cell numbers of the objects needed, chunk after chunk."""
    backed: int
    """As in `Reserved`."""


class Confirm(Message, frozen=True, array_like=True, tag=True):
    """This rank has copied. Idempotent."""

    ticket: int
    epoch: str


class Confirmed(Message, frozen=True, array_like=True, tag=True):
    held: bool
    """Whether the ticket held throughout; otherwise the load must not count."""


class Drop(Message, frozen=True, array_like=True, tag=True):
    """End a ticket before its ranks have confirmed: answered with `Done`. Unknown tickets are no error."""

    ticket: int


class Done(Message, frozen=True, array_like=True, tag=True):
    pass


# ------------------------------------------------------------------------------------------------ on the bulk channel


class Write(Message, frozen=True, array_like=True, tag=True):
    """Followed by a frame with the bytes for a piece of a granted cell: answered with `Written`."""

    reservation: int
    cell: int
    offset: int
    """Bytes into the cell: as many as have been written of it."""
    checksum: int
    """xxh3_64 of the bytes."""


class Written(Message, frozen=True, array_like=True, tag=True):
    pass


class Read(Message, frozen=True, array_like=True, tag=True):
    """Ask for a piece of a cell of an open ticket: answered with `Contents`."""

    ticket: int
    cell: int
    offset: int
    """Bytes into the cell."""
    length: int


class Contents(Message, frozen=True, array_like=True, tag=True):
    """Followed by a frame with the bytes."""

    checksum: int


# ----------------------------------------------------------------------------------------------- of other servers


class Peek(Message, frozen=True, array_like=True, tag=True):
    """Ask which chunks have one shard of one group in L1: answered with `Peeked`. Peer."""

    hashes: bytes
    """Joined chain hashes, in any order."""
    group: int
    shard: int


class Peeked(Message, frozen=True, array_like=True, tag=True):
    there: bytes
    """One byte for each chunk: 1 if it can be had."""


class Take(Message, frozen=True, array_like=True, tag=True):
    """Ask for one shard of one group of one chunk, whatever hit it may be part of: answered with `Taken`. Peer."""

    chain_hash: bytes
    group: int
    shard: int


class Taken(Message, frozen=True, array_like=True, tag=True):
    ticket: int
    """Pins the chunk until this client confirms it, or drops it; 0 when the shard is not there."""
    cells: bytes
    """Little-endian 32-bit cell numbers of the object."""


Request = (
    Hello
    | Ping
    | Status
    | Pin
    | Unpin
    | Register
    | Reserve
    | Commit
    | Abort
    | Lookup
    | AskAgain
    | Open
    | Confirm
    | Drop
    | Write
    | Read
    | Peek
    | Take
)
Reply = (
    Error
    | Welcome
    | Pong
    | StatusReport
    | Pinned
    | Registered
    | Reserved
    | Found
    | Opened
    | Confirmed
    | Done
    | Written
    | Contents
    | Peeked
    | Taken
)

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """Bytes of a message, without the length that precedes it on a stream."""
    return _encoder.encode(message)


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    """Read what a client sent. Raises ProtocolError, whatever the bytes are."""
    return _decode(_requests, data)


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    """Read what a server sent. Raises ProtocolError, whatever the bytes are."""
    return _decode(_replies, data)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes | bytearray | memoryview) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes that are no message of protocol {PROTOCOL}: {error}") from error
