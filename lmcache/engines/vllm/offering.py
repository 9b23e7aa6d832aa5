"""Which chunks of a request are whole by the end of a step, and in which blocks they lie. Scheduler process."""

from collections.abc import Iterable, Sequence

from lmcache.core.keys import HASH_BYTES
from lmcache.engines.storing import StoreOrder
from lmcache.engines.vllm.orders import NULL_BLOCK
from lmcache.engines.vllm.tracked import BlockTable, SchedulerLink, Tracked
from lmcache.geometry.chunking import kept_blocks, kept_span
from lmcache.geometry.groups import Geometry, KVGroup

Snapshot = tuple[int, int, int]
"""KV group, block and token boundary of a recurrent state that a step leaves behind, as vLLM hands it over."""


class Offering:
    """Makes store orders. `handed_over` are the groups whose blocks vLLM names as snapshots, and only so."""

    def __init__(self, geometry: Geometry, handed_over: Iterable[int] = (), *, decode: bool = True) -> None:
        """`decode` also offers chunks that sampled tokens complete."""
        self._geometry = geometry
        self._handed_over = frozenset(handed_over)
        self._decode = decode

    def whole_chunks(self, tracked: Tracked, tokens: int, link: SchedulerLink) -> range:
        """Numbers of the chunks that are whole by the end of a step of `tokens` and were not offered before."""
        request = tracked.request
        # positions beyond `num_tokens` hold drafts that may be refused, or tokens that are not sampled yet
        known = min(request.num_tokens, request.num_computed_tokens + tokens)
        if not self._decode:
            known = min(known, request.num_prompt_tokens)
        life = (link.epoch, request.num_preemptions)
        if tracked.offered_in != life:
            # a new boot of the server holds nothing, and a resumed request has other blocks
            tracked.offered, tracked.offered_in = 0, life
        chunks = range(tracked.offered, known // link.chunk_size)
        tracked.offered = max(tracked.offered, chunks.stop)
        return chunks

    def order(
        self, tracked: Tracked, chunks: range, link: SchedulerLink, table: BlockTable, snapshots: Sequence[Snapshot]
    ) -> StoreOrder:
        """The order to store `chunks`, from the request's block table as it is in this step."""
        hashes = tracked.hashes(link.chunk_size)[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES]
        blocks = tuple(
            _snapshot_blocks([s for s in snapshots if s[0] == number], chunks, link.chunk_size)
            if number in self._handed_over
            else _table_blocks(group, chunks, link.chunk_size, ids)
            for number, (group, ids) in enumerate(zip(self._geometry.groups, table, strict=True))
        )
        content = tracked.content
        return StoreOrder(
            *(tracked.request.request_id, content.tenant, chunks.start, hashes, blocks),
            evidence=content.evidence(),
            hints=content.hints,
        )


def _table_blocks(group: KVGroup, chunks: range, chunk_size: int, ids: list[int]) -> list[int]:
    if not group.cached:
        return []
    ids = ids + [NULL_BLOCK] * (chunks.stop * chunk_size // group.tokens_per_block - len(ids))
    if kept_blocks(group, chunk_size) * group.tokens_per_block == chunk_size:
        return ids[
            chunks.start * chunk_size // group.tokens_per_block : chunks.stop * chunk_size // group.tokens_per_block
        ]
    return [ids[block] for chunk in chunks for block in kept_span(group, chunk_size, chunk)]


def _snapshot_blocks(snapshots: Iterable[Snapshot], chunks: range, chunk_size: int) -> list[int]:
    # a boundary that is no chunk's end cannot be the end of a hit
    at = {tokens // chunk_size - 1: block for _, block, tokens in snapshots if tokens % chunk_size == 0}
    return [at.get(chunk, NULL_BLOCK) for chunk in chunks]
