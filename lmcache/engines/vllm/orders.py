"""What the scheduler tells the workers to do in a step. Plain values: vLLM carries them between its own processes."""

import attrs


@attrs.frozen
class LoadOrder:
    """Fill a request's blocks from the cache."""

    request: str
    epoch: str
    """Boot of the server that the ticket belongs to."""
    ticket: int
    computed: int
    """Tokens that the engine already holds; a block boundary. Nothing before it may be written."""
    hit: int
    """Tokens that it will hold afterwards."""
    blocks: tuple[list[int], ...]
    """The request's block table, for each group."""


@attrs.frozen
class StoreOrder:
    """Offer chunks of a request that are whole by the end of this step."""

    request: str
    tenant: str
    first: int
    """Number of the first of these chunks. 0 starts the request over: earlier orders for it mean nothing any more."""
    hashes: bytes
    """Joined chain hashes of these chunks."""
    blocks: tuple[list[int], ...]
    """For each group, the ids of all blocks of these chunks, in order; empty for scratch."""


@attrs.frozen
class StepOrders:
    """All orders of one step."""

    namespace: bytes = b""
    """What the hashes and chunk numbers belong to; a worker registered for another leaves the stores alone."""
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
