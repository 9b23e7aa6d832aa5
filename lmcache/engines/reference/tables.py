"""Block tables: which blocks a request needs of each group, and giving them to it and taking them away in time."""

from collections.abc import Iterable

from lmcache.engines.reference.blocks import NULL_BLOCK, BlockPool
from lmcache.engines.reference.requests import Request
from lmcache.engines.reference.shapes import GroupShape, ModelShape
from lmcache.geometry.groups import GroupKind


def first_needed_block(group: GroupShape, computed: int) -> int:
    """The first block of the sequence that is still read, or written, once `computed` tokens are computed."""
    match group.kind:
        case GroupKind.FULL | GroupKind.SCRATCH:
            return 0
        case GroupKind.SLIDING_WINDOW:
            return max(0, computed - group.window + 1) // group.tokens_per_block
        case GroupKind.CHUNKED_LOCAL:
            return computed // group.window * group.window // group.tokens_per_block
        case GroupKind.RECURRENT:
            return max(0, computed - 1) // group.tokens_per_block


def blocks_for(shape: ModelShape, tokens: int) -> int:
    """Blocks that a request of `tokens` tokens needs at most, over all groups."""
    return sum(-(-tokens // group.tokens_per_block) if group.tokens_per_block else 1 for group in shape.groups)


class BlockTables:
    """Moves blocks between the pool and the tables of requests. Used by the scheduler only."""

    def __init__(self, shape: ModelShape, pool: BlockPool) -> None:
        self._shape = shape
        self._pool = pool
        self._alignment = shape.geometry().alignment
        # scratch is never complete, and so never remembered
        self._kept = [(n, group) for n, group in enumerate(shape.groups) if group.kind is not GroupKind.SCRATCH]

    def room_for(self, request: Request) -> bool:
        """Whether there are blocks for all the tokens that the request has, and the next one."""
        return blocks_for(self._shape, len(request.tokens) + 1) <= self._pool.unused

    def take_own(self, request: Request) -> None:
        """Have the request begin where the engine's own prefix cache ends."""
        longest = (len(request.tokens) - 1) // self._alignment * self._alignment
        for computed in range(longest, 0, -self._alignment):
            found = self._find_own(request, computed)
            if found is not None:
                for group, number, block in found:
                    self._pool.share(block)
                    request.set_block(group, number, block)
                request.computed = request.keyed = computed
                request.own_hit_tokens += computed
                return

    def _find_own(self, request: Request, computed: int) -> list[tuple[int, int, int]] | None:
        """The cached blocks `(group, number, block)` that the request needs to go on after `computed` tokens."""
        found = []
        for group, shape in self._kept:
            for number in range(first_needed_block(shape, computed), computed // shape.tokens_per_block):
                block = self._pool.find(request.key(group, number))
                if block == NULL_BLOCK:
                    return None
                found.append((group, number, block))
        return found

    def fill(self, request: Request, group: int, numbers: Iterable[int]) -> None:
        """New blocks for block numbers of the sequence where there are none. Raises OutOfBlocks."""
        table = request.tables[group]
        for number in numbers:
            if number >= len(table) or table[number] == NULL_BLOCK:
                request.set_block(group, number, self._pool.allocate())

    def extend(self, request: Request, upto: int) -> None:
        """New blocks for the tokens up to `upto`. Raises OutOfBlocks; what was given until then stays."""
        for group, shape in enumerate(self._shape.groups):
            stop = -(-upto // shape.tokens_per_block) if shape.tokens_per_block else 1
            self.fill(request, group, range(first_needed_block(shape, request.computed), stop))

    def remember(self, request: Request) -> None:
        """Let the engine's own prefix cache know what has become complete."""
        for group, shape in self._kept:
            table, size = request.tables[group], shape.tokens_per_block
            for number in range(request.keyed // size, request.computed // size):
                if number < len(table) and table[number] != NULL_BLOCK:
                    self._pool.remember(request.key(group, number), table[number])
        request.keyed = request.computed

    def release_unneeded(self, request: Request) -> None:
        """Let go of what no later token reads: window blocks that have been left behind, and old snapshots."""
        for shape, table in zip(self._shape.groups, request.tables, strict=True):
            unneeded = min(first_needed_block(shape, request.computed), len(table))
            self._pool.release(table[:unneeded])
            table[:unneeded] = [NULL_BLOCK] * unneeded

    def release(self, request: Request) -> None:
        """Take all blocks from the request, which is back at its beginning."""
        self._pool.release(request.blocks())
        request.clear_tables()
