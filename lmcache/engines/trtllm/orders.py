"""What the scheduler tells the workers to do in a step. Plain values: TensorRT-LLM carries them between its ranks."""

import attrs

from lmcache.engines.storing import StoreOrder

BAD_PAGE = -1
"""TensorRT-LLM's block id where a layer group holds no page: never stored, never loaded into."""


@attrs.frozen
class LoadOrder:
    """Fill a request's blocks from the cache."""

    request: int
    epoch: str
    """Boot of the server that the ticket belongs to."""
    ticket: int
    start: int
    """Tokens that the engine already holds; a block boundary. Nothing before it may be written."""
    end: int
    """Tokens that it will hold afterwards."""
    blocks: tuple[list[int], ...]
    """The request's block table, for each KV group."""
    parked: bool = False
    """Whether the request waits outside the batch, so that the load need not be done when the step begins."""
    reservation: int | None = None
    """Under what the engine wants to hear of it, if that is not the request."""


@attrs.frozen
class StepOrders:
    """All orders of one step."""

    namespace: bytes = b""
    """What the hashes and chunk numbers belong to; a worker registered for another leaves the stores alone."""
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    ended: tuple[str, ...] = ()
    """Requests that have ended since the last step."""
    owner: int | None = None
    """The rank whose blocks these are, where each rank serves requests of its own."""
