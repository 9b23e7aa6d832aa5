"""What the scheduler tells the workers to do in a step. Plain values: vLLM carries them between its own processes."""

import attrs

from lmcache.engines.storing import StoreOrder

NULL_BLOCK = 0
"""vLLM's block for positions that hold nothing, in every group: never stored, never loaded into."""


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
class StepOrders:
    """All orders of one step."""

    namespace: bytes = b""
    """What the hashes and chunk numbers belong to; a worker registered for another leaves the stores alone."""
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    updates: int = 0
    """Updates of the weights that the scheduler knows of. Workers that have seen more carry none of this out."""
