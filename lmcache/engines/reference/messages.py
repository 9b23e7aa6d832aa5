"""What the engine and its ranks tell each other in a step. Values only, so that they can travel between processes."""

import msgspec

from lmcache.engines.reference.shapes import ModelShape


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank's process."""

    shape: ModelShape
    seed: int
    rank: int
    ranks: int
    blocks: int
    server: str
    """Address of the cache server; empty to run without one."""
    deadline: float
    """Seconds that a request to the server may take."""


class Run(msgspec.Struct, frozen=True):
    """Compute tokens of one request."""

    request: int
    start: int
    tokens: list[int]
    tables: list[list[int]]
    """For each group, the block id of each block of the sequence."""


class LoadOrder(msgspec.Struct, frozen=True):
    """Load a hit into a request's blocks. The right to it is the ticket, good in one epoch of the server."""

    request: int
    epoch: str
    ticket: int
    computed: int
    """Tokens that the engine holds itself; blocks that end there or before are not to be written."""
    hit: int
    """Tokens."""
    tables: list[list[int]]


class StoreOffer(msgspec.Struct, frozen=True):
    """What of one request may be stored when the step has been computed."""

    request: int
    tenant: str
    namespace: bytes
    """The hashes are meant for a link of this namespace only."""
    hashes: bytes
    """Joined hashes of the chunks that are whole, from the first on, when the step has been computed."""
    tables: list[list[int]]


class Step(msgspec.Struct, frozen=True, tag=True):
    """One step, for all ranks alike."""

    runs: list[Run] = []
    loads: list[LoadOrder] = []
    offers: list[StoreOffer] = []
    ended: list[int] = []
    """Requests that the ranks may forget."""


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a step."""

    logits: list[bytes] = []
    """For each run, the float32 logits after its last token. Rank 0 only."""
    loaded: list[int] = []
    """Requests whose load has ended well on this rank."""
    failed: list[int] = []
    """Requests whose load has ended without: their blocks hold anything."""


class Partial(msgspec.Struct, frozen=True, tag=True):
    """A rank's part of a sum over ranks; it goes on when it has received the `Sum`."""

    data: bytes


class Sum(msgspec.Struct, frozen=True, tag=True):
    """The sum of all ranks' parts."""

    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank met an error and ends."""

    error: str


ToRank = Setup | Step | Sum
FromRank = StepDone | Partial | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
