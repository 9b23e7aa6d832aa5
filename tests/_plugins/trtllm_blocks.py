"""The simulated engine's pages: who owns which, what is reused at once, what the engine keeps for itself."""

from collections.abc import Callable, Sequence
from typing import Any

from trtllm_model import Toy
from trtllm_requests import BAD_PAGE, Run

TREE = 0
"""Owner of pages that the engine keeps for the next request with the same beginning."""

PoolsOf = Callable[[int], list[Any]]
"""A layer group's pages on every rank."""


class Blocks:
    """Block ids of every layer group; the same on every rank."""

    def __init__(self, toy: Toy, slots: int, *, reuse: bool) -> None:
        """With `reuse` the engine keeps pages of ended requests (one full layer group only)."""
        self.toy, self.slots, self.reuse = toy, slots, reuse
        assert not reuse or len(toy.groups) == 1
        self._free = [list(range(slots + 3 * number)) for number in range(len(toy.groups))]
        self._owner: list[dict[int, int]] = [{} for _ in toy.groups]
        self._tree: dict[tuple[str, bytes], int] = {}
        self._pools: PoolsOf | None = None

    def owner(self, number: int, slot: int) -> int:
        return self._owner[number][slot]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.toy.tokens_per_block)

    def room_for(self, tokens: int, runs: Sequence[Run]) -> bool:
        """Whether all of a request fits beside all of what the others may come to need."""
        promised = sum(
            self.blocks_for(run.prompt_tokens + run.answer_tokens) for run in runs if run.admitted and not run.done
        )
        return promised + self.blocks_for(tokens) <= self.slots

    def match(self, run: Run) -> int:
        """Take the engine's own pages for the beginning of a prompt; returns tokens."""
        table: list[int] = []
        tokens = self.toy.tokens_per_block
        for block in range((len(run.request.tokens) - 1) // tokens):
            slot = self._tree.get((run.domain, run.states()[(block + 1) * tokens - 1]))
            if slot is None:
                break
            table.append(slot)
        run.tables = [table, *([] for _ in self.toy.groups[1:])]
        run.shared = len(table)
        return len(table) * tokens

    def give_back(self, run: Run) -> None:
        """It was not admitted."""
        run.tables, run.shared, run.computed, run.position = [], 0, 0, 0

    def allocate(self, run: Run, end: int, start: int) -> None:
        """Pages up to token `end`; none behind the window of the token at `start`, which is the next to be computed."""
        for number, group in enumerate(self.toy.groups):
            table = run.tables[number]
            for block in range(len(table), self.blocks_for(end)):
                last = (block + 1) * self.toy.tokens_per_block - 1
                gone = group.window and last < start - group.window + 1
                table.append(BAD_PAGE if gone else self._take(number, run))

    def grow(self, run: Run, end: int) -> None:
        for number, table in enumerate(run.tables):
            while len(table) < self.blocks_for(end):
                table.append(self._take(number, run))

    def _take(self, number: int, run: Run) -> int:
        if not self._free[number] and self._tree:
            self._forget_one(run)
        # what was freed last is given out first
        slot = self._free[number].pop()
        self._owner[number][slot] = run.number
        return slot

    def _forget_one(self, run: Run) -> None:
        key = next(key for key, slot in self._tree.items() if slot not in run.tables[0][: run.shared])
        self._release(0, self._tree.pop(key))

    def forget(self) -> None:
        """Keep nothing for requests to come; none runs."""
        while self._tree:
            self._release(0, self._tree.popitem()[1])

    def _release(self, number: int, slot: int) -> None:
        del self._owner[number][slot]
        if self._pools is not None:
            for pool in self._pools(number):
                pool.poison(slot)
        self._free[number].append(slot)

    def reclaim(self, run: Run, pools: PoolsOf) -> None:
        """Behind a window nothing is kept: the page goes to whoever asks next, and the table says so in its place."""
        self._pools = pools
        for number, group in enumerate(self.toy.groups):
            table = run.tables[number]
            for block in range(len(table) if group.window else 0):
                last = (block + 1) * self.toy.tokens_per_block - 1
                if table[block] != BAD_PAGE and last < run.position - group.window + 1:
                    self._release(number, table[block])
                    table[block] = BAD_PAGE

    def free(self, run: Run, pools: PoolsOf) -> None:
        """The request has ended: its pages are poisoned, and given out again at once."""
        self._pools = pools
        tokens = self.toy.tokens_per_block
        for number, table in enumerate(run.tables):
            for block, slot in enumerate(table):
                if slot == BAD_PAGE or block < run.shared:
                    continue
                key = (run.domain, run.states()[min((block + 1) * tokens, len(run.states())) - 1])
                whole = (block + 1) * tokens <= run.position
                if self.reuse and whole and not run.aborted and key not in self._tree:
                    self._tree[key] = slot
                    self._owner[number][slot] = TREE
                else:
                    self._release(number, slot)
