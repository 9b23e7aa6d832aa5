"""What the scheduler tells the workers to do in a step. Plain values: vLLM carries them between its own processes."""

import attrs

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.engines.vllm.lora import Evidence

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
class StoreOrder:
    """Offer chunks of a request that are whole by the end of this step."""

    request: str
    tenant: str
    first: int
    """Number of the first of these chunks. 0 starts the request over: earlier orders for it mean nothing any more."""
    hashes: bytes
    """Joined chain hashes of these chunks."""
    blocks: tuple[list[int], ...]
    """For each group, the ids of the blocks that these chunks keep (`geometry.chunking.kept_span`), chunk after chunk.

    `NULL_BLOCK` where vLLM holds none: behind a window, or where there is no state snapshot. Empty for scratch. Ids of
    groups that are not full are good for this step only: vLLM may give such blocks to others before the next one.
    """
    evidence: Evidence | None = None
    """What has to hold after this step, or its KV may be of other LoRA weights than the hashes say."""
    hints: Hints = NO_HINTS
    """How long the request wants its chunks kept."""


@attrs.frozen
class StepOrders:
    """All orders of one step."""

    namespace: bytes = b""
    """What the hashes and chunk numbers belong to; a worker registered for another leaves the stores alone."""
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
